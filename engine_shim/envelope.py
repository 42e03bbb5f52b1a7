"""The envelope of a resumable request: what is kept of it as its client sent it.

One JSON line (path, response id, `created`), then the client's body. With it a worker can
serve the request again when the gateway that had it is gone.
"""

from __future__ import annotations

import msgspec

Headers = list[tuple[bytes, bytes]]


class Envelope(msgspec.Struct, frozen=True):
    """`path`: the route; `id`: what the response is named after; `created`: as shown."""

    path: str
    id: str
    created: str
    body: bytes = b""

    def packed(self) -> bytes:
        """As it is kept and sent."""
        head = {"path": self.path, "id": self.id, "created": self.created}
        return msgspec.json.encode(head) + b"\n" + self.body

    def headers(self, headers: Headers) -> Headers:
        """`headers` of the call that named this envelope, as if its body had come with it."""
        kept = [(k, v) for k, v in headers if k not in (b"x-request-id", b"content-length")]
        kept.append((b"content-length", b"%d" % len(self.body)))
        kept.append((b"x-request-id", self.id.encode("latin-1")))
        return kept


_head = msgspec.json.Decoder(Envelope).decode


def unpacked(data: bytes) -> Envelope:
    """The envelope in `data`. Raises msgspec.MsgspecError."""
    head, _, body = data.partition(b"\n")
    return msgspec.structs.replace(_head(head), body=body)
