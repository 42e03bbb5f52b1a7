"""What the stream machine has recorded: events through the scheduler, and lines of the process's
own log. If the event log refuses an event, a line there says so; the request continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from relume.controlplane.gateway.context import Context
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream.arrival import Arrival
from relume.controlplane.stream.stream_data import Stream
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import RequestOutcome, TransportKind

log = structlog.get_logger("relume.gateway")
failover_log = structlog.get_logger("relume.failover")


def about(arrival: Arrival) -> dict[str, str]:
    """What log lines of a request carry."""
    ids = {"request": arrival.request, "client_id": arrival.client_id}
    return {**ids, "trace": arrival.trace} if arrival.trace else ids


def record_end(ctx: Context, stream: Stream, effect: do.RecordEnd) -> None:
    """Write the terminal event."""
    counters, outcome, scheduler = ctx.counters, effect.outcome, ctx.scheduler
    counters.in_flight -= 1
    setattr(counters, outcome, getattr(counters, outcome) + 1)
    try:
        if effect.unaccepted is not None:
            scheduler.arrived(effect.unaccepted)
        counters.tokens += effect.tokens
        if outcome == RequestOutcome.COMPLETED and effect.tokens == len(stream.answer.ids):
            request = stream.arrival.request
            scheduler.completed(request, stream.path, stream.body, stream.answer.ids)
        scheduler.ended(
            request=stream.arrival.request,
            outcome=outcome,
            status=effect.status,
            tokens=effect.tokens,
            finish=effect.finish,
            ttft_us=effect.ttft_us,
            longest_gap_us=effect.longest_gap_us,
            detail=effect.detail,
        )
    except LogError as error:
        log.error("end_not_written", reason=str(error), **about(stream.arrival))


def _record_failure(ctx: Context, stream: Stream, effect: do.RecordFailure) -> None:
    if effect.kind == TransportKind.MOVED:
        ctx.counters.moves += 1
        unwritten = "move_not_written"
    else:
        ctx.counters.failovers += 1
        unwritten = "failed_attempt_not_written"
    request = stream.arrival.request
    try:
        ctx.scheduler.observed(
            request,
            effect.attempt,
            effect.kind,
            effect.delivered,
            effect.detail,
            effect.status,
        )
    except LogError as error:
        log.error(unwritten, reason=str(error), **about(stream.arrival))


def _record_timer(ctx: Context, stream: Stream, effect: do.RecordTimer) -> None:
    try:
        ctx.scheduler.timer_fired(effect.timer, stream.arrival.request)
    except LogError as error:
        log.error("timer_not_written", reason=str(error), **about(stream.arrival))


def _report_failover(ctx: Context, stream: Stream, effect: do.ReportFailover) -> None:
    """Times are those of CLOCK_MONOTONIC: a bench on the same machine can set them beside the
    moment at which it killed something."""
    failover_log.info(
        "failover",
        kind=effect.kind,
        noticed=effect.noticed,
        decided=effect.decided,
        sent=effect.sent,
        resumed=effect.resumed,
        **about(stream.arrival),
    )


def _report_waiting(ctx: Context, stream: Stream, effect: do.ReportWaiting) -> None:
    log.info("stream_waits", reason=effect.reason, **about(stream.arrival))


TO_LOG: dict[type, Callable[[Context, Stream, Any], None]] = {
    do.RecordFailure: _record_failure,
    do.RecordTimer: _record_timer,
    do.ReportFailover: _report_failover,
    do.ReportWaiting: _report_waiting,
}
