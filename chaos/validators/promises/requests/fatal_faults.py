"""Which faults may have ended a request: what explains a failure, by the number and kind of attempts that
faults ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from relume.chaos.validators.ground_truth import ClientCall, GroundTruth
from relume.chaos.validators.records import (
    Course,
    Entry,
    Log,
    events_of,
)
from relume.chaos.validators.service_limits import ServiceLimits
from relume.chaos.validators.strikes import (
    DEATHS_OF_REPLICAS,
    FELT_MS,
    WRONG_WEIGHTS,
    Strike,
    is_struck,
)
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, Guarantee, TransportKind

OF_ENGINE = 500
"""An engine's own refusal, or its word that it failed on the request, has at most this status."""
BUSY, NO_WORKER = 429, 503
SLACK_MS = 1000
"""Difference permitted between the log's clock and the wait."""
MS = 1_000_000
TICK_MS = 1000
FRAGILE = frozenset(("choices", "relayed", "unnamed", "restarting", "resumable"))
"""Kinds of requests that one failure may end: they cannot be continued, or a part of the stream is
lost with the gateway."""
DEATHS = frozenset((TransportKind.RESET, TransportKind.EOF, TransportKind.ENGINE_DEAD))


class FatalFaults:
    """The faults of one run, and what each request felt of them."""

    def __init__(
        self,
        log: Log,
        truth: GroundTruth,
        began_ms: int,
        strikes: Sequence[Strike],
        limits: ServiceLimits,
    ) -> None:
        self._truth = truth
        self._began_ms = began_ms
        self._strikes = strikes
        self._kills = [strike for strike in strikes if strike.what in DEATHS_OF_REPLICAS]
        self._limits = limits
        self._restarted = _restarted(log)
        self._moves = _moves(log)

    def blows(self, call: ClientCall, course: Course | None) -> list[Entry]:
        """Its attempts that a fault ended, or the restart of their engine."""
        if course is None:
            return []
        return [
            at
            for at in course.events
            if type(at.event) is v.TransportObserved
            and at.event.kind != TransportKind.MOVED
            and (
                (at.event.worker, at.event.incarnation) in self._restarted
                or self.is_felt(at.event.worker, *self.ran_in(call, course, at))
            )
        ]

    def ran_in(self, call: ClientCall, course: Course, failed: Entry) -> tuple[int, int]:
        """When an attempt that failed began, and by when it had failed, ms. The log may have been
        away, and have its records late."""
        assert course.arrived is not None
        begun = [
            (int(name.rpartition("/")[2]), self.ms(at_ns))
            for name, _, at_ns in self._truth.attempts.get(course.arrived.event.client_id, ())
        ]
        attempt = failed.event.attempt
        since_ms = max((ms for n, ms in begun if n <= attempt), default=self.ms(call.sent_ns))
        until_ms = min((ms for n, ms in begun if n > attempt), default=self.ms(call.ended_ns))
        return since_ms, max(since_ms, min(until_ms, failed.at_ms))

    def is_felt(self, worker: str, since_ms: int, until_ms: int) -> bool:
        """Whether a fault of the worker may end an attempt that ran there in that time."""
        since_ms = min(since_ms, until_ms) - FELT_MS
        return is_struck(self._strikes, (worker,), since_ms, until_ms + SLACK_MS)

    def have_ended(self, blows: Sequence[Entry], call: ClientCall, course: Course | None) -> bool:
        """Whether these failures are as many as end such a request."""
        at_ms = self.ms(call.ended_ns)
        if course is None:  # attempts that no log has, of a replica that was killed
            return call.status != BUSY and self.struck_replica(at_ms)
        begun = [at.event for at in course.events if type(at.event) is v.RouteDecided]
        ran_on = {event.worker for event in begun if event.worker}
        if any(strike.targets & ran_on for strike in self._strikes if strike.what in WRONG_WEIGHTS):
            return True
        last = begun[-1].worker if begun else ""
        count = len(blows) + self._is_last_unwritten(course, at_ms)
        if call.status in (BUSY, NO_WORKER):
            ran_last = course.decisions[-1].worker if course.decisions else ""
            is_lost = call.kind == "resumable" and (
                self._are_both_struck(course, ran_last, at_ms) or self._is_sample_lost(call, course)
            )
            return is_lost or count >= self._limits.errors
        if (
            self._is_grace_over(call, course)
            or self._is_lost_with_gateway(call, course)
            or _is_sample_taken_away(course)
            or self._breaks_off(course, begun[-1] if begun else None, at_ms)
        ):
            return True
        by_one = bool(blows) or self.is_felt(last, at_ms, at_ms)
        if call.status <= OF_ENGINE or _is_fragile(call, course):
            return by_one
        if any(at.event.kind == TransportKind.DECLINED for at in blows):
            return True
        deaths = [at for at in blows if at.event.kind in DEATHS]
        return len(deaths) >= self._limits.deaths or count >= self._limits.errors

    def _is_last_unwritten(self, course: Course, at_ms: int) -> bool:
        """Whether a fault may have ended its last attempt, and its gateway was killed before it wrote
        that."""
        failed = [at.event.attempt for at in course.events if type(at.event) is v.TransportObserved]
        if not course.decisions or course.decisions[-1].attempt in failed:
            return False
        killed = is_struck(self._kills, _owners(course), at_ms, at_ms + FELT_MS)
        return killed and self.is_felt(course.decisions[-1].worker, at_ms, at_ms)

    def _are_both_struck(self, course: Course, worker: str, at_ms: int) -> bool:
        """Whether faults killed its gateway and struck its worker: until the log knows of the first, its
        client is sent away to return again."""
        is_alone = is_struck(self._kills, _owners(course), at_ms - FELT_MS, at_ms)
        return is_alone and self.is_felt(worker, at_ms, at_ms)

    def _is_sample_lost(self, call: ClientCall, course: Course) -> bool:
        """Whether faults killed a gateway of its and struck a worker of its, since it was sent: nobody
        else can continue what was sampled without a seed."""
        assert course.arrived is not None
        since_ms, until_ms = self.ms(call.sent_ns), self.ms(call.ended_ns)
        ran_on = {decision.worker for decision in course.decisions}
        return (
            course.arrived.event.verdict == Guarantee.SAMPLED
            and is_struck(self._kills, _owners(course), since_ms, until_ms)
            and is_struck(self._strikes, ran_on, since_ms, until_ms)
        )

    def _is_lost_with_gateway(self, call: ClientCall, course: Course) -> bool:
        """Whether a fault killed a gateway of its, and its last attempt was nowhere else: its engine had
        finished it, with no holder any more, and was struck before its client returned; or had handed
        over to that gateway what nobody can generate again."""
        assert course.arrived is not None
        arrival = course.arrived.event
        begun = self._truth.attempts.get(arrival.client_id, ())
        if call.kind != "resumable" or not begun:
            return False
        name, worker, _ = begun[-1]
        left_ns = self._truth.ended.get(name)
        if left_ns is None:
            return False
        left_ms, until_ms = self.ms(left_ns), self.ms(call.ended_ns)
        owners = _owners(course)
        if name in self._truth.finished:
            killed = is_struck(self._kills, owners, self.ms(call.sent_ns), until_ms)
            return killed and is_struck(self._strikes, (worker,), left_ms, until_ms)
        if arrival.verdict != Guarantee.SAMPLED:
            return False
        number = int(name.rpartition("/")[2])
        planned = {
            stream.removeprefix("r.")
            for stream, request, attempt, of_worker in self._moves
            if (request, attempt, of_worker) == (course.request, number, worker)
        }
        movers = planned.intersection(owners)
        return is_struck(self._kills, movers, left_ms - SLACK_MS, left_ms + SLACK_MS)

    def _breaks_off(self, course: Course, last: v.RouteDecided | None, at_ms: int) -> bool:
        """Whether a fault let its engine break the last answer off, with a word of its own."""
        failed = [at.event.attempt for at in course.events if type(at.event) is v.TransportObserved]
        if last is None or last.attempt in failed:
            return False
        if ended_ns := self._truth.ended.get(f"{last.request}/{last.attempt}"):
            at_ms = min(at_ms, self.ms(ended_ns))  # its gateway may have stood still since
        breaks = [strike for strike in self._strikes if strike.what == "answer-broken"]
        return is_struck(breaks, (last.worker,), at_ms - FELT_MS, at_ms + SLACK_MS)

    def _is_grace_over(self, call: ClientCall, course: Course) -> bool:
        """Whether its client returned when its grace was over: nobody need keep what was sampled, or a
        stream that its engine had finished."""
        assert course.arrived is not None
        arrival = course.arrived.event
        away_ms = (call.ended_ns - call.last_ns) // MS if call.last_ns else 0
        if not arrival.grace_ticks or away_ms < TICK_MS * arrival.grace_ticks:
            return False
        names = [name for name, _, _ in self._truth.attempts.get(arrival.client_id, ())]
        has_finished = bool(names) and names[-1] in self._truth.finished
        return arrival.verdict == Guarantee.SAMPLED or has_finished

    def struck_replica(self, at_ms: int) -> bool:
        """Whether a replica was struck by then, or soon after."""
        return any(
            strike.since_ms <= at_ms + FELT_MS and any(n.startswith("r") for n in strike.targets)
            for strike in self._strikes
        )

    def ms(self, at_ns: int) -> int:
        return self._began_ms + (at_ns - self._truth.began_ns) // MS


def _is_sample_taken_away(course: Course) -> bool:
    """Whether its client went to another replica just after its own one had let go of the engine to
    continue elsewhere: nobody else can continue what was sampled without a seed."""
    assert course.arrived is not None
    if course.arrived.event.verdict != Guarantee.SAMPLED:
        return False
    back = [at for at in course.events if type(at.event) is v.ClientReturned]
    let_go = [
        at for at in course.events
        if type(at.event) is v.TransportObserved and at.event.kind == TransportKind.DETACHED
    ]  # fmt: skip
    return any(
        first.stream == at.stream != last.stream
        and first.at_ms <= at.at_ms <= last.at_ms + FELT_MS
        and last.at_ms - first.at_ms <= SLACK_MS
        for first, last in pairwise(back)
        for at in let_go
    )


def _is_fragile(call: ClientCall, course: Course) -> bool:
    assert course.arrived is not None
    verdict = course.arrived.event.verdict
    return call.kind in FRAGILE or verdict in (Guarantee.RESTART, Guarantee.REPLAY)


def _owners(course: Course) -> list[str]:
    """The replicas that had the request."""
    return [stream.removeprefix("r.") for stream in course.owners]


def _moves(log: Log) -> frozenset[tuple[str, str, int, str]]:
    """Planned moves: the stream of the replica, the request, its attempt and the worker it leaves."""
    return frozenset(
        (at.stream, choice.request, choice.attempt, at.event.worker)
        for at in events_of(log, "r.")
        if type(at.event) is v.MigrationPlanned
        for choice in at.event.choices
    )


def _restarted(log: Log) -> frozenset[tuple[str, int]]:
    """Engines, by worker and incarnation, that effects restarted. I16 asks who decided that."""
    return frozenset(
        (effect.worker, effect.incarnation)
        for at in events_of(log, "fleet")
        if type(at.event) is v.EffectsDecided
        for effect in at.event.effects
        if effect.kind == EffectKind.RESTART
    )
