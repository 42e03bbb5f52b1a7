"""How a request ends: one terminal event, and what its client gets."""

from __future__ import annotations

from relume.controlplane.stream.arrival import Assignment, Rejected
from relume.controlplane.stream.error_codes import CORRUPTED, NOT_COMPARED, STOPPING
from relume.controlplane.stream.stream_data import NEVER, Stream
from relume.controlplane.stream.stream_effects import (
    Close,
    Cut,
    Fail,
    LetGo,
    RecordEnd,
    RecordFailure,
    Release,
    Reply,
    ReportWaiting,
    StopWaiting,
)
from relume.controlplane.stream.stream_events import Fault, ShutDown, TakenOver
from relume.controlplane.stream.stream_states import (
    Attempt,
    BackingOff,
    Delivering,
    Detached,
    Ended,
    Refusal,
    State,
)
from relume.events.vocabulary.enums import RequestOutcome, TransportKind

LOST = "neither a worker nor this gateway has the stream any more"
NO_ENVELOPE = f"{LOST}, and no holder has the request: send it again"
UNREPEATABLE = (
    f"{LOST}, and what was sampled without a seed cannot be generated again: "
    "what you received remains valid; send the request again for another answer"
)
NOT_SENT = "assigned, and not sent: its client left or returned, or no other worker takes it"
NO_RETRY = ("x-should-retry", "false")
NO_CLIENT = "client closed the connection"


def attempt_of(state: State) -> Assignment | None:
    """The attempt that is under way, if one is."""
    return state.to if isinstance(state, Attempt) else None


def left_of(state: State) -> Assignment | None:
    """The attempt that runs on without us, if one does."""
    return state.left if isinstance(state, Detached | Delivering) else None


def drop_plan(stream: Stream, state: State) -> None:
    """An attempt that was assigned and not sent is over: what follows is another one."""
    if isinstance(state, BackingOff) and state.planned is not None:
        to = state.planned
        failure = RecordFailure(to.attempt, TransportKind.DETACHED, stream.delivered, NOT_SENT)
        stream.effects.append(failure)


def leave(stream: Stream, state: State) -> Assignment | None:
    """Stop what `state` waits for and drop its attempt; the attempt that may run on."""
    stream.effects.append(StopWaiting())
    to = attempt_of(state)
    if to is not None:
        stream.effects.append(Close())
        return to
    return left_of(state)


def end(
    stream: Stream,
    state: State,
    outcome: RequestOutcome,
    status: int,
    detail: str = "",
    finish: str = "-",
    reuse: bool = False,
) -> Ended:
    """The terminal event. `reuse`: the attempt's connection may serve others."""
    effects, answer = stream.effects, stream.answer
    to = attempt_of(state)
    assigned = to or left_of(state)
    if outcome != RequestOutcome.COMPLETED and assigned is not None:
        release(stream, assigned)
    effects.append(StopWaiting())
    if to is not None:
        effects.append(Close(reuse))
    stream.absent_until = NEVER
    timed = answer.first_at >= 0
    effects.append(
        RecordEnd(
            outcome=outcome,
            status=status,
            tokens=max(stream.delivered, stream.have[0]),
            finish=finish,
            ttft_us=int((answer.first_at - stream.arrived_at) * 1e6) if timed else -1,
            longest_gap_us=int(answer.longest_gap * 1e6) if timed else -1,
            detail=detail,
            unaccepted=None if stream.accepted else stream.arrival,
        )
    )
    return Ended(outcome)


def fail(
    stream: Stream,
    state: State,
    status: int,
    message: str,
    why: str = "",
    *,
    retry_after_s: int = 0,
    code: str = "",
) -> State:
    """Send the client an error: its request cannot continue; `why` is for the log alone. An absent
    client gets nothing: the stream waits for it and is tried again then."""
    if stream.is_absent and status >= 502:
        stream.effects.append(ReportWaiting(message))
        drop_plan(stream, state)
        leave(stream, state)
        return Detached(None)
    outcome = RequestOutcome.REJECTED if status < 500 else RequestOutcome.FAILED
    ended = end(stream, state, outcome, status, f"{message}: {why}" if why else message)
    headers = stream.reply_headers()
    if not retry_after_s and status in (429, 503):
        retry_after_s = stream.limits.retry_after_s
    if stream.relayed is not None and stream.begun:
        stream.effects.append(Cut())
        return ended
    if status == 404:
        code = code or "model_not_found"
    if stream.stamp is not None and message.startswith(LOST):
        # OpenAI's clients would retry it, and must not.
        code, headers = "stream_lost", (*headers, NO_RETRY)
    elif stream.stamp is not None and message in (NOT_COMPARED, CORRUPTED):
        headers = (*headers, NO_RETRY)
    stream.effects.append(
        Fail(
            status=status,
            message=message,
            code=code,
            retry_after_s=retry_after_s,
            headers=headers,
            begun=stream.begun,
            path=stream.path,
            event=stream.answer.next_after_all,
        )
    )
    return ended


def refuse(stream: Stream, state: State, refusal: Refusal) -> State:
    """Pass a worker's 4xx on to the client."""
    status = refusal.status
    ended = end(
        stream, state, RequestOutcome.REJECTED, status, f"worker answered {status}", reuse=True
    )
    headers = stream.reply_headers()
    if refusal.retry_after:
        headers = (*headers, ("retry-after", refusal.retry_after))
    stream.effects.append(Reply(status, refusal.body, headers, refusal=True))
    return ended


def declined_by_all(stream: Stream, state: State, refusal: Refusal | None) -> State:
    """Every worker that is left refused the moved request with a 4xx."""
    if refusal is None or stream.begun or stream.delivered:
        return fail(stream, state, 502, "no worker would continue the request")
    return refuse(stream, state, refusal)


def release(stream: Stream, to: Assignment, soon: bool = False) -> None:
    """Inform the worker that no client will resume the attempt."""
    if stream.stamp is not None and stream.is_resumable:
        stream.effects.append(Release(to, stream.have[0], soon))


# --- handlers


def on_rejected(stream: Stream, state: State, event: Rejected, now: float) -> State:
    return fail(
        stream, state, event.status, event.message,
        retry_after_s=event.retry_after_s, code=event.code,
    )  # fmt: skip


def on_fault(stream: Stream, state: State, event: Fault, now: float) -> State:
    return fail(stream, state, 500, "the gateway failed on this request")


def on_shutdown(stream: Stream, state: State, event: ShutDown, now: float) -> State:
    return fail(stream, state, 503, STOPPING)


def on_taken_over(stream: Stream, state: State, event: TakenOver, now: float) -> State:
    """The request ends here without a word in the log. A client that is there may connect
    again. If all is written to it, the log must hear whether that arrived."""
    if isinstance(state, Delivering):
        return Delivering(state.left, is_taken=True)
    is_there = not stream.is_absent
    ended = let_go(stream, state)
    if is_there:
        stream.effects.append(Cut())
    return ended


def let_go(stream: Stream, state: State) -> Ended:
    """Leave the stream to another replica."""
    leave(stream, state)
    stream.absent_until = NEVER
    stream.effects.append(LetGo())
    return Ended("let_go")


def ignore(stream: Stream, state: State, event: object, now: float) -> State:
    """It is over already."""
    return state
