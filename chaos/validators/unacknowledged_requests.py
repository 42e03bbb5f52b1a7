"""Requests that the log knows from their engines and the leader alone.

A gateway acts on a decision first and appends it with the next segment. So a killed gateway leaves
requests without its own events, and may have completed a short one by then. Their dispatches carried
the decisions to the engines, which recorded them; the leader ends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relume.chaos.validators.records import ClientRecord, courses, events_of
from relume.events import vocabulary as v
from relume.events.log.codec import decode
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome

_Life = tuple[str, str]
"""A replica, and its boot."""


class UnacknowledgedRequests:
    """Requests without an arrival whose dispatch came after the last decision in the log of a life
    of their gateway that is over. `tokens`: the engines' counts; None: unknown."""

    def __init__(self, groups: Sequence[RevisionGroup], lost: set[str]) -> None:
        self._last: dict[_Life, int] = {}
        self._over: set[_Life] = set()
        self._lives(groups, lost)
        self.tokens: dict[str, int | None] = {}
        known = {name for name, course in courses(groups).items() if course.arrived is not None}
        for at in events_of(groups, "w."):
            if type(at.event) is v.EngineStep:
                for change in at.event.changes:
                    if change.request.partition("#")[0] not in known:
                        self._take(change)

    def _lives(self, groups: Sequence[RevisionGroup], lost: set[str]) -> None:
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

    def _take(self, change: object) -> None:
        if type(change) is v.RequestQueued:
            if "#" not in change.request and self._died(change.dispatch):
                self.tokens.setdefault(change.request, None)
        elif type(change) is v.EngineFinished and change.request in self.tokens:
            if change.attempt == 1 and change.reason in ("stop", "length"):
                self.tokens[change.request] = change.output_tokens

    def _died(self, dispatch: bytes) -> bool:
        try:
            event = decode(dispatch)
        except LogError:
            return False
        if type(event) is not v.RouteDecided:
            return False
        life, number = _parts(event.decision)
        return life in self._over and number > self._last.get(life, 0)

    def take(self, client: ClientRecord) -> bool:
        """Whether one of them may be `client`'s; if so, assigns it to this client. A client that
        left has at most the tokens that the engine counted."""
        counted = client.token_count if not client.other_tokens else None
        fitting = [
            (n is None, n or 0, request)
            for request, n in self.tokens.items()
            if n is None or n == counted or (_left(client) and n >= client.token_count)
        ]
        if not fitting:
            return False
        del self.tokens[min(fitting)[2]]
        return True


def in_order(clients: Iterable[ClientRecord]) -> list[ClientRecord]:
    """The clients in the order in which `take` finds each its request: whole answers, which only
    one count fits, then those that left, the longest part first."""
    return sorted(clients, key=lambda client: (_left(client), -client.token_count))


def _left(client: ClientRecord) -> bool:
    return client.outcome == RequestOutcome.CANCELLED


def _parts(decision: str) -> tuple[_Life, int]:
    """A decision's name: replica, boot, number."""
    life, _, number = decision.rpartition(".")
    replica, _, boot = life.rpartition(".")
    return (replica, boot), int(number) if number.isdigit() else 0
