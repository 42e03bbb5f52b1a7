"""Replicas and agents of several builds as processes on a real etcd, and clients of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from relume.controlplane.cli.admin_client import EXIT_PARTLY
from relume.events.etcd.factory import EtcdLog
from relume.events.log.codec import decode_all
from relume.policies.decision_versions import DECISION_VERSIONS
from tests.etcd_server import EtcdServer, free_port
from tests.gateway.peers import expected_stream
from tests.gateway.raw_client import RawClient
from tests.gateway.replica_scene import BODY, TEXT

ROOT = Path(__file__).resolve().parents[2]
OLDER = "c79a9ea64074"
"""The last commit without feature levels. This repository has no tags, so a commit on main names the older
build: it is in every whole clone. `build_older.sh` takes a tag as well."""
CREATED = "1700000000"
TOKENS = 12
RETURN_S = 0.1
"""A client returns after this time."""


class Build:
    """Commands of one build."""

    def __init__(
        self, python: str | Path, folder: Path, replica: str = "", agent: str = ""
    ) -> None:
        """`replica` and `agent` are modules to run in place of the build's own."""
        module = (python, "-m")
        self.relume = (*module, "relume.controlplane.cli.relume_command")
        self.replica = (*module, replica) if replica else (*self.relume, "serve")
        self.agent = (*module, agent or "relume.engine_shim.agent")
        self.engines = (*module, "tests.mixed_versions.small_engine")
        self.folder = folder
        """Where they run. It has `tests` of this checkout, and no `relume` of another build."""


THIS_BUILD = Build(sys.executable, ROOT)
NEXT_BUILD = Build(
    sys.executable, ROOT, "tests.mixed_versions.next_replica", "tests.mixed_versions.next_agent"
)


def build_older(folder: Path) -> Build:
    """The wheel of the older commit."""
    environment = folder / "environment"
    subprocess.run(
        [ROOT / "deploy/dev/build_older.sh", OLDER, environment], check=True, timeout=240
    )
    beside = folder / "beside"
    beside.mkdir()
    (beside / "tests").symlink_to(ROOT / "tests")
    python = environment / "bin" / "python"
    code = "import relume.engine_shim.agent.journal as j; print(hasattr(j, 'require'))"
    found = subprocess.run([python, "-c", code], cwd=beside, capture_output=True, check=True)
    assert found.stdout.strip() == b"False", "the older build runs the code of this one"
    return Build(python, beside)


class Fleet:
    """Processes by name, clients, and the log that all write."""

    def __init__(self, etcd: EtcdServer, folder: Path, log: EtcdLog, stack: AsyncExitStack) -> None:
        self.etcd = etcd
        self.folder = folder
        self.log = log
        self.stack = stack
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self.ports: dict[str, int] = {}
        """Of replicas that new requests go to."""
        self.admins: dict[str, int] = {}
        self.busy: dict[str, int] = {}
        self.reading: dict[str, set[Resumable]] = {}
        """Streams by the replica that sends them."""
        self.answered = 0
        self.resumed = 0
        """Streams that continued at another replica, or at another connection."""
        self.unbegun = 0
        """Requests whose replica ended before their first event."""
        self.broken: list[str] = []
        self._names = itertools.count()
        self._builds: dict[Build, Path] = {}

    async def replica(self, name: str, build: Build) -> asyncio.subprocess.Process:
        """Start one; it has the name's spool."""
        port, self.admins[name] = free_port(), free_port()
        flags = (
            "--name", name, "--port", str(port), "--admin-port", str(self.admins[name]),
            "--log-format", "json", "--lease-ttl-s", "2", "--tick-ms", "250",
            "--etcd", self.etcd.endpoints[0], "--spool-dir", str(self.folder / f"spool-{name}"),
            "--archive-dir", str(self.folder / "archive"),
        )  # fmt: skip
        process = await self._spawn(name, build, *build.replica, *flags)
        await self.until(lambda: self._serves(name, port, process))
        self.ports[name] = port
        self.busy.setdefault(name, 0)
        self.reading.setdefault(name, set())
        return process

    async def agent(self, name: str, build: Build) -> None:
        """Start the agent of a worker; it has the name's run directory."""
        if build not in self._builds:
            self._builds[build] = self.folder / f"z{len(self._builds)}.sock"
            engines = (*build.engines, self._builds[build])
            await self._spawn(f"zygote{len(self._builds)}", build, *engines)
            await self.until(self._builds[build].exists)
        flags = (
            "--worker", name, "--run-dir", str(self.folder / name), "--model", "m", "--domain", name,
            "--host-kind", "zygote", "--zygote", str(self._builds[build]), "--lease-ttl-s", "2",
            "--backoff-s", "0,0.1", "--canary-interval-s", "0", "--etcd", self.etcd.endpoints[0],
        )  # fmt: skip
        await self._spawn(name, build, *build.agent, *flags)

    async def _spawn(
        self, name: str, build: Build, *command: str | Path
    ) -> asyncio.subprocess.Process:
        with (self.folder / f"{name}.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=output, stderr=output, cwd=build.folder,
                env={**os.environ, "PYTHONPATH": str(build.folder)},
            )  # fmt: skip
        self.stack.push_async_callback(_ended, process)
        self.running[name] = process
        return process

    def _serves(self, name: str, port: int, process: asyncio.subprocess.Process) -> bool:
        assert process.returncode is None, (self.folder / f"{name}.log").read_text()
        return f"127.0.0.1:{port}" in "".join(line for line in self.lines(name, "serving"))

    async def kill(self, name: str) -> None:
        """kill -9. Clients that start a request know that a replica is gone."""
        self.ports.pop(name, None)
        self.running[name].kill()
        await self.running.pop(name).wait()

    async def begun(self, name: str, count: int) -> None:
        """Wait until so many streams of the replica have events, and more to come."""

        def has_begun() -> bool:
            streams = [
                stream for stream in self.reading[name] if 0 < len(stream.events) < TOKENS // 2
            ]
            return len(streams) >= count

        async with asyncio.timeout(60):
            while not has_begun():
                await asyncio.sleep(0.01)

    async def stop(self, name: str) -> None:
        """As systemd does, after clients went elsewhere."""
        self.ports.pop(name, None)
        await self.until(lambda: not self.busy.get(name))
        self.running[name].send_signal(signal.SIGTERM)
        assert await self.running.pop(name).wait() == 0

    def kill_engine(self, worker: str) -> None:
        """kill -9 of the engine that the worker's agent watches."""
        state = json.loads((self.folder / worker / "state.json").read_text())
        os.kill(state["engine"]["process"][0], signal.SIGKILL)

    def lines(self, name: str, event: str) -> list[str]:
        """What the replica logged of that event."""
        text = (self.folder / f"{name}.log").read_text()
        return [line for line in text.splitlines() if f'"event": "{event}"' in line
                or f'"event":"{event}"' in line]  # fmt: skip

    async def until(self, found: Callable[[], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not found():
                await asyncio.sleep(0.05)

    async def logged(
        self, found: Callable[[list[tuple[str, Any]]], object], *kinds: type
    ) -> list[tuple[str, Any]]:
        """Wait until `found` is true of the events of these kinds in the log; returns these."""
        events: list[tuple[str, Any]] = []
        try:
            async with asyncio.timeout(60):
                while not found(events := await self.events(*kinds)):
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not in the log after 60 s; last {events[-9:]}") from None
        return events

    async def client(self) -> None:
        """One request after the other, each to a replica in turn; what a client gets is compared."""
        while True:
            number = next(self._names)
            name = sorted(self.ports)[number % len(self.ports)]
            request = f"q{number}"
            want = expected_stream(BODY, f"cmpl-{request}", CREATED, TOKENS, False)
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

    async def returning_client(self) -> None:
        """The same with resumable streams: it comes back to another replica when one is gone."""
        while True:
            stream = Resumable(f"q{next(self._names)}")
            try:
                async with asyncio.timeout(30):
                    await self._read(stream)
            except TimeoutError:
                stream.why = f"no end within 30 s, last {stream.why}"
            if stream.why:
                self.broken.append(f"{stream.request}: {stream.why} after {stream.events}")
            elif stream.is_unbegun:
                self.unbegun += 1
            else:
                self.answered += 1
                self.resumed += stream.connections > 1

    async def _read(self, stream: Resumable) -> None:
        """The whole stream, over as many connections as it takes."""
        at = int(stream.request[1:])
        while not stream.is_over:
            name = sorted(self.ports)[(at + stream.connections) % len(self.ports)]
            self.busy[name] += 1
            self.reading[name].add(stream)
            try:
                await stream.read_from(self.ports[name])
            finally:
                self.busy[name] -= 1
                self.reading[name].remove(stream)
            if not stream.is_over:
                await asyncio.sleep(RETURN_S)

    async def more(self, count: int) -> None:
        """Wait until so many more requests are answered."""
        enough = self.answered + count
        await self.until(lambda: self.answered >= enough or self.broken)
        assert not self.broken, self.broken[:3]

    async def events(self, *kinds: type) -> list[tuple[str, Any]]:
        """(stream, event) of these kinds."""
        return [
            (segment.stream, event)
            for group in await self.log.reader().read()
            for segment in group.segments
            for event in decode_all(segment.records)
            if type(event) in kinds
        ]

    async def revision(self) -> int:
        """Where the log stands."""
        return (await self.log.reader().read())[-1].revision


class Resumable:
    """What a client has of one resumable stream."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.last_id = ""
        self.events: list[bytes] = []
        self.connections = 0
        self.is_over = False
        self.is_unbegun = False
        self.why = ""
        """Why it is broken."""

    async def read_from(self, port: int) -> None:
        """One connection."""
        self.connections += 1
        headers = f"x-request-id: {self.request}\r\nx-relume-resumable: 1\r\n"
        if self.last_id:
            headers += f"last-event-id: {self.last_id}\r\n"
        try:
            async with RawClient(port) as client:
                client.send(TEXT, b"" if self.last_id else BODY, headers=headers)
                head = await client.answer(head_only=True)
                if head.status == 200:
                    await self._take(client.reader)
                elif not (self.last_id and head.status == 503):  # 503: come back later
                    self.why, self.is_over = f"status {head.status}", True
        except (OSError, asyncio.IncompleteReadError):
            self.is_unbegun = self.is_over = not self.last_id

    async def _take(self, reader: asyncio.StreamReader) -> None:
        async for event in _events_of(reader):
            first, _, data = event.partition(b"\n")
            self.last_id = first.decode().removeprefix("id: ")
            self.events.append(data + b"\n\n")
        self.is_over = True
        shown = b"".join(self.events)
        created = re.search(rb'"created":(\d+)', shown)
        when = created[1].decode() if created else ""
        if shown != expected_stream(BODY, f"cmpl-{self.request}", when, TOKENS, False):
            self.why = "other bytes"


async def _events_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Whole events of a chunked answer. Raises IncompleteReadError if it breaks."""
    rest = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        *events, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n\n")
        for event in events:
            yield event


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def verified_by(build: Build, etcd: EtcdServer, until: int) -> Any:
    """The verdict of `relume replay --verify` of a build on the log up to a revision. It is partial if the
    build lacks a rule by which a newer one decided."""
    done = subprocess.run(
        [*build.relume, "replay", "--verify", "--json", "--etcd", etcd.endpoints[0], "--at", str(until)],
        capture_output=True, text=True, timeout=120, check=False, cwd=build.folder,
    )  # fmt: skip
    verdict = json.loads(done.stdout)
    partly = 0 if verdict["complete"] else EXIT_PARTLY
    assert done.returncode == partly, (done.stdout, done.stderr)
    return verdict


def newer_than(build: Build) -> set[str]:
    """What this build decides by a rule of which that one knows no or an older version, as a verdict names it."""
    code = "import json, relume.policies.decision_versions as d; print(json.dumps(d.DECISION_VERSIONS))"
    found = subprocess.run(
        [build.relume[0], "-c", code], cwd=build.folder, capture_output=True, check=True, timeout=60
    )
    known = json.loads(found.stdout)
    return {
        f"{kind} version {version}"
        for kind, version in DECISION_VERSIONS.items()
        if known.get(kind) != version
    }
