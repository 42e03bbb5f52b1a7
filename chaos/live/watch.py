"""Follows the log while it is written: where things stand, and when a fault is due.

A log is told a little late, by the time events gather before they are written; a fault "in
the middle of" a short phase may come behind its end. What is due in a phase is timed by how
long such phases took in this run so far.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from chaos.scenario.catalogue import PHASES
from chaos.scenario.schedule import Planned
from events import vocabulary as v
from events.errors import LogError
from events.log import Landed, LogReader, RevisionGroup
from policies.fleet import apply_group
from policies.state import Fleet

PHASE_S = {
    "prefill": 0.05, "decode": 0.3, "restore": 0.05, "recovery": 0.1, "checkpoint": 0.2,
    "engine-start": 1.5, "effect": 0.05,
}  # fmt: skip
"""How long a phase is taken to be before one was seen, in seconds."""

RECENT = 40


class Seen(Struct, frozen=True):
    """An event a fault waited for: whose stream, what, and when it was seen (monotonic)."""

    stream: str
    event: Any
    at_s: float


class _Waiting(Struct):
    planned: Planned
    future: asyncio.Future[Seen]
    count: int = 0


class _Phase(Struct):
    begins: str
    ends: str
    open: dict[str, float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)


class Watch:
    """`fleet` is the fold of the log so far, `groups` the log itself, `clients` the request
    of each x-request-id. `error`: why it follows no more."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.groups: list[RevisionGroup] = []
        self.clients: dict[str, str] = {}
        self.error = ""
        self._waiting: dict[str, list[_Waiting]] = defaultdict(list)
        self._phases = {name: _Phase(*ends) for name, ends in PHASES.items()}
        self._counts: dict[str, int] = defaultdict(int)

    async def follow(self, reader: LogReader) -> None:
        """For ever, or until the log cannot be followed (`error` says why)."""
        try:
            async for group in reader.follow(0):
                self.groups.append(group)
                apply_group(self.fleet, group, self._take)
        except LogError as error:
            self.error = f"the log cannot be followed: {error}"

    def due(self, planned: Planned) -> asyncio.Future[Seen]:
        """Done when the event that `planned` waits for has been seen `nth` times from now on."""
        waiting = _Waiting(planned, asyncio.get_running_loop().create_future())
        self._waiting[planned.event or ""].append(waiting)
        return waiting.future

    def length_s(self, phase: str) -> float:
        """How long such a phase takes at least in most cases, by those seen so far: what
        comes behind its end has missed it."""
        took = sorted(self._phases[phase].took_s[-RECENT:])
        return took[len(took) // 4] if took else PHASE_S[phase]

    def forget_lengths(self) -> None:
        """What was seen until now took another time than what comes."""
        for phase in self._phases.values():
            phase.took_s.clear()

    def is_in(self, phase: str, event: Any) -> bool:
        """Whether the phase that `event` began is not over, as far as is known."""
        return any(key in self._phases[phase].open for key in _keys(event))

    def count(self, name: str) -> int:
        """How many events of type `name` the log has so far."""
        return self._counts[name]

    async def until(self, found: Callable[[Fleet], bool], timeout_s: float) -> bool:
        """Wait until the fold is so; False when it has not come to that in time."""
        deadline = time.monotonic() + timeout_s
        while not found(self.fleet):
            if self.error or time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.05)
        return True

    def landed(self) -> tuple[Landed, ...]:
        """All segments that were followed: etcd has shown them, so they must stay (I13)."""
        return tuple(
            Landed(segment.stream, group.revision, segment.seq, segment.first, segment.last)
            for group in self.groups
            for segment in group.segments
        )

    # --- inside ------------------------------------------------------------------------

    def _take(self, stream: str, position: int, event: Any) -> None:
        if type(event) is v.RequestArrived:
            self.clients[event.request] = event.client_id
        self._one(stream, event)
        for change in getattr(event, "changes", ()):
            self._one(stream, change)

    def _one(self, stream: str, event: Any) -> None:
        name, now = type(event).__name__, time.monotonic()
        self._counts[name] += 1
        for phase in self._phases.values():
            for key in _keys(event):
                if name == phase.begins:
                    phase.open[key] = now
                elif name == phase.ends and (began := phase.open.pop(key, None)) is not None:
                    phase.took_s.append(now - began)
        for waiting in list(self._waiting.get(name, ())):
            if not _fits(event, waiting.planned.where):
                continue
            waiting.count += 1
            if waiting.count >= waiting.planned.nth:
                self._waiting[name].remove(waiting)
                if not waiting.future.done():
                    waiting.future.set_result(Seen(stream, event, now))


def _fits(event: Any, where: dict[str, str | int | bool]) -> bool:
    return all(getattr(event, name, None) == value for name, value in where.items())


def _keys(event: Any) -> list[str]:
    """What an event of a phase and the one that ends it have in common."""
    if choices := getattr(event, "choices", ()):
        return [choice.request for choice in choices]
    for name in ("request", "decision", "incarnation"):
        if (value := getattr(event, name, None)) is not None:
            return [str(value)]
    return []


def subject(fleet: Fleet, kind: str, seen: Seen) -> str:
    """Whom of a `kind` of target the event tells of; empty when of none. Of a plan to
    recover, that is who takes the first of the requests over."""
    event = seen.event
    if kind == "request":
        return getattr(event, "request", "")
    if kind == "control plane":
        return getattr(event, "replica", "") or _of_stream(seen.stream, "r.") or fleet.leader
    if type(event) is v.RecoveryPlanned:
        return next((c.options[c.chosen].worker for c in event.choices if c.chosen >= 0), "")
    if effects := getattr(event, "effects", ()):
        return effects[0].worker
    for name in ("worker", "primary"):
        if value := getattr(event, name, ""):
            return value
    if worker := _of_stream(seen.stream, "w."):
        return worker
    request = fleet.requests.get(getattr(event, "request", ""))
    return request.worker if request is not None else ""


def _of_stream(stream: str, kind: str) -> str:
    return stream[len(kind) :] if stream.startswith(kind) else ""
