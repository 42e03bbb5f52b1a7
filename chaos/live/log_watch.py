"""Follows the log of a run: its fold, and when a fault is due. Writers gather events before they
append them, so the log arrives a little late; a fault "in the middle of" a short phase may come
after its end.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from relume.chaos.phases import Phases, Seen, fits, subject
from relume.chaos.scenario.schedule import PlannedFault
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.log.interface import LandedSegment, LogReader, RevisionGroup
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group

PHASE_S = {
    "prefill": 0.05, "decode": 0.3, "restore": 0.05, "recovery": 0.1, "checkpoint": 0.2,
    "engine-start": 1.5, "effect": 0.05,
}  # fmt: skip
"""Assumed length of each phase until one was seen, in seconds."""

OF_LENGTHS = 0.25
"""Quantile of phase lengths that times a fault: a short one, since a fault after the end misses."""


class _Waiting(Struct):
    planned: PlannedFault
    future: asyncio.Future[Seen]
    count: int = 0

    def take(self, seen: Seen) -> None:
        """An event of its type was seen."""
        if not self.future.done() and fits(seen.event, self.planned.where):
            self.count += 1
            if self.count >= self.planned.nth:
                self.future.set_result(seen)


async def _never() -> None:
    await asyncio.Event().wait()


class Watch:
    """`fleet` is the fold of the log so far, `groups` the log itself, `clients` the x-request-id of
    each request. `error`: why it stopped following. `former`: a log that ended, and what follows it is
    another one."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.groups: list[RevisionGroup] = []
        self.former: list[RevisionGroup] = []
        self.clients: dict[str, str] = {}
        self.error = ""
        self._waiting: dict[str, list[_Waiting]] = defaultdict(list)
        self._past: dict[str, list[Seen]] = {}
        self.phases = Phases(PHASE_S, OF_LENGTHS)
        self._counts: dict[str, int] = defaultdict(int)
        self._reading: asyncio.Task[None] | None = None
        self.make_reader: Callable[[], LogReader] | None = None
        """For a log that begins later."""

    async def follow(self, reader: LogReader) -> None:
        """Follow until cancelled, or until the log cannot be followed (`error` says why)."""
        self._reading = asyncio.create_task(self._read(reader))
        try:
            while not self._reading.done():
                await asyncio.wait({self._reading})
        finally:
            self._reading.cancel()

    def end_log(self) -> None:
        """Read no more of this log, which etcd is about to lose."""
        assert self._reading is not None
        self._reading.cancel()
        self._reading = asyncio.create_task(_never())

    def begin_log(self) -> None:
        """Follow the log that begins in its place."""
        assert self._reading is not None and self.make_reader is not None
        self.former, self.groups = self.groups, []
        self.fleet = Fleet()
        self.clients.clear()
        self._counts.clear()
        waiting, self._reading = self._reading, asyncio.create_task(self._read(self.make_reader()))
        waiting.cancel()

    async def _read(self, reader: LogReader) -> None:
        try:
            async for group in reader.follow(0):
                self.groups.append(group)
                apply_group(self.fleet, group, self._take)
        except LogError as error:
            self.error = f"the log cannot be followed: {error}"

    def due(self, planned: PlannedFault, behind: Seen | None = None) -> asyncio.Future[Seen]:
        """Done when the event that `planned` waits for has been seen `nth` times, from now on
        or after event `behind`, which an earlier wait found."""
        waiting = _Waiting(planned, asyncio.get_running_loop().create_future())
        name = planned.event or ""
        past = self._past.setdefault(name, [])
        if behind is not None:
            at = next(index for index, seen in enumerate(past) if seen is behind)
            for seen in past[at + 1 :]:
                waiting.take(seen)
        if not waiting.future.done():
            self._waiting[name].append(waiting)
        return waiting.future

    def subject(self, kind: str, seen: Seen) -> str:
        """The target of a `kind` that the event names; empty: none."""
        if kind == "request":
            return getattr(seen.event, "request", "")
        return subject(kind, seen, self.fleet.leader, self._worker_of)

    def count(self, name: str) -> int:
        """Number of events of type `name` in the log so far."""
        return self._counts[name]

    async def until(self, found: Callable[[Fleet], bool], timeout_s: float) -> bool:
        """Wait until `found(fold)`; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not found(self.fleet):
            if self.error or time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def landed(self) -> tuple[LandedSegment, ...]:
        """All segments read so far: etcd has shown them, so they must stay (I13)."""
        return tuple(
            LandedSegment(
                stream=segment.stream,
                revision=group.revision,
                seq=segment.seq,
                first=segment.first,
                last=segment.last,
            )
            for group in self.groups
            for segment in group.segments
        )

    # --- inside ------------------------------------------------------------------------

    def _worker_of(self, request: str) -> str:
        known = self.fleet.requests.get(request)
        return known.worker if known is not None else ""

    def _take(self, stream: str, position: int, event: Any) -> None:
        if type(event) is v.RequestArrived:
            self.clients[event.request] = event.client_id
        self._one(stream, event)
        for change in getattr(event, "changes", ()):
            self._one(stream, change)

    def _one(self, stream: str, event: Any) -> None:
        name, now = type(event).__name__, time.monotonic()
        self._counts[name] += 1
        self.phases.take(name, event, now)
        if name not in self._past:
            return  # no fault waits for this type
        seen = Seen(stream, event, now)
        self._past[name].append(seen)
        for waiting in self._waiting[name]:
            waiting.take(seen)
        self._waiting[name] = [w for w in self._waiting[name] if not w.future.done()]
