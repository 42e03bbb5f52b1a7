"""From the arrival, or a lost attempt, to a worker: count, queue, route, wait, back off."""

from __future__ import annotations

import msgspec

from relume.controlplane.stream.arrival import Assignment
from relume.controlplane.stream.error_codes import NO_LOG, NO_WORKER, NOT_COMPARED
from relume.controlplane.stream.handlers.endings import (
    NOT_SENT,
    declined_by_all,
    fail,
)
from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.stream_effects import (
    Accept,
    Admit,
    Assign,
    AwaitCapacity,
    FindLaterAttempt,
    LocateEnvelope,
    Open,
    RecordFailure,
    RecordTimer,
    SetTimer,
)
from relume.controlplane.stream.stream_events import (
    Accepted,
    Admitted,
    Assigned,
    Called,
    CapacityKnown,
    Counted,
    Enqueued,
    EnvelopeKnown,
    NotAccepted,
    NoWorker,
    TimerFired,
)
from relume.controlplane.stream.stream_states import (
    Adopting,
    BackingOff,
    Connecting,
    Counting,
    Locating,
    Queued,
    Refusal,
    Routing,
    State,
    Waiting,
)
from relume.events.vocabulary.enums import RouteCause, TimerKind, TransportKind


def assign(
    stream: Stream, state: State, cause: RouteCause, refusal: Refusal | None = None
) -> State:
    """Request a worker, unless the retry budget is used up. `state` has no attempt."""
    budget = stream.budget
    if budget.failures() >= stream.limits.max_attempts:
        if cause == RouteCause.DECLINED:
            return declined_by_all(stream, state, refusal)
        return fail(stream, state, 502, f"gave up after {budget.tries} attempts")
    stream.effects.append(Assign(cause, stream.delivered))
    return Routing(cause, refusal=refusal)


def proceed(
    stream: Stream,
    state: State,
    cause: RouteCause,
    must_pause: bool = False,
    refusal: Refusal | None = None,
) -> State:
    """Continue on another worker after what the client has, if that is possible. `state` has no
    attempt."""
    if stream.stamp is None or (
        stream.body and (stream.is_repeatable or len(stream.answer.ids) >= stream.have[0])
    ):
        if obstacle := stream.obstacle():
            if stream.is_doubted:
                return fail(stream, state, 502, NOT_COMPARED, obstacle)
            return fail(stream, state, 502, obstacle)
        return _next_attempt(stream, state, cause, must_pause, refusal)
    if stream.is_doubted and stream.have > (0, 0):
        return fail(stream, state, 502, NOT_COMPARED)
    if not stream.is_repeatable:
        return _find_later_attempt(stream)
    stream.effects.append(LocateEnvelope())
    return Locating(cause, must_pause)


def _find_later_attempt(stream: Stream) -> State:
    """No worker can get the request. An engine may have an attempt that the log does not have."""
    stream.effects.append(FindLaterAttempt())
    return Adopting(is_ours=True)


def _next_attempt(
    stream: Stream, state: State, cause: RouteCause, must_pause: bool, refusal: Refusal | None
) -> State:
    if must_pause:
        return _back_off(stream, BackingOff(cause))
    return assign(stream, state, cause, refusal)


def _back_off(stream: Stream, state: BackingOff) -> State:
    stream.effects.append(SetTimer(stream.budget.next_pause(), state.planned))
    return state


def dispatch(stream: Stream, to: Assignment, now: float, attach: bool = False) -> State:
    """Connect to the worker that gets the request."""
    stream.budget.tries += 1
    stream.sent_at = now
    stream.had = 0 if attach else stream.delivered
    if stream.failover is not None:
        stream.failover.decided = now
    stream.effects.append(Open(to))
    return Connecting(to, attach)


def _await_capacity(stream: Stream, until: float, now: float, again: bool) -> State:
    """No worker can take it: wait for one, within the bound, then answer honestly."""
    left = until - now
    waiting = Waiting(until)
    if left <= 0:
        return _give_up(stream, waiting)
    stream.effects.append(AwaitCapacity(left, again))
    return waiting


def _give_up(stream: Stream, state: Waiting) -> State:
    stream.effects.append(RecordTimer(TimerKind.WAIT))
    return fail(stream, state, 503, NO_WORKER)


# --- handlers


def on_counted(stream: Stream, state: Counting, event: Counted, now: float) -> State:
    if event.tokens >= 0:
        stream.arrival = msgspec.structs.replace(
            stream.arrival, prompt_tokens=event.tokens, estimated=False, prefix=event.prefix
        )
    stream.effects.append(Accept(stream.arrival))
    return state


def on_accepted(stream: Stream, state: Counting, event: Accepted, now: float) -> State:
    stream.arrival = event.arrival
    stream.accepted = True
    stream.effects.append(Admit(no_worker=False))
    return Queued()


def on_not_accepted(stream: Stream, state: Counting, event: NotAccepted, now: float) -> State:
    return fail(stream, state, 503, NO_LOG)


def on_admitted(stream: Stream, state: Queued, event: Admitted, now: float) -> State:
    if state.no_worker:
        return _await_capacity(stream, now + event.wait_s, now, again=False)
    return assign(stream, state, RouteCause.ARRIVAL)


def on_enqueued(stream: Stream, state: Queued, event: Enqueued, now: float) -> State:
    return state


def on_called(stream: Stream, state: Queued, event: Called, now: float) -> State:
    stream.effects.append(Assign(RouteCause.WAIT_OVER, stream.delivered))
    return Routing(RouteCause.WAIT_OVER, back=state)


def on_assigned(stream: Stream, state: Routing, event: Assigned, now: float) -> State:
    to = event.to
    stream.is_doubted = to.doubted
    if state.back is None and (to.worker, to.incarnation) in stream.budget.failed_on:
        if state.cause == RouteCause.DECLINED:
            if stream.is_absent:  # the stream waits: this attempt is over
                stream.effects.append(
                    RecordFailure(to.attempt, TransportKind.DETACHED, stream.delivered, NOT_SENT)
                )
            return declined_by_all(stream, state, state.refusal)
        # It failed there before and no other worker is left: give its death time to be known.
        return _back_off(stream, BackingOff(state.cause, to))
    return dispatch(stream, to, now)


def on_no_worker(stream: Stream, state: Routing, event: NoWorker, now: float) -> State:
    back = state.back
    if isinstance(back, Waiting):
        stream.effects.append(SetTimer(stream.budget.next_pause()))
        return back
    if back is not None:
        return back
    if state.cause == RouteCause.DECLINED:
        return declined_by_all(stream, state, state.refusal)
    if state.cause == RouteCause.ARRIVAL:
        stream.effects.append(Admit(no_worker=True))
        return Queued(no_worker=True)
    return _await_capacity(stream, now + event.wait_s, now, again=False)


def on_capacity(stream: Stream, state: Waiting, event: CapacityKnown, now: float) -> State:
    if not event.found:
        return _give_up(stream, state)
    stream.effects.append(Assign(RouteCause.WAIT_OVER, stream.delivered))
    return Routing(RouteCause.WAIT_OVER, back=state)


def on_wait_timer(stream: Stream, state: Waiting, event: TimerFired, now: float) -> State:
    return _await_capacity(stream, state.until, now, again=True)


def on_retry_timer(stream: Stream, state: BackingOff, event: TimerFired, now: float) -> State:
    stream.effects.append(RecordTimer(TimerKind.RETRY))
    if state.planned is not None:
        return dispatch(stream, state.planned, now)
    return assign(stream, state, state.cause)


def on_envelope_known(stream: Stream, state: Locating, event: EnvelopeKnown, now: float) -> State:
    """Generate all of it again, from what a state daemon has of the request."""
    if not event.found:
        return _find_later_attempt(stream)
    stream.again = True
    del stream.known[:]
    stream.rewind(stream.have)
    return _next_attempt(stream, state, state.cause, state.must_pause, None)
