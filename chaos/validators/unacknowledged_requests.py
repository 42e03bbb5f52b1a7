"""Requests that the log knows from their engines and the leader alone.

A gateway acts on a decision first and appends it with the next segment. So a killed gateway leaves
requests without its own events, and may have completed a short one by then. Their dispatches carried
the decisions to the engines, which recorded them; the leader ends them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relume.chaos.validators.records import ClientRecord, courses, events_of
from relume.chaos.validators.unwritten_decisions import UnwrittenDecisions
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome


class UnacknowledgedRequests:
    """Requests without an arrival whose dispatch came after the last decision in the log of a life
    of their gateway that is over. `tokens`: the engines' counts; None: unknown."""

    def __init__(self, groups: Sequence[RevisionGroup], lost: set[str]) -> None:
        self._unwritten = UnwrittenDecisions(groups, lost)
        self.tokens: dict[str, int | None] = {}
        known = {name for name, course in courses(groups).items() if course.arrived is not None}
        for at in events_of(groups, "w."):
            if type(at.event) is v.EngineStep:
                for change in at.event.changes:
                    if change.request.partition("#")[0] not in known:
                        self._take(change)

    def _take(self, change: object) -> None:
        if type(change) is v.RequestQueued:
            if "#" not in change.request and self._unwritten.of(change.dispatch):
                self.tokens.setdefault(change.request, None)
        elif type(change) is v.EngineFinished and change.request in self.tokens:
            if change.attempt == 1 and change.reason in ("stop", "length"):
                self.tokens[change.request] = change.output_tokens

    def take(self, client: ClientRecord) -> bool:
        """Whether one of them may be `client`'s; if so, assigns it to this client. A client that
        left has at most the tokens that the engine counted. Of several choices, the engine names one
        by the request's own name and counts its tokens alone."""
        counted = (client.token_count, client.other_tokens or client.token_count)
        fitting = [
            (n is None, n or 0, request)
            for request, n in self.tokens.items()
            if n is None or n in counted or (_left(client) and n >= client.token_count)
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
