"""What a streaming client gets: the head, and in one write what one read brought."""

from __future__ import annotations

from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.stream_effects import Begin, Finish, ToClient

STREAM_HEADERS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)


def flush(stream: Stream) -> None:
    """Send what is there."""
    data = _pending(stream)
    if data and stream.begun:
        stream.effects.append(ToClient(data))
    elif data:
        _begin(stream, data)


def greet(stream: Stream) -> None:
    """The stream continues: the client's answer begins."""
    if not stream.begun:
        _begin(stream, b"")


def finish(stream: Stream) -> None:
    """Send what is left."""
    data = _pending(stream)
    if stream.begun:
        stream.effects.append(Finish(data))
    else:
        _begin(stream, data, last=True)


def _begin(stream: Stream, data: bytes, last: bool = False) -> None:
    stream.begun = True
    headers = (*STREAM_HEADERS, *stream.reply_headers())
    stream.effects.append(Begin(200, headers, data, last))


def _pending(stream: Stream) -> bytes:
    out = stream.out
    data = out[0] if len(out) == 1 else b"".join(out)
    out.clear()
    return data
