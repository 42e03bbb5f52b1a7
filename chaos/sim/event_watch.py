"""Follows the events of a run: when a fault is due, and which target an event names. It sees engines'
reports when they are sent, all other events when they are in the log.

If a phase is over when a fault in the middle of it is due, the fault waits for the next one. While
no fault waits for an event, the watch reads only the leader's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from relume.chaos.phases import Phases, Seen, fits, subject
from relume.chaos.scenario.schedule import PlannedFault
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.events import vocabulary as v
from relume.events.log.codec import decode_all

PHASE_S = {
    "prefill": 0.02, "decode": 0.5, "restore": 0.0002, "recovery": 0.05, "checkpoint": 0.2,
    "engine-start": 0.8, "effect": 0.002,
}  # fmt: skip
"""Assumed length of each phase until one was seen, in seconds."""
OF_ENGINES = (v.EngineStep, v.RestoreStarted, v.RestoreDone, v.RestoreFailed, v.LinkMeasured)


class _Waiting(Struct):
    planned: PlannedFault
    strike: Callable[[Seen], None]
    count: int = 0


class Watch:
    """`leader` names the replica that leads, `requests` maps our ids to the schedule's names."""

    def __init__(self, loop: VirtualLoop, etcd: SimEtcd) -> None:
        self.leader = ""
        self.requests: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self._loop = loop
        self._etcd = etcd
        self._waiting: list[_Waiting] = []
        self.phases = Phases(PHASE_S, 0.5)
        etcd.observers.append(self._changed)

    def due(self, planned: PlannedFault, strike: Callable[[Seen], None]) -> None:
        """Call `strike` when the event that `planned` waits for was seen `nth` times."""
        self._waiting.append(_Waiting(planned, strike))

    def give_up(self) -> int:
        """Give up all waits; return the number of faults that waited."""
        waiting, self._waiting = self._waiting, []
        return len(waiting)

    def met(self, request: str, content_id: str) -> None:
        """An engine received an attempt of a client's request."""
        self.requests[request] = content_id

    # --- inside ------------------------------------------------------------------------------

    def _changed(self, first: int, of_leader: bool) -> None:
        if not self._waiting and not of_leader:
            return
        for group in self._etcd.groups_from(first):
            for segment in group.segments:
                if self._waiting or segment.stream == "fleet":
                    for event in decode_all(segment.records):
                        if type(event) not in OF_ENGINES:
                            self._take(segment.stream, event)

    def on_report(self, worker: str, event: Any) -> None:
        """An engine reports to its agent."""
        if self._waiting:
            self._take(f"w.{worker}", event)

    def _take(self, stream: str, event: Any) -> None:
        kind = type(event)
        if kind is v.EngineStep:
            for change in event.changes:
                self._one(stream, change)
        elif kind is v.LeaderElected:
            self.leader = event.replica
        elif kind is v.RouteDecided:
            self.places[event.request] = event.worker
        self._one(stream, event)

    def _one(self, stream: str, event: Any) -> None:
        name, now = type(event).__name__, self._loop.time()
        self.phases.take(name, event, now)
        for waiting in list(self._waiting):
            planned = waiting.planned
            if name == planned.event and fits(event, planned.where):
                waiting.count += 1
                if waiting.count >= planned.nth:
                    self._waiting.remove(waiting)
                    waiting.strike(Seen(stream, event, now))

    def subject(self, kind: str, seen: Seen) -> str:
        """The target of a `kind` that the event names; empty: none."""
        if kind == "request":
            return self.requests.get(getattr(seen.event, "request", ""), "")
        return subject(kind, seen, self.leader, lambda request: self.places.get(request, ""))
