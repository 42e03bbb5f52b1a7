"""Frames of the worker protocol: one header line, then payload bytes.

See ARCHITECTURE.md, "Worker protocol". The writer is the engine's middleware; the
reader serves tests and tools (the gateway has its own, made for its buffers).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

CONTENT_TYPE = b"application/x-relume-frames"


class Tokens(msgspec.Struct, frozen=True):
    """`:r`: tokens from index `start` on and their bytes. `:c`: the same for one of several
    choices."""

    start: int
    ids: tuple[int, ...]
    payload: bytes
    choice: int = 0


class Whole(msgspec.Struct, frozen=True):
    """`:w`: the response of a non-streaming request."""

    status: int
    payload: bytes


class End(msgspec.Struct, frozen=True):
    """`:e`: clean end with vLLM's finish reason, `-` unknown, `multi` several choices."""

    reason: str


class Broken(msgspec.Struct, frozen=True):
    """`:x`: generation broke. `kind`: engine, mismatch, internal, moved (handed over)."""

    kind: str
    message: str


Frame = Tokens | Whole | End | Broken


class MalformedFrame(ValueError):
    """Bytes that are no frame of the worker protocol."""


def tokens(start: int, ids: Sequence[int], payload: bytes = b"", choice: int = -1) -> bytes:
    """`choice`: which of several; -1 when there is one only."""
    kind = f":c {choice} {start}" if choice >= 0 else f":r {start}"
    numbers = "".join(f" {number}" for number in ids)
    return f"{kind} {len(payload)}{numbers}\n".encode() + payload


def whole(status: int, payload: bytes) -> bytes:
    return b":w %d %d\n%b" % (status, len(payload), payload)


def envelope(payload: bytes) -> bytes:
    return b":v %d\n%b" % (len(payload), payload)


def end(reason: str) -> bytes:
    return f":e {reason}\n".encode()


def broken(kind: str, message: str) -> bytes:
    text = message.encode()
    return b":x %b %d\n%b" % (kind.encode(), len(text), text)


class FrameReader:
    """Cuts a response body into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Frames completed by `data`. Raises MalformedFrame."""
        self._buffer += data
        frames: list[Frame] = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        newline = self._buffer.find(b"\n")
        if newline < 0:
            return None
        words = self._buffer[:newline].decode().split(" ")
        try:
            at = {":e": 0, ":c": 3}.get(words[0], 2)
            length = int(words[at]) if at else 0
            stop = newline + 1 + length
            if len(self._buffer) < stop:
                return None
            frame = _frame(words, bytes(self._buffer[newline + 1 : stop]))
        except (IndexError, ValueError) as error:
            raise MalformedFrame(" ".join(words)[:80]) from error
        del self._buffer[:stop]
        return frame


def _frame(words: list[str], payload: bytes) -> Frame:
    match words[0]:
        case ":r":
            return Tokens(int(words[1]), tuple(map(int, words[3:])), payload)
        case ":c":
            return Tokens(int(words[2]), tuple(map(int, words[4:])), payload, int(words[1]))
        case ":w":
            return Whole(int(words[1]), payload)
        case ":e":
            return End(words[1])
        case ":x":
            return Broken(words[1], payload.decode())
    raise ValueError(words[0])
