"""Frames of the worker protocol, which a worker's streamed answer consists of.

A frame is one header line, then payload bytes:

    :r <start> <length> [<id> ...]            tokens `start`.. and the bytes that show them
    :c <choice> <start> <length> [<id> ...]   the same for one of several choices
    :w <status> <length>                      the whole answer of a request that does not stream
    :v <length>                               the request's envelope, before all other frames
    :e <reason>                               clean end; no payload
    :x <kind> <length>                        the generation broke; the payload is a message

Numbers are decimal with at most nine digits; a token id is one that fits a uint32. `start` is -1
where the worker does not know the token ids. Nothing follows `:e` or `:x`.

A frame is atomic: its ids and the bytes that show them are handed on together or not at all.
A connection that is cut anywhere therefore leaves the reader at a frame boundary, and another
worker continues from there.

Encoder and parser are made for a token a frame, which is what a decoding engine sends. The
parser hands on all such frames of one read as one run; they cost it one pattern match and one
slice each. Incomplete frames are held in pieces and joined once, so that a sender of single
bytes costs no quadratic time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from relume.events.wire.errors import FrameError

CONTENT_TYPE = b"application/x-relume-frames"
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
MAX_WORD_BYTES = 64
"""Of a finish reason, and of the kind of a failure."""
UNKNOWN_START = -1
"""`start` of a frame whose token ids are unknown to the worker."""

_ONE_TOKEN = rb":r (\d{1,9}) (\d{1,9}) (\d{1,9})\n"
TOKEN_CHUNK_HEAD = b"%x\r\n:r %d %d "
"""How one HTTP chunk begins that is a frame of one token: the chunk's size, `start`, `length`. The id
and a newline follow. A reader that knows what must come compares: one formatting and one comparison
take less time than a pattern and the conversion of three numbers."""
MAX_DIGITS = 9
_one_token = re.compile(_ONE_TOKEN).match
_tokens = re.compile(rb":(?:r|c (\d{1,9})) (-1|\d{1,9}) (\d{1,9})(?: ([\d ]+))?\n").match
_other = re.compile(
    rb"(?::e ([!-~]{1,64})|:w ([2-5]\d\d) (\d{1,9})|:x ([!-~]{1,64}) (\d{1,9})|:v (\d{1,9}))\n"
).match


class FailureKind(StrEnum):
    """Why a generation broke (`:x`)."""

    ENGINE = "engine"
    """The engine died: continue the request on another one."""
    MISMATCH = "mismatch"
    """A replay gave other tokens than the client has."""
    INTERNAL = "internal"
    """The worker failed on this request."""
    MOVED = "moved"
    """The engine gave the request up because it continues elsewhere."""
    TAKEN = "taken"
    """Another connection continues this stream."""


# --- encoding


def encode_tokens(start: int, ids: Sequence[int], payload: bytes = b"", choice: int = -1) -> bytes:
    """Tokens from index `start` on and the bytes that show them.

    `choice`: which of several choices; -1 if there is one only.
    """
    if choice < 0:
        if len(ids) == 1:
            return b":r %d %d %d\n%b" % (start, len(payload), ids[0], payload)
        head = b":r %d %d" % (start, len(payload))
    else:
        head = b":c %d %d %d" % (choice, start, len(payload))
    return b"%b%b\n%b" % (head, b" %d" * len(ids) % tuple(ids), payload)


def encode_response(status: int, payload: bytes) -> bytes:
    """The whole answer of a request that does not stream."""
    return b":w %d %d\n%b" % (status, len(payload), payload)


def encode_envelope(payload: bytes) -> bytes:
    """The request as its client sent it."""
    return b":v %d\n%b" % (len(payload), payload)


def encode_end(reason: str) -> bytes:
    """Clean end with vLLM's finish reason; `-`: unknown, `multi`: several choices."""
    return f":e {reason}\n".encode()


def encode_failure(kind: str, message: str) -> bytes:
    """The generation broke. `kind`: a `FailureKind`."""
    text = message.encode()
    return b":x %b %d\n%b" % (kind.encode(), len(text), text)


# --- parsing


class FrameSink(Protocol):
    """Takes whole frames, in order."""

    def on_tokens(self, start: int, ids: list[int], shown: list[bytes]) -> None:
        """A run of `:r` frames: tokens `start`.. and the bytes that show them. Frames without
        ids come alone."""
        ...

    def on_choice(self, choice: int, start: int, ids: list[int], shown: bytes) -> None:
        """One `:c` frame."""
        ...

    def on_whole(self, status: int, payload: bytes) -> None:
        """The whole answer of a request that does not stream."""
        ...

    def on_envelope(self, payload: bytes) -> None:
        """The request as its client sent it."""
        ...

    def on_end(self, reason: str) -> None:
        """The clean end of the generation."""
        ...

    def on_broken(self, kind: str, message: str) -> None:
        """The generation broke. `kind`: a `FailureKind`, or one that this build does not know."""
        ...


class FrameParser:
    """Feeds one response body to a `FrameSink`.

    `merge`: token frames of one read may come as one run. Without it a run consists of frames
    of one token each, every one with bytes that show it; all others come alone.
    """

    __slots__ = ("_ended", "_held", "_held_bytes", "_merge", "_need", "_sink")

    def __init__(self, sink: FrameSink, merge: bool = True) -> None:
        self._sink = sink
        self._merge = merge
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._need = 0  # bytes of the held frame; 0 while its header is incomplete
        self._ended = False

    @property
    def is_incomplete(self) -> bool:
        """Whether the bytes so far end inside a frame."""
        return bool(self._held)

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body; calls the sink for the frames they complete.

        Raises FrameError on what is no frame and on bytes after the last one, and lets the
        sink's own FrameError pass.
        """
        if self._ended:
            raise FrameError("bytes after the last frame")
        if self._held:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._need:
                if self._held_bytes < self._need:
                    return
            elif b"\n" not in data:
                if self._held_bytes > MAX_HEADER_BYTES:
                    raise FrameError("header line too long")
                return
            data = b"".join(self._held)
            self._held.clear()
        pos = self._plain_run(data)
        if pos < len(data):
            self._mixed_frames(data, pos)

    def _plain_run(self, data: bytes) -> int:
        """Hand on the whole frames of one token each that `data` begins with, numbered in
        order; returns the position of what follows them."""
        size = len(data)
        first = due = -1
        ids: list[int] = []
        shown: list[bytes] = []
        pos = 0
        while (match := _one_token(data, pos)) is not None:
            start, length, token = match.groups()
            at = match.end()
            end = at + int(length)
            if end > size or end == at:
                break
            if int(start) != due:
                if due >= 0:
                    break
                first = due = int(start)
            due += 1
            ids.append(int(token))
            shown.append(data[at:end])
            pos = end
        if ids:
            self._sink.on_tokens(first, ids, shown)
        return pos

    def _mixed_frames(self, data: bytes, pos: int) -> None:
        """Hand on frames of any kind from `pos` on; hold an incomplete one."""
        size = len(data)
        merge = self._merge
        run: list[int] = []
        shown: list[bytes] = []
        first = due = 0
        try:
            while pos < size:
                match = _tokens(data, pos)
                if match is not None:
                    choice, number, length, numbers = match.groups()
                    at = match.end()
                    end = at + int(length)
                    if end > size or at - pos > MAX_HEADER_BYTES:
                        self._hold_payload(data, pos, at, end)
                        return
                    start = int(number)
                    try:
                        ids = list(map(int, numbers.split(b" "))) if numbers else []
                    except ValueError:
                        raise FrameError(f"bad token ids {numbers[:80]!r}") from None
                    pos = end
                    if choice is None and ids and run and start == due and merge:
                        run += ids
                        due += len(ids)
                        if end > at:
                            shown.append(data[at:end])
                        continue
                if run:
                    self._sink.on_tokens(first, run, shown)
                    run, shown = [], []
                if match is None:
                    pos = self._other_frame(data, pos)
                elif choice is not None:
                    self._sink.on_choice(int(choice), start, ids, data[at:end])
                elif ids:
                    run, first, due = ids, start, start + len(ids)
                    if end > at:
                        shown.append(data[at:end])
                else:
                    self._sink.on_tokens(start, ids, [data[at:end]] if end > at else [])
        finally:
            if run:
                self._sink.on_tokens(first, run, shown)

    def _other_frame(self, data: bytes, pos: int) -> int:
        """Hand on a frame without tokens; returns the position of the next one."""
        match = _other(data, pos)
        if match is None:
            self._hold_header(data[pos:])
            return len(data)
        reason, status, response, kind, message, envelope = match.groups()
        at = match.end()
        end = at + int(response or message or envelope or b"0")
        if end > len(data):
            self._hold_payload(data, pos, at, end)
            return len(data)
        if status:
            self._sink.on_whole(int(status), data[at:end])
        elif envelope:
            self._sink.on_envelope(data[at:end])
        else:
            self._ended = True
            if reason:
                self._sink.on_end(reason.decode())
            else:
                self._sink.on_broken(kind.decode(), data[at:end].decode("utf-8", "replace"))
            if end < len(data):
                raise FrameError("bytes after the last frame")
        return end

    def _hold_header(self, rest: bytes) -> None:
        newline = rest.find(b"\n", 0, MAX_HEADER_BYTES)
        if newline >= 0:
            raise FrameError(f"not a frame: {rest[: min(newline, 80)]!r}")
        if len(rest) >= MAX_HEADER_BYTES:
            raise FrameError("header line too long")
        self._hold(rest, 0)

    def _hold_payload(self, data: bytes, pos: int, at: int, end: int) -> None:
        """Hold the frame at `pos`, whose payload from `at` to `end` is incomplete."""
        if at - pos > MAX_HEADER_BYTES:
            raise FrameError("header line too long")
        if end - at > MAX_PAYLOAD_BYTES:
            raise FrameError(f"payload of {end - at} bytes")
        self._hold(data[pos:], end - pos)

    def _hold(self, rest: bytes, need: int) -> None:
        if rest[:1] != b":":
            raise FrameError(f"not a frame: {rest[:40]!r}")
        self._held.append(rest)
        self._held_bytes = len(rest)
        self._need = need


# --- frames as values, for readers that need no hot path


class Tokens(Struct, frozen=True):
    """`:r` and `:c`: tokens from index `start` on and the bytes that show them. `choice` is -1
    in a `:r`."""

    start: int
    ids: tuple[int, ...]
    payload: bytes
    choice: int = -1


class Response(Struct, frozen=True):
    """`:w`: the whole answer of a request that does not stream."""

    status: int
    payload: bytes


class Envelope(Struct, frozen=True):
    """`:v`: the request as its client sent it."""

    payload: bytes


class End(Struct, frozen=True):
    """`:e`: clean end."""

    reason: str


class Failure(Struct, frozen=True):
    """`:x`: the generation broke. `kind`: a `FailureKind`, or one that this build does not know."""

    kind: str
    message: str


Frame = Tokens | Response | Envelope | End | Failure


class FrameReader:
    """Cuts a response body into frames as values, each as its sender wrote it."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._parser = FrameParser(self, merge=False)

    @property
    def is_incomplete(self) -> bool:
        """Whether the bytes so far end inside a frame."""
        return self._parser.is_incomplete

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises FrameError."""
        self._parser.feed(data)
        frames, self._frames = self._frames, []
        return frames

    def on_tokens(self, start: int, ids: list[int], shown: list[bytes]) -> None:
        if len(shown) > 1:
            for index, payload in enumerate(shown):
                self._frames.append(Tokens(start + index, (ids[index],), payload))
        else:
            payload = shown[0] if shown else b""
            self._frames.append(Tokens(start, tuple(ids), payload))

    def on_choice(self, choice: int, start: int, ids: list[int], shown: bytes) -> None:
        self._frames.append(Tokens(start, tuple(ids), shown, choice))

    def on_whole(self, status: int, payload: bytes) -> None:
        self._frames.append(Response(status, payload))

    def on_envelope(self, payload: bytes) -> None:
        self._frames.append(Envelope(payload))

    def on_end(self, reason: str) -> None:
        self._frames.append(End(reason))

    def on_broken(self, kind: str, message: str) -> None:
        self._frames.append(Failure(kind, message))


def read_frames(body: bytes) -> list[Frame]:
    """The frames of `body`, which are whole. Raises FrameError."""
    reader = FrameReader()
    frames = reader.feed(body)
    if reader.is_incomplete:
        raise FrameError("the bytes end inside a frame")
    return frames
