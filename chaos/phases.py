"""The triggers of a run's faults: events, and the middle of phases.

The durations of earlier phases in the run set the time of a fault in the middle of a phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from relume.chaos.scenario.catalogue import PHASES
from relume.chaos.scenario.schedule import PlannedFault
from relume.events import vocabulary as v
from relume.events.failpoints.points import Failpoint

RECENT = 50
"""Number of latest phases that estimate the length of the next."""


MIDDLE: Mapping[str, Failpoint] = {
    "prefill": Failpoint.ENGINE_PREFILL,
    "decode": Failpoint.ENGINE_DECODE,
    "restore": Failpoint.RESTORE_FETCH,
    "checkpoint": Failpoint.CHECKPOINT_STORE,
}
"""Phases in whose middle a process can be made to wait until a fault strikes. A fault in the middle
of another phase is timed by how long such phases took."""


class Seen(Struct, frozen=True):
    """An event that a fault waited for, its stream, and the time of its arrival (s)."""

    stream: str
    event: Any
    at_s: float


class _Phase(Struct):
    begins: str
    ends: str
    open: dict[str, float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)


class Phases:
    """`guess`: assumed length of each phase until one was seen, in seconds. `share`: quantile of
    the seen lengths that serves as the estimate."""

    def __init__(self, guess: Mapping[str, float], share: float) -> None:
        self._guess = guess
        self._share = share
        self._phases = {name: _Phase(*ends) for name, ends in PHASES.items()}

    def take(self, name: str, event: Any, now_s: float) -> None:
        """An event of type `name` was seen."""
        for phase in self._phases.values():
            if name == phase.begins:
                phase.open.update(dict.fromkeys(_keys(event), now_s))
            elif name == phase.ends:
                for key in _keys(event):
                    if (began := phase.open.pop(key, None)) is not None:
                        phase.took_s.append(now_s - began)

    def length_s(self, phase: str) -> float:
        """Estimated length of such a phase, by those seen so far."""
        took = sorted(self._phases[phase].took_s[-RECENT:])
        return took[int(len(took) * self._share)] if took else self._guess[phase]

    def is_in(self, phase: str, event: Any) -> bool:
        """Whether the phase that `event` began is not over, as far as is known."""
        return any(key in self._phases[phase].open for key in _keys(event))

    def forget_lengths(self) -> None:
        """Forget the lengths so far: later phases differ from them."""
        for phase in self._phases.values():
            phase.took_s.clear()


def fits(event: Any, where: Mapping[str, str | int | bool]) -> bool:
    """Whether an event's fields match a fault's `where`."""
    return all(getattr(event, name, None) == value for name, value in where.items())


def is_at_failpoint(planned: PlannedFault) -> bool:
    """Whether the fault of a live run strikes at a failpoint."""
    return planned.phase in MIDDLE and not planned.where


def subject(kind: str, seen: Seen, leader: str, worker_of: Callable[[str], str]) -> str:
    """The replica ("control plane") or worker that an event is about; empty: none. For a recovery
    plan, it is the worker that receives the first of the requests. For a holder's coverage, it is
    the worker of the request with the least coverage. For spares, it is the one that is promoted.
    `worker_of` gives a request's worker."""
    event = seen.event
    if kind == "control plane":
        return getattr(event, "replica", "") or _of(seen.stream, "r.") or leader
    if type(event) is v.RecoveryPlanned:
        return next((c.options[c.chosen].worker for c in event.choices if c.chosen >= 0), "")
    if type(event) is v.SparesDecided:
        return next((name for name in event.was if name not in event.spares), "")
    if type(event) is v.CheckpointsAcknowledged:
        running = [held for held in event.held if worker_of(held.request)]
        least = min(running, key=lambda held: held.tokens, default=None)
        return worker_of(least.request) if least is not None else ""
    if effects := getattr(event, "effects", ()):
        return effects[0].worker
    for name in ("worker", "primary"):
        if value := getattr(event, name, ""):
            return value
    return _of(seen.stream, "w.") or worker_of(getattr(event, "request", ""))


def _of(stream: str, kind: str) -> str:
    return stream[len(kind) :] if stream.startswith(kind) else ""


def _keys(event: Any) -> list[str]:
    """Fields that an event of a phase and the one that ends it have in common."""
    if choices := getattr(event, "choices", ()):
        return [choice.request for choice in choices]
    for name in ("request", "decision", "incarnation"):
        if (value := getattr(event, name, None)) is not None:
            return [str(value)]
    return []
