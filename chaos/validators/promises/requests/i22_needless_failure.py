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
from relume.chaos.validators.promises.requests.fatal_faults import (
    BUSY,
    MS,
    NO_WORKER,
    SLACK_MS,
    FatalFaults,
)
from relume.chaos.validators.records import (
    ClientRecord,
    Course,
    Log,
    Violation,
    courses,
    events_of,
    log_of,
    of_clients,
)
from relume.chaos.validators.service_limits import ServiceLimits, limits_of
from relume.chaos.validators.strikes import (
    FELT_MS,
    THE_LOG,
    Strike,
    is_struck,
)
from relume.controlplane.stream.error_codes import NO_NEWS
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import ShedReason

PROMISE = "I22"
GONE = 410
LEAST_S = 5.0
LATE_MS = 2000
IDLE_MS = 1000
"""Time around a refusal in which its replica may not know yet that an engine is idle."""
LOG_LATE = "the log was too late"
"""How a return ends that the log, away meanwhile, did not record in time: its 410 is permitted."""
BEGINS = (v.RequestArrived, v.TransportObserved, v.ClientReturned)
"""Events with which a request begins to wait for a worker."""


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
    limits = limits or limits_of({})
    faults = FatalFaults(log, truth, began_ms, strikes, limits)
    rules = _Rules(truth, began_ms, away, strikes, limits, _degraded(log), faults)
    rules.landed_ms = _landed(log)
    rules.report_ms = report_ms or {}
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
        faults: FatalFaults,
    ) -> None:
        self._degraded = degraded
        self._faults = faults
        self._truth = truth
        self._began_ms = began_ms
        self._reachable = [worker for worker in truth.serving if worker not in away]
        self._strikes = strikes
        gaps = ((s.since_ms, s.until_ms) for s in strikes if s.stops_log)
        self._log_away = sorted(gaps, reverse=True)
        self._limits = limits
        self._queue = _Queue(truth)
        self.landed_ms: Mapping[int, int] = {}
        """When the log had each revision, at the earliest."""
        self.report_ms: Mapping[str, int] = {}
        """By worker, how late its reports come: until then no replica can know that it is idle."""

    def needless(self, call: ClientCall, course: Course | None) -> Iterator[str]:
        """Why its error was needless; nothing: it was not."""
        if course is not None and course.arrived is None:
            course = None
        if call.status == GONE:
            yield from self._gone(call, course)
            return
        blows = self._faults.blows(call, course)
        if self._faults.have_ended(blows, call, course):
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
        served = self._served_after(call, since_ns)
        if served:
            failed = f"{len(blows)} of its attempts failed by faults"
            yield f"it got {call.status} after {waited_ms} ms, {failed}; {', '.join(served)} served"

    # --- 410

    def _gone(self, call: ClientCall, course: Course | None) -> Iterator[str]:
        at_ms = self._faults.ms(call.ended_ns)
        if course is None or course.arrived is None:
            if not self._faults.struck_replica(at_ms):
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
        at_ns, at_ms, limits = call.ended_ns, self._faults.ms(call.ended_ns), self._limits
        waited_ms = (at_ns - call.sent_ns) // MS
        until_ns, news_ns = at_ns + IDLE_MS * MS, at_ns - (at_ms - self._news_ms(at_ms)) * MS
        idle = [
            worker for worker in self._reachable
            if self._truth.serves(worker, call)
            and self._truth.idled(worker, news_ns - self._idle_ns(worker), until_ns)
            and not is_struck(self._strikes, (worker,), at_ms - FELT_MS, at_ms)
        ]  # fmt: skip
        if idle and not self._faults.struck_replica(at_ms):
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

    # --- times

    def _stood_still_ms(self, call: ClientCall) -> int:
        """For how long its replica had stood still when it answered: its timers go on meanwhile, and it
        reads the log after them."""
        at_ms, sent_ms = self._faults.ms(call.ended_ns), self._faults.ms(call.sent_ns)
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
        sent_ms = self._faults.ms(call.sent_ns)
        begun = [
            self._faults.ran_in(call, course, at)[1]
            if type(at.event) is v.TransportObserved
            else sent_ms
            if type(at.event) is v.RequestArrived  # the log may have it late
            else at.at_ms
            for at in course.events
            if type(at.event) in BEGINS
        ]
        ended_ms = self._faults.ms(call.ended_ns)
        since_ms = max((ms for ms in begun if ms <= ended_ms), default=ended_ms)
        return self._truth.began_ns + (since_ms - self._began_ms) * MS

    def _served_after(self, call: ClientCall, since_ns: int) -> list[str]:
        """Reachable engines of its model that served within the wait that begins then."""
        until_ns, least_ns = since_ns + int(self._limits.wait_s * 1e9), int(LEAST_S * 1e9)
        return [
            worker
            for worker in self._reachable
            if self._truth.serves(worker, call)
            and self._truth.served(worker, since_ns, until_ns, least_ns)
        ]

    def _around(self, call: ClientCall) -> tuple[int, int]:
        """The time in which a fault may have kept the log away when it was answered."""
        return self._faults.ms(call.ended_ns) - FELT_MS, self._faults.ms(call.ended_ns)


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
