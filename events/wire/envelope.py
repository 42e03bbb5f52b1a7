"""The envelope of a resumable request: the stored copy of what its client sent.

One JSON line (path, response id, `created`, and `origin` if it is known), then the client's body.
With it a worker can serve the request again when the gateway that had it is gone.
"""

from __future__ import annotations

import re

import msgspec

from relume.events.decode_errors import UNREADABLE
from relume.events.wire.errors import EnvelopeError

Headers = list[tuple[bytes, bytes]]


class Envelope(msgspec.Struct, frozen=True):
    """`path`: the route; `id`: what the response is named after; `created`: as shown; `origin`: where
    the stream began (`relume.events.wire.stream_origin`), as text."""

    path: str
    id: str
    created: str
    body: bytes = b""
    origin: str = ""

    def pack(self) -> bytes:
        """As it is stored and sent."""
        head = {"path": self.path, "id": self.id, "created": self.created}
        if self.origin:
            head["origin"] = self.origin
        return msgspec.json.encode(head) + b"\n" + self.body

    def headers(self, headers: Headers) -> Headers:
        """`headers` of the call that named this envelope, as if its body had come with it."""
        passed = [(k, v) for k, v in headers if k not in (b"x-request-id", b"content-length")]
        passed.append((b"content-length", b"%d" % len(self.body)))
        passed.append((b"x-request-id", self.id.encode("latin-1")))
        return passed


_head = msgspec.json.Decoder(Envelope).decode
_is_text = re.compile(r"[ -~\x80-\xff]*").fullmatch  # what the head of an HTTP message may have


def unpack(data: bytes) -> Envelope:
    """The envelope in `data`. Raises EnvelopeError."""
    head, newline, body = data.partition(b"\n")
    try:
        envelope = _head(head)
    except UNREADABLE as error:
        raise EnvelopeError(str(error)) from None
    if not newline or envelope.body:
        raise EnvelopeError("an envelope is one JSON line, then the body")
    if not all(map(_is_text, (envelope.path, envelope.id, envelope.created, envelope.origin))):
        raise EnvelopeError("its first line has characters that HTTP does not allow")
    return msgspec.structs.replace(envelope, body=body)
