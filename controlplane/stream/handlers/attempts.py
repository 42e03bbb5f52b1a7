"""One attempt: connect, send, read the head; and what follows when it ends, well or not."""

from __future__ import annotations

from array import array

from relume.controlplane.stream.arrival import Assignment
from relume.controlplane.stream.error_codes import NOT_COMPARED
from relume.controlplane.stream.handlers.endings import (
    NO_ENVELOPE,
    drop_plan,
    end,
    fail,
    refuse,
    release,
)
from relume.controlplane.stream.handlers.placing import proceed
from relume.controlplane.stream.handlers.to_client import finish, flush, greet
from relume.controlplane.stream.reception import Reception
from relume.controlplane.stream.retry_budget import DEATHS
from relume.controlplane.stream.stream_data import Failover, RelayedRequest, Stream
from relume.controlplane.stream.stream_effects import (
    AwaitDelivery,
    Close,
    Open,
    RecordFailure,
    Reply,
    StopWaiting,
)
from relume.controlplane.stream.stream_events import (
    Connected,
    ConnectFailed,
    ConnectionLost,
    Data,
    EngineGivenUp,
    Head,
    ResponseEnded,
    TokensDoubted,
)
from relume.controlplane.stream.stream_states import (
    Attaching,
    Attempt,
    AwaitingFirst,
    AwaitingRelayed,
    BackingOff,
    Connecting,
    Declining,
    Delivering,
    Detached,
    HandingOver,
    Receiving,
    Refusal,
    Relaying,
    Routing,
    State,
)
from relume.controlplane.stream.worker_requests import (
    RESUMING_MODES,
    attach_request,
    dispatch_request,
    relayed_request,
)
from relume.events.vocabulary.enums import RequestOutcome, RouteCause, TransportKind
from relume.events.wire.frames import CONTENT_TYPE
from relume.events.wire.headers import CACHED_BYTES, FROM_BYTES

CAUSES = {TransportKind.EOF: RouteCause.RESET, TransportKind.TIMEOUT: RouteCause.STALL}
"""What a lost attempt is called when it causes the next one."""
UNHEALTHY = frozenset(
    (
        TransportKind.STALL,
        TransportKind.STUCK,
        TransportKind.TIMEOUT,
        TransportKind.ENGINE_ERROR,
        TransportKind.CORRUPT,
    )
)
"""After these the engine may still generate: the machine stops it."""
LATELY_FRAMED = frozenset(("/v1/messages", "/v1/responses"))
"""Engines of earlier builds answer these routes without frames, as servers that are relayed."""
_NO_ATTEMPT = Routing(RouteCause.ARRIVAL)


# --- how an attempt ends


def complete(stream: Stream, state: Attempt, now: float) -> State:
    """All of the answer is there."""
    answer = stream.answer
    if answer.whole is None and not (stream.begun or stream.out or answer.done):
        answer.finish = ""
        return lose(stream, state, TransportKind.ENGINE_ERROR, "ended without a response", now)
    if answer.whole is None and stream.stamp is not None and stream.is_resumable:
        stream.effects += (StopWaiting(), Close(reuse=True))
        finish(stream)
        stream.effects.append(AwaitDelivery())
        return Delivering(state.to)
    status, body = answer.whole if answer.whole is not None else (200, b"")
    ended = end(stream, state, outcome_of(status), status, finish=answer.finish, reuse=True)
    if answer.whole is not None:
        stream.effects.append(Reply(status, body, stream.reply_headers()))
    else:
        finish(stream)
    return ended


def outcome_of(status: int) -> RequestOutcome:
    """The outcome of a request that a worker answered."""
    if status < 400:
        return RequestOutcome.COMPLETED
    return RequestOutcome.REJECTED if status < 500 else RequestOutcome.FAILED


def lose(
    stream: Stream,
    state: Attempt,
    kind: TransportKind,
    detail: str,
    now: float,
    status: int = 0,
    refusal: Refusal | None = None,
) -> State:
    """The attempt is lost: continue on another worker. `status`: what the engine answered."""
    answer, budget, to = stream.answer, stream.budget, state.to
    if answer.is_complete:
        answer.finish = answer.finish or "-"  # all is there: its failure changes nothing
        return complete(stream, state, now)
    if is_attaching(state):
        _stop_attaching(stream)
    elif kind in UNHEALTHY:
        release(stream, to)
    stream.effects.append(Close(reuse=refusal is not None))
    if kind != TransportKind.DETACHED:  # which is no failure of the engine
        budget.failed_on.add((to.worker, to.incarnation))
    _leave_for(stream, to, kind, detail, now, status)
    final, message = budget.failed(
        kind, status, stream.delivered, stream.limits, detail, to.worker if to.alone else ""
    )
    if final:
        return fail(stream, _NO_ATTEMPT, final, message)
    must_pause = kind in DEATHS and budget.must_pause(now - stream.sent_at)
    return proceed(stream, _NO_ATTEMPT, CAUSES.get(kind) or RouteCause(kind), must_pause, refusal)


def hand_over(
    stream: Stream,
    state: State,
    to: Assignment,
    now: float,
    cause: RouteCause = RouteCause.MOVED,
    detail: str = "handed over",
) -> State:
    """The engine gave the attempt `to` up on request: continue where it is planned. No worker is
    blamed."""
    if is_attaching(state):
        _stop_attaching(stream)
    if isinstance(state, Attempt):
        stream.effects.append(Close())
    stream.budget.moves += 1
    _leave_for(stream, to, TransportKind.MOVED, detail, now)
    return proceed(stream, _NO_ATTEMPT, cause)


def _leave_for(
    stream: Stream,
    to: Assignment,
    kind: TransportKind,
    detail: str,
    now: float,
    status: int = 0,
) -> None:
    if stream.failover is None:
        stream.failover = Failover(kind, now)
    flush(stream)
    stream.effects.append(RecordFailure(to.attempt, kind, stream.delivered, detail, status))


def is_attaching(state: State) -> bool:
    """Whether it takes up an attempt that runs already."""
    return isinstance(state, Attaching) or (isinstance(state, Connecting) and state.attach)


def _stop_attaching(stream: Stream) -> None:
    stream.known = max(stream.known, stream.answer.ids, key=len)
    stream.rewind(stream.have)


# --- handlers: the connection


def on_connected(stream: Stream, state: Connecting, event: Connected, now: float) -> State:
    """Send the request of this attempt."""
    following = _send(stream, state, event.envelope_at)
    if stream.failover is not None:
        stream.failover.sent = now
    return following


def _send(stream: Stream, state: Connecting, envelope_at: tuple[str, ...]) -> State:
    to, answer = state.to, stream.answer
    if to.doubted and _lacks_ids(stream):
        return fail(stream, state, 502, NOT_COMPARED)
    if stream.relayed is not None:
        stream.effects.append(relayed_request(stream, to))
        return AwaitingRelayed(to)
    reception = Reception(merge=stream.stamp is None, repeats=answer.tail)
    if state.attach:
        assert stream.stamp is not None
        stream.effects.append(attach_request(stream, to))
        answer.restart(array("I"))
        stream.stamp.restart((0, 0), stream.have)
        return Attaching(to, reception)
    if stream.again and not envelope_at:
        return fail(stream, state, 502, NO_ENVELOPE)
    if to.mode not in RESUMING_MODES and stream.delivered:
        if stream.begun or stream.have > (0, 0):
            error = "the stream cannot start over: the client has a part of it"
            return fail(stream, state, 502, error)
        answer.restart(array("I"))
    stream.effects.append(dispatch_request(stream, to, envelope_at))
    return HandingOver(to) if stream.is_absent else AwaitingFirst(to, reception)


def on_connect_failed(stream: Stream, state: Connecting, event: ConnectFailed, now: float) -> State:
    return lose(stream, state, state.lost or event.kind, event.detail, now)


def on_connection_lost(stream: Stream, state: Attempt, event: ConnectionLost, now: float) -> State:
    """Perhaps only an idle connection had timed out at the engine's end: try a fresh one. A dead
    engine refuses it at once, and that is the failure then."""
    if event.idle and event.kind in (TransportKind.EOF, TransportKind.RESET):
        stream.effects.append(Open(state.to, fresh=True))
        return Connecting(state.to, is_attaching(state), event.kind)
    return lose(stream, state, event.kind, event.detail, now)


def on_engine_given_up(stream: Stream, state: Attempt, event: EngineGivenUp, now: float) -> State:
    if event.cause == TransportKind.STALL:
        stream.budget.found_hung(now - stream.sent_at)
    elif event.cause == TransportKind.CORRUPT:
        stream.budget.found_corrupt()
        stream.found_corrupt()
    return lose(stream, state, event.cause, event.detail, now)


def on_tokens_doubted(stream: Stream, state: Attempt, event: TokensDoubted, now: float) -> State:
    """What its client has must be generated again and compared."""
    if stream.answer.is_complete or stream.relayed is not None:
        return state
    stream.is_doubted = True
    release(stream, state.to)
    return hand_over(stream, state, state.to, now, RouteCause.CORRUPT, event.detail)


def on_plan_given_up(stream: Stream, state: BackingOff, event: EngineGivenUp, now: float) -> State:
    """The engine that was to get the next attempt: another one is wanted."""
    return _plan_anew(stream, state, CAUSES.get(event.cause) or RouteCause(event.cause))


def on_plan_doubted(stream: Stream, state: BackingOff, event: TokensDoubted, now: float) -> State:
    """The planned attempt would continue what must be compared."""
    stream.is_doubted = True
    return _plan_anew(stream, state, RouteCause.CORRUPT)


def _plan_anew(stream: Stream, state: BackingOff, cause: RouteCause) -> State:
    if state.planned is None:
        return state  # the scheduler is asked after the pause
    stream.effects.append(StopWaiting())
    drop_plan(stream, state)
    return proceed(stream, state, cause)


def _lacks_ids(stream: Stream) -> bool:
    """Whether its client has tokens that are not known here, so that no engine can compare them."""
    return stream.have > (0, 0) and (stream.again or len(stream.answer.ids) < stream.have[0])


# --- handlers: the head


def on_head(stream: Stream, state: AwaitingFirst | HandingOver, event: Head, now: float) -> State:
    status, headers = event.status, event.headers
    if status == 200:
        if not headers.get(b"content-type", b"").startswith(CONTENT_TYPE):
            if isinstance(state, AwaitingFirst) and _may_be_relayed(stream):
                stream.relayed = RelayedRequest("POST", ())
                return Relaying(state.to, status, headers)
            return lose(stream, state, TransportKind.ENGINE_ERROR, "answered without frames", now)
        if not stream.delivered:
            stream.cached = headers.get(CACHED_BYTES, b"")
        if isinstance(state, HandingOver):
            stream.failover = None
            stream.effects.append(Close())
            return Detached(state.to)  # it has begun there, and is buffered
        if stream.again:
            greet(stream)
        return AwaitingFirst(state.to, state.reception, has_begun=True)
    if status == 409:
        return lose(stream, state, TransportKind.STALE, "another incarnation answered", now)
    if status == 429 or status >= 500 or status < 400:
        return lose(stream, state, TransportKind.ENGINE_ERROR, f"answered {status}", now, status)
    if stream.again and status == 424:
        return fail(stream, state, 502, NO_ENVELOPE)
    return Declining(state.to, status, (), headers.get(b"retry-after", b"").decode("latin-1"))


def _may_be_relayed(stream: Stream) -> bool:
    """Whether an answer without frames is one, which no client has a part of."""
    is_new = not stream.begun and not stream.delivered and stream.have == (0, 0)
    return is_new and stream.path in LATELY_FRAMED


def on_attach_head(stream: Stream, state: Attaching, event: Head, now: float) -> State:
    if event.status != 200:
        kind = TransportKind.STALE if event.status == 409 else TransportKind.DETACHED
        detail = f"the worker answered {event.status}: its stream is not there"
        return lose(stream, state, kind, detail, now)
    base = int(event.headers.get(FROM_BYTES, b"0"))
    stream.cached = event.headers.get(CACHED_BYTES, b"")
    if base <= stream.have[0]:
        greet(stream)
    return Attaching(state.to, state.reception, base)


def on_frames_end(stream: Stream, state: Receiving, event: ResponseEnded, now: float) -> State:
    return lose(stream, state, TransportKind.EOF, "response ended without an end frame", now)


# --- handlers: a worker declines


def on_declining_data(stream: Stream, state: Declining, event: Data, now: float) -> State:
    parts = (*state.parts, event.data)
    if sum(map(len, parts)) > stream.limits.max_error_body_bytes:
        return lose(stream, state, TransportKind.ENGINE_ERROR, "error body too large", now)
    return Declining(state.to, state.status, parts, state.retry_after)


def on_declined(stream: Stream, state: Declining, event: ResponseEnded, now: float) -> State:
    """The client's fault if it was the first worker. Of a moved request another worker took the
    same body, so the remaining ones are tried too."""
    refusal = Refusal(state.status, b"".join(state.parts), state.retry_after)
    if stream.budget.tries > 1 or stream.delivered:
        detail = f"answered {state.status}"
        return lose(stream, state, TransportKind.DECLINED, detail, now, state.status, refusal)
    return refuse(stream, state, refusal)
