"""The effects of the stream machine that the scheduler answers at once, with its answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from relume.controlplane.gateway.context import Context
from relume.controlplane.gateway.log_effects import about
from relume.controlplane.gateway.ports import Caller
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.arrival import Assignment, Rejected
from relume.controlplane.stream.error_codes import NO_DECISIONS
from relume.controlplane.stream.stream_data import Stream
from relume.events.log.errors import LogError

log = structlog.get_logger("relume.gateway")


def _accept(ctx: Context, stream: Stream, caller: Caller, effect: do.Accept) -> object:
    try:
        return e.Accepted(ctx.scheduler.arrived(effect.arrival))
    except LogError as error:
        log.error("arrival_not_written", reason=str(error), **about(stream.arrival))
        return e.NotAccepted()


def _admit(ctx: Context, stream: Stream, caller: Caller, effect: do.Admit) -> object:
    arrival = stream.arrival
    wait_s = _wait_s(ctx, stream) if effect.no_worker else ctx.config.wait_timeout_s
    try:
        held = ctx.scheduler.waiting.admit(
            arrival, caller, len(stream.body), wait_s, effect.no_worker
        )
    except LogError as error:
        log.error("decision_not_written", reason=str(error), **about(arrival))
        return Rejected(503, NO_DECISIONS)
    if held is True:
        ctx.counters.waits += 1
        return e.Enqueued()
    return held or e.Admitted(wait_s)


def _assign(ctx: Context, stream: Stream, caller: Caller, effect: do.Assign) -> object:
    request = stream.arrival.request
    try:
        found = ctx.scheduler.assign(request, effect.cause, effect.delivered)
    except LogError as error:
        log.error("decision_not_written", reason=str(error), **about(stream.arrival))
        return Rejected(503, NO_DECISIONS)
    if isinstance(found, Assignment):
        return e.Assigned(found)
    return found or e.NoWorker(_wait_s(ctx, stream))


def _locate(ctx: Context, stream: Stream, caller: Caller, effect: do.LocateEnvelope) -> object:
    found = ctx.scheduler.returns.holders(stream.arrival.request)
    return e.EnvelopeKnown(bool(found))


def _wait_s(ctx: Context, stream: Stream) -> float:
    restart_s = ctx.scheduler.restart_left_s(stream.arrival.model)
    return max(ctx.config.wait_timeout_s, restart_s)


TO_SCHEDULER: dict[type, Callable[[Context, Stream, Caller, Any], object]] = {
    do.Accept: _accept,
    do.Admit: _admit,
    do.Assign: _assign,
    do.LocateEnvelope: _locate,
}
