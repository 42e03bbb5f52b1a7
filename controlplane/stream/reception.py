"""The frames of one attempt, cut out of the bytes that come."""

from __future__ import annotations

from relume.controlplane.stream.stream_events import (
    Broken,
    ChoiceTokens,
    End,
    Envelope,
    Event,
    Tokens,
    Whole,
)
from relume.events.wire.errors import FrameError
from relume.events.wire.frames import FrameParser


class Reception:
    """What an attempt's response was read to. `repeats`: bytes after the last token which the
    client has and the worker has yet to repeat. `merge`: a read's token frames may come as one
    run."""

    __slots__ = ("_frames", "_parser", "repeats")

    def __init__(self, merge: bool, repeats: bytes = b"") -> None:
        self.repeats = repeats
        self._frames: list[Event] = []
        self._parser = FrameParser(self, merge)

    def read(self, data: bytes) -> tuple[list[Event], FrameError | None]:
        """The frames that `data` completes, and what is wrong after them."""
        error = None
        try:
            self._parser.feed(data)
        except FrameError as found:
            error = found
        frames, self._frames = self._frames, []
        return frames, error

    def without_known(self, payload: bytes) -> bytes:
        """What of these bytes the client does not have. Raises FrameError if they differ from
        what it has."""
        due = self.repeats
        known = min(len(due), len(payload))
        if payload[:known] != due[:known]:
            raise FrameError("the resumed stream differs from what the client has")
        self.repeats = due[known:]
        return payload[known:]

    # --- frames.FrameSink

    def on_tokens(self, start: int, ids: list[int], shown: list[bytes]) -> None:
        self._frames.append(Tokens(start, ids, shown))

    def on_choice(self, choice: int, start: int, ids: list[int], shown: bytes) -> None:
        self._frames.append(ChoiceTokens(choice, start, ids, shown))

    def on_whole(self, status: int, payload: bytes) -> None:
        self._frames.append(Whole(status, payload))

    def on_envelope(self, payload: bytes) -> None:
        self._frames.append(Envelope(payload))

    def on_end(self, reason: str) -> None:
        self._frames.append(End(reason))

    def on_broken(self, kind: str, message: str) -> None:
        self._frames.append(Broken(kind, message))
