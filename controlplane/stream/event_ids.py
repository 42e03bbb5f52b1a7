"""Ids of the events of a resumable stream, and events cut out of frames.

`id: <request>:<resume token>:<tokens>[:<events>]`: a client with this event has the first `tokens`
tokens of the answer and `events` events after them. The resume token is a random secret of the
request; the log has only its digest. A frame's last event counts its tokens; the ones before it
count as events.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re

from msgspec import Struct

_ID = re.compile(r"([A-Za-z0-9_.-]{1,64}):([A-Za-z0-9_-]{22}):(\d{1,9})(?::(\d{1,6}))?").fullmatch

TOKEN_ENTROPY_BYTES = 16

Position = tuple[int, int]  # tokens, and events after them


class EventId(Struct, frozen=True):
    """What a client sends to resume."""

    request: str
    resume_token: str
    position: Position


def resume_token(entropy: bytes) -> str:
    """The secret made of `TOKEN_ENTROPY_BYTES` random bytes, 22 characters."""
    return base64.urlsafe_b64encode(entropy).rstrip(b"=").decode()


def digest(resume_token: str) -> str:
    """What the log may know of a resume token."""
    return hashlib.sha256(resume_token.encode()).hexdigest()[:32]


def proves(resume_token: str, known: str) -> bool:
    """Whether `resume_token` is the one with digest `known`; in constant time."""
    return bool(known) and hmac.compare_digest(digest(resume_token), known)


def parse(text: str) -> EventId | None:
    """The id, or None when it is none of ours."""
    match = _ID(text.strip())
    if match is None:
        return None
    request, token, tokens, events = match.groups()
    return EventId(request, token, (int(tokens), int(events or 0)))


class Stamp:
    """Puts ids in front of events, and drops what the client has. `at` is the position of
    the stream, `have` what the client had when it connected.

    Of the events after token `have[0]` the client has the first `have[1]`, whatever frames they come
    in: a worker may group tokens otherwise than the one before it. `_passed` counts them."""

    __slots__ = ("_passed", "at", "have", "prefix")

    def __init__(self, request: str, resume_token: str) -> None:
        self.prefix = f"id: {request}:{resume_token}:".encode()
        self.at: Position = (0, 0)
        self.have: Position = (0, 0)
        self._passed = 0

    @property
    def is_behind(self) -> bool:
        """Whether the stream is before the end of what the client has."""
        tokens, events = self.have
        return self.at[0] < tokens or self._passed < events

    def restart(self, at: Position, have: Position) -> None:
        """The stream continues from `at`, for a client that has `have`."""
        self.at, self.have = at, have
        self._passed = 0

    def frame(self, payload: bytes, tokens: int) -> bytes:
        """The events of one frame of `tokens` tokens with their ids, without known ones."""
        at, events = self.at
        parts = payload.split(b"\n\n")
        rest = parts.pop()
        out = []
        last = len(parts) - 1
        for number, event in enumerate(parts):
            place = (at + tokens, 0) if tokens and number == last else (at, events + number + 1)
            if not self._is_known(at):
                out.append(self.line(place) + event + b"\n\n")
        self.at = (at + tokens, 0) if tokens else (at, events + len(parts))
        if rest and not self.is_behind:
            out.append(rest)
        return out[0] if len(out) == 1 else b"".join(out)

    def _is_known(self, at: int) -> bool:
        """Whether the client has the next event, which is of a frame that begins at token `at`."""
        tokens, events = self.have
        if at < tokens:
            return True
        if self._passed < events:
            self._passed += 1
            return True
        return False

    def run(self, frames: list[bytes]) -> bytes:
        """The same of frames of one token each."""
        if self.is_behind:
            return b"".join([self.frame(payload, 1) for payload in frames])
        stamped = self.prefix + b"%d\n%b"
        out = []
        for place, payload in enumerate(frames, self.at[0] + 1):
            # One line and one event: looking for one byte takes a quarter of looking for two.
            if payload.find(b"\n") == len(payload) - 2 and payload.endswith(b"\n"):
                out.append(stamped % (place, payload))
                self.at = (place, 0)
            else:
                out.append(self.frame(payload, 1))
        return b"".join(out)

    def line(self, place: Position) -> bytes:
        """The `id:` line of the event after which a client is at `place`."""
        tokens, events = place
        if events:
            return b"%b%d:%d\n" % (self.prefix, tokens, events)
        return b"%b%d\n" % (self.prefix, tokens)

    def skipped(self, tokens: int) -> None:
        """A frame whose tokens show no text."""
        self.at = (self.at[0] + tokens, 0)

    def straddles(self, tokens: int, payload: bytes) -> bool:
        """Whether a frame of `tokens` tokens would begin before what the client has and end
        after it, and cannot be cut there: an event may show several of its tokens."""
        at, (have, events) = self.at[0], self.have
        if at < have:
            return have < at + tokens
        shown = payload.count(b"\n\n")
        return shown < tokens and self._passed < events and self._passed + shown <= events
