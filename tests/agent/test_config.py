"""Configuration: precedence, refusals that name the setting, help that teaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_shim.agent import main
from engine_shim.agent_config import parse
from engine_shim.agent_errors import ConfigInvalid

NEEDED = ["--worker", "w0", "--run-dir", "/tmp/w0", "--model", "m"]


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(
        'lease_ttl_s = 20\ndomain = "file"\nbackoff_s = [0, 9]\nrestart_nice = 3\n'
        'engine_args = ["--dtype", "float32"]\n'
    )
    environ = {"RELUME_DOMAIN": "env", "RELUME_LEASE_TTL_S": "30", "RELUME_CONFIG": str(file)}
    config = parse([*NEEDED, "--lease-ttl-s", "40"], environ)
    assert (config.lease_ttl_s, config.domain, config.restart_nice) == (40, "env", 3)
    assert config.backoff_s == (0.0, 9.0)
    assert config.ready_timeout_s == 300.0
    assert config.engine_args == ("--dtype", "float32")
    assert parse([*NEEDED, "--", "--seed", "1"], environ).engine_args == ("--seed", "1")


def test_etcd_by_endpoints_or_url() -> None:
    config = parse([*NEEDED, "--etcd", "a:1,b:2", "--backoff-s", "0,0.5"], {}).log_config()
    assert config.endpoints == ("a:1", "b:2")
    assert config.spool_dir == "/tmp/w0/spool"
    config = parse([*NEEDED, "--etcd", "https://u:p@a:1/x?ca=/ca.pem"], {}).log_config()
    assert (config.user, config.prefix, config.tls.ca) == ("u", "/x", "/ca.pem")


@pytest.mark.parametrize(
    ("argv", "setting"),
    [
        (["--run-dir", "/tmp/w0", "--model", "m"], "--worker"),
        ([*NEEDED, "--worker", "w/0"], "--worker"),
        ([*NEEDED, "--host-kind", "zygote"], "--zygote"),
        ([*NEEDED, "--host-kind", "docker"], "--host-kind"),
        ([*NEEDED, "--lease-ttl-s", "0"], "--lease-ttl-s"),
        ([*NEEDED, "--lease-ttl-s", "soon"], "configuration"),
        ([*NEEDED, "--backoff-s", "-1"], "--backoff-s"),
        ([*NEEDED, "--etcd", "ftp://x"], "--etcd"),
        ([*NEEDED, "--engine-host", "0.0.0.0"], "--advertise-host"),
        ([*NEEDED, "--config", "/nowhere"], "--config"),
    ],
)
def test_a_refusal_names_its_setting(
    argv: list[str], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigInvalid) as refusal:
        parse(argv, {})
    assert refusal.value.setting == setting
    assert main(argv) == 2
    assert setting in capsys.readouterr().err


def test_help_tells_settings_defaults_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parse(["--help"], {})
    assert done.value.code == 0
    text = capsys.readouterr().out
    for word in ("--zygote SOCKET", "default: 8", "RELUME_", "Exit status", "vllm serve"):
        assert word in text
