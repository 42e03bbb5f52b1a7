"""Ids of the events of a resumable stream, and events cut out of frames.

`id: <request>:<claim>:<tokens>[:<events>]`: who has this event has the first `tokens` tokens
of the answer and `events` events behind them. The claim is a random secret of the request;
the log knows its digest alone. A frame's last event counts its tokens; the ones before it
count as events.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from msgspec import Struct

_ID = re.compile(r"([A-Za-z0-9_.-]{1,64}):([A-Za-z0-9_-]{22}):(\d{1,9})(?::(\d{1,6}))?").fullmatch

Position = tuple[int, int]  # tokens, and events behind them


class EventId(Struct, frozen=True):
    """What a client shows to go on."""

    request: str
    claim: str
    position: Position


def new_claim() -> str:
    """A secret that cannot be guessed, 22 characters."""
    return secrets.token_urlsafe(16)


def digest(claim: str) -> str:
    """What the log may know of a claim."""
    return hashlib.sha256(claim.encode()).hexdigest()[:32]


def proves(claim: str, known: str) -> bool:
    """Whether `claim` is the one with digest `known`; in constant time."""
    return bool(known) and hmac.compare_digest(digest(claim), known)


def parse(text: str) -> EventId | None:
    """The id, or None when it is none of ours."""
    match = _ID(text.strip())
    if match is None:
        return None
    request, claim, tokens, events = match.groups()
    return EventId(request, claim, (int(tokens), int(events or 0)))


class Stamp:
    """Puts ids in front of events, and drops what the client has. `at` is where the stream
    stands, `have` what the client had when it connected."""

    __slots__ = ("at", "have", "prefix")

    def __init__(self, request: str, claim: str) -> None:
        self.prefix = f"id: {request}:{claim}:".encode()
        self.at: Position = (0, 0)
        self.have: Position = (0, 0)

    def restart(self, at: Position, have: Position) -> None:
        """The stream is taken from `at` on, for a client that has `have`."""
        self.at, self.have = at, have

    def frame(self, payload: bytes, tokens: int) -> bytes:
        """The events of one frame of `tokens` tokens with their ids, without known ones."""
        at, events = self.at
        parts = payload.split(b"\n\n")
        rest = parts.pop()
        out = []
        last = len(parts) - 1
        for number, event in enumerate(parts):
            place = (at + tokens, 0) if tokens and number == last else (at, events + number + 1)
            if place > self.have:
                out.append(self.line(place) + event + b"\n\n")
        self.at = (at + tokens, 0) if tokens else (at, events + len(parts))
        if rest and self.at > self.have:
            out.append(rest)
        return out[0] if len(out) == 1 else b"".join(out)

    def run(self, frames: list[bytes]) -> bytes:
        """The same of frames of one token each."""
        if self.have > self.at:
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
        """The `id:` line of the event behind which a client is at `place`."""
        tokens, events = place
        if events:
            return b"%b%d:%d\n" % (self.prefix, tokens, events)
        return b"%b%d\n" % (self.prefix, tokens)

    def skipped(self, tokens: int) -> None:
        """A frame whose tokens nothing shows."""
        self.at = (self.at[0] + tokens, 0)

    def straddles(self, tokens: int) -> bool:
        """Whether a frame of `tokens` tokens would begin in front of what the client has and
        end behind it: its events cannot be cut there."""
        have = self.have[0]
        return self.at[0] < have < self.at[0] + tokens
