"""What the Responses API needs beside frames: a response named after its request, like those of other
APIs, and events that are numbered on where another engine's end."""

from __future__ import annotations

import msgspec
from msgspec import Raw

ROUTE = "/v1/responses"

_NAME = "request_id"
_NUMBER = b'"sequence_number":'

_members = msgspec.json.Decoder(dict[str, Raw]).decode


def named(body: bytes, response_id: str) -> bytes:
    """The body with a name for its response, unless its client gave it one. A body that is no JSON
    object is left to the handler."""
    try:
        members = _members(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if bytes(members.get(_NAME, b"null")) != b"null":
        return body
    members[_NAME] = Raw(msgspec.json.encode(f"resp_{response_id}"))
    return msgspec.json.encode(members)


class EventNumbers:
    """Numbers of a continued stream. The handler numbers the events that show delivered tokens again,
    and these may be fewer or more than the first engine's."""

    def __init__(self, first: int) -> None:
        """`first`: the number of the first event that the client does not have."""
        self._first = first
        self._shift: int | None = None

    def renumber(self, payload: bytes) -> bytes:
        """The next events of the stream, with the numbers that the client expects."""
        if self._shift is None:
            found = _number_in(payload.partition(b"\n\n")[0])
            if found is None:
                return payload
            self._shift = self._first - found[2]
        if not self._shift:
            return payload
        return b"\n\n".join([self._moved(event) for event in payload.split(b"\n\n")])

    def _moved(self, event: bytes) -> bytes:
        found = _number_in(event)
        if found is None:
            return event
        at, end, number = found
        assert self._shift is not None
        return b"%b%d%b" % (event[:at], number + self._shift, event[end:])


def _number_in(event: bytes) -> tuple[int, int, int] | None:
    """(start, end, value) of the event's own number: what comes after it is only its type."""
    at = event.rfind(_NUMBER)
    if at < 0:
        return None
    at = end = at + len(_NUMBER)
    while event[end : end + 1].isdigit():
        end += 1
    return (at, end, int(event[at:end])) if end > at else None
