"""The test's side of failpoints: it listens on a socket and says what processes do where.

    async with FailpointServer(folder / "failpoints.sock") as failpoints:
        os.environ[ENVIRONMENT] = str(failpoints.path)   # before the fleet starts
        async with failpoints.armed(Failpoint.ENGINE_DECODE, process="engine w0", tokens=40) as point:
            ...                                          # send a request
            hit = await point.reached()                  # the engine stands there
            os.kill(hit.pid, signal.SIGKILL)

The protocol is that of `relume.events.failpoints.failpoint_client`.
"""

from __future__ import annotations

import asyncio
import fnmatch
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from relume.events.failpoints.points import PLACES, TIMED, Action, Failpoint
from relume.events.log.errors import RelumeError

APPLY_S = 10.0
"""Maximum time that a process takes to apply a rule."""
REACH_S = 30.0


class FailpointError(RelumeError):
    """A rule that nothing can meet, or a process that does not answer."""


class Hit(Struct, frozen=True, kw_only=True):
    """A process reached a failpoint."""

    process: str
    pid: int
    facts: dict[str, Any]


class ArmedFailpoint:
    """A rule in force. `hits`: its first action in each process so far."""

    def __init__(self, server: FailpointServer, rule: dict[str, Any], process: str) -> None:
        self.rule = rule
        self.process = process
        self.hits: list[Hit] = []
        self._server = server
        self._reached = asyncio.Event()

    async def reached(self, timeout_s: float = REACH_S) -> Hit:
        """Wait for the first hit. Raises FailpointError after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._reached.wait()
        except TimeoutError:
            known = sorted(self._server.processes)
            raise FailpointError(
                f"nothing reached {self.rule} within {timeout_s:g} s; processes: {known}"
            ) from None
        return self.hits[0]

    async def release(self) -> None:
        """Take the rule back; threads that it paused continue."""
        await self._server.disarm(self)

    def on_hit(self, hit: Hit) -> None:
        """For the server."""
        self.hits.append(hit)
        self._reached.set()


class _Process:
    def __init__(self, name: str, pid: int, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.pid = pid
        self.writer = writer
        self.applied = 0
        self.changed = asyncio.Event()


class FailpointServer:
    """Use as an async context manager; leaving it releases all paused threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._processes: set[_Process] = set()
        self._armed: dict[int, ArmedFailpoint] = {}
        self._serial = 0
        self._last_rule = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for process in self._processes:
            process.writer.close()
        self.path.unlink(missing_ok=True)

    @property
    def processes(self) -> set[str]:
        """Names of the connected processes."""
        return {process.name for process in self._processes}

    @asynccontextmanager
    async def armed(
        self,
        point: Failpoint,
        action: Action = Action.PAUSE,
        *,
        process: str = "*",
        nth: int = 1,
        times: int = 1,
        seconds: float = 0.0,
        factor: float = 1.0,
        **facts: Any,
    ) -> AsyncIterator[ArmedFailpoint]:
        """A rule for the processes whose name matches `process` (as fnmatch), in force inside.

        In each of them it acts `times` times (0: always), from the `nth` passage with these
        `facts` on. `seconds`: of a delay. `factor`: of a stretch, at least 1.
        Raises FailpointError for a fact that the failpoint does not know, for a stretch of a place that
        does not say how long it took, and if a process does not apply the rule within `APPLY_S`.
        """
        if unknown := set(facts) - set(PLACES[point].facts):
            raise FailpointError(f"{point} knows {PLACES[point].facts}, not {sorted(unknown)}")
        if action is Action.STRETCH and point not in TIMED:
            raise FailpointError(
                f"{point} does not say how long it took; {', '.join(sorted(TIMED))} does"
            )
        self._last_rule += 1
        rule = {
            "id": self._last_rule,
            "point": point,
            "action": action,
            "nth": nth,
            "times": times,
            "seconds": seconds,
            "factor": factor,
            "facts": facts,
        }
        armed = self._armed[self._last_rule] = ArmedFailpoint(self, rule, process)
        try:
            await self._apply(process)
            yield armed
        finally:
            await self.disarm(armed)

    async def disarm(self, armed: ArmedFailpoint) -> None:
        """Take a rule back. A process that is stopped learns of it when it continues."""
        if self._armed.pop(armed.rule["id"], None) is not None:
            self._serial += 1
            for process in self._processes:
                self._send(process)

    async def _apply(self, names: str) -> None:
        """Send all rules, and wait until they are in force in the processes of these names. One
        that ends is no concern."""
        self._serial += 1
        serial = self._serial
        for process in list(self._processes):
            self._send(process)
        try:
            async with asyncio.timeout(APPLY_S):
                for process in [p for p in self._processes if fnmatch.fnmatchcase(p.name, names)]:
                    while process in self._processes and process.applied < serial:
                        process.changed.clear()
                        await process.changed.wait()
        except TimeoutError:
            late = [p.name for p in self._processes if p.applied < serial]
            raise FailpointError(f"{late} applied no rule within {APPLY_S:g} s") from None

    def _send(self, process: _Process) -> None:
        armed = self._armed.values()
        rules = [a.rule for a in armed if fnmatch.fnmatchcase(process.name, a.process)]
        message = {"serial": self._serial, "rules": rules}
        process.writer.write(json.dumps(message).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline() or b"{}")
        if not hello:
            return
        process = _Process(hello["process"], hello["pid"], writer)
        self._processes.add(process)
        self._send(process)
        try:
            while line := await reader.readline():
                self._take(process, json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._processes.discard(process)
            process.changed.set()
            writer.close()

    def _take(self, process: _Process, message: dict[str, Any]) -> None:
        if "applied" in message:
            process.applied = message["applied"]
            process.changed.set()
        elif armed := self._armed.get(message["reached"]):
            armed.on_hit(Hit(process=process.name, pid=process.pid, facts=message["facts"]))
