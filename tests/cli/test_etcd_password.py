"""The password of etcd stands in no error, log line, `repr`, process list or stored event."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest
from aetcd import rpc

from relume.controlplane import serve_settings
from relume.controlplane.cli.relume_command import main
from relume.controlplane.local.child_processes import free_port
from relume.engine_shim.agent import agent_config
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import parse_url
from relume.events.etcd.errors import BadUrl
from relume.events.settings.config_error import ConfigError
from tests.etcd_server import EtcdServer
from tests.events.conftest import config_for

PASSWORD = "hush/p@ss#w?rd:℀ "
QUOTED = quote(PASSWORD, safe="")
PARTS = ("hush", "ss#w", "ss%23w", "w?rd", "w%3Frd", "℀")
"""Whatever of it an error could show."""
WRONG_URLS = (
    f"http://root:{PASSWORD}@127.0.0.1:1/relume/v1",
    f"http://root:{QUOTED}@127.0.0.1:x/relume/v1",
    f"http://root:{QUOTED}@127.0.0.1:1/relume/v1?ca=/nowhere",
    f"http://root:{QUOTED}@127.0.0.1:1?linger=1",
    f"http://root:{QUOTED}@127.0.0.1:1?linger_ms=x",
    f"http://127.0.0.1:1?user=root&password={QUOTED}&linger=1",
    f"ftp://root:{QUOTED}@127.0.0.1:1",
    f"http://root:{QUOTED}@[::1:1",
    "http://root:hush/pass@127.0.0.1:1",
    "http://root:hush#pass@127.0.0.1:1",
    "http://root:hush?pass@127.0.0.1:1",
    "http://root:hush℀@127.0.0.1:1",
    "http://root:hush[@127.0.0.1:1",
    "root:hush@127.0.0.1:x",
)
AGENT = ["--worker", "w0", "--run-dir", "/nowhere", "--model", "m"]


def shows_nothing(text: str) -> None:
    found = [part for part in PARTS if part in text]
    assert not found, (found, text)


@pytest.mark.parametrize("url", WRONG_URLS)
def test_an_error_of_a_url_shows_no_password(url: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(BadUrl) as refused:
        parse_url(url)
    shows_nothing(str(refused.value))
    with pytest.raises(ConfigError) as refused_setting:
        config = serve_settings.load({"etcd": url}, {})
        serve_settings.etcd_config(config)
    shows_nothing(f"{refused_setting.value} {refused_setting.value.value}")
    with pytest.raises(ConfigError) as refused_setting:
        agent_config.parse([*AGENT, "--etcd", url], {})
    shows_nothing(f"{refused_setting.value} {refused_setting.value.value}")
    main(["doctor", "--etcd", url])
    main(["replay", "--etcd", url])
    shows_nothing("".join(capsys.readouterr()))


def test_no_value_of_settings_shows_it() -> None:
    url = f"http://root:{QUOTED}@127.0.0.1:1"
    serving = serve_settings.load({"etcd": url}, {"RELUME_API_KEYS": "hush"})
    agent = agent_config.parse([*AGENT, "--etcd", url], {})
    for config in (serving, agent, serve_settings.etcd_config(serving), agent.log_config()):
        shows_nothing(f"{config!r} {config}")
        assert "***" in repr(config)
    assert serve_settings.etcd_config(serving).password == PASSWORD
    assert agent.log_config().password == PASSWORD
    shows_nothing(str(serve_settings.masked(serving)))
    for value in ('["http://root:hush@h:1", 3]', '["http://root:hush@h:1"'):
        with pytest.raises(ConfigError) as refused:
            serve_settings.load({"etcd": value}, {})
        shows_nothing(str(refused.value))


def test_endpoints_may_have_a_user_without_a_scheme() -> None:
    """It became part of the address, and of every error."""
    config = serve_settings.load({"etcd": "root:hush@h0:1,h1", "prefix": "/other"}, {})
    etcd = serve_settings.etcd_config(config)
    assert (etcd.user, etcd.password) == ("root", "hush")
    assert (etcd.endpoints, etcd.prefix) == (("h0:1", "h1:2379"), "/other")
    shows_nothing(str(serve_settings.masked(config)))
    with pytest.raises(ConfigError) as refused:
        etcd = serve_settings.load({"etcd": "h0:1,http://root:hush@h1:1"}, {})
        serve_settings.etcd_config(etcd)
    shows_nothing(str(refused.value))


def test_a_local_fleet_refuses_one(capsys: pytest.CaptureFixture) -> None:
    """It would give it to its processes as a flag, and write it to its state."""
    assert main(["up", "--etcd", "http://root:hush@127.0.0.1:1"]) == 2
    error = capsys.readouterr().err
    shows_nothing(error)
    assert "--etcd @FILE" in error


def test_doctor_and_replay_name_the_endpoint_alone(capsys: pytest.CaptureFixture) -> None:
    for command in ("doctor", "replay"):
        assert main([command, "--etcd", f"http://root:{QUOTED}@127.0.0.1:1"]) != 0
        output = "".join(capsys.readouterr())
        shows_nothing(output)
        assert "127.0.0.1:1" in output


@pytest.fixture
async def guarded() -> Iterator[EtcdServer]:
    """etcd that wants the password of root."""
    async with EtcdServer(extra=("--bcrypt-cost=4",)) as etcd:
        async with EtcdClient(config_for(etcd)) as client:
            auth = client._connected(client.endpoint).methods
            await auth["UserAdd"](rpc.AuthUserAddRequest(name="root", password=PASSWORD))
            await auth["UserGrantRole"](rpc.AuthUserGrantRoleRequest(user="root", role="root"))
            await auth["AuthEnable"](rpc.AuthEnableRequest())
        yield etcd


def urls(etcd: EtcdServer) -> dict[str, str]:
    host = etcd.endpoints[0]
    return {
        "right": f"http://root:{QUOTED}@{host}",
        "wrong": f"http://root:hush@{host}",
        "away": f"http://root:{QUOTED}@127.0.0.1:1?open_timeout_ms=300",
        "bad": f"http://root:{QUOTED}@{host}:x",
    }


def command(name: str, folder: Path, etcd: str) -> list[str]:
    python = [sys.executable, "-m"]
    if name == "agent":
        run = ["--run-dir", str(folder / "run"), "--host-kind", "plain"]
        backend = ["--backend", "http://127.0.0.1:1", "--model", "m", "--worker", "w0"]
        return [*python, "relume.engine_shim.agent", *run, *backend, "--etcd", etcd]
    relume = [*python, "relume.controlplane.cli.relume_command", name, "--etcd", etcd]
    if name == "serve":
        ports = [
            "--port",
            str(free_port()),
            "--admin-port",
            "0",
            "--archive-dir",
            str(folder / "archive"),
        ]
        return [*relume, *ports, "--spool-dir", str(folder / "spool"), "--log-format", "json"]
    return [*relume, "--state-dir", str(folder)]


STAY = {("right", "serve"), ("right", "agent"), ("away", "agent")}
"""What runs on. An agent waits for etcd."""


class Run(NamedTuple):
    """A process, started with the URL `kind`, and where it writes."""

    kind: str
    name: str
    process: subprocess.Popen
    log: Path

    @property
    def ends(self) -> bool:
        return (self.kind, self.name) not in STAY


def started(etcd: EtcdServer, folder: Path) -> Iterator[Run]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("RELUME_")}
    for kind, url in urls(etcd).items():
        cwd = folder / kind
        cwd.mkdir()
        (cwd / "url").write_text(url + "\n")
        for name in ("serve", "agent", "doctor", "replay"):
            argv = command(name, cwd, f"@{cwd / 'url'}")
            with (cwd / f"{name}.log").open("wb") as log:
                process = subprocess.Popen(argv, env=environ, stdout=log, stderr=log, cwd=cwd)
            yield Run(kind, name, process, cwd / f"{name}.log")


def watch_until_done(runs: list[Run]) -> None:
    """Until those end that should, and the replica serves. No process list shows the password."""
    deadline = time.monotonic() + 90
    (serving,) = [run for run in runs if (run.kind, run.name) == ("right", "serve")]
    while any(r.ends and r.process.poll() is None for r in runs) or (
        b'"serving"' not in serving.log.read_bytes()
    ):
        for run in runs:
            if run.process.poll() is None:
                shows_nothing(Path(f"/proc/{run.process.pid}/cmdline").read_text())
        assert time.monotonic() < deadline, [r for r in runs if r.process.poll() is None]
        time.sleep(0.2)
    for run in runs:
        assert run.ends or run.process.poll() is None, run


def end(runs: list[Run]) -> None:
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
    for run in runs:
        try:
            run.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()


@pytest.mark.etcd
@pytest.mark.full
async def test_no_process_shows_it_however_it_fails(guarded: EtcdServer, tmp_path: Path) -> None:
    """Flags name a file: `ps` shows its path."""
    runs: list[Run] = []
    try:
        runs.extend(started(guarded, tmp_path))
        watch_until_done(runs)
    finally:
        end(runs)
    for run in runs:
        text = run.log.read_text()
        assert text and "Traceback" not in text, (run, text)
        if run.ends and run.kind != "right":
            assert run.process.returncode != 0, run
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.name != "url":
            shows_nothing(path.read_text(errors="replace"))
    async with EtcdClient(parse_url(urls(guarded)["right"])) as client:
        stored = await client.range(b"\0", b"\0")
    assert stored.kvs
    for entry in stored.kvs:
        shows_nothing((entry.key + entry.value).decode(errors="replace"))
