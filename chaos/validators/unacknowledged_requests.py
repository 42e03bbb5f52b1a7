"""Requests that the log knows from their engines and the leader alone.

A gateway acts on a decision first and appends it with the next segment. So a killed gateway leaves
requests without its own events, and may have completed a short one by then. Their dispatches carried
the decisions to the engines, which recorded them; the leader ends them. If a fault dropped that record
too, the log never has the request: of a simulated run it is known what the record said.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relume.chaos.validators.ground_truth import GroundTruth, QueuedReport
from relume.chaos.validators.records import ClientRecord, courses, events_of
from relume.chaos.validators.unwritten_decisions import UnwrittenDecisions
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome

_Engine = tuple[str, int]
"""A worker, and an incarnation of its engine."""
_UNKNOWN = 1 << 62
"""Number of a step that the log does not have yet."""


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


class UnreportedRequests:
    """Requests that no replica wrote, as above, and whose engines' records were dropped: the log says
    of each of these engines that it lacks reports of that time, or that its agent ended."""

    def __init__(self, groups: Sequence[RevisionGroup], lost: set[str], truth: GroundTruth) -> None:
        self._truth = truth
        self._unwritten = UnwrittenDecisions(groups, lost)
        self._reports = _Reports(groups)

    def has(self, client: ClientRecord) -> bool:
        """Whether `client`'s is one of them."""
        names = [name for name, _, _ in self._truth.attempts.get(client.request, ())]
        return bool(names) and all(map(self._is_unreported, names))

    def _is_unreported(self, name: str) -> bool:
        sent = self._truth.queued.get(name)
        return (
            sent is not None
            and self._unwritten.of(sent.dispatch) is not None
            and name not in self._reports.attempts
            and self._reports.are_missing(sent)
        )


class _Reports:
    """What engines reported. `attempts`: those that they took."""

    def __init__(self, groups: Sequence[RevisionGroup]) -> None:
        self.attempts: set[str] = set()
        self._missing: dict[_Engine, list[tuple[int, int]]] = {}
        """Between which steps reports are missing, as the log says."""
        self._last: dict[_Engine, int] = {}
        self._noted: dict[_Engine, int] = {}
        """The last step before the log said so for the agent."""
        for at in events_of(groups, "w."):
            engine = at.stream.removeprefix("w."), getattr(at.event, "incarnation", 0)
            if type(at.event) is v.ReportsDropped:
                self._on_dropped(engine)
            elif type(at.event) is v.WorkerRegistered:
                self._on_agent(engine[0])
            elif type(at.event) is v.EngineStep:
                self._on_step(engine, at.event)

    def are_missing(self, sent: QueuedReport) -> bool:
        """Whether reports of that time are."""
        missing = self._missing.get((sent.worker, sent.incarnation), ())
        return any(since <= sent.step <= until for since, until in missing)

    def _on_dropped(self, engine: _Engine) -> None:
        last = self._last.get(engine, 0)
        # Its agent says so at most once a second: the time since it did so last counts.
        since = self._noted.get(engine, last)
        self._missing.setdefault(engine, []).append((since, _UNKNOWN))
        self._noted[engine] = last

    def _on_agent(self, worker: str) -> None:
        """Another agent: what the one before had of engines may have ended with it."""
        for engine, last in self._last.items():
            if engine[0] == worker:
                self._missing.setdefault(engine, []).append((last, _UNKNOWN))

    def _on_step(self, engine: _Engine, event: v.EngineStep) -> None:
        missing = self._missing.setdefault(engine, [])
        if missing and missing[-1][1] == _UNKNOWN:
            missing[-1] = missing[-1][0], event.step
        if event.lost:
            missing.append((self._last.get(engine, 0), event.step))
        self._last[engine] = event.step
        queued = (change for change in event.changes if type(change) is v.RequestQueued)
        self.attempts.update(f"{change.request}/{change.attempt}" for change in queued)


def in_order(clients: Iterable[ClientRecord]) -> list[ClientRecord]:
    """The clients in the order in which `take` finds each its request: whole answers, which only
    one count fits, then those that left, the longest part first."""
    return sorted(clients, key=lambda client: (_left(client), -client.token_count))


def _left(client: ClientRecord) -> bool:
    return client.outcome == RequestOutcome.CANCELLED
