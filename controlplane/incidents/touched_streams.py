"""The streams that failures touch, until they end: where each continued, when, and how it ended.

Another failure may touch a stream that continued after one. Then it is in both records.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.incident import MOST_STREAMS, TouchedStream
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import FailedPart, FailureClass, RequestOutcome, RequestState

MOST_LIVE = 65_536
"""Maximum number of live streams that are followed; the oldest are left as they are."""


NO_ATTEMPT = 1 << 30
"""The attempt of a stream that continues when its client returns, whatever its engine does."""


class Touch(Struct, eq=False):
    """A stream in one case: the failure broke its attempt `attempt`. `restored`: tokens had from a
    holder, by attempt and child; of several ranks, what all of them had."""

    case: Case
    stream: TouchedStream
    attempt: int
    restored: dict[tuple[int, int], int] = field(default_factory=dict)


class TouchedStreams:
    """By request, each case that it is in."""

    def __init__(self) -> None:
        self._touched: dict[str, list[Touch]] = {}
        self.waiting: dict[str, None] = {}
        """Those that have not continued."""

    def touch(self, case: Case, entry: Entry, request: str, attempt: int, delivered: int) -> None:
        """`case` broke the stream of `request`, which was at `attempt`."""
        touch = self._touch(case, request, entry.at_ms, attempt)
        touch.attempt = attempt
        touch.stream.delivered = max(touch.stream.delivered, delivered)
        if touch.stream.on_ms < 0:
            self.waiting[request] = None

    def moved(self, case: Case, entry: Entry, request: str, holders: tuple[str, ...]) -> None:
        """The checkpoint of `request` goes to other holders, because its own was lost."""
        touch = self._touch(case, request, entry.at_ms, NO_ATTEMPT)
        touch.stream.to = list(holders)
        if touch.stream.on_ms < 0:
            _continued(touch, holders, entry.at_ms)

    def _touch(self, case: Case, request: str, at_ms: int, attempt: int) -> Touch:
        places = self._touched.setdefault(request, [])
        for touch in places:
            if touch.case is case:
                return touch
        touch = Touch(case, TouchedStream(request=request, touched_ms=at_ms), attempt)
        places.append(touch)
        case.record.streams += 1
        case.waiting += 1
        if len(case.record.touched) < MOST_STREAMS:
            case.record.touched.append(touch.stream)
        if len(self._touched) > MOST_LIVE:
            self._leave(next(iter(self._touched)))
        return touch

    def on_routed(self, entry: Entry, event: v.RouteDecided) -> None:
        """It is sent to another worker."""
        if event.request not in self.waiting or not event.worker:
            return
        for touch in self._touched[event.request]:
            if touch.stream.on_ms < 0:
                touch.stream.to.append(event.worker)
                touch.case.decided(entry.at_ms)
                touch.case.link(entry, event.request)

    def on_step(self, entry: Entry, event: v.EngineStep) -> list[Case]:
        """First tokens of new attempts; returns the cases of the streams that have them."""
        continued = []
        for change in event.changes:
            if type(change) is not v.FirstToken or change.request not in self.waiting:
                continue
            touches = self._touched[change.request]
            for touch in touches:
                if touch.stream.on_ms < 0 and change.attempt > touch.attempt:
                    _continued(touch, (entry.stream[2:],), entry.at_ms)
                    continued.append(touch.case)
            if all(touch.stream.on_ms >= 0 for touch in touches):
                del self.waiting[change.request]
        return continued

    def on_restored(self, entry: Entry, event: v.RestoreDone | v.RestoreFailed) -> None:
        """A holder had some of its tokens."""
        for touch in self._touched.get(event.request, ()):
            if event.attempt > touch.attempt:
                key = event.attempt, event.child
                touch.restored[key] = min(touch.restored.get(key, event.tokens), event.tokens)
                touch.stream.restored = sum(touch.restored.values())
                if type(event) is v.RestoreDone:
                    touch.case.record.moved_bytes += event.bytes
                touch.case.link(entry, event.request)

    def on_returned(self, entry: Entry, event: v.ClientReturned, gateway: str) -> None:
        """Its client is at another gateway, or at this one again."""
        for touch in self._touched.get(event.request, ()):
            if touch.attempt == NO_ATTEMPT and touch.stream.on_ms < 0:
                touch.stream.to.append(gateway)
                _continued(touch, (gateway,), entry.at_ms)
                touch.case.link(entry, event.request)

    def on_ended(self, entry: Entry, event: v.RequestEnded) -> list[Case]:
        """It is over; returns the cases that it was in."""
        self.waiting.pop(event.request, None)
        touches = self._touched.pop(event.request, [])
        for touch in touches:
            stream, record = touch.stream, touch.case.record
            stream.state = RequestState(event.outcome)
            stream.longest_gap_us = event.longest_gap_us
            if record.part != FailedPart.DAEMON:
                record.longest_gap_us = max(record.longest_gap_us, event.longest_gap_us)
                if not stream.delivered and touch.attempt != NO_ATTEMPT:
                    record.longest_ttft_us = max(record.longest_ttft_us, event.ttft_us)
            if stream.on_ms < 0:
                if event.outcome == RequestOutcome.COMPLETED:
                    _continued(touch, stream.to[-1:], entry.at_ms)
                else:
                    touch.case.waiting -= 1
                    record.left += event.outcome == RequestOutcome.CANCELLED
                    record.failed += event.outcome != RequestOutcome.CANCELLED
            touch.case.link(entry, event.request)
        return [touch.case for touch in touches]

    def withdraw(self, request: str) -> list[Case]:
        """The failure of `request` was its client's fault, and is no evidence. Returns the cases
        that nothing else speaks for."""
        empty = []
        for touch in list(self._touched.get(request, ())):
            case, stream = touch.case, touch.stream
            record = case.record
            if case.confirmed or record.failure != FailureClass.ERRORS or stream.on_ms >= 0:
                continue
            self._touched[request].remove(touch)
            record.touched[:] = [other for other in record.touched if other is not stream]
            record.streams -= 1
            case.waiting -= 1
            if not record.streams:
                empty.append(case)
        return empty

    def forget(self, case: Case) -> None:
        """`case` is no more."""
        for request, touches in list(self._touched.items()):
            left = [touch for touch in touches if touch.case is not case]
            if not left:
                self._leave(request)
            elif len(left) < len(touches):
                self._touched[request] = left

    def _leave(self, request: str) -> None:
        del self._touched[request]
        self.waiting.pop(request, None)


def _continued(touch: Touch, workers: Iterable[str], at_ms: int) -> None:
    stream, record = touch.stream, touch.case.record
    stream.on_ms = max(at_ms, stream.touched_ms)
    touch.case.waiting -= 1
    record.continued += 1
    for worker in workers:
        record.workers[worker] = record.workers.get(worker, 0) + 1
    if record.first_stream_on_ms < 0 or stream.on_ms < record.first_stream_on_ms:
        record.first_stream_on_ms = stream.on_ms
    record.last_stream_on_ms = max(record.last_stream_on_ms, stream.on_ms)
