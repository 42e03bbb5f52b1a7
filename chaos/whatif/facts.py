"""What a log knows of each request, and where a continuation begins.

Times are ms of the log's segments, so an arrival is up to one gathering time late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from msgspec import Struct, field

from relume.controlplane.replay.what_if import Difference
from relume.events import vocabulary as v
from relume.events.log.codec import decode
from relume.events.log.entries import Entry
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import RequestOutcome
from relume.policies.state.fleet import Fleet

NO_FAILURE = ("moved",)
BEFORE_MS = 2000


class Place(Struct, frozen=True):
    """Where a live request is when the continuation begins: `computed` tokens of the prompt
    were computed there; `decoding`: all were."""

    worker: str
    computed: int
    decoding: bool


class Facts(Struct, kw_only=True):
    """One request. `points` are (ms, tokens its client could have by then); `prompt` is the
    engine's count, else the gateway's estimate; `cached` tokens of it needed no computing at
    first. `known`: its gateway's word is in the log; engines' may be there before."""

    request: str
    arrived_ms: int
    prompt: int = 1
    most: int = 0
    verdict: str = "exact"
    counted: bool = False
    cached: int = 0
    points: list[tuple[int, int]] = field(default_factory=list)
    first_ms: int | None = None
    end: v.RequestEnded | None = None
    end_ms: int = 0
    known: bool = False
    attempt: int = 0
    worker: str = ""
    delivered: int = 0
    computed: int = 0
    decoding: bool = False

    def tokens_at(self, ms: int) -> int:
        """Tokens made by then, evenly between what is known."""
        before = (self.arrived_ms, 0)
        for at, tokens in sorted(self.points):
            if at > ms:
                if self.first_ms is None or ms < self.first_ms:
                    return before[1]
                share = (ms - before[0]) / max(at - before[0], 1)
                return before[1] + int(share * (tokens - before[1]))
            before = at, max(tokens, before[1])
        return before[1]


class Read(Struct, kw_only=True):
    """A log from `cut` (an index of its events) on: all requests' facts, and the places of
    those that were live there. `at_ms` is the time of the cut."""

    at_ms: int
    facts: dict[str, Facts]
    live: dict[str, Place]
    decided: dict[str, int]
    """Routes that replicas had decided by the cut, by their stream."""
    over: frozenset[str]
    """Requests that had ended by then."""
    routed: dict[str, str]
    """Where requests went that came behind the cut and were decided on before the decision in
    question."""
    usual: int
    """Tokens of the median request that was completed."""


def cut_of(events: Sequence[Entry], first: Difference) -> tuple[int, int, int]:
    """Where to continue from: the index of the first event that is left to the simulator, its
    time, and the index of the decision. Before the arrival of the request that is decided on;
    or `BEFORE_MS` before the failure, silence or command that the decision answers, so that
    checkpoints are under way again."""
    until = next(
        i for i, e in enumerate(events)
        if (e.stream, e.position) == (first.stream, first.position)
    )  # fmt: skip
    event, at = events[until].event, until
    if isinstance(event, v.StallJudged):
        at = _back(events, until, event.silent_us // 1000)
    elif isinstance(event, v.MigrationPlanned):
        at = _last(events, until, lambda e: _commands(e, event.worker))
    elif isinstance(event, v.RecoveryPlanned):
        at = _failed(events, until, event.worker, event.incarnation)
    elif getattr(event, "attempt", 1) > 1:
        at = _last(events, until, lambda e: _cut_off(e, event.request))
        seen = events[at].event
        if isinstance(seen, v.TransportObserved) and seen.kind not in NO_FAILURE:
            at = _failed(events, at, seen.worker, seen.incarnation)
    else:
        at = _last(events, until, lambda e: _arrives(e, event.request))
        return at, events[at].at_ms, until
    at = _back(events, at, BEFORE_MS)
    return at, events[at].at_ms, until


def _commands(event: Any, worker: str) -> bool:
    return type(event) is v.AdminCommanded and event.target == worker


def _cut_off(event: Any, request: str) -> bool:
    return type(event) is v.TransportObserved and event.request == request


def _arrives(event: Any, request: str) -> bool:
    return type(event) is v.RequestArrived and event.request == request


def _last(events: Sequence[Entry], at: int, is_it: Callable[[Any], bool]) -> int:
    """The last such event before `at`; without one, `at`."""
    return next((i for i in range(at - 1, -1, -1) if is_it(events[i].event)), at)


def _back(events: Sequence[Entry], at: int, ms: int) -> int:
    """The first event within `ms` milliseconds before that at `at`."""
    from_ms = events[at].at_ms - ms
    while at and events[at - 1].at_ms >= from_ms:
        at -= 1
    return at


def _failed(events: Sequence[Entry], at: int, worker: str, incarnation: int) -> int:
    """The first word of an engine's failure up to `at`."""
    for i, e in enumerate(events[:at]):
        event = e.event
        if type(event) in (v.EngineDied, v.TransportObserved, v.WorkerSuspected, v.StallJudged):
            told = event.worker, event.incarnation
            if told == (worker, incarnation) and getattr(event, "kind", "") not in NO_FAILURE:
                return i
        elif type(event) is v.WorkerLost and event.worker == worker:
            return i
    return at


def read(
    events: Sequence[Entry], cut: int, at_ms: int, until: int, base: Fleet | None = None
) -> Read:
    """All facts of a log that continues from `base`, and what was live at the cut; the decision
    in question is at `until`."""
    found = dict(_before(base, events[0].at_ms)) if base is not None else {}
    live: dict[str, Place] = {}
    decided: dict[str, int] = {}
    over: frozenset[str] = frozenset()
    routed: dict[str, str] = {}
    for index, at in enumerate(events):
        if index == cut:
            live = _live(found)
            over = frozenset(name for name, facts in found.items() if facts.end is not None)
        event = at.event
        if type(event) is v.EngineStep:
            for change in event.changes:
                if change.request not in found and type(change) is v.RequestQueued:
                    found[change.request] = Facts(request=change.request, arrived_ms=at.at_ms)
                if change.request in found:
                    _changed(found[change.request], change, at)
        elif type(event) is v.RequestArrived:
            facts = found.setdefault(
                event.request, Facts(request=event.request, arrived_ms=at.at_ms)
            )
            facts.known, facts.most, facts.verdict = True, event.max_tokens, event.verdict
            if not facts.counted:
                facts.prompt = max(event.prompt_tokens, 1)
        elif getattr(event, "request", "") in found:
            _told(found[event.request], event, at)
        if type(event) is v.RouteDecided and index < cut:
            decided[at.stream] = decided.get(at.stream, 0) + 1
        elif type(event) is v.RouteDecided and index < until and event.attempt == 1:
            routed[event.request] = event.worker
    ends = [
        f.end.tokens for f in found.values() if f.end and f.end.outcome == RequestOutcome.COMPLETED
    ]
    return Read(
        at_ms=at_ms,
        facts=found,
        live=live,
        decided=decided,
        over=over,
        routed=routed,
        usual=int(median(ends)) if ends else 1,
    )


def _before(base: Fleet, at_ms: int) -> Iterator[tuple[str, Facts]]:
    """What a snapshot knows of requests that came before it, as if it had been just then."""
    attempts = {
        (one.request, one.attempt): one
        for worker in base.workers.values()
        for one in worker.attempts.values()
    }
    for name, request in base.requests.items():
        facts = Facts(
            request=name,
            arrived_ms=at_ms,
            prompt=max(request.engine_prompt_tokens, request.prompt_tokens, 1),
        )
        facts.known, facts.counted, facts.most = (
            True,
            request.engine_prompt_tokens > 0,
            request.max_tokens,
        )
        facts.verdict, facts.worker, facts.attempt = (
            request.verdict, request.worker, request.attempt,
        )  # fmt: skip
        one = attempts.get((name, request.attempt))
        if one is not None:
            facts.computed, facts.decoding = max(one.tokens - one.left, 0), one.decoding
        if facts.decoding:
            facts.first_ms, facts.points = at_ms, [(at_ms, 1)]
        yield name, facts


def _live(found: dict[str, Facts]) -> dict[str, Place]:
    return {
        name: Place(f.worker, f.computed, f.decoding)
        for name, f in found.items()
        if f.end is None and f.known
    }


def _changed(facts: Facts, change: v.AnyChange, at: Entry) -> None:
    kind = type(change)
    if isinstance(change, v.RequestQueued):
        if change.dispatch:
            with suppress(LogError):  # of another build: its gateway tells the same
                _dispatched(facts, decode(change.dispatch))
        facts.attempt = max(facts.attempt, change.attempt)
        if change.attempt == 1 and not facts.counted:
            facts.prompt, facts.counted = max(change.prompt_tokens, 1), True
    elif change.attempt != facts.attempt:
        return
    elif isinstance(change, v.RequestAdmitted):
        if change.attempt == 1 and facts.first_ms is None:
            facts.cached = change.cached_tokens
        facts.computed = max(facts.computed, change.cached_tokens)
    elif isinstance(change, v.PrefillChunkDone):
        facts.computed = change.computed
    elif kind is v.RequestPreempted:
        facts.computed, facts.decoding = 0, False
    elif kind is v.FirstToken:
        facts.decoding = True
        facts.points.append((at.at_ms, facts.delivered + 1))
        facts.first_ms = facts.first_ms or at.at_ms


def _dispatched(facts: Facts, route: v.RouteDecided) -> None:
    """The first that is heard of a dispatch: from its gateway, or from the engine."""
    if route.worker and route.attempt > facts.attempt:
        facts.attempt, facts.worker = route.attempt, route.worker
        facts.delivered, facts.computed, facts.decoding = route.delivered, 0, False


def _told(facts: Facts, event: Any, at: Entry) -> None:
    kind = type(event)
    if kind is v.RouteDecided:
        _dispatched(facts, event)
    elif kind is v.TransportObserved:
        facts.points.append((at.at_ms, event.delivered))
    elif kind is v.RequestEnded and facts.end is None:
        facts.end, facts.end_ms = event, at.at_ms
        facts.points.append((at.at_ms, event.tokens))
