"""A replica of a real older build beside one of the next build, on real etcd: under load, with a kill of
an engine, through the upgrade of the older one."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relume.controlplane.cli.admin_client import EXIT_PARTLY
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.codec import decode_all
from relume.events.vocabulary.enums import DeathReason
from relume.policies.decision_versions import DECISION_VERSIONS
from tests.etcd_server import EtcdServer, free_port
from tests.gateway.peers import Behaviour, Engine, expected_stream
from tests.gateway.raw_client import RawClient
from tests.gateway.replica_scene import BODY, TEXT
from tests.history.stage import config_for
from tests.mixed_versions.next_build import NEXT, WeatherReported, next_build

pytestmark = [pytest.mark.etcd, pytest.mark.full]

ROOT = Path(__file__).resolve().parents[2]
OLDER = "c79a9ea64074"
"""The last commit without feature levels."""
NEW = (sys.executable, "-m", "tests.mixed_versions.next_replica")
THIS = (sys.executable, "-m", "relume.controlplane.cli.relume_command", "serve")
CREATED = "1700000000"
CLIENTS = 8


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `relume` command of the older build."""
    folder = tmp_path_factory.mktemp("older") / "environment"
    subprocess.run([ROOT / "deploy/dev/build_older.sh", OLDER, folder], check=True, timeout=240)
    return folder / "bin" / "relume"


class Fleet:
    """Replicas as processes, scripted engines, and clients."""

    def __init__(self, etcd: EtcdServer, folder: Path, log: EtcdLog, stack: AsyncExitStack) -> None:
        self.etcd = etcd
        self.folder = folder
        self.log = log
        self.stack = stack
        self.ports: dict[str, int] = {}
        """Of replicas that new requests go to."""
        self.busy: dict[str, int] = {}
        self.answered = 0
        self.broken: list[str] = []
        self._names = itertools.count()

    async def start(self, name: str, *command: str | Path) -> asyncio.subprocess.Process:
        port = free_port()
        flags = (
            "--name", name, "--port", str(port), "--admin-port", "0", "--log-format", "json",
            "--etcd", self.etcd.endpoints[0], "--lease-ttl-s", "2", "--tick-ms", "250",
            "--spool-dir", str(self.folder / f"spool-{name}"),
            "--archive-dir", str(self.folder / "archive"),
        )  # fmt: skip
        with (self.folder / f"{name}.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, *flags, stdout=output, stderr=output
            )
        self.stack.push_async_callback(_ended, process)
        await self.until(lambda: self._serves(name, port, process))
        self.ports[name] = port
        self.busy.setdefault(name, 0)
        return process

    def _serves(self, name: str, port: int, process: asyncio.subprocess.Process) -> bool:
        assert process.returncode is None, (self.folder / f"{name}.log").read_text()
        return f"127.0.0.1:{port}" in "".join(line for line in self.lines(name, "serving"))

    def lines(self, name: str, event: str) -> list[str]:
        """What the replica logged of that event."""
        text = (self.folder / f"{name}.log").read_text()
        return [line for line in text.splitlines() if f'"event": "{event}"' in line
                or f'"event":"{event}"' in line]  # fmt: skip

    async def until(self, found: Callable[[], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not found():
                await asyncio.sleep(0.05)

    async def client(self) -> None:
        """One request after the other, each to a replica in turn; what a client gets is compared."""
        while True:
            number = next(self._names)
            name = sorted(self.ports)[number % len(self.ports)]
            request = f"q{number}"
            want = expected_stream(BODY, f"cmpl-{request}", CREATED, 12, False)
            self.busy[name] += 1
            try:
                async with RawClient(self.ports[name]) as client:
                    given = await client.ask(TEXT, BODY, headers=f"x-request-id: {request}\r\n")
                if given.status != 200 or not given.complete or given.body != want:
                    self.broken.append(f"{request} at {name}: {given.status} {given.body!r}")
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.broken.append(f"{request} at {name}: {error!r}")
            finally:
                self.busy[name] -= 1
            self.answered += 1

    async def more(self, count: int) -> None:
        """Wait until so many more requests are answered."""
        enough = self.answered + count
        await self.until(lambda: self.answered >= enough)
        assert self.broken == []

    async def events(self, *kinds: type) -> list[tuple[str, Any]]:
        """(stream, event) of these kinds."""
        return [
            (segment.stream, event)
            for group in await self.log.reader().read()
            for segment in group.segments
            for event in decode_all(segment.records)
            if type(event) in kinds
        ]


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def start_engine(writer: EtcdWriter, engine: Engine, incarnation: int) -> None:
    engine.incarnation = incarnation
    writer.append(
        v.EngineStarted(engine.name, incarnation, 2, 3),
        v.EngineReady(
            worker=engine.name, incarnation=incarnation, host="127.0.0.1", port=engine.port,
            model="m", max_model_len=4096, block_size=16, kv_blocks=512,
        ),
    )  # fmt: skip


@asynccontextmanager
async def fleet_of(etcd: EtcdServer, folder: Path) -> AsyncIterator[tuple[Fleet, Any]]:
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(EtcdLog(config_for(etcd), name="test"))
        workers = []
        for name in ("w0", "w1"):
            engine = await stack.enter_async_context(Engine(name))
            engine.default = Behaviour(pause_s=0.02)
            writer = await stack.enter_async_context(log.writer(f"w.{name}"))
            writer.append(v.WorkerRegistered(worker=name, domain=name, agent_pid=1))
            start_engine(writer, engine, 1)
            workers.append((writer, engine))
        yield Fleet(etcd, folder, log, stack), workers


def verified_by(command: tuple[str | Path, ...], etcd: EtcdServer, until: int) -> Any:
    """The verdict of `relume replay --verify` of a build on the log up to a revision. It is partial if the
    build lacks a rule by which a newer one decided."""
    done = subprocess.run(
        [*command, "--verify", "--json", "--etcd", etcd.endpoints[0], "--at", str(until)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    verdict = json.loads(done.stdout)
    partly = 0 if verdict["complete"] else EXIT_PARTLY
    assert done.returncode == partly, (done.stdout, done.stderr)
    return verdict


async def test_an_older_build_is_upgraded_under_load_and_no_stream_breaks(
    etcd: EtcdServer, older: Path, tmp_path: Path
) -> None:
    async with fleet_of(etcd, tmp_path) as (fleet, workers), asyncio.timeout(200):
        # At once: a newer replica that was alone for a lease would raise the level.
        _, former = await asyncio.gather(fleet.start("r0", *NEW), fleet.start("r1", older, "serve"))
        clients = [asyncio.create_task(fleet.client()) for _ in range(CLIENTS)]
        try:
            await fleet.more(100)
            writer, engine = workers[0]
            engine.stop()  # as a kill does
            writer.append(v.EngineDied("w0", 1, DeathReason.KILLED))
            await fleet.more(60)
            engine.port = 0
            await fleet.stack.enter_async_context(engine)
            start_engine(writer, engine, 2)
            await fleet.more(100)
            assert await fleet.events(v.FeatureLevelRaised) == [], "the older build cannot read it"
            at = (await fleet.log.reader().read())[-1].revision
            by_older, verdict = [
                await asyncio.to_thread(verified_by, command, etcd, at)
                for command in ((older, "replay"), (*THIS[:-1], "replay"))
            ]
            assert verdict["complete"] and verdict["decisions"] > 250 and verdict["hashes"] > 5
            version = DECISION_VERSIONS["health"]
            assert by_older["untaken"].keys() <= {f"health version {version}"}
            differs = {k: (by_older[k], verdict[k]) for k in verdict if by_older[k] != verdict[k]}
            assert differs.keys() <= {"untaken", "complete"}, differs

            del fleet.ports["r1"]
            await fleet.until(lambda: not fleet.busy["r1"])
            former.send_signal(signal.SIGTERM)
            assert await former.wait() == 0
            await fleet.start("r1", *NEW)
            await fleet.more(100)
            with next_build():
                while True:
                    weather = {stream for stream, _ in await fleet.events(WeatherReported)}
                    if weather == {"r.r0", "r.r1"}:
                        break
                    await asyncio.sleep(0.2)
            raised = [e for _, e in await fleet.events(v.FeatureLevelRaised) if e.level > e.was]
            assert [(e.level, e.was) for e in raised] == [(NEXT, NEXT - 1)]
            seen = [type(e) for _, e in await fleet.events(v.ReplicaStopped, v.FeatureLevelRaised)]
            assert seen[:2] == [v.ReplicaStopped, v.FeatureLevelRaised]
            await fleet.more(60)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        with next_build():
            verdict = verify(await fleet.log.reader().read())
        assert not verdict.divergences and not verdict.unreadable and verdict.hashes > 5
        with pytest.raises(AssertionError, match="build_too_old"):
            await fleet.start("r2", *THIS)
