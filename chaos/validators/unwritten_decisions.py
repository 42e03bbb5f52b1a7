"""Decisions that a gateway acted on and never wrote.

A gateway acts on a decision first and appends it with the next segment. A dispatch carries its
decision to the engine, whose record of the attempt has it (`RequestQueued.dispatch`). If the gateway
is killed in between, the engine's record is the only one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from relume.chaos.validators.records import events_of
from relume.events import vocabulary as v
from relume.events.log.codec import decode
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup

_Life = tuple[str, str]
"""A replica, and its boot."""


class UnwrittenDecisions:
    """Recognises dispatches that came after the last decision in the log of a life of their gateway
    that is over. `lost`: streams of replicas that were declared lost."""

    def __init__(self, groups: Sequence[RevisionGroup], lost: set[str]) -> None:
        self._last: dict[_Life, int] = {}
        self._over: set[_Life] = set()
        current: dict[str, _Life] = {}
        for at in events_of(groups, "r."):
            if type(at.event) is v.ReplicaStarted:
                if at.stream in current:
                    self._over.add(current[at.stream])
                current[at.stream] = at.event.replica, at.event.boot
            elif decision := getattr(at.event, "decision", ""):
                life, number = _parts(decision)
                self._last[life] = max(number, self._last.get(life, 0))
        self._over.update(life for stream, life in current.items() if stream in lost)

    def of(self, dispatch: bytes) -> v.RouteDecided | None:
        """The decision in an engine's record, if its gateway never wrote it."""
        try:
            event = decode(dispatch)
        except LogError:
            return None
        if type(event) is not v.RouteDecided:
            return None
        life, number = _parts(event.decision)
        unwritten = life in self._over and number > self._last.get(life, 0)
        return event if unwritten else None


def broken_replicas(groups: Sequence[RevisionGroup]) -> tuple[set[str], set[str]]:
    """Streams of replicas that restarted or were declared lost, and of the latter alone."""
    lives = Counter(
        at.stream for at in events_of(groups, "r.") if type(at.event) is v.ReplicaStarted
    )
    fleet = (at.event for at in events_of(groups, "fleet"))
    lost = {f"r.{e.replica}" for e in fleet if type(e) is v.ReplicaLost}
    return {stream for stream, count in lives.items() if count > 1} | lost, lost


def _parts(decision: str) -> tuple[_Life, int]:
    """A decision's name: replica, boot, number."""
    life, _, number = decision.rpartition(".")
    replica, _, boot = life.rpartition(".")
    return (replica, boot), int(number) if number.isdigit() else 0
