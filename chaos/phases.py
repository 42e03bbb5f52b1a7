"""What a run's faults wait for: events, and the middle of phases.

A fault in the middle of a phase is timed by how long such phases took so far in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from relume.chaos.scenario.catalogue import PHASES
from relume.events import vocabulary as v

RECENT = 50
"""So many phases, the latest, say how long one takes."""


class Seen(Struct, frozen=True):
    """An event a fault waited for, in whose stream, and when it was seen (s)."""

    stream: str
    event: Any
    at_s: float


class _Phase(Struct):
    begins: str
    ends: str
    open: dict[str, float] = field(default_factory=dict)
    took_s: list[float] = field(default_factory=list)


class Phases:
    """`guess`: how long each phase is taken to be before one was seen, in seconds. `share`: of
    the lengths seen, sorted, the one that counts."""

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
        """How long such a phase takes, by those seen so far."""
        took = sorted(self._phases[phase].took_s[-RECENT:])
        return took[int(len(took) * self._share)] if took else self._guess[phase]

    def is_in(self, phase: str, event: Any) -> bool:
        """Whether the phase that `event` began is not over, as far as is known."""
        return any(key in self._phases[phase].open for key in _keys(event))

    def forget_lengths(self) -> None:
        """What was seen until now took another time than what comes."""
        for phase in self._phases.values():
            phase.took_s.clear()


def fits(event: Any, where: Mapping[str, str | int | bool]) -> bool:
    """Whether an event's fields are as a fault wants them."""
    return all(getattr(event, name, None) == value for name, value in where.items())


def subject(kind: str, seen: Seen, leader: str, worker_of: Callable[[str], str]) -> str:
    """Which replica ("control plane") or worker an event tells of; empty when of none. Of a
    plan to recover, that is who takes the first of the requests over; of what a holder has, who
    runs the request of which it has least. `worker_of` a request: where it runs."""
    event = seen.event
    if kind == "control plane":
        return getattr(event, "replica", "") or _of(seen.stream, "r.") or leader
    if type(event) is v.RecoveryPlanned:
        return next((c.options[c.chosen].worker for c in event.choices if c.chosen >= 0), "")
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
    """What an event of a phase and the one that ends it have in common."""
    if choices := getattr(event, "choices", ()):
        return [choice.request for choice in choices]
    for name in ("request", "decision", "incarnation"):
        if (value := getattr(event, name, None)) is not None:
            return [str(value)]
    return []
