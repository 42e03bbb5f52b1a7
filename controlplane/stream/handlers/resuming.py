"""Clients that lose their connection to a stream and return to it.

If the client disconnects the machine detaches from its engine, which continues into a bounded
buffer. A client that sends the last id is attached to that buffer, here or at any other replica.
While the client is absent the stream may still be handed over to another worker: it resumes there
after what the client has, and is detached again.

A stream that has come to its end ends when its client has it; one that is lost on its last way
waits for its client like any other.
"""

from __future__ import annotations

from relume.controlplane.stream.arrival import Assignment
from relume.controlplane.stream.error_codes import LOG_LATE, OF_MESSAGES
from relume.controlplane.stream.errors import IllegalEvent
from relume.controlplane.stream.handlers.attempts import hand_over, lose
from relume.controlplane.stream.handlers.endings import (
    NO_CLIENT,
    NO_ENVELOPE,
    UNREPEATABLE,
    drop_plan,
    end,
    fail,
    leave,
    let_go,
    release,
)
from relume.controlplane.stream.handlers.placing import dispatch, proceed
from relume.controlplane.stream.stream_data import NEVER, Stream
from relume.controlplane.stream.stream_effects import (
    AwaitOwnership,
    Detach,
    Fail,
    RecordFailure,
    RecordTimer,
    Release,
)
from relume.controlplane.stream.stream_events import (
    Adopted,
    ClientGone,
    ClientReturned,
    Delivered,
    EngineGivenUp,
    GraceOver,
    HandoverNoticed,
    Owned,
    Position,
    TokensDoubted,
)
from relume.controlplane.stream.stream_states import (
    Adopting,
    AwaitingFirst,
    BackingOff,
    Connecting,
    Counting,
    Delivering,
    Detached,
    HandingOver,
    State,
    Waiting,
)
from relume.events.vocabulary.enums import RequestOutcome, RouteCause, TimerKind, TransportKind

NOT_OURS = "the stream is over"


def detach(stream: Stream, state: State, now: float) -> State:
    """The client is absent: let go of the engine, once the attempt has begun there, and wait."""
    unattended = _placed_on(stream, state)
    if unattended is None:
        drop_plan(stream, state)
        left = leave(stream, state)
        unattended = state if isinstance(state, Adopting) else Detached(left)
    stream.out.clear()
    stream.absent_until = now + stream.limits.resume.grace_s
    stream.effects.append(Detach())
    return unattended


def _placed_on(stream: Stream, state: State) -> State | None:
    """The state in which an attempt that has not begun at its worker is placed on without the
    client. Nothing would be kept of it otherwise: a worker stops a request of which it has sent
    nothing, and another replica could not go on with it."""
    if stream.is_doubted or not _is_continuable(stream):
        return None
    if isinstance(state, AwaitingFirst) and not state.has_begun:
        return HandingOver(state.to)
    is_sent = isinstance(state, Connecting) and state.attach
    is_waiting = isinstance(state, Waiting | BackingOff | Connecting)
    return state if is_waiting and not is_sent else None


def can_be_placed(stream: Stream, state: State) -> bool:
    """Whether the attempt runs on for an absent client, and another worker can take the stream up
    after what that client has."""
    return isinstance(state, Detached) and state.left is not None and _is_continuable(stream)


def _is_continuable(stream: Stream) -> bool:
    """Whether all is known here that another worker needs to take the stream up after what its
    client has."""
    if stream.again or not stream.body or stream.answer.is_complete:
        return False
    return len(stream.answer.ids) >= stream.have[0] and not stream.obstacle()


def _go_on(stream: Stream, state: State, left: Assignment | None, now: float) -> State:
    """Take the stream up where it runs, else have it generated from here."""
    if left is None:
        return proceed(stream, state, RouteCause.RETURNED)
    stream.budget.tries -= 1
    return dispatch(stream, left, now, attach=True)


def _rewind(stream: Stream, have: Position) -> None:
    stream.rewind(have)
    stream.begun = stream.answer.done = False
    stream.answer.finish = ""
    stream.absent_until = NEVER


def _not_ours(stream: Stream, is_late: bool) -> Fail:
    """What its client gets. As long as the log has not decided, the stream may be live."""
    return Fail(
        status=503 if is_late else 410,
        message=LOG_LATE if is_late else NOT_OURS,
        code=OF_MESSAGES[LOG_LATE] if is_late else "stream_gone",
        retry_after_s=stream.limits.retry_after_s if is_late else 0,
        headers=(),
        begun=False,
    )


# --- handlers


def on_client_gone(stream: Stream, state: State, event: ClientGone, now: float) -> State:
    """The engine stops computing, and the log says so; or it continues for a client that may
    return."""
    if stream.is_absent:
        raise IllegalEvent(state, event)
    if isinstance(state, Delivering) and state.is_taken:
        return let_go(stream, state)
    may_return = stream.stamp is not None and stream.is_resumable and stream.relayed is None
    if may_return and (stream.begun or stream.have > (0, 0)):
        return detach(stream, state, now)
    return end(stream, state, RequestOutcome.CANCELLED, 499, NO_CLIENT)


def on_client_returned(stream: Stream, state: State, event: ClientReturned, now: float) -> State:
    """The newest connection wins. A stream that another replica has taken is adopted anew instead."""
    if stream.stamp is None or (isinstance(state, Delivering) and state.is_taken):
        raise IllegalEvent(state, event)
    left = leave(stream, state)
    stream.known = max(stream.known, stream.answer.ids, key=len)
    _rewind(stream, event.have)
    drop_plan(stream, state)  # after the return, which the log has first: what this client has
    if isinstance(state, Adopting):
        return state
    return _go_on(stream, Detached(None), left, now)


def on_adopted(stream: Stream, state: Counting, event: Adopted, now: float) -> State:
    stream.accepted = True
    _rewind(stream, event.have)
    stream.effects.append(AwaitOwnership())
    return Adopting()


def on_owned(stream: Stream, state: Adopting, event: Owned, now: float) -> State:
    if not event.ours:
        is_there = not stream.is_absent
        ended = let_go(stream, state)
        if is_there:
            stream.effects.append(_not_ours(stream, event.late))
        return ended
    left = event.left
    if event.doubted:
        stream.is_doubted = True
        if left is not None:
            release(stream, left)  # its failure is recorded
            left = None
    if state.is_ours and left is None:
        return fail(stream, state, 502, NO_ENVELOPE if stream.is_repeatable else UNREPEATABLE)
    if stream.is_absent:
        return Detached(left)
    return _go_on(stream, Detached(None), left, now)


def on_handover_noticed(
    stream: Stream, state: Detached | HandingOver, event: HandoverNoticed, now: float
) -> State:
    """The engine gave it up: it continues on another worker. The news may come before the head of
    its answer."""
    if isinstance(state, HandingOver):
        release(stream, state.to)
        return hand_over(stream, state, state.to, now)
    to = state.left
    if to is None or not can_be_placed(stream, state):
        return state
    release(stream, to)
    return hand_over(stream, Detached(None), to, now)


def on_unattended_given_up(
    stream: Stream, state: Detached, event: EngineGivenUp, now: float
) -> State:
    """The engine on which it runs for its absent client is not to be used: it continues on another
    one. What its client has of a corrupt engine must be compared, which waits for the client."""
    if event.cause == TransportKind.CORRUPT:
        stream.found_corrupt()
    elif state.left is not None and can_be_placed(stream, state):
        return lose(stream, HandingOver(state.left), event.cause, event.detail, now)
    return _leave_unattended(stream, state, event.cause, event.detail)


def on_unattended_doubted(
    stream: Stream, state: Detached, event: TokensDoubted, now: float
) -> State:
    """What its absent client has must be generated again and compared: the next attempt waits for
    the client."""
    stream.is_doubted = True
    return _leave_unattended(stream, state, TransportKind.MOVED, event.detail)


def _leave_unattended(
    stream: Stream, state: Detached, kind: TransportKind, detail: str
) -> Detached:
    if (to := state.left) is not None:
        release(stream, to)
        stream.effects.append(RecordFailure(to.attempt, kind, stream.delivered, detail))
    return Detached(None)


def on_grace_over(stream: Stream, state: State, event: GraceOver, now: float) -> State:
    if not stream.is_absent:
        raise IllegalEvent(state, event)
    if isinstance(state, Adopting) and not state.is_ours:
        return let_go(stream, state)  # the log has not said yet that it is ours
    seconds = stream.limits.resume.grace_s
    stream.effects.append(RecordTimer(TimerKind.GRACE))
    explanation = f"the client did not come back within {seconds} s"
    return end(stream, state, RequestOutcome.CANCELLED, 499, explanation)


def on_delivered(stream: Stream, state: Delivering, event: Delivered, now: float) -> State:
    """The client has all of it."""
    ended = end(stream, state, RequestOutcome.COMPLETED, 200, finish=stream.answer.finish)
    if not state.is_taken:
        stream.effects.append(Release(state.left, stream.have[0], soon=True))
    return ended
