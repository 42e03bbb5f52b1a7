"""Failures of engines and their hosts: which events open a record, join one, and end one.

Theory of operation. What speaks against an engine comes from several sides: replicas whose
connections break, their judgements, its agent, the leader. All evidence about one incarnation joins
one record, and the gravest class of it names the failure. So an engine that two replicas and its
agent found hung, and that was then killed, is one incident.

An operator's stop or restart looks at first like a failure, because connections break. When the
agent records that the death was meant, such a record is withdrawn. A death before the engine was
ready belongs to the record of its predecessor. Slowness is a record of its own: it says nothing
about a later death.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from relume.controlplane.incidents.case import MILD, SAME_FAILURE_MS, Case
from relume.controlplane.incidents.case_book import CaseBook
from relume.controlplane.incidents.touched_streams import TouchedStreams
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import (
    DeathReason,
    FailedPart,
    FailureClass,
    ProbeResult,
    TransportKind,
)
from relume.policies.liveness.overdue import OUT_OF_REACH
from relume.policies.liveness.suspicious import OVERLOADED, SUSPICIOUS, WRONG

AGENT = "its agent"
_LEADS_TO_MS = {FailureClass.ERRORS: 5_000, FailureClass.UNREACHABLE: SAME_FAILURE_MS}
"""Mild evidence that is older than this has nothing to do with a death or a hang. An engine that
dies may answer wrongly just before; its connections may break a lease before the log says why."""
_PLANNED = (DeathReason.STOPPED, DeathReason.REPLACED)
"""Deaths that an operator asked for: the agent leaves, or restarts the engine."""


class EngineLife(Struct, kw_only=True):
    """What the log says of a worker: its owner's `epoch`, the `newest` incarnation, the last that
    was `ready`, that `died`, and that an operator ended (`planned`); whether it `left`."""

    epoch: int = 0
    newest: int = 0
    ready: int = 0
    died: int = 0
    planned: int = 0
    left: bool = False


class WorkerFailures:
    """The cases of workers in `book`; `streams` are those that they touch."""

    def __init__(self, book: CaseBook, streams: TouchedStreams) -> None:
        self._book = book
        self._streams = streams
        self._lives: dict[str, EngineLife] = {}
        self.handlers: dict[type, Callable[[Entry, Any], None]] = {
            v.WorkerRegistered: self._on_registered,
            v.StreamResumed: self._on_stream_resumed,
            v.EngineStarted: self._on_started,
            v.EngineRestartScheduled: self._on_scheduled,
            v.EngineReady: self._on_ready,
            v.EngineDied: self._on_died,
            v.EngineHung: self._on_hung,
            v.EngineRecovered: self._on_recovered,
            v.ReportsDropped: self._on_reports_dropped,
            v.StallJudged: self._on_stall_judged,
            v.StreamJudged: self._on_stream_judged,
            v.WorkerSuspected: self._on_suspected,
            v.WorkerCleared: self._on_cleared,
            v.TransportObserved: self._on_observed,
            v.RecoveryPlanned: self._on_planned,
            v.WorkerLost: self._on_lost,
            v.WorkerDeregistered: self._on_deregistered,
            v.WorkerForgotten: self._on_forgotten,
        }

    def on_replica_gone(self, entry: Entry, replica: str) -> None:
        """What the replica held against engines is void."""
        for case in self._book:
            if case.judges.pop(replica, 0) is None:
                case.settle(entry.at_ms)

    # --- evidence ------------------------------------------------------------------------

    def evidence(
        self,
        entry: Entry,
        worker: str,
        incarnation: int,
        failure: FailureClass,
        reason: str,
        confirmed: bool = True,
    ) -> Case | None:
        """The case that this evidence belongs to, opened if need be; None if it belongs to none,
        because an operator ended the engine. Wrong answers that were found as it left count."""
        life = self._life(worker)
        is_planned = incarnation <= life.planned
        if is_planned and failure not in (FailureClass.HOST, FailureClass.CORRUPTION):
            return None
        case = self._book.of_engine(worker, incarnation) or self._before_ready(worker, incarnation)
        if case is None or not self._belongs(case, entry, incarnation, failure):
            self._supersede(worker)
            case = self._book.open(entry, FailedPart.WORKER, worker, incarnation, failure, reason)
        case.explain(failure, reason)
        case.confirmed = case.confirmed or confirmed
        case.last = max(case.last, incarnation)
        case.evidence_ms = entry.at_ms
        if is_planned and failure == FailureClass.CORRUPTION:
            case.dead = max(case.dead, incarnation)
            if life.left:
                case.close(-1)
        return case

    def _before_ready(self, worker: str, incarnation: int) -> Case | None:
        """The open case of the incarnation before, if this one was never ready."""
        latest = self._book.latest(FailedPart.WORKER, worker)
        if latest is not None and latest.record.open and self._life(worker).ready < incarnation:
            return latest
        return None

    def _belongs(self, case: Case, entry: Entry, incarnation: int, failure: FailureClass) -> bool:
        """Whether evidence is of the same failure as `case`; reopens it if it is."""
        record = case.record
        if case.dead >= incarnation:
            return True
        if record.open:
            lead_ms = _LEADS_TO_MS.get(record.failure, 0)
            is_old = lead_ms and entry.at_ms - record.noticed_ms > lead_ms
            return failure in MILD or not is_old
        soon = entry.at_ms - case.evidence_ms <= SAME_FAILURE_MS
        if failure in MILD and record.failure in MILD and soon:
            case.reopen()
            return True
        return False

    def _supersede(self, worker: str) -> None:
        """Another failure begins: the case before it is over."""
        latest = self._book.latest(FailedPart.WORKER, worker)
        if latest is not None and latest.record.open:
            latest.close(latest.ready_ms)

    def _end_slowness(self, entry: Entry, worker: str) -> None:
        """The slow engine died, or its worker left. (After an operator's restart it may be fast.)"""
        case = self._book.slow(worker)
        if case is not None and case.record.open:
            case.link(entry)
            case.close(-1)

    # --- what replicas saw -----------------------------------------------------------------

    def _on_observed(self, entry: Entry, event: v.TransportObserved) -> None:
        kind, worker, incarnation = event.kind, event.worker, event.incarnation
        if kind in SUSPICIOUS:
            stalled = kind == TransportKind.STALL
            failure = FailureClass.HANG if stalled else FailureClass.UNREACHABLE
            case = self.evidence(entry, worker, incarnation, failure, kind, False)
            if case is not None and case.dead < incarnation:
                case.judges[entry.stream[2:]] = None
        elif kind in WRONG and event.status not in OVERLOADED:
            case = self.evidence(entry, worker, incarnation, FailureClass.ERRORS, kind, False)
        elif kind in (TransportKind.STALE, TransportKind.CORRUPT):
            case = self._book.of_engine(worker, incarnation)
        else:
            return
        if case is not None:
            case.link(entry, event.request)
            self._streams.touch(case, entry, event.request, event.attempt, event.delivered)

    def _on_stall_judged(self, entry: Entry, event: v.StallJudged) -> None:
        if not event.hung:
            return
        reason = f"silent for {event.silent_us / 1e6:.1f} s"
        case = self.evidence(entry, event.worker, event.incarnation, FailureClass.HANG, reason)
        if case is not None:
            if case.dead < event.incarnation:
                case.judges[entry.stream[2:]] = None
            _began(case, entry.at_ms - event.silent_us // 1000)
            case.decided(entry.at_ms)
            case.link(entry)

    def _on_stream_judged(self, entry: Entry, event: v.StreamJudged) -> None:
        if event.stuck:
            failure, reason = FailureClass.ERRORS, "stuck"
            if event.probe == ProbeResult.SILENT:
                failure, reason = FailureClass.UNREACHABLE, OUT_OF_REACH
            place = event.worker, event.incarnation
            case = self.evidence(entry, *place, failure, reason, False)
            if case is not None:
                _began(case, entry.at_ms - event.silent_us // 1000)
                case.decided(entry.at_ms)
                case.link(entry, event.request)

    def _on_suspected(self, entry: Entry, event: v.WorkerSuspected) -> None:
        worker, incarnation = event.worker, event.incarnation
        unreachable = FailureClass.UNREACHABLE
        case = self.evidence(entry, worker, incarnation, unreachable, event.reason, False)
        if case is not None:
            if case.dead < incarnation:
                case.judges[entry.stream[2:]] = None
            case.link(entry)

    def _on_cleared(self, entry: Entry, event: v.WorkerCleared) -> None:
        self._acquit(entry, event.worker, event.incarnation, entry.stream[2:])

    def _acquit(self, entry: Entry, worker: str, incarnation: int, judge: str) -> None:
        case = self._book.of_engine(worker, incarnation)
        if case is not None and judge in case.judges:
            del case.judges[judge]
            case.link(entry)
            case.settle(entry.at_ms)

    def _on_planned(self, entry: Entry, event: v.RecoveryPlanned) -> None:
        case = self._book.of_engine(event.worker, event.incarnation)
        if case is not None:
            case.decided(entry.at_ms)
            case.link(entry)

    # --- what the agent says ---------------------------------------------------------------

    def _on_registered(self, entry: Entry, event: v.WorkerRegistered) -> None:
        """Another agent: it starts an engine of its own."""
        life = self._life(event.worker)
        life.epoch, life.left = entry.epoch, False
        case = self._book.latest(FailedPart.WORKER, event.worker)
        if case is not None and case.lost:
            case.lost, case.dead = False, max(case.dead, case.last)
            case.link(entry)

    def _on_stream_resumed(self, entry: Entry, event: v.StreamResumed) -> None:
        """The same agent: it had been cut off."""
        self._life(entry.stream[2:]).epoch = entry.epoch
        case = self._book.latest(FailedPart.WORKER, entry.stream[2:])
        if case is not None and case.lost:
            case.lost = False
            case.link(entry)
            case.settle(entry.at_ms)

    def _on_started(self, entry: Entry, event: v.EngineStarted) -> None:
        life = self._life(event.worker)
        if life.ready and life.ready == life.newest < event.incarnation and life.died < life.ready:
            self._died(entry, event.worker, life.ready, DeathReason.UNKNOWN_REASON)
        life.newest = event.incarnation
        self._on_scheduled(entry, event)

    def _on_scheduled(self, entry: Entry, event: Any) -> None:
        case = self._book.latest(FailedPart.WORKER, event.worker)
        if case is not None and case.record.open and case.dead:
            case.link(entry)

    def _on_ready(self, entry: Entry, event: v.EngineReady) -> None:
        life = self._life(event.worker)
        life.newest = life.ready = event.incarnation
        case = self._book.latest(FailedPart.WORKER, event.worker)
        if case is not None and case.record.open and event.incarnation > case.record.incarnation:
            case.dead = max(case.dead, event.incarnation - 1)
            case.ready_ms = entry.at_ms
            case.judges.clear()
            case.link(entry)
            case.settle(entry.at_ms)

    def _on_died(self, entry: Entry, event: v.EngineDied) -> None:
        self._died(entry, event.worker, event.incarnation, event.reason)

    def _died(self, entry: Entry, worker: str, incarnation: int, reason: DeathReason) -> None:
        life = self._life(worker)
        life.newest = max(life.newest, incarnation)
        life.died = max(life.died, incarnation)
        if reason in _PLANNED:
            life.planned = max(life.planned, incarnation)
            case = self._book.of_engine(worker, incarnation)
            if case is not None and not self._withdrawn(case):
                case.dead = max(case.dead, incarnation)
                case.link(entry)
            return
        self._end_slowness(entry, worker)
        hung = reason == DeathReason.HUNG
        failure = FailureClass.HANG if hung else FailureClass.CRASH
        case = self.evidence(entry, worker, incarnation, failure, reason)
        if case is not None:
            case.dead, case.ready_ms = max(case.dead, incarnation), -1
            case.judges.clear()
            case.link(entry)

    def _on_hung(self, entry: Entry, event: v.EngineHung) -> None:
        reason = f"its loop took no turn for {event.silent_us / 1e6:.1f} s"
        case = self.evidence(entry, event.worker, event.incarnation, FailureClass.HANG, reason)
        if case is not None:
            case.judges[AGENT] = None
            _began(case, entry.at_ms - event.silent_us // 1000)
            case.link(entry)

    def _on_recovered(self, entry: Entry, event: v.EngineRecovered) -> None:
        self._acquit(entry, event.worker, event.incarnation, AGENT)

    def _on_reports_dropped(self, entry: Entry, event: v.ReportsDropped) -> None:
        worker, incarnation = event.worker, event.incarnation
        case = self.evidence(entry, worker, incarnation, FailureClass.REPORTS, event.reason, False)
        if case is not None:
            case.link(entry)

    def _on_deregistered(self, entry: Entry, event: v.WorkerDeregistered) -> None:
        """It leaves on purpose: what failed before does not come back."""
        life = self._life(event.worker)
        life.left, life.planned = True, max(life.planned, life.newest)
        self._end_slowness(entry, event.worker)
        case = self._book.latest(FailedPart.WORKER, event.worker)
        if case is not None and not self._withdrawn(case) and case.record.open:
            case.link(entry)
            case.close(case.ready_ms)

    def _withdrawn(self, case: Case) -> bool:
        """Drop a case of which nothing but broken connections is known: an operator did that."""
        mild = case.record.failure == FailureClass.UNREACHABLE and not case.confirmed
        if mild and case.record.open:
            self._book.drop(case)
            return True
        return False

    # --- what the leader decides -------------------------------------------------------------

    def _on_lost(self, entry: Entry, event: v.WorkerLost) -> None:
        life = self._life(event.worker)
        if life.left or (life.epoch and life.epoch != event.epoch):
            return
        case = self.evidence(
            entry, event.worker, life.newest, FailureClass.HOST, event.reason or "lease lapsed"
        )
        self._end_slowness(entry, event.worker)
        if case is not None:
            case.lost = True
            case.decided(entry.at_ms)
            case.link(entry)

    def knows(self, worker: str) -> bool:
        """Whether it has not been removed."""
        return worker in self._lives

    def _on_forgotten(self, entry: Entry, event: v.WorkerForgotten) -> None:
        life = self._lives.get(event.worker)
        if life is not None and life.epoch > event.epoch:
            return
        self._lives.pop(event.worker, None)
        case = self._book.latest(FailedPart.WORKER, event.worker)
        if case is not None and case.record.open:
            case.link(entry)
            case.close(-1)

    def _life(self, worker: str) -> EngineLife:
        life = self._lives.get(worker)
        if life is None:
            life = self._lives[worker] = EngineLife()
        return life


def _began(case: Case, at_ms: int) -> None:
    """It began earlier than its first event."""
    case.record.began_ms = min(case.record.began_ms, at_ms)
