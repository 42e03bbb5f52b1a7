"""Names of the HTTP headers that Relume's processes and their clients exchange, and the values
that have a structure.

Names are lower case, as HTTP parsers of this project give them. Those that are looked up in a
mapping of bytes have a second constant, `..._BYTES`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from typing import Self

from msgspec import Struct

from relume.events.wire.errors import HeaderError

PREFIX = "x-relume-"
PREFIX_BYTES = PREFIX.encode()

# --- a gateway's dispatch to a worker

REQUEST = "x-relume-request"
"""The request; a worker serves a call without it as its server does without Relume. The gateway
names the request in its answer to the client, too."""
ATTEMPT = "x-relume-attempt"
"""1, 2, ... one per dispatch of the request."""
INCARNATION = "x-relume-incarnation"
"""The engine that the gateway means; another one answers 409."""
DISPATCH = "x-relume-dispatch"
"""The encoded `RouteDecided` event in base64url (`encode_record`)."""
CREATED = "x-relume-created"
"""Unix seconds that a continued answer shows as `created`."""
CACHED = "x-relume-cached"
"""Prompt tokens that the first worker found cached. The worker puts it into the head of its
answer; the gateway repeats it with a resumption."""
UNCACHED = "x-relume-uncached"
"""`1`: the engine reads no block of its prefix cache for this attempt. Engines of earlier builds ignore
it."""
RESUME = "x-relume-resume"
"""What the client has of the answer (`relume.events.wire.resumption`)."""
NEXT_EVENT = "x-relume-next-event"
"""Number of the first event that the client does not have, on a route where events have numbers.
Without it the worker counts as if each token were an event of its own."""
CHECKPOINT = "x-relume-checkpoint"
"""Endpoints of the state daemons that are to hold the request's KV blocks (`format_endpoints`)."""
RESTORE = "x-relume-restore"
"""Endpoints that may have the request's KV blocks."""
PRIORITY = "x-relume-priority"
"""Weight of the request's checkpoint when a holder must evict; a client may send it, too."""
GRACE = "x-relume-grace"
"""Bounds within which the stream outlives its connection (`Grace`)."""
CLAIM = "x-relume-claim"
"""The secret that a gateway shows to attach to the stream."""
ORIGIN = "x-relume-origin"
"""Log in which the request of a resumable stream arrived, and its arrival there
(`relume.events.wire.stream_origin`)."""
ENVELOPE = "x-relume-envelope"
"""Endpoints that may have the request as its client sent it; the body is empty."""

# --- a worker's answer

FROM = "x-relume-from"
"""First token whose payload the worker still has; on an attached stream."""

# --- a client's call to a gateway, and the answer

TIER = "x-relume-tier"
"""Tier of the request."""
RESUMABLE = "x-relume-resumable"
"""`1` from a client that can resume its stream; seconds of grace in the answer."""
VERDICT = "x-relume-verdict"
"""What a failure would do to this stream: exact, best_effort, sampled, replay or restart."""
REASON = "x-relume-reason"
"""Why the guarantee is not exact."""
MAX_TOKENS = "x-relume-max-tokens"
"""What the request's maximum of output tokens was lowered to, because capacity is short."""
PROTECTED = "x-relume-protected"
"""`no` in the answer to a call that the gateway relays without protection."""

ROLE_FIELD = "x-relume-role"
"""Extension field of the OpenAPI description: the role that an operation needs."""

CACHED_BYTES = CACHED.encode()
FROM_BYTES = FROM.encode()
PRIORITY_BYTES = PRIORITY.encode()
RESUMABLE_BYTES = RESUMABLE.encode()
TIER_BYTES = TIER.encode()

MAX_DIGITS = 9
MAX_ENDPOINTS = 4
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}").fullmatch
_ENDPOINT = re.compile(
    r"unix:/[A-Za-z0-9_./-]{1,100}|tcp://[A-Za-z0-9_.:\[\]-]{1,120}:[0-9]{1,5}"
).fullmatch


def parse_number(name: str, text: str) -> int:
    """A decimal number of at most nine digits, from header `name`. Raises HeaderError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS):
        raise HeaderError(name, f"{text[:20]!r} is not a number of at most {MAX_DIGITS} digits")
    return int(text)


def parse_request(text: str) -> str:
    """A request id. Raises HeaderError."""
    if not _REQUEST_ID(text):
        raise HeaderError(REQUEST, f"{text[:80]!r} is not 1 to 64 of A-Z a-z 0-9 _ . -")
    return text


def encode_record(record: bytes) -> bytes:
    """An encoded event in a header: base64url without padding."""
    return base64.urlsafe_b64encode(record).rstrip(b"=")


def decode_dispatch(text: str | bytes) -> bytes:
    """The encoded event in the value of `DISPATCH`. Raises HeaderError."""
    return decode_record(DISPATCH, text)


def decode_record(name: str, text: str | bytes) -> bytes:
    """The encoded event in header `name`, from base64url with or without padding. Raises HeaderError."""
    try:
        value = text.encode("ascii") if isinstance(text, str) else text
        return base64.b64decode(value + b"=" * (-len(value) % 4), b"-_", validate=True)
    except ValueError as error:
        raise HeaderError(name, str(error)) from None


def format_endpoints(endpoints: Iterable[str]) -> str:
    """Endpoints of state daemons (`unix:<path>`, `tcp://<host>:<port>`) as one value."""
    return ",".join(endpoints)


def parse_endpoints(name: str, text: str) -> tuple[str, ...]:
    """The endpoints in header `name`, at most `MAX_ENDPOINTS`. Raises HeaderError."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if len(found) > MAX_ENDPOINTS:
        raise HeaderError(name, f"{len(found)} endpoints; the maximum is {MAX_ENDPOINTS}")
    if len(set(found)) < len(found):
        raise HeaderError(name, "one endpoint is listed twice")
    for endpoint in found:
        if not _ENDPOINT(endpoint):
            raise HeaderError(name, f"{endpoint[:80]!r} is no endpoint")
    return found


class Grace(Struct, frozen=True):
    """Bounds of a stream that outlives its connection: how long, its own bytes, the bytes and the
    number of all such streams of one engine."""

    grace_s: int
    stream_bytes: int
    total_bytes: int
    streams: int

    def format(self) -> str:
        """As the value of `GRACE`."""
        return f"{self.grace_s} {self.stream_bytes} {self.total_bytes} {self.streams}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises HeaderError."""
        words = text.split()
        if len(words) != 4:
            raise HeaderError(GRACE, f"{text[:80]!r} is not four numbers")
        return cls(*(parse_number(GRACE, word) for word in words))
