"""Which web pages of other origins may use the endpoint: CORS, as the Fetch standard has it
(https://fetch.spec.whatwg.org/#http-cors-protocol).

A browser sends an `origin` with the calls of a page, and shows the page an answer only if a header allows
it. Before a call with JSON or a key it asks first (the preflight), without a key.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from relume.controlplane.gateway.http.reading import Request
from relume.controlplane.gateway.http.replies import Reply

ANY = "*"
ORIGIN = re.compile(r"\*|https?://[^/\s,@?#]+").fullmatch
"""A setting: any origin, or one as a browser sends it, without a path."""
MAX_AGE_S = 600
"""Time for which a browser need not ask again."""
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9,\- ]{1,1024}").fullmatch


class CrossOrigin:
    """The allowed origins; without any, no answer has headers of this kind."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._any = ANY in origins

    def lines(self, request: Request) -> bytes:
        """Header lines of every answer to the request."""
        if not self._origins or not (allowed := self._allowed(request)):
            return b""
        return (b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n%b") % (
            allowed,
            b"" if self._any else b"vary: origin\r\n",
        )

    def is_preflight(self, request: Request) -> bool:
        """Whether a browser asks for an allowed page."""
        return (
            request.method == "OPTIONS"
            and b"access-control-request-method" in request.headers
            and bool(self._allowed(request))
        )

    def preflight(self, request: Request, methods: Collection[str]) -> Reply:
        """The answer to `is_preflight`; its origin is in `lines`."""
        headers = [("access-control-allow-methods", ", ".join(methods))]
        wanted = request.headers.get(b"access-control-request-headers", b"")
        if _HEADER_NAMES(wanted):
            headers.append(("access-control-allow-headers", wanted.decode()))
        headers.append(("access-control-max-age", str(MAX_AGE_S)))
        return Reply(status=204, headers=tuple(headers))

    def _allowed(self, request: Request) -> bytes:
        origin = request.headers.get(b"origin", b"")
        if self._any:
            return b"*" if origin else b""
        return origin if origin in self._origins else b""
