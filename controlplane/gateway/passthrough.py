"""Routes that are relayed to some worker as they are, without failover inside a response.

Until the first byte of an answer another worker may be asked; after it a broken connection
breaks the client's response off, as its framing has no way to say more.
"""

from __future__ import annotations

from relume.controlplane.gateway.attempts import Attempts
from relume.controlplane.gateway.context import ClientPort, Context
from relume.controlplane.gateway.ports import Arrival, Assignment
from relume.controlplane.gateway.replies import Reply, status_line
from relume.controlplane.gateway.upstream import Upstream

UNPROTECTED = ("x-relume-protected", "no")

_PASSED_BACK = (b"content-type", b"cache-control", b"retry-after", b"content-disposition")


class Passthrough(Attempts):
    """One request to an unprotected route. `headers` are passed on to the engine."""

    __slots__ = ("_begun", "_headers", "_method", "_response", "_status")

    def __init__(
        self,
        ctx: Context,
        client: ClientPort,
        arrival: Arrival,
        path: str,
        response_id: str,
        body: bytes,
        method: str,
        headers: tuple[tuple[str, str], ...],
    ) -> None:
        super().__init__(ctx, client, arrival, path, response_id, body)
        self._method = method
        self._headers = headers
        self._status = 0
        self._response: dict[bytes, bytes] = {}
        self._begun = False

    def send(self, to: Assignment, upstream: Upstream) -> None:
        extra = "".join(f"{name}: {value}\r\n" for name, value in self._headers)
        # A parser of responses cannot know that the answer to HEAD has no body: ask with GET.
        method = "GET" if self._method == "HEAD" else self._method
        head = (
            f"{method} {self.path} HTTP/1.1\r\nhost: {to.host}:{to.port}\r\n"
            f"content-length: {len(self.body)}\r\nx-request-id: {self.response_id}\r\n"
            f"{self.trace_header()}{extra}\r\n"
        )
        self._status = 0
        upstream.send(self, head.encode("latin-1"), self.body, generates=False)

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        if status == 429 or (status >= 500 and status != 501):
            self.attempt_failed("engine_error", f"answered {status}", status)
            return
        self._status = status
        self._response = headers

    def take_chunk(self, data: bytes, now: float) -> bool:
        return False

    def on_data(self, data: bytes) -> None:
        if self._method == "HEAD":
            return
        if self._begun:
            self.client.write(data)
        else:
            self._begun = True
            self.client.begin(self._head(), data)

    def on_complete(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.release()
        status = self._status
        outcome = "completed" if status < 400 else "rejected" if status < 500 else "failed"
        if self._end(outcome, status):
            if self._begun:
                self.client.finish()
            else:
                self.client.begin(self._head(), b"", last=True)

    def may_retry(self) -> str:
        return "the worker failed within its answer" if self._begun else ""

    def reply_headers(self) -> tuple[tuple[str, str], ...]:
        return (("x-relume-request", self.arrival.request), UNPROTECTED)

    def tell_failure(self, reply: Reply, message: str) -> None:
        if self._begun:
            self.client.break_off()
        else:
            self.client.reply(reply)

    def _head(self) -> bytes:
        lines = [f"{name}: {value}".encode("latin-1") for name, value in self.reply_headers()]
        lines += [
            name + b": " + self._response[name] for name in _PASSED_BACK if name in self._response
        ]
        return status_line(self._status) + b"\r\n".join(lines) + b"\r\n"
