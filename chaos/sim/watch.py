"""Follows what is written in a run: when a fault is due, and whom an event tells of. What engines
tell is seen when they tell it, the rest when it is in the log.

What is due in the middle of a phase is timed by how long such phases took so far. A phase that
is over by then is not struck: the next one is waited for. While no fault waits for an
event, nothing is read but the leader's stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from chaos.scenario.catalogue import PHASES
from chaos.scenario.schedule import Planned
from chaos.sim.etcd import SimEtcd
from chaos.sim.loop import VirtualLoop
from events import vocabulary as v
from events.codec import decode_all
from events.etcd.keys import Keys

PHASE_S = {
    "prefill": 0.02, "decode": 0.5, "restore": 0.0002, "recovery": 0.05, "checkpoint": 0.2,
    "engine-start": 0.8, "effect": 0.002,
}  # fmt: skip
"""How long a phase is taken to be before one was seen, in seconds."""
REMEMBERED = 50
OF_ENGINES = (v.EngineStep, v.RestoreStarted, v.RestoreDone, v.RestoreFailed)


class Seen(Struct, frozen=True):
    """An event a fault waited for, and in whose stream."""

    stream: str
    event: Any


class _Waiting(Struct):
    planned: Planned
    strike: Callable[[Seen], None]
    count: int = 0


class _Phase(Struct):
    begins: str
    ends: str
    open: dict[str, float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)


class Watch:
    """`leader` names the replica that leads, `requests` maps our ids to the schedule's names."""

    def __init__(self, loop: VirtualLoop, etcd: SimEtcd) -> None:
        self.leader = ""
        self.requests: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self._loop = loop
        self._etcd = etcd
        self._read = 0
        self._leaders = Keys(etcd.config.prefix).stream("fleet")
        self._waiting: list[_Waiting] = []
        self._phases = {name: _Phase(*ends) for name, ends in PHASES.items()}
        etcd.observers.append(self._changed)

    def due(self, planned: Planned, strike: Callable[[Seen], None]) -> None:
        """Call `strike` when the event that `planned` waits for was seen `nth` times."""
        self._waiting.append(_Waiting(planned, strike))

    def give_up(self) -> int:
        """What is waited for never comes; how many faults waited."""
        waiting, self._waiting = self._waiting, []
        return len(waiting)

    def length_s(self, phase: str) -> float:
        """How long such a phase takes, by those seen so far."""
        took = sorted(self._phases[phase].took_s[-REMEMBERED:])
        return took[len(took) // 2] if took else PHASE_S[phase]

    def is_in(self, phase: str, event: Any) -> bool:
        """Whether the phase that `event` began is not over."""
        return any(key in self._phases[phase].open for key in _keys(event))

    def met(self, request: str, asked: str) -> None:
        """An engine met an attempt of a client's request."""
        self.requests[request] = asked

    # --- inside ------------------------------------------------------------------------------

    def _changed(self) -> None:
        store = self._etcd.store
        first, self._read = self._read + 1, store.revision
        if not self._waiting and not any(
            event.kv.key.startswith(self._leaders)
            for _, events in store.changes_from(first)
            for event in events
        ):
            return
        for group in self._etcd.groups_from(first):
            for segment in group.segments:
                if self._waiting or segment.stream == "fleet":
                    for event in decode_all(segment.records):
                        if type(event) not in OF_ENGINES:
                            self._take(segment.stream, event)

    def told(self, worker: str, event: Any) -> None:
        """An engine tells its agent."""
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
        for phase in self._phases.values():
            if name == phase.begins:
                phase.open.update(dict.fromkeys(_keys(event), now))
            elif name == phase.ends:
                for key in _keys(event):
                    if (began := phase.open.pop(key, None)) is not None:
                        phase.took_s.append(now - began)
        for waiting in list(self._waiting):
            planned = waiting.planned
            if name == planned.event and _fits(event, planned.where):
                waiting.count += 1
                if waiting.count >= planned.nth:
                    self._waiting.remove(waiting)
                    waiting.strike(Seen(stream, event))

    def subject(self, kind: str, seen: Seen) -> str:
        """Whom of a `kind` of target the event tells of; empty when of none. Of a plan to
        recover, that is who takes the first of the requests over."""
        event = seen.event
        if kind == "request":
            return self.requests.get(getattr(event, "request", ""), "")
        if kind == "control plane":
            return getattr(event, "replica", "") or _of(seen.stream, "r.") or self.leader
        if type(event) is v.RecoveryPlanned:
            return next((c.options[c.chosen].worker for c in event.choices if c.chosen >= 0), "")
        if effects := getattr(event, "effects", ()):
            return str(effects[0].worker)
        for name in ("worker", "primary"):
            if value := getattr(event, name, ""):
                return str(value)
        return _of(seen.stream, "w.") or self.places.get(getattr(event, "request", ""), "")


def _of(stream: str, kind: str) -> str:
    return stream[len(kind) :] if stream.startswith(kind) else ""


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
