"""The token path of one protected request: frames in, the client's bytes out.

The exchange keeps the ids of every token it has had, so that any worker can take the
request up at the next token. What was delivered is defined by frames, whose ids and bytes
stand or fall together. Bytes that follow the last token (a usage event, the first event
of a chat) are remembered too: a resumed attempt sends them again, and they are compared
and dropped. When `[DONE]` is with the client, nothing that happens afterwards matters.
"""

from __future__ import annotations

import re
from array import array

from relume.controlplane.gateway.attempts import Attempts
from relume.controlplane.gateway.context import ClientPort, Context
from relume.controlplane.gateway.delivered import Delivered
from relume.controlplane.gateway.errors import FrameError
from relume.controlplane.gateway.frames import FrameParser
from relume.controlplane.gateway.ports import Arrival, Assignment
from relume.controlplane.gateway.replies import (
    JSON,
    Reply,
    as_openai_error,
    error_event,
    status_line,
)
from relume.controlplane.gateway.upstream import Upstream

FRAMES = b"application/x-relume-frames"
DONE = b"data: [DONE]\n\n"
DONE_CHUNK = DONE + b"\r\n"
ONE_FRAME = re.compile(rb"([0-9a-f]{1,8})\r\n:r (\d{1,9}) (\d{1,9}) (\d{1,9})\n").match
MAX_TAIL_BYTES = 64 << 10  # beyond it the bytes after the last token are not remembered

_STREAM_HEAD = (
    status_line(200)
    + b"content-type: text/event-stream; charset=utf-8\r\n"
    + b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
)


class Exchange(Attempts):
    """One protected request from arrival to its terminal event."""

    __slots__ = (
        "_begun",
        "_cached",
        "_created",
        "_done",
        "_error",
        "_finish",
        "_first_at",
        "_frames",
        "_held",
        "_last_at",
        "_longest_gap",
        "_out",
        "_plain",
        "_retry_after",
        "_skip",
        "_status",
        "_tail",
        "_unresumable",
        "_whole",
    )

    def __init__(
        self,
        ctx: Context,
        client: ClientPort,
        arrival: Arrival,
        path: str,
        response_id: str,
        body: bytes,
    ) -> None:
        super().__init__(ctx, client, arrival, path, response_id, body)
        self._held = Delivered()
        self._frames: FrameParser | None = None
        self._status = 0
        self._error: list[bytes] = []
        self._out: list[bytes] = []
        self._begun = False  # the client has bytes of the response
        self._plain = False  # nothing stands between a token frame and the client
        self._tail = b""  # bytes delivered after the last token
        self._skip = b""  # of them, what the resumed attempt has yet to repeat
        self._unresumable = ""
        self._created = b""
        self._cached = b""  # cached tokens of its prompt as the first worker counted them
        self._whole: tuple[int, bytes] | None = None
        self._finish = ""
        self._done = False  # the last bytes of the stream are with the client or in `_out`
        self._retry_after = b""
        self._first_at = -1.0
        self._last_at = -1.0
        self._longest_gap = 0.0

    # --- towards the engine

    def may_count(self) -> bool:
        return self.arrival.countable

    @property
    def delivered(self) -> int:
        return self._held.count

    def send(self, to: Assignment, upstream: Upstream) -> None:
        self._frames = self._parser()
        self._status = 0
        self._error.clear()
        self._skip = self._tail
        self._plain = False
        tail = b""
        extra = ""
        if to.mode in ("continue", "replay"):
            counts, tail = self._held.resumption()
            extra = f"x-relume-resume: {to.mode} {counts}\r\n"
            if self._cached:
                extra += f"x-relume-cached: {self._cached.decode('latin-1')}\r\n"
        elif self.delivered:
            if self._begun:
                self.fail(502, "the stream cannot begin anew: the client has a part of it")
                return
            self._held = Delivered()
        extra += _checkpoint_headers(to) + self.dispatch_headers(to)
        if self._created:
            extra += f"x-relume-created: {self._created.decode()}\r\n"
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {to.host}:{to.port}\r\ncontent-type: {JSON}\r\n"
            f"content-length: {len(self.body) + len(tail)}\r\n"
            f"x-relume-request: {to.request}\r\nx-relume-attempt: {to.attempt}\r\n"
            f"x-relume-incarnation: {to.incarnation}\r\n"
            f"x-relume-dispatch: {to.dispatch.decode()}\r\n"
            f"x-request-id: {self.response_id}\r\n{self.trace_header()}{extra}\r\n"
        )
        upstream.send(self, head.encode("latin-1"), self.body, tail)

    def _parser(self) -> FrameParser:
        return FrameParser(self)

    # --- from the engine (upstream.Consumer)

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status
        if status == 200:
            if not headers.get(b"content-type", b"").startswith(FRAMES):
                self.attempt_failed("engine_error", "answered without frames")
            elif not self.delivered:
                self._cached = headers.get(b"x-relume-cached", b"")
        elif status == 409:
            self.attempt_failed("stale", "another incarnation answered")
        elif status == 429 or status >= 500 or status < 400:
            self.attempt_failed("engine_error", f"answered {status}", status)
        else:
            self._retry_after = headers.get(b"retry-after", b"")

    def take_chunk(self, data: bytes, now: float) -> bool:
        """One token frame in one HTTP chunk, with the client in midstream: the rule while an
        engine decodes. All is checked as `frames` does; what is not just so is left to it."""
        if not self._plain:
            return False
        match = ONE_FRAME(data)
        if match is None:
            return False
        chunk, start, length, token = match.groups()
        ids = self._held.ids
        at, size = match.end(), int(length)
        if (
            len(data) != at + size + 2
            or int(chunk, 16) != at + size - len(chunk) - 2
            or int(start) != len(ids)
            or not size
            or data.endswith(DONE_CHUNK)
        ):
            return False
        ids.append(int(token))
        gap = now - self._last_at
        if gap > self._longest_gap:
            self._longest_gap = gap
        self._last_at = now
        self._tail = b""
        self.client.write_chunk(b"%x\r\n%b" % (size, data[at:]))
        return True

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            self._error.append(data)
            if sum(map(len, self._error)) > self.ctx.config.max_error_body_bytes:
                self.attempt_failed("engine_error", "error body too large")
            return
        try:
            self._frames.feed(data)
        except FrameError as error:
            self.attempt_failed("engine_error", f"frames: {error}"[:200])
            return
        if self._finish:
            self._complete()
        elif self._out:
            self._flush()
            self._plain = self._begun and self.client.chunked and not self._skip

    def _flush(self) -> None:
        """Send what one read brought in one write."""
        data = self._pending()
        if not data:
            return
        if self._begun:
            self.client.write(data)
        else:
            self._begun = True
            self.client.begin(self._head(), data)

    def _pending(self) -> bytes:
        out = self._out
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data

    def on_complete(self) -> None:
        if self._status == 200:
            self.attempt_failed("eof", "response ended without an end frame")
        else:
            self._refused()

    # --- frames (frames.FrameSink)

    def on_tokens(self, start: int, ids: list[int], shown: list[bytes]) -> None:
        if self.over or self.assignment is None:
            return
        payload = b""
        if shown:
            payload = shown[0] if len(shown) == 1 else b"".join(shown)
        if ids:
            self._add(self._held.ids, 0, start, ids, payload)
            return
        payload = self._accepted(payload)
        if start < 0 and shown:
            self._unresumable = "told no token ids"
            self._time()
        if payload:
            self._take(payload, False)

    def on_choice(self, choice: int, start: int, ids: list[int], shown: bytes) -> None:
        if self.over or self.assignment is None:
            return
        if ids:
            self._add(self._held.of(choice), choice, start, ids, shown)
        elif payload := self._accepted(shown):
            self._take(payload, False)

    def _add(
        self, known: array[int], choice: int, start: int, ids: list[int], payload: bytes
    ) -> None:
        """Tokens of a choice and what shows them: they count together or not at all."""
        self._held.expect(known, start)
        if self.arrival.stream and payload:
            payload = self._accepted(payload)
        self._held.add(known, ids)
        self._time()
        if not self.arrival.stream:
            self._held.note(choice, payload)
        elif payload:
            self._take(payload, True)

    def _accepted(self, payload: bytes) -> bytes:
        """What of these bytes is for the client."""
        if payload and not self.arrival.stream:
            raise FrameError("events for a request that does not stream")
        return self._without_known(payload) if self._skip and payload else payload

    def _without_known(self, payload: bytes) -> bytes:
        """What of a resumed attempt's first bytes the client does not have."""
        skip = self._skip
        known = min(len(skip), len(payload))
        if payload[:known] != skip[:known]:
            raise FrameError("the resumed stream differs from what the client has")
        self._skip = skip[known:]
        return payload[known:]

    def _take(self, payload: bytes, shows_tokens: bool) -> None:
        if shows_tokens:
            self._tail = b""
        elif len(self._tail) + len(payload) <= MAX_TAIL_BYTES:
            self._tail += payload
        else:
            self._unresumable = "too many bytes since the last token"
        if not self._created and not self._begun:
            self._created = _created_in(payload)
        self._done = payload.endswith(DONE)
        self._out.append(payload)

    def on_whole(self, status: int, payload: bytes) -> None:
        if self._begun or self._out:
            raise FrameError("a whole response inside a stream")
        self._whole = (status, payload)

    def on_envelope(self, payload: bytes) -> None:
        raise FrameError("an envelope nobody asked for")

    def on_end(self, reason: str) -> None:
        self._finish = reason

    def on_broken(self, kind: str, message: str) -> None:
        if kind == "engine":
            self.attempt_failed("engine_dead", message[:200])
            return
        if kind == "moved":
            if self._finish or self._done or self._whole is not None:
                self.attempt_failed("eof", message[:200])
            else:
                self.handed_over()
            return
        self._flush()
        if kind == "mismatch":
            told = "the continuation would have differed from what was delivered"
            self.fail(502, told, message)
        else:
            self.fail(500, "the worker failed on this request", message)

    # --- endings

    def may_retry(self) -> str:
        if not (self._begun or self._out):
            return ""
        if self._unresumable:
            return f"the worker failed and {self._unresumable}"
        if self.arrival.verdict == "restart":
            return f"the worker failed and this request cannot be continued ({self.arrival.reason})"
        return ""

    def attempt_failed(self, kind: str, detail: str, status: int = 0) -> None:
        if self._finish or self._done or self._whole is not None:
            self._finish = self._finish or "-"  # all there: its failure changes nothing
            self._complete()
            return
        super().attempt_failed(kind, detail, status)

    def before_failover(self) -> None:
        self._flush()

    def _complete(self) -> None:
        """The end frame is here."""
        whole = self._whole
        if whole is None and not (self._begun or self._out):
            self._finish = ""
            self.attempt_failed("engine_error", "ended without a response")
            return
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.release()
        status, body = whole if whole is not None else (200, b"")
        outcome = "completed" if status < 400 else "rejected" if status < 500 else "failed"
        if not self._end(outcome, status, finish=self._finish):
            return
        if whole is not None:
            self.client.reply(Reply(status, body, JSON, self.reply_headers()))
        elif self._begun:
            self.client.finish(self._pending())
        else:
            self.client.begin(self._head(), self._pending(), last=True)

    def _refused(self) -> None:
        """The engine answered with a 4xx: the client's fault if it was asked first. Of a moved
        request another worker took the same body, so those that are left are asked too."""
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.release()
        if self._trials.tries > 1 or self.delivered:
            self.attempt_failed("declined", f"answered {self._status}", self._status)
        else:
            self._relay_refusal()

    def declined_by_all(self) -> None:
        if self._begun or self.delivered:
            super().declined_by_all()
        else:
            self._relay_refusal()

    def _relay_refusal(self) -> None:
        status, body = self._status, b"".join(self._error)
        if not self._end("rejected", status, f"worker answered {status}"):
            return
        headers = self.reply_headers()
        if self._retry_after:
            headers += (("retry-after", self._retry_after.decode("latin-1")),)
        self.client.reply(Reply(status, as_openai_error(status, body), JSON, headers))

    def tell_failure(self, reply: Reply, message: str) -> None:
        if self._begun:
            self.client.finish(error_event(reply), close=True)
        else:
            self.client.reply(reply)

    def tell_scheduler(self, outcome: str, status: int, finish: str, detail: str) -> None:
        ttft = self._first_at - self._arrived_at
        self.ctx.counters.tokens += self.delivered
        self.ctx.scheduler.ended(
            self.arrival.request,
            outcome,
            status,
            self.delivered,
            finish,
            int(ttft * 1e6) if self._first_at >= 0 else -1,
            int(self._longest_gap * 1e6) if self._first_at >= 0 else -1,
            detail,
        )

    # --- small parts

    def _time(self) -> None:
        """Keep the time of the first token and the longest gap between tokens."""
        now = self.upstream.activity.last_byte if self.upstream is not None else self.ctx.clock()
        if self._failover is not None:
            self._failover.over(self.about(), now)
            self._failover = None
        if self._first_at < 0:
            self._first_at = now
        elif now - self._last_at > self._longest_gap:
            self._longest_gap = now - self._last_at
        self._last_at = now

    def _head(self) -> bytes:
        extra = "".join(f"{name}: {value}\r\n" for name, value in self.reply_headers())
        return _STREAM_HEAD + extra.encode("latin-1")

    def reply_headers(self) -> tuple[tuple[str, str], ...]:
        arrival = self.arrival
        headers = (
            ("x-relume-request", arrival.request),
            ("x-relume-verdict", arrival.verdict),
        )
        if arrival.reason:
            reason = arrival.reason.encode("ascii", "replace").decode()
            headers += (("x-relume-reason", reason.replace("\r", " ").replace("\n", " ")),)
        return headers


def _checkpoint_headers(to: Assignment) -> str:
    lines = ""
    if to.checkpoint:
        lines = f"x-relume-checkpoint: {','.join(to.checkpoint)}\r\n"
        lines += f"x-relume-priority: {to.priority}\r\n"
    if to.restore:
        lines += f"x-relume-restore: {','.join(to.restore)}\r\n"
    return lines


def _created_in(payload: bytes) -> bytes:
    """The digits after `"created":` in the first event, or empty."""
    at = payload.find(b'"created":')
    if at < 0:
        return b""
    rest = payload[at + 10 : at + 32].lstrip()
    digits = rest[: len(rest) - len(rest.lstrip(b"0123456789"))]
    return digits
