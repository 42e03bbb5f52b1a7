"""How the capacity of a failed worker came back: from where its next engine had its weights, when that
engine generated its first token, and when it was as fast as it became.

The first is the time to first success (TFS) of seed 001 (AnchorTP, section V), from the failure on. The
time to peak (TTP) follows it: until throughput is at its peak. Here that is the first second in which the
engine generated PEAK_PERCENT of what it generated in its best second of the PEAK_S after its first token.
So it says how long the engine took to be as fast as its requests needed it.
"""

from __future__ import annotations

from msgspec import Struct, field

from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.case_book import CaseBook
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import FailedPart, RecoveryTier

PEAK_S = 60
PEAK_PERCENT = 90


class _Recovering(Struct, eq=False):
    """An engine that follows a failed one. `tokens` of each second since its first token."""

    case: Case
    incarnation: int
    tokens: list[int] = field(default_factory=list)


class Recoveries:
    """Engines that follow those of `book`, until PEAK_S after their first token. One that generates none
    within PEAK_S has no times: it had no request."""

    def __init__(self, book: CaseBook) -> None:
        self._book = book
        self._running: dict[str, _Recovering] = {}
        """By worker."""

    def follows(self, stream: str) -> bool:
        """Whether steps of the worker with this stream matter."""
        return stream[2:] in self._running

    def on_loaded(self, entry: Entry, event: v.WeightsLoaded) -> None:
        """The engine that follows a failed one has its weights."""
        case = self._book.latest(FailedPart.WORKER, event.worker)
        if case is None or not case.record.incarnation < event.incarnation:
            return
        recovering = self._running.get(event.worker)
        is_its = recovering is not None and recovering.case is case
        if (case.record.open and case.dead) or is_its:
            record = case.record
            record.reloaded_bytes = event.read_bytes
            record.reused_bytes = event.bytes - event.read_bytes
            record.tier = _tier(event)
            case.link(entry)

    def on_ready(self, entry: Entry, event: v.EngineReady) -> None:
        """The engine serves; called after the failure's record knows it."""
        case = self._book.latest(FailedPart.WORKER, event.worker)
        if case is None or not case.dead or case.ready_ms != entry.at_ms:
            self._running.pop(event.worker, None)
        elif event.incarnation > case.record.incarnation:
            self._running[event.worker] = _Recovering(case, event.incarnation)

    def on_step(self, entry: Entry, event: v.EngineStep) -> None:
        """An engine generated tokens."""
        recovering = self._running.get(entry.stream[2:])
        if recovering is None or recovering.incarnation != event.incarnation:
            return
        count = event.batch
        for change in event.changes:
            count += type(change) is v.FirstToken
        record = recovering.case.record
        if count and record.first_token_ms < 0:
            record.first_token_ms = entry.at_ms
        if record.first_token_ms >= 0:
            second = max(entry.at_ms - record.first_token_ms, 0) // 1000
            if second >= PEAK_S:
                self._finish(entry.stream[2:])
                return
            tokens = recovering.tokens
            tokens.extend([0] * (second + 1 - len(tokens)))
            tokens[second] += count

    def on_tick(self, entry: Entry) -> None:
        """Time passes, also for engines that generate nothing."""
        for worker, recovering in list(self._running.items()):
            until_ms = entry.at_ms - PEAK_S * 1000
            if recovering.case.record.first_token_ms < 0 and recovering.case.ready_ms <= until_ms:
                del self._running[worker]  # it gets no request
            elif 0 <= recovering.case.record.first_token_ms <= until_ms:
                self._finish(worker)

    def on_died(self, event: v.EngineDied) -> None:
        """An engine died: if it is the one that follows, its best second is not known."""
        recovering = self._running.get(event.worker)
        if recovering is not None and recovering.incarnation <= event.incarnation:
            del self._running[event.worker]

    def on_gone(self, worker: str) -> None:
        """The worker left: the best second of its engine is not known."""
        self._running.pop(worker, None)

    def forget(self, case: Case) -> None:
        """`case` is no more."""
        for worker, recovering in list(self._running.items()):
            if recovering.case is case:
                del self._running[worker]

    def _finish(self, worker: str) -> None:
        recovering = self._running.pop(worker)
        record, best = recovering.case.record, max(recovering.tokens)
        fast = (100 * tokens >= PEAK_PERCENT * best for tokens in recovering.tokens)
        record.peak_ms = record.first_token_ms + 1000 * list(fast).index(True)


def _tier(event: v.WeightsLoaded) -> RecoveryTier:
    if not event.read_bytes:
        return RecoveryTier.SOFTWARE_CRASH
    return RecoveryTier.DEVICE_LOST if event.read_bytes < event.bytes else RecoveryTier.COLD
