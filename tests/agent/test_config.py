"""Configuration: precedence, refusals that name the setting, help that teaches."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import msgspec
import pytest

from relume.engine_shim.agent.__main__ import main
from relume.engine_shim.agent.agent_config import parse
from relume.engine_shim.agent.host_daemon.checkpoint_options import checkpoints_of
from relume.engine_shim.checkpoints import curve_keys
from relume.engine_shim.checkpoints.daemon.config import DaemonConfig
from relume.engine_shim.checkpoints.daemon.store import host_memory
from relume.engine_shim.checkpoints.daemon_links import LinkConfig
from relume.events.settings.config_error import ConfigError

NEEDED = ["--worker", "w0", "--run-dir", "/tmp/w0", "--model", "m"]


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    file.write_text(
        'lease_ttl_s = 20\ndomain = "file"\nbackoff_s = [0, 9]\nready_timeout_s = 9\n'
        'engine_args = ["--dtype", "float32"]\n'
    )
    environ = {"RELUME_DOMAIN": "env", "RELUME_LEASE_TTL_S": "30", "RELUME_CONFIG": str(file)}
    config = parse([*NEEDED, "--lease-ttl-s", "40"], environ)
    assert (config.lease_ttl_s, config.domain, config.ready_timeout_s) == (40, "env", 9)
    assert config.backoff_s == (0.0, 9.0)
    assert config.stable_after_s == 60.0
    assert config.engine_args == ("--dtype", "float32")
    assert parse([*NEEDED, "--", "--seed", "1"], environ).engine_args == ("--seed", "1")


def test_etcd_by_endpoints_or_url() -> None:
    config = parse([*NEEDED, "--etcd", "a:1,b:2", "--backoff-s", "0,0.5"], {}).log_config()
    assert config.endpoints == ("a:1", "b:2")
    assert config.spool_dir == "/tmp/w0/spool"
    limits = ["--etcd", "a:1/x?linger_ms=9", "--etcd-limits", "linger_ms=2,silence_ms=700"]
    config = parse([*NEEDED, *limits], {}).log_config()
    assert (config.linger_ms, config.silence_ms) == (2.0, 700)
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
        ([*NEEDED, "--lease-ttl-s", "soon"], "--lease-ttl-s"),
        ([*NEEDED, "--backoff-s", "-1"], "--backoff-s"),
        ([*NEEDED, "--etcd", "ftp://x"], "--etcd"),
        ([*NEEDED, "--engine-host", "0.0.0.0"], "--advertise-host"),
        ([*NEEDED, "--config", "/nowhere"], "--config"),
        ([*NEEDED, "--checkpoint-file-dir", "/x"], "--checkpoint-file-dir"),
        ([*NEEDED, "--checkpoint-mb", "-1"], "--checkpoint-mb"),
        ([*NEEDED, "--checkpoint-percent", "51"], "--checkpoint-percent"),
        ([*NEEDED, "--checkpoint-percent", "5", "--checkpoint-mb", "9"], "--checkpoint-percent"),
    ],
)
def test_a_refusal_names_its_setting(
    argv: list[str], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(argv, {})
    assert refusal.value.flag == setting
    assert main(argv) == 2
    assert f"{refusal.value.field} = " in capsys.readouterr().err


def test_a_budget_is_a_share_of_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """LUMEN Eq. 7."""
    monkeypatch.setattr(host_memory, "total", lambda: 512 << 30)
    found = checkpoints_of(parse([*NEEDED, "--checkpoint-percent", "5"], {}))
    assert found is not None
    assert 0 <= (512 << 30) // 20 - found.daemon["budget_bytes"] < mmap.PAGESIZE
    assert found.daemon["budget_bytes"] % mmap.PAGESIZE == 0
    assert checkpoints_of(parse(NEEDED, {})) is None
    monkeypatch.undo()
    assert 0 < host_memory.total() <= host_memory.meminfo()["MemTotal"]


ON = [*NEEDED, "--checkpoint-mb", "64"]


@pytest.mark.parametrize(
    ("argv", "setting"),
    [
        (["--checkpoint-socket", "/tmp/with space/s"], "--checkpoint-socket"),
        (["--checkpoint-listen", "10.0.0.1"], "--checkpoint-listen"),
        (["--checkpoint-listen", "10.0.0.1:70000"], "--checkpoint-listen"),
        (["--checkpoint-curve-file", "/nowhere"], "--checkpoint-curve-file"),
        (["--checkpoint-listen", "127.0.0.1:7"], "--checkpoint-secret-file"),
        (["--checkpoint-secret-file", "/nowhere"], "--checkpoint-secret-file"),
        (["--checkpoint-listen", "10.0.0.1:7"], "--checkpoint-private-networks"),
        (["--checkpoint-listen", "host:7"], "--checkpoint-private-networks"),
        (["--checkpoint-listen", "0.0.0.0:7"], "--checkpoint-advertise"),
        (
            ["--checkpoint-listen", "10.0.0.1:7", "--checkpoint-private-networks", "10.0.0.0/99"],
            "--checkpoint-private-networks",
        ),
        (["--checkpoint-local", "false"], "--checkpoint-listen"),
        (
            ["--checkpoint-file-dir", "/nowhere", "--checkpoint-file-mb", "1"],
            "--checkpoint-file-dir",
        ),
    ],
)
def test_impossible_checkpoint_settings_are_refused_at_the_start(
    argv: list[str], setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkpoints_of(parse([*NEEDED, *argv], {})) is None, "asked for by nobody"
    with pytest.raises(ConfigError) as refusal:
        checkpoints_of(parse([*ON, *argv], {}))
    assert refusal.value.flag == setting
    assert main([*ON, *argv]) == 2
    assert f"{refusal.value.field} = " in capsys.readouterr().err


def test_checkpoints_on_a_private_network(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("15 bytes of it!\n")
    secret.chmod(0o600)
    argv = (
        "--checkpoint-listen 10.0.0.1:7000 --checkpoint-advertise 10.0.0.1:7001 "
        "--checkpoint-private-networks 10.0.0.0/8,192.168.0.0/16 "
        f"--checkpoint-secret-file {secret} "
        f"--checkpoint-file-dir {tmp_path} --checkpoint-file-mb 2 --checkpoint-cold-after-s 1.5"
    )
    with pytest.raises(ConfigError, match="15 bytes, at least 16 are required"):
        checkpoints_of(parse([*ON, *argv.split()], {}))
    secret.write_text("a longer secret than that")
    secret.chmod(0o640)
    if os.getuid() == 0:  # as secrets are mounted: root's, and its group may read
        checkpoints_of(parse([*ON, *argv.split()], {}))
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="read by others"):
        checkpoints_of(parse([*ON, *argv.split()], {}))
    secret.chmod(0o600)
    found = checkpoints_of(parse([*ON, *argv.split()], {}))
    assert found is not None
    assert (found.local, found.address) == ("unix:/tmp/w0/state.sock", "tcp://10.0.0.1:7001")
    daemon = msgspec.convert(found.daemon, DaemonConfig)
    assert daemon.remote is not None
    assert daemon.remote.private_networks == ("10.0.0.0/8", "192.168.0.0/16")
    assert (daemon.budget_bytes, daemon.file_budget_bytes) == (64 << 20, 2 << 20)
    assert daemon.cold_after_s == 1.5
    flag, connector = found.engine_arguments(epoch=9)
    assert flag == "--kv-transfer-config"
    config = json.loads(connector)
    assert config["kv_connector"] == "RelumeConnector"
    links = LinkConfig.of(config["kv_connector_extra_config"])
    assert (links.epoch, links.secret_file) == (9, str(secret))


def test_curve_keys_reach_daemon_and_engine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    keys = {"public": "p" * 40, "secret_file": str(secret), "hosts": {"tcp://h2:7": "k" * 40}}
    file = tmp_path / "curve.json"
    file.write_text(json.dumps(keys))
    argv = [*ON, "--checkpoint-listen", "10.0.0.1:7", "--checkpoint-curve-file", str(file)]
    with pytest.raises(ConfigError, match="read by others"):
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


def test_keys_are_made_for_all_hosts_together(tmp_path: Path) -> None:
    hosts = {"h1": "10.0.0.1:7", "h2": "h2.fleet:7"}
    given = [f"{name}={address}" for name, address in hosts.items()]
    assert curve_keys.main(["--out", str(tmp_path), *given]) == 0
    found = {}
    for name, address in hosts.items():
        argv = ["--checkpoint-listen", "10.0.0.1:7", "--checkpoint-advertise", address]
        argv += ["--checkpoint-curve-file", str(tmp_path / f"{name}.json")]
        found[name] = checkpoints_of(parse([*ON, *argv], {}))
    for name, other in (("h1", "h2"), ("h2", "h1")):
        ours, theirs = found[name], found[other]
        assert ours is not None and theirs is not None
        assert (
            ours.links["curve_servers"][theirs.address] == theirs.daemon["remote"]["curve_public"]
        )
        assert ours.links["curve_public"] in theirs.daemon["remote"]["curve_clients"]
    assert curve_keys.main(["--out", str(tmp_path), *given]) == 1, "keys are not replaced"
    for wrong in ("h1", "h1=host", "h1=a:1 h1=b:2"):
        with pytest.raises(SystemExit):
            curve_keys.main(["--out", str(tmp_path), *wrong.split()])
    (tmp_path / "h1.secret").write_text("short")
    with pytest.raises(ConfigError, match="40 characters"):
        checkpoints_of(parse([*ON, "--checkpoint-curve-file", str(tmp_path / "h1.json")], {}))


def test_help_tells_settings_defaults_and_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        parse(["--help"], {})
    assert done.value.code == 0
    text = capsys.readouterr().out
    for word in ("--zygote SOCKET", "default 8", "RELUME_", "Exit status", "vllm serve"):
        assert word in text
