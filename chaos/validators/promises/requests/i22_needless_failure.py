"""I22: no request fails that a worker could have served within its wait.

Of a simulated run it is known which engines served and which had no request, when each client sent
its request, got a token and got an error (`relume.chaos.validators.ground_truth`), and what each
fault struck (`relume.chaos.validators.strikes`). Every error that a client got, also in the middle
of its stream, must have one of these explanations. The bound is zero in every scenario: one
failure without an explanation breaks the promise.

- 410: the log does not have the request live. Within `LATE_MS` of the time at which the log had its
  arrival, and of its end, the replica may not know yet, or know already.
- 503: it waited for the whole time that the settings give, or its replica stood still for so long, or
  no engine that a fault left reachable served for `LEAST_S` on end within it.
- 503 because of a level of degradation: I11 judges whether the level refuses it.
- 503 to a client that returned to a replica that heard nothing from the log, while a fault kept the log
  away: the stream runs at another one, which cannot be asked.
- 429: it waited for the whole time in the queue, or the queue was full, or the share of its tenant.
  At most so many wait as were sent to its replica, had no answer, and were taken by no engine. It is
  needless if an engine that no fault had struck had no request for `IDLE_MS` before and after, and
  before that for as long as the run delays its reports. While faults keep the log away, and for `LATE_MS`
  after, replicas know the engines of before: it must have been idle since then.
- 503 to a client that returned: its gateway was killed, and its worker struck; however long ago, if it
  was sampled without a seed.
- Any error: faults ended its attempts, or effects restarted their engines. If it could continue
  elsewhere, they ended as many as the settings permit. One is enough for a request that cannot be
  continued, for an engine's own refusal, for an answer that its engine broke off, and for tokens of a
  worker that computes wrong results.
- Another error: its client returned to the stream when its grace was over. Nobody need keep then what
  was sampled without a seed, or what its engine had finished.
- Another error to a client that returned: its gateway was killed, and its engine had finished it and was
  struck then; or had just handed over to that gateway what was sampled without a seed.

The log is asked only where an attempt ran, and when; the words of an error count for nothing but
the choice of its rule. A request that the log lacks was served by a replica that was killed before
it could write: such an error is compared with the faults until then. A run without truth, a real
one, is not judged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence

from relume.chaos.validators.ground_truth import ClientCall, GroundTruth
from relume.chaos.validators.records import (
    ClientRecord,
    Course,
    Entry,
    Log,
    Violation,
    courses,
    events_of,
    log_of,
    of_clients,
)
from relume.chaos.validators.service_limits import ServiceLimits, limits_of
from relume.chaos.validators.strikes import (
    DEATHS_OF_REPLICAS,
    FELT_MS,
    THE_LOG,
    WRONG_WEIGHTS,
    Strike,
    is_struck,
)
from relume.controlplane.stream.error_codes import NO_NEWS
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EffectKind, Guarantee, ShedReason, TransportKind

PROMISE = "I22"
GONE, BUSY, NO_WORKER = 410, 429, 503
OF_ENGINE = 500
"""An engine's own refusal, or its word that it failed on the request, has at most this status."""
LEAST_S = 5.0
SLACK_MS = 1000
"""Difference permitted between the log's clock and the wait."""
LATE_MS = 2000
IDLE_MS = 1000
"""Time around a refusal in which its replica may not know yet that an engine is idle."""
LOG_LATE = "the log was too late"
"""How a return ends that the log, away meanwhile, did not record in time: its 410 is permitted."""
MS = 1_000_000
BEGINS = (v.RequestArrived, v.TransportObserved, v.ClientReturned)
"""Events with which a request begins to wait for a worker."""
TICK_MS = 1000
FRAGILE = frozenset(("choices", "relayed", "unnamed", "restarting", "resumable"))
"""Kinds of requests that one failure may end: they cannot be continued, or a part of the stream is
lost with the gateway."""
DEATHS = frozenset((TransportKind.RESET, TransportKind.EOF, TransportKind.ENGINE_DEAD))


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    truth: GroundTruth | None = None,
    began_ms: int = 0,
    away: Collection[str] = (),
    strikes: Sequence[Strike] = (),
    limits: ServiceLimits | None = None,
    report_ms: Mapping[str, int] | None = None,
) -> list[Violation]:
    """Needless failures. `began_ms`: wall time of the run's start; `away`: workers that a fault
    kept from gateways; `limits`: those of the run's settings; `report_ms`: by worker, how late the
    run lets its reports come at most."""
    if truth is None:
        return []
    log = log_of(groups)
    rules = _Rules(
        truth, began_ms, away, strikes, limits or limits_of({}), _degraded(log), _restarted(log)
    )
    rules.landed_ms = _landed(log)
    rules.report_ms = report_ms or {}
    rules.moves = _moves(log)
    return [
        Violation(PROMISE, client.request, text)
        for client, course in of_clients(courses(log), clients)
        if (call := truth.calls.get(client.request)) is not None and call.status
        for text in rules.needless(call, course)
    ]


class _Rules:
    """The rules for one run."""

    def __init__(
        self,
        truth: GroundTruth,
        began_ms: int,
        away: Collection[str],
        strikes: Sequence[Strike],
        limits: ServiceLimits,
        degraded: Collection[str],
        restarted: Collection[tuple[str, int]],
    ) -> None:
        self._degraded = degraded
        self._restarted = restarted
        self._truth = truth
        self._began_ms = began_ms
        self._reachable = [worker for worker in truth.serving if worker not in away]
        self._strikes = strikes
        self._kills = [strike for strike in strikes if strike.what in DEATHS_OF_REPLICAS]
        gaps = ((s.since_ms, s.until_ms) for s in strikes if s.stops_log)
        self._log_away = sorted(gaps, reverse=True)
        self._limits = limits
        self._queue = _Queue(truth)
        self.landed_ms: Mapping[int, int] = {}
        """When the log had each revision, at the earliest."""
        self.report_ms: Mapping[str, int] = {}
        """By worker, how late its reports come: until then no replica can know that it is idle."""

        self.moves: Collection[tuple[str, str, int, str]] = ()
        """Planned moves: the stream of the replica, the request, its attempt and the worker it leaves."""

    def needless(self, call: ClientCall, course: Course | None) -> Iterator[str]:
        """Why its error was needless; nothing: it was not."""
        if course is not None and course.arrived is None:
            course = None
        if call.status == GONE:
            yield from self._gone(call, course)
            return
        blows = self._blows(call, course)
        if self._have_ended(blows, call, course):
            return
        if call.status == BUSY:
            yield from self._not_full(call)
            return
        if call.status == NO_WORKER and course is not None and course.request in self._degraded:
            return
        if call.message == NO_NEWS and is_struck(self._strikes, (THE_LOG,), *self._around(call)):
            return
        since_ns = self._waits_since(call, course)
        waited_ms = (call.ended_ns - since_ns) // MS
        most_ms = 1000 * self._limits.wait_s - SLACK_MS
        if call.status == NO_WORKER and max(waited_ms, self._stood_still_ms(call)) >= most_ms:
            return
        served = self._served_after(since_ns)
        if served:
            failed = f"{len(blows)} of its attempts failed by faults"
            yield f"it got {call.status} after {waited_ms} ms, {failed}; {', '.join(served)} served"

    # --- 410

    def _gone(self, call: ClientCall, course: Course | None) -> Iterator[str]:
        at_ms = self._ms(call.ended_ns)
        if course is None or course.arrived is None:
            if not self._struck_replica(at_ms):
                yield "its client got 410, and the log never had it"
            return
        if any(LOG_LATE in end.event.detail for end in course.ends):
            return
        arrived = course.arrived
        since = max(arrived.at_ms, self.landed_ms.get(arrived.revision, arrived.at_ms))
        until = min((end.at_ms for end in course.ends), default=1 << 62)
        if since + LATE_MS <= at_ms <= until - LATE_MS:
            yield f"its client got 410 after {at_ms - since} ms, and the log had it live"

    # --- 429

    def _not_full(self, call: ClientCall) -> Iterator[str]:
        at_ns, at_ms, limits = call.ended_ns, self._ms(call.ended_ns), self._limits
        waited_ms = (at_ns - call.sent_ns) // MS
        until_ns, news_ns = at_ns + IDLE_MS * MS, at_ns - (at_ms - self._news_ms(at_ms)) * MS
        idle = [
            worker for worker in self._reachable
            if self._truth.idled(worker, news_ns - self._idle_ns(worker), until_ns)
            and not is_struck(self._strikes, (worker,), at_ms - FELT_MS, at_ms)
        ]  # fmt: skip
        if idle and not self._struck_replica(at_ms):
            yield f"it got {BUSY} after {waited_ms} ms; {', '.join(idle)} had no request"
            return
        if waited_ms >= 1000 * limits.queue_s - SLACK_MS:
            return
        waiting, of_tenant = self._queue.at(call, at_ns)
        is_shared = bool(call.tenant) and of_tenant > limits.of_tenant
        if waiting <= limits.requests and not is_shared:
            queue_use = f"{limits.requests} may wait, at most {waiting} did"
            yield f"it got {BUSY} after {waited_ms} ms; {queue_use}, of its tenant {of_tenant}"

    def _news_ms(self, at_ms: int) -> int:
        """The last time by then of which the log could tell replicas what engines have."""
        for since_ms, until_ms in self._log_away:
            if since_ms < at_ms <= until_ms + LATE_MS:
                at_ms = since_ms
        return at_ms

    def _idle_ns(self, worker: str) -> int:
        """Time for which it must be idle until every replica knows."""
        return (IDLE_MS + self.report_ms.get(worker, 0)) * MS

    # --- faults

    def _blows(self, call: ClientCall, course: Course | None) -> list[Entry]:
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
                or self._is_felt(at.event.worker, *self._ran_in(call, course, at))
            )
        ]

    def _ran_in(self, call: ClientCall, course: Course, failed: Entry) -> tuple[int, int]:
        """When an attempt that failed began, and by when it had failed, ms. The log may have been
        away, and have its records late."""
        assert course.arrived is not None
        begun = [
            (int(name.rpartition("/")[2]), self._ms(at_ns))
            for name, _, at_ns in self._truth.attempts.get(course.arrived.event.client_id, ())
        ]
        attempt = failed.event.attempt
        since_ms = max((ms for n, ms in begun if n <= attempt), default=self._ms(call.sent_ns))
        until_ms = min((ms for n, ms in begun if n > attempt), default=self._ms(call.ended_ns))
        return since_ms, max(since_ms, min(until_ms, failed.at_ms))

    def _is_felt(self, worker: str, since_ms: int, until_ms: int) -> bool:
        """Whether a fault of the worker may end an attempt that ran there in that time."""
        since_ms = min(since_ms, until_ms) - FELT_MS
        return is_struck(self._strikes, (worker,), since_ms, until_ms + SLACK_MS)

    def _have_ended(self, blows: Sequence[Entry], call: ClientCall, course: Course | None) -> bool:
        """Whether these failures are as many as end such a request."""
        at_ms = self._ms(call.ended_ns)
        if course is None:  # attempts that no log has, of a replica that was killed
            return call.status != BUSY and self._struck_replica(at_ms)
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
            or self._breaks_off(course, begun[-1] if begun else None, at_ms)
        ):
            return True
        by_one = bool(blows) or self._is_felt(last, at_ms, at_ms)
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
        return killed and self._is_felt(course.decisions[-1].worker, at_ms, at_ms)

    def _are_both_struck(self, course: Course, worker: str, at_ms: int) -> bool:
        """Whether faults killed its gateway and struck its worker: until the log knows of the first, its
        client is sent away to return again."""
        is_alone = is_struck(self._kills, _owners(course), at_ms - FELT_MS, at_ms)
        return is_alone and self._is_felt(worker, at_ms, at_ms)

    def _is_sample_lost(self, call: ClientCall, course: Course) -> bool:
        """Whether faults killed a gateway of its and struck a worker of its, since it was sent: nobody
        else can continue what was sampled without a seed."""
        assert course.arrived is not None
        since_ms, until_ms = self._ms(call.sent_ns), self._ms(call.ended_ns)
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
        left_ms, until_ms = self._ms(left_ns), self._ms(call.ended_ns)
        owners = _owners(course)
        if name in self._truth.finished:
            killed = is_struck(self._kills, owners, self._ms(call.sent_ns), until_ms)
            return killed and is_struck(self._strikes, (worker,), left_ms, until_ms)
        if arrival.verdict != Guarantee.SAMPLED:
            return False
        number = int(name.rpartition("/")[2])
        planned = {
            stream.removeprefix("r.")
            for stream, request, attempt, of_worker in self.moves
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
            at_ms = min(at_ms, self._ms(ended_ns))  # its gateway may have stood still since
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

    def _struck_replica(self, at_ms: int) -> bool:
        """Whether a replica was struck by then, or soon after."""
        return any(
            strike.since_ms <= at_ms + FELT_MS and any(n.startswith("r") for n in strike.targets)
            for strike in self._strikes
        )

    # --- times

    def _stood_still_ms(self, call: ClientCall) -> int:
        """For how long its replica had stood still when it answered: its timers go on meanwhile, and it
        reads the log after them."""
        at_ms, sent_ms = self._ms(call.ended_ns), self._ms(call.sent_ns)
        replica = call.gateway.removeprefix("r.")
        stops = (s for s in self._strikes if s.what == "leader-stop" and replica in s.targets)
        return max(
            (
                s.until_ms - max(s.since_ms, sent_ms)
                for s in stops
                if 0 <= at_ms - s.until_ms <= SLACK_MS
            ),
            default=0,
        )

    def _waits_since(self, call: ClientCall, course: Course | None) -> int:
        """When it began to wait for a worker the last time, ns."""
        if course is None:
            return call.sent_ns
        sent_ms = self._ms(call.sent_ns)
        begun = [
            self._ran_in(call, course, at)[1]
            if type(at.event) is v.TransportObserved
            else sent_ms
            if type(at.event) is v.RequestArrived  # the log may have it late
            else at.at_ms
            for at in course.events
            if type(at.event) in BEGINS
        ]
        ended_ms = self._ms(call.ended_ns)
        since_ms = max((ms for ms in begun if ms <= ended_ms), default=ended_ms)
        return self._truth.began_ns + (since_ms - self._began_ms) * MS

    def _served_after(self, since_ns: int) -> list[str]:
        """Reachable engines that served within the wait that begins then."""
        until_ns, least_ns = since_ns + int(self._limits.wait_s * 1e9), int(LEAST_S * 1e9)
        return [
            worker
            for worker in self._reachable
            if self._truth.served(worker, since_ns, until_ns, least_ns)
        ]

    def _around(self, call: ClientCall) -> tuple[int, int]:
        """The time in which a fault may have kept the log away when it was answered."""
        return self._ms(call.ended_ns) - FELT_MS, self._ms(call.ended_ns)

    def _ms(self, at_ns: int) -> int:
        return self._began_ms + (at_ns - self._truth.began_ns) // MS


class _Queue:
    """Maximum numbers of requests that wait in the queues of replicas: those that were sent, had no
    answer, and were taken by no engine. Those whose replica is unknown count everywhere."""

    def __init__(self, truth: GroundTruth) -> None:
        self._came: dict[tuple[str, str], list[int]] = {}
        self._gone: dict[tuple[str, str], list[int]] = {}
        for name, call in truth.calls.items():
            taken = [at_ns for _, _, at_ns in truth.attempts.get(name, ())]
            gone_ns = min([call.ended_ns, *taken]) + SLACK_MS * MS
            for tenant in {"", call.tenant}:
                key = call.gateway, tenant
                self._came.setdefault(key, []).append(call.sent_ns)
                self._gone.setdefault(key, []).append(gone_ns)
        for times in (*self._came.values(), *self._gone.values()):
            times.sort()

    def at(self, call: ClientCall, at_ns: int) -> tuple[int, int]:
        """How many waited at the replica of `call` then, and how many of its tenant."""
        return self._count(call.gateway, "", at_ns), self._count(call.gateway, call.tenant, at_ns)

    def _count(self, gateway: str, tenant: str, at_ns: int) -> int:
        return sum(
            bisect_right(came, at_ns) - bisect_left(self._gone[key], at_ns)
            for key, came in self._came.items()
            if key[1] == tenant and (key[0] in ("", gateway) or not gateway)
        )


def _degraded(log: Log) -> frozenset[str]:
    """Requests that were refused because of a level of degradation."""
    return frozenset(
        at.event.request
        for at in events_of(log, "r.")
        if type(at.event) is v.RequestShed and at.event.reason == ShedReason.DEGRADED
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


def _moves(log: Log) -> frozenset[tuple[str, str, int, str]]:
    """Planned moves: the stream of the replica, the request, its attempt and the worker it leaves."""
    return frozenset(
        (at.stream, choice.request, choice.attempt, at.event.worker)
        for at in events_of(log, "r.")
        if type(at.event) is v.MigrationPlanned
        for choice in at.event.choices
    )


def _is_fragile(call: ClientCall, course: Course) -> bool:
    assert course.arrived is not None
    verdict = course.arrived.event.verdict
    return call.kind in FRAGILE or verdict in (Guarantee.RESTART, Guarantee.REPLAY)


def _owners(course: Course) -> list[str]:
    """The replicas that had the request."""
    return [stream.removeprefix("r.") for stream in course.owners]


def _landed(log: Log) -> dict[int, int]:
    """When the log had each revision, at the earliest: what another replica had written before it says
    so of a writer that is late."""
    found: dict[int, int] = {}
    latest = 0
    for at in events_of(log):
        if not at.stream.startswith("w."):
            latest = max(latest, at.at_ms)
        found[at.revision] = latest
    return found
