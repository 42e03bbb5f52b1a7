"""The frames of an answer: tokens in, the client's bytes out."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from relume.controlplane.stream.answer import created_in
from relume.controlplane.stream.error_codes import CORRUPTED
from relume.controlplane.stream.handlers.attempts import complete, hand_over, lose
from relume.controlplane.stream.handlers.endings import fail, release
from relume.controlplane.stream.handlers.resuming import detach
from relume.controlplane.stream.handlers.to_client import flush
from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.stream_effects import Cut, ReportFailover
from relume.controlplane.stream.stream_events import (
    Broken,
    ChoiceTokens,
    Data,
    End,
    Envelope,
    Tokens,
    Whole,
)
from relume.controlplane.stream.stream_states import (
    Attaching,
    AwaitingFirst,
    Collecting,
    Receiving,
    Regenerating,
    State,
    Streaming,
)
from relume.events.vocabulary.enums import TransportKind
from relume.events.wire.envelope import unpack
from relume.events.wire.errors import EnvelopeError, FrameError
from relume.events.wire.frames import UNKNOWN_START, FailureKind

DIFFERS = "the continuation would have differed from what was delivered"

FrameHandler = Callable[[Stream, Any, Any, float], State]


def on_data(stream: Stream, state: Receiving, event: Data, now: float) -> State:
    """Take the frames that the data completes, then send what they brought in one write."""
    frames, error = state.reception.read(event.data)
    receiving = state
    try:
        for frame in frames:
            found = _HANDLERS[type(frame)](stream, receiving, frame, now)
            if found is not receiving:
                if not isinstance(found, Receiving):
                    return found  # the rest of this read is useless
                receiving = found
    except FrameError as contradiction:
        error = contradiction
    if error is not None:
        return _garbled(stream, receiving, error, now)
    return settle(stream, receiving, now)


def settle(stream: Stream, state: Receiving, now: float) -> State:
    """The state after a read: what is for the client is sent."""
    if stream.answer.finish:
        return complete(stream, state, now)
    if stream.out:
        flush(stream)
    kind = type(state)
    if kind is Streaming or kind is Attaching or kind is Collecting:
        return state
    to, reception, stamp = state.to, state.reception, stream.stamp
    if not stream.arrival.stream:
        return Collecting(to, reception) if stream.answer.count else state
    if reception.repeats or (stamp is not None and stamp.is_behind):
        return Regenerating(to, reception)
    if stream.begun and stream.answer.first_at >= 0 and stream.failover is None:
        take = stream.answer.take if stamp is None else stream.answer.take_with_id
        return Streaming(to, reception, take)
    return AwaitingFirst(to, reception, has_begun=True)


def _garbled(stream: Stream, state: Receiving, error: FrameError, now: float) -> State:
    return lose(stream, state, TransportKind.ENGINE_ERROR, f"frames: {error}"[:200], now)


def _guarded(handler: FrameHandler) -> FrameHandler:
    """`handler`, which loses the attempt where a frame contradicts what was said before."""

    def handle(stream: Stream, state: Receiving, event: Any, now: float) -> State:
        try:
            return handler(stream, state, event, now)
        except FrameError as error:
            return _garbled(stream, state, error, now)

    return handle


# --- tokens


def _on_tokens(stream: Stream, state: Receiving, event: Tokens, now: float) -> State:
    start, ids, shown = event.start, event.ids, event.shown
    single = type(state) is Attaching or state.reception.repeats
    if stream.stamp is not None and len(shown) > 1 and single:
        found: State = state
        for n in range(len(ids)):
            assert isinstance(found, Receiving)
            found = _take_run(stream, found, start + n, ids[n : n + 1], shown[n : n + 1], now)
            if not isinstance(found, Receiving):
                break
        return found
    return _take_run(stream, state, start, ids, shown, now)


def _take_run(
    stream: Stream, state: Receiving, start: int, ids: list[int], shown: list[bytes], now: float
) -> State:
    """Frames of one token each with their bytes, or one frame; where events carry no ids, any
    run."""
    answer, stamp = stream.answer, stream.stamp
    run = shown if stamp is not None and len(shown) > 1 else None
    payload = b""
    if shown:
        payload = shown[0] if len(shown) == 1 else b"".join(shown)
    if stamp is not None and run is None and ids and shown and stamp.straddles(len(ids), payload):
        raise FrameError("the stream does not begin where the client's copy ends")
    if ids:
        _add(stream, state, answer.ids, (0, start, ids, payload), run, now)
    else:
        if start != UNKNOWN_START:
            answer.expect(answer.ids, start)
        payload = _accepted(stream, state, payload)
        if start == UNKNOWN_START and shown:
            answer.unresumable = "the worker sent no token ids"
            _time(stream, now)
        if payload:
            _pass_on(stream, payload, False, run)
    if stamp is not None and ids and not shown:
        stamp.skipped(len(ids))
    if type(state) is Attaching and len(answer.ids) >= stream.have[0]:
        if state.base <= stream.have[0]:
            return AwaitingFirst(state.to, state.reception, has_begun=True)
        # The engine dropped the part that the client lacks: its tokens are known now.
        release(stream, state.to)
        return lose(
            stream, state, TransportKind.DETACHED, "the worker keeps too little of the stream", now
        )
    return state


def _on_choice(stream: Stream, state: Receiving, event: ChoiceTokens, now: float) -> State:
    answer = stream.answer
    if event.ids:
        known = answer.ids_of(event.choice)
        tokens = event.choice, event.start, event.ids, event.shown
        _add(stream, state, known, tokens, None, now)
    else:
        if event.start != UNKNOWN_START:
            answer.expect(answer.ids_of(event.choice), event.start)
        if payload := _accepted(stream, state, event.shown):
            _pass_on(stream, payload, False, None)
    return state


def _add(
    stream: Stream,
    state: Receiving,
    known: array[int],
    tokens: tuple[int, int, list[int], bytes],
    run: list[bytes] | None,
    now: float,
) -> None:
    """Tokens of a choice (its number, start, ids, bytes), after `known`, and what shows them: they
    count together or not at all."""
    answer = stream.answer
    choice, start, ids, payload = tokens
    answer.expect(known, start)
    if state.reception.repeats and payload:
        payload = _accepted(stream, state, payload)
    answer.add(known, ids)
    _time(stream, now)
    if not stream.arrival.stream:
        answer.note(choice, payload)
    elif payload:
        _pass_on(stream, payload, True, run)
    else:
        answer.tail = b""  # what the client has is before this token


def _accepted(stream: Stream, state: Receiving, payload: bytes) -> bytes:
    """What of these bytes is for the client."""
    if payload and not stream.arrival.stream:
        raise FrameError("events for a request that does not stream")
    return state.reception.without_known(payload) if state.reception.repeats else payload


def _pass_on(stream: Stream, payload: bytes, shows_tokens: bool, run: list[bytes] | None) -> None:
    """`run`: the frames of one token each that `payload` was."""
    answer, stamp = stream.answer, stream.stamp
    answer.follow(payload, shows_tokens)
    if not stream.created and not stream.begun:
        stream.created = created_in(payload)
    if stamp is not None:
        if run is not None:
            payload = stamp.run(run)
        else:
            payload = stamp.frame(payload, len(answer.ids) - stamp.at[0] if shows_tokens else 0)
    stream.out.append(payload)


def _time(stream: Stream, now: float) -> None:
    """A token came at `now`."""
    over = stream.failover
    if over is not None:
        stream.failover = None
        report = ReportFailover(
            kind=over.kind,
            noticed=over.noticed,
            decided=over.decided,
            sent=over.sent,
            resumed=now,
        )
        stream.effects.append(report)
    stream.answer.time(now)


# --- other frames


def _on_whole(stream: Stream, state: Receiving, event: Whole, now: float) -> State:
    has_part = stream.arrival.stream and (stream.answer.count or stream.have > (0, 0))
    if stream.begun or stream.out or has_part:
        raise FrameError("a whole response inside a stream")
    stream.answer.whole = (event.status, event.payload)
    return state


def _on_envelope(stream: Stream, state: Receiving, event: Envelope, now: float) -> State:
    if stream.stamp is None:
        raise FrameError("an unexpected envelope")
    try:
        found = unpack(event.payload)
    except EnvelopeError as error:
        raise FrameError(f"not an envelope: {error}") from error
    stream.path, stream.response_id, stream.body = found.path, found.id, found.body
    stream.created = found.created.encode()
    stream.again = False
    return state


def _on_end(stream: Stream, state: Receiving, event: End, now: float) -> State:
    stream.answer.finish = event.reason
    return state


def _on_broken(stream: Stream, state: Receiving, event: Broken, now: float) -> State:
    kind, message = event.kind, event.message
    if kind == FailureKind.TAKEN and stream.stamp is not None:  # the log will name the new owner
        stream.effects.append(Cut())
        return detach(stream, state, now)
    if kind == FailureKind.ENGINE:
        return lose(stream, state, TransportKind.ENGINE_DEAD, message[:200], now)
    if kind == FailureKind.MOVED:
        if stream.answer.is_complete:
            return lose(stream, state, TransportKind.EOF, message[:200], now)
        return hand_over(stream, state, state.to, now)
    flush(stream)
    if kind == FailureKind.MISMATCH:
        return fail(stream, state, 502, CORRUPTED if state.to.doubted else DIFFERS, message)
    return fail(stream, state, 500, "the worker failed on this request", message)


_HANDLERS: dict[type, FrameHandler] = {
    Tokens: _on_tokens,
    ChoiceTokens: _on_choice,
    Whole: _on_whole,
    Envelope: _on_envelope,
    End: _on_end,
    Broken: _on_broken,
}
FRAME_HANDLERS = {event: _guarded(handler) for event, handler in _HANDLERS.items()}
"""By frame, in every state in which frames come."""
