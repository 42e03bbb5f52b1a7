"""Variables of the environment that nothing reads: who names them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from relume.controlplane.cli import relume_command
from relume.controlplane.cli.doctor import Finding
from relume.controlplane.serve_settings import ServeConfig, load
from relume.engine_shim.agent import __main__ as agent
from relume.engine_shim.agent.agent_config import AgentConfig
from relume.events.settings.config_error import ConfigError
from relume.events.settings.declared import settings_of
from relume.events.settings.variables import OTHERS, PREFIX, SETTINGS, unknown

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"RELUME_[A-Z0-9_]*[A-Z0-9]")


def test_all_that_programs_read_are_known_and_no_others() -> None:
    declared = {s.variable for c in (ServeConfig, AgentConfig) for s in settings_of(c).values()}
    assert {PREFIX + name for name in SETTINGS} == declared
    folders = ("events", "policies", "controlplane", "engine_shim", "chaos", "deploy")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    texts = [
        f.read_text() for f in files if f.suffix in (".py", ".sh", ".yaml", ".service", ".env")
    ]
    used = {
        name for text in (*texts, (ROOT / "Makefile").read_text()) for name in NAME.findall(text)
    }
    assert unknown(dict.fromkeys(used, "1")) == {}
    read_elsewhere = {name for name in OTHERS if PREFIX + name in used}
    assert read_elsewhere == OTHERS


def test_an_unknown_variable_gets_the_closest_name_if_one_is_close() -> None:
    given = ("RELUME_API_KEY", "RELUME_LEASE_TTL", "RELUME_ZZ", "RELUME_API_KEYS", "HOME")
    assert unknown(dict.fromkeys(given, "1")) == {
        "RELUME_API_KEY": "RELUME_API_KEYS",
        "RELUME_LEASE_TTL": "RELUME_LEASE_TTL_S",
        "RELUME_ZZ": "",
    }


def test_variables_that_kubernetes_sets_are_not_unknown() -> None:
    services = {
        "RELUME_SERVICE_HOST": "10.0.0.1",
        "RELUME_CONTROL_SERVICE_PORT_ADMIN": "8001",
        "RELUME_PORT_8000_TCP_ADDR": "10.0.0.1",
        "RELUME_CONTROL_PORT": "tcp://10.0.0.1:8000",
    }
    assert unknown(services) == {}


def test_a_service_of_kubernetes_is_no_setting() -> None:
    """A service `relume` gives each pod a RELUME_PORT, which would end a replica at its start."""
    assert load({}, {"RELUME_PORT": "tcp://10.0.0.1:80"}).port == ServeConfig().port
    with pytest.raises(ConfigError, match="whole number"):
        load({}, {"RELUME_PORT": "10.0.0.1:80"})


def test_the_doctor_names_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def no_etcd(_: ServeConfig) -> list[Finding]:
        return []

    monkeypatch.setenv("RELUME_API_KEY", "k")
    monkeypatch.setattr("relume.controlplane.cli.doctor.check_etcd", no_etcd)
    relume_command.main(["doctor", "--json", "--state-dir", str(tmp_path), "--admin-port", "0"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [one for one in findings if one["check"] == "variable"]
    assert found["level"] == "warn" and found["text"].startswith("RELUME_API_KEY is")
    assert found["remedy"] == "did you mean RELUME_API_KEYS?"


def test_a_replica_and_an_agent_name_them_when_they_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The set-up of a process's log lines would outlast the test."""
    monkeypatch.setenv("RELUME_API_KEY", "k")
    monkeypatch.setattr("relume.controlplane.telemetry.logs.setup_logging", lambda *_: None)
    monkeypatch.setattr("relume.controlplane.replica.serve.main", lambda _: 0)
    with capture_logs() as lines:
        assert relume_command.main(["serve"]) == 0
    (line,) = lines
    assert (line["event"], line["name"]) == ("unknown_variable", "RELUME_API_KEY")
    assert line["remedy"] == "did you mean RELUME_API_KEYS?"

    async def nothing(*_: Any) -> None:
        return

    monkeypatch.setattr(agent, "run_agent", nothing)
    given = ["--worker", "w0", "--model", "m", "--run-dir", str(tmp_path)]
    assert agent.main(given) == 0
    said = "".join(capsys.readouterr())
    assert "unknown variable" in said and "did you mean RELUME_API_KEYS?" in said
