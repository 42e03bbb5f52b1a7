"""Incremental parser of the frames an engine sends (ARCHITECTURE.md, "Worker protocol").

A frame is atomic: its ids and the bytes that show them are handed on together or not at
all, so a connection cut anywhere leaves the gateway at a frame boundary, and that is the
point another worker continues from. The common case, whole frames in one read, takes one
`find`, one `split` and one slice a frame, and the token frames of a read are handed on as
one run. Frames in pieces are held as pieces and joined once, when complete, so a byte-wise
sender costs no quadratic time.
"""

from __future__ import annotations

from typing import Protocol

from relume.controlplane.gateway.errors import FrameError

MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 64 << 20
MAX_PLAIN_HEADER = 48  # of a frame of one token


class FrameSink(Protocol):
    """Takes whole frames, in order."""

    def on_tokens(self, start: int, ids: list[int], shown: list[bytes]) -> None:
        """A run of token frames: tokens `start..` and the SSE bytes that show them. Frames
        without ids come alone; `start` is -1 when ids are not told."""
        ...

    def on_choice(self, choice: int, start: int, ids: list[int], shown: bytes) -> None:
        """The same of one of several choices, frame by frame."""
        ...

    def on_whole(self, status: int, payload: bytes) -> None:
        """The whole response of a non-streaming request."""
        ...

    def on_envelope(self, payload: bytes) -> None:
        """What the worker keeps of a request whose stream is attached to."""
        ...

    def on_end(self, reason: str) -> None:
        """The clean end of the generation."""
        ...

    def on_broken(self, kind: str, message: str) -> None:
        """The generation broke in the engine. `kind`: engine, mismatch, internal."""
        ...


class FrameParser:
    """Feeds one attempt's body to a `FrameSink`.

    Raises `FrameError` on anything that is not a frame, and on bytes after the last one.
    `merge`: token frames of one read may be handed on as one run; else only frames of one
    token each, every one with the bytes that show it; others come alone.
    """

    __slots__ = ("_ended", "_held", "_held_bytes", "_merge", "_need", "_sink")

    def __init__(self, sink: FrameSink, merge: bool = True) -> None:
        self._sink = sink
        self._merge = merge
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._need = 0
        self._ended = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body; calls the sink for the frames they complete."""
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
        pos, size = self._plain_run(data), len(data)
        run: list[int] = []
        shown: list[bytes] = []
        first = 0
        try:
            while pos < size:
                newline = data.find(b"\n", pos, pos + MAX_HEADER_BYTES)
                if newline < 0:
                    self._hold_header(data[pos:])
                    return
                fields = data[pos:newline].split(b" ")
                if fields[0] != b":r":
                    if run:
                        self._sink.on_tokens(first, run, shown)
                        run, shown = [], []
                    pos = self._other_frame(fields, data, pos, newline + 1)
                    continue
                try:
                    start, length = int(fields[1]), int(fields[2])
                    ids = [int(field) for field in fields[3:]]
                except (ValueError, IndexError) as error:
                    raise FrameError(f"bad header {fields[:4]!r:.80}") from error
                end = newline + 1 + length
                if end > size or length < 0:
                    self._hold_payload(data[pos:], length, end - pos)
                    return
                pos = end
                if run and (start != first + len(run) or not ids or not self._merge):
                    self._sink.on_tokens(first, run, shown)
                    run, shown = [], []
                if not run:
                    first = start
                if length:
                    shown.append(data[newline + 1 : end])
                if ids:
                    run += ids
                else:
                    self._sink.on_tokens(start, ids, shown)
                    shown = []
        finally:
            if run:
                self._sink.on_tokens(first, run, shown)

    def _plain_run(self, data: bytes) -> int:
        """Hand on the whole frames of one token each that `data` begins with, numbered in
        order; returns where the first other thing begins, which is left to the full parse."""
        find = data.find
        size = len(data)
        first = number = -1
        ids: list[bytes] = []
        shown: list[bytes] = []
        pos = 0
        while pos < size:
            newline = find(b"\n", pos)
            fields = data[pos:newline].split(b" ", 4)
            if (
                newline < 0
                or newline - pos > MAX_PLAIN_HEADER
                or len(fields) != 4
                or fields[0] != b":r"
            ):
                break
            _, start, length, token = fields
            if not (start.isdigit() and length.isdigit() and token.isdigit()):
                break
            end = newline + 1 + int(length)
            if end > size or end == newline + 1:
                break
            if number < 0:
                first = number = int(start)
            elif int(start) != number:
                break
            number += 1
            ids.append(token)
            shown.append(data[newline + 1 : end])
            pos = end
        if ids:
            self._sink.on_tokens(first, [int(token) for token in ids], shown)
        return pos

    def _hold_header(self, rest: bytes) -> None:
        if len(rest) >= MAX_HEADER_BYTES:
            raise FrameError("header line too long")
        self._hold(rest, 0)

    def _hold_payload(self, rest: bytes, length: int, need: int) -> None:
        if not 0 <= length <= MAX_PAYLOAD_BYTES:
            raise FrameError(f"payload of {length} bytes")
        self._hold(rest, need)

    def _hold(self, rest: bytes, need: int) -> None:
        if rest[:1] != b":":
            raise FrameError(f"not a frame: {rest[:40]!r}")
        self._held.append(rest)
        self._held_bytes = len(rest)
        self._need = need

    def _other_frame(self, fields: list[bytes], data: bytes, pos: int, at: int) -> int:
        """Hand on a frame that is no token frame; returns where the next one begins."""
        if self._ended:
            raise FrameError("bytes after the last frame")
        if fields[0] == b":c":
            return self._choice_frame(fields, data, pos, at)
        try:
            number, word, length = _other(fields)
        except (ValueError, IndexError) as error:
            raise FrameError(f"bad header {fields[:4]!r:.80}") from error
        end = at + length
        if end > len(data) or length < 0:
            self._hold_payload(data[pos:], length, end - pos)
            return len(data)
        if number:
            self._sink.on_whole(number, data[at:end])
            return end
        if word[0] == "v":
            self._sink.on_envelope(data[at:end])
            return end
        self._ended = True
        if word[0] == "e":
            self._sink.on_end(word[1:])
        else:
            self._sink.on_broken(word[1:], data[at:end].decode("utf-8", "replace"))
        return end

    def _choice_frame(self, fields: list[bytes], data: bytes, pos: int, at: int) -> int:
        try:
            choice, start, length, *ids = map(int, fields[1:])
        except ValueError as error:
            raise FrameError(f"bad header {fields[:5]!r:.80}") from error
        end = at + length
        if end > len(data) or length < 0:
            self._hold_payload(data[pos:], length, end - pos)
            return len(data)
        if choice < 0:
            raise FrameError(f"choice {choice}")
        self._sink.on_choice(choice, start, ids, data[at:end])
        return end


def _other(fields: list[bytes]) -> tuple[int, str, int]:
    """(status of `:w` or 0, else the frame's letter and its word, payload length) of a header
    line.

    Raises `ValueError`, `IndexError` on fields that do not read, `FrameError` on others.
    """
    kind = fields[0]
    if kind == b":e":
        return 0, "e" + _word(fields[1]), 0
    if kind == b":x":
        return 0, "x" + _word(fields[1]), int(fields[2])
    if kind == b":v":
        return 0, "v", int(fields[1])
    if kind == b":w":
        status = int(fields[1])
        if not 200 <= status <= 599:
            raise FrameError(f"status {status} out of range")
        return status, "", int(fields[2])
    raise FrameError(f"unknown frame {kind[:40]!r}")


def _word(field: bytes) -> str:
    word = field.decode("ascii")
    if not 0 < len(word) <= 64:
        raise FrameError("bad reason")
    return word
