"""Reading requests from one client connection: HTTP/1.1 parsed, limits held, heads judged.

`RequestReader` is fed bytes and hands its owner one `Request` after another. A refused request (by
the gateway from its head, or here for its size) carries its answer as `refusal`; nothing after it
is read. Bodies count against the gateway's budget of all bodies, by their declared length from the
head on.
"""

from __future__ import annotations

from typing import Protocol

import httptools
import structlog
from msgspec import Struct

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.http.replies import Reply, error_reply
from relume.controlplane.stream.error_codes import TOO_MANY_BYTES
from relume.events.wire.headers import PRIORITY_BYTES, RESUMABLE_BYTES, TIER_BYTES

log = structlog.get_logger("relume.gateway")

IDLE, HEAD, BODY = "idle", "head", "body"  # what is being read

_PASSED_HEADERS = frozenset(
    b"authorization content-type content-encoding x-request-id expect accept content-length "
    b"transfer-encoding traceparent last-event-id x-session-id x-tenant-id "
    b"x-gateway-inference-fairness-id x-slo-ttft-ms x-api-key origin access-control-request-method "
    b"access-control-request-headers".split()
) | {PRIORITY_BYTES, RESUMABLE_BYTES, TIER_BYTES}


class Request(Struct, kw_only=True):
    """One request as read. `headers` holds the few that matter, names in lower case.
    `refusal`: the answer, settled while reading, in place of serving it."""

    method: str
    path: str
    query: str
    headers: dict[bytes, bytes]
    request_id: str = ""
    body: bytes = b""
    keep_alive: bool = True
    http_1_0: bool = False
    refusal: Reply | None = None


class RequestIntake(Protocol):
    """Who may come in; offered by `request_service.RequestService`. `bodies_bytes`: of all bodies held."""

    config: GatewayConfig
    bodies_bytes: int

    def identify(self, request: Request) -> None:
        """Settle `request.request_id`: the client's if it is usable, else a new one."""
        ...

    def admit(self, request: Request, expected_body: int | None) -> Reply | None:
        """Judge a request by its head; a reply refuses it before its body is read."""
        ...


class Owner(Protocol):
    """The owner of a reader."""

    def progressed(self) -> None:
        """A head began, or a body: its time runs from now."""
        ...

    def take(self, request: Request) -> None:
        """The next request, whole or refused."""
        ...


class RequestReader:
    """The parser of one connection and the request under way. `state`: idle, head, body;
    `closed`: nothing more is parsed; `expects`: the client waits for 100 Continue."""

    def __init__(self, door: RequestIntake, owner: Owner) -> None:
        self._door = door
        self._config = door.config
        self._owner = owner
        self._parser = httptools.HttpRequestParser(self)
        self.state = IDLE
        self.closed = False
        self.expects = False
        self._request: Request | None = None
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0  # read of a head that is not complete
        self._seen_bytes = 0  # of its headers that are
        self._fresh = False  # the head under way began in the read being parsed
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._reserved_bytes = 0  # of `bodies_bytes`, for the body being read
        self._without_offer: bytes | None = None  # a head that offers an upgrade, less the offer

    @property
    def begun(self) -> bool:
        """Whether a byte of the body under way has come."""
        return self._body_bytes > 0

    def feed(self, data: bytes) -> None:
        """Parse the next bytes; calls the owner for each part they complete."""
        self._fresh = False
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError:
            log.exception("reading_broke", client_id=self._request and self._request.request_id)
            self.refuse(broke())
        except httptools.HttpParserUpgrade:
            self.refuse(error_reply(400, "CONNECT is not supported"))
        except httptools.HttpParserError:
            self.refuse(error_reply(400, "the request is not valid HTTP/1.1"))
        else:
            if self.state is HEAD and not self._fresh:
                self._head_bytes += len(data)
                if self._head_bytes > self._config.max_header_bytes:
                    self.refuse(error_reply(431, "request headers too large"))

    def refuse(self, reply: Reply) -> None:
        """Answer what is being read, if anything, with `reply`; read nothing more."""
        if self.closed:
            return
        request = self._request
        if request is None:
            request = Request(method="", path="", query="", headers={})
            self._door.identify(request)
        self._refuse_request(request, reply)

    def drop(self) -> None:
        """The connection is gone or closing: forget the request under way."""
        self.closed = True
        self._forget_body()

    def _feed(self, data: bytes) -> None:
        """Parse, ignoring offers to change the protocol (h2c, say), as a server may.

        The parser stops after a head with an offer and takes the body for the other
        protocol's; so a new one gets the same head without it, and then the body.
        """
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                head, self._without_offer = self._without_offer, None
                if head is None:
                    raise
                data = head + data[stop.args[0] :]
                self._parser = httptools.HttpRequestParser(self)

    def _head_without_offer(self) -> bytes:
        """The head just read, less what offers another protocol."""
        parser = self._parser
        lines = [b"%b: %b" % header for header in self._headers.items()]
        lines.append(b"connection: " + (b"keep-alive" if parser.should_keep_alive() else b"close"))
        version = parser.get_http_version().encode()
        start = b"%b %b HTTP/%b" % (parser.get_method(), self._url, version)
        return b"\r\n".join([start, *lines, b"\r\n"])

    # --- httptools callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._head_bytes = 0
        self._seen_bytes = 0
        self.state = HEAD
        self._fresh = True
        self._body_bytes = 0
        self.expects = False
        self._owner.progressed()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._seen_bytes += len(name) + len(value)
        name = name.lower()
        if name in _PASSED_HEADERS:
            self._headers[name] = value

    def on_headers_complete(self) -> None:
        self.state = BODY
        if self.closed:
            return
        headers = self._headers
        parser = self._parser
        too_long = self._seen_bytes + len(self._url) > self._config.max_header_bytes
        if parser.should_upgrade() and parser.get_method() != b"CONNECT" and not too_long:
            self._without_offer = self._head_without_offer()
            return
        path, query = _split_url(self._url)
        request = self._request = Request(
            method=parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=headers,
            keep_alive=parser.should_keep_alive(),
            http_1_0=parser.get_http_version() == "1.0",
        )
        length = headers.get(b"content-length")
        expected = int(length) if length is not None else None
        refusal = self._door.admit(request, expected)
        if too_long:
            refusal = error_reply(431, "request headers too large", close=True)
        if refusal is not None:
            self._refuse_request(request, refusal)
            return
        self._reserve(expected or 0)
        self.expects = headers.get(b"expect", b"").lower() == b"100-continue"
        self._owner.progressed()

    def on_body(self, data: bytes) -> None:
        if self.closed or self._request is None:
            return
        self._body_bytes += len(data)
        self._body.append(data)
        if self._body_bytes > self._config.max_body_bytes:
            self._refuse_request(self._request, too_large(self._config))
        elif self._body_bytes > self._reserved_bytes:  # its length was not declared
            self._reserve(self._body_bytes)
            if self._door.bodies_bytes > self._config.max_bodies_bytes:
                self._refuse_request(self._request, bodies_full(self._config))

    def _reserve(self, size: int) -> None:
        """Take `size` bytes of the budget of all bodies for the one being read."""
        self._door.bodies_bytes += size - self._reserved_bytes
        self._reserved_bytes = size

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        self.state = IDLE
        if request is None or self.closed:
            return
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        self._body = []
        self._reserve(len(request.body))
        self._reserved_bytes = 0  # given back with the request
        self._owner.take(request)

    def _refuse_request(self, request: Request, reply: Reply) -> None:
        request.refusal = reply
        request.keep_alive = False
        self._request = None
        self.state = IDLE
        self.closed = True
        self._forget_body()
        self._owner.take(request)

    def _forget_body(self) -> None:
        self._reserve(0)
        self._body = []


def broke() -> Reply:
    """The answer to a request on which our own code failed."""
    return error_reply(500, "the gateway failed on this request", close=True)


def too_large(config: GatewayConfig) -> Reply:
    """The refusal of a body beyond the limit."""
    return error_reply(
        413,
        f"the body is larger than {config.max_body_bytes} bytes",
        code="body_too_large",
        close=True,
    )


def bodies_full(config: GatewayConfig) -> Reply:
    """The refusal of a body that would exceed the budget of all bodies."""
    return error_reply(503, TOO_MANY_BYTES, retry_after_s=config.retry_after_s)


def _split_url(url: bytes) -> tuple[str, str]:
    """(path, query) of a request target in origin or absolute form."""
    text = url.decode("latin-1")
    if not text.startswith("/"):
        scheme_end = text.find("://")
        slash = text.find("/", scheme_end + 3) if scheme_end >= 0 else -1
        text = text[slash:] if slash >= 0 else text
    path, _, query = text.partition("?")
    return path, query
