"""Configuration: precedence, refusals that name the setting, help that teaches."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from engine_shim.agent import main
from engine_shim.agent_checkpoints import checkpoints_of
from engine_shim.agent_config import parse
from engine_shim.agent_errors import ConfigInvalid
from engine_shim.checkpoint_links import LinkConfig
from engine_shim.state_daemon.config import DaemonConfig

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
        ([*NEEDED, "--checkpoint-file-dir", "/x"], "--checkpoint-file-dir"),
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


ON = [*NEEDED, "--checkpoint-mb", "64"]


@pytest.mark.parametrize(
    ("argv", "setting"),
    [
        (["--checkpoint-socket", "/tmp/with space/s"], "--checkpoint-socket"),
        (["--checkpoint-listen", "10.0.0.1"], "--checkpoint-listen"),
        (["--checkpoint-listen", "10.0.0.1:70000"], "--checkpoint-listen"),
        (["--checkpoint-curve-file", "/nowhere"], "--checkpoint-curve-file"),
    ],
)
def test_impossible_checkpoint_settings_are_refused_at_the_start(
    argv: list[str], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoints_of(parse([*NEEDED, *argv], {})) is None, "asked for by nobody"
    with pytest.raises(ConfigInvalid) as refusal:
        checkpoints_of(parse([*ON, *argv], {}))
    assert refusal.value.setting == setting
    assert main([*ON, *argv]) == 2
    assert setting in capsys.readouterr().err


def test_checkpoints_on_a_private_network() -> None:
    argv = (
        "--checkpoint-listen 10.0.0.1:7000 --checkpoint-advertise 10.0.0.1:7001 "
        "--checkpoint-private-networks 10.0.0.0/8,192.168.0.0/16 --checkpoint-secret-file /s "
        "--checkpoint-file-dir /cold --checkpoint-file-mb 2"
    )
    found = checkpoints_of(parse([*ON, *argv.split()], {}))
    assert found is not None
    assert (found.local, found.address) == ("unix:/tmp/w0/state.sock", "tcp://10.0.0.1:7001")
    daemon = msgspec.convert(found.daemon, DaemonConfig)
    assert daemon.remote is not None
    assert daemon.remote.private_networks == ("10.0.0.0/8", "192.168.0.0/16")
    assert (daemon.budget_bytes, daemon.file_budget_bytes) == (64 << 20, 2 << 20)
    flag, connector = found.engine_arguments(epoch=9)
    assert flag == "--kv-transfer-config"
    config = json.loads(connector)
    assert config["kv_connector"] == "RelumeConnector"
    links = LinkConfig.of(config["kv_connector_extra_config"])
    assert (links.epoch, links.secret_file) == (9, "/s")


def test_curve_keys_reach_daemon_and_engine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    keys = {"public": "p" * 40, "secret_file": str(secret), "hosts": {"tcp://h2:7": "k" * 40}}
    file = tmp_path / "curve.json"
    file.write_text(json.dumps(keys))
    argv = [*ON, "--checkpoint-listen", "10.0.0.1:7", "--checkpoint-curve-file", str(file)]
    with pytest.raises(ConfigInvalid, match="read by others"):
        checkpoints_of(parse(argv, {}))
    secret.chmod(0o600)
    found = checkpoints_of(parse(argv, {}))
    assert found is not None
    remote = msgspec.convert(found.daemon, DaemonConfig).remote
    assert remote is not None and remote.curve_secret == "s" * 40
    assert set(remote.curve_clients) == {"p" * 40, "k" * 40}
    links = LinkConfig.of(found.links)
    assert links.curve_servers == {"tcp://h2:7": "k" * 40}
    assert "s" * 40 not in found.engine_arguments(1)[1], "command lines are public"


def test_help_tells_settings_defaults_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parse(["--help"], {})
    assert done.value.code == 0
    text = capsys.readouterr().out
    for word in ("--zygote SOCKET", "default: 8", "RELUME_", "Exit status", "vllm serve"):
        assert word in text
