"""Routes that are relayed to some worker as they are, without failover inside a response.

Until the first byte of an answer another worker may be tried. After it a broken connection breaks
off the client's response, because its framing cannot report an error.
"""

from __future__ import annotations

from relume.controlplane.stream.handlers.attempts import lose, outcome_of
from relume.controlplane.stream.handlers.endings import end
from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.stream_effects import Begin, Finish, Headers, ToClient
from relume.controlplane.stream.stream_events import Data, Head, ResponseEnded
from relume.controlplane.stream.stream_states import AwaitingRelayed, Relaying, State
from relume.events.vocabulary.enums import TransportKind

_PASSED_BACK = (b"content-type", b"cache-control", b"retry-after", b"content-disposition")


def on_relayed_head(stream: Stream, state: AwaitingRelayed, event: Head, now: float) -> State:
    status = event.status
    if status == 429 or (status >= 500 and status != 501):
        return lose(stream, state, TransportKind.ENGINE_ERROR, f"answered {status}", now, status)
    return Relaying(state.to, status, event.headers)


def on_relayed_data(stream: Stream, state: Relaying, event: Data, now: float) -> State:
    assert stream.relayed is not None
    if stream.relayed.method == "HEAD":
        return state
    if stream.begun:
        stream.effects.append(ToClient(event.data))
    else:
        stream.begun = True
        stream.effects.append(Begin(state.status, _headers(stream, state), event.data))
    return state


def on_relayed_end(stream: Stream, state: Relaying, event: ResponseEnded, now: float) -> State:
    status = state.status
    ended = end(stream, state, outcome_of(status), status, reuse=True)
    if stream.begun:
        stream.effects.append(Finish())
    else:
        stream.effects.append(Begin(status, _headers(stream, state), b"", last=True))
    return ended


def _headers(stream: Stream, state: Relaying) -> Headers:
    """Those that every answer carries, and the worker's that a client may have."""
    found = [
        (name.decode(), state.headers[name].decode("latin-1"))
        for name in _PASSED_BACK
        if name in state.headers
    ]
    return (*stream.reply_headers(), *found)
