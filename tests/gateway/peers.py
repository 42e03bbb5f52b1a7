"""The gateway's neighbours for its tests: an engine that speaks the worker protocol by
script, and a scheduler that follows a list. Real sockets, no part of the gateway mocked.

The scripted engine generates a text that depends on the request's body alone, and renders
it as vLLM would; a resumed request is answered from the first token the client lacks.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import struct
from collections import deque
from dataclasses import dataclass, field

import httptools

from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected
from relume.events.wire import worker_calls
from relume.events.wire.worker_calls import CROSS_CHECK_PATH, STATE_PATH

ORIGIN_PATH = getattr(worker_calls, "ORIGIN_PATH", "")
"""Engines of an older build, which `tests/mixed_versions` runs with this module, have no such call."""


@dataclass(kw_only=True)
class Behaviour:
    """What an engine does with one request. `cut_at`: raw bytes of the response sent before
    the connection goes (`cut`: rst or fin). `status`: refuse with it. `hang_at`: send that
    many raw bytes, then nothing more; `stuck_at`: tokens below that one. `before_s`: time before the
    first byte. `shows`: frames have bytes for the client. `piece`: write in pieces of so many bytes. `apart`: what
    shows no token comes in frames of its own. `moved_after`: so many frames, then the request
    is handed over."""

    cut_at: int | None = None
    cut_after: int | None = None  # so many pieces
    moved_after: int | None = None
    apart: bool = False
    cut: str = "fin"
    status: int = 0
    body: bytes = b'{"error":{"message":"scripted"}}'
    hang_at: int | None = None
    stuck_at: int | None = None
    before_s: float = 0.0
    shows: bool = True
    piece: int = 0
    raw: bytes | None = None
    pause_s: float = 0.0
    tokens: int = 12
    text_bytes: int = 8
    close: bool = False


@dataclass(kw_only=True)
class Seen:
    """One request as the engine got it. `gone`: its connection closed before the end."""

    path: str
    headers: dict[str, str]
    body: bytes
    resume: str = ""
    ids: tuple[int, ...] = ()
    notes: bytes = b""
    gone: bool = False
    finished: bool = False


@dataclass(kw_only=True)
class Check:
    """A cross-check as the engine got it. `gone`: its connection closed before the end."""

    asked: dict[str, object]
    gone: bool = False
    finished: bool = False


def token_ids(body: bytes, n: int) -> list[int]:
    """The ids this body's generation yields."""
    return [
        struct.unpack("<I", hashlib.blake2b(body + b"%d" % i, digest_size=4).digest())[0] % 150_000
        for i in range(n)
    ]


def frames(
    body: bytes,
    response_id: str,
    created: str,
    n: int,
    start: int,
    chat: bool,
    stream: bool,
    size: int,
    apart: bool = False,
) -> list[bytes]:
    """The frames of one answer from token `start` on. As of a real engine, the first event of
    a chat is in the frame of the first token, usage and the end in the last one's."""
    ids = token_ids(body, n)
    if not stream:
        text = "".join(f"{i:x}"[:size].ljust(size, "~") for i in ids)
        whole = json.dumps({"id": response_id, "created": int(created), "text": text}).encode()
        out = [f":r {i} 0 {ids[i]}\n".encode() for i in range(start, n)]
        return [*out, f":w 200 {len(whole)}\n".encode() + whole, b":e stop\n"]

    def event(**content: object) -> bytes:
        common = {"id": response_id, "created": int(created), **content}
        return b"data: " + json.dumps(common, separators=(",", ":")).encode() + b"\n\n"

    out = []
    role = event(delta={"role": "assistant"}) if chat and start == 0 else b""
    closing = [event(usage={"completion_tokens": n}), b"data: [DONE]\n\n"]
    if apart and role:
        out.append(f":r 0 {len(role)}\n".encode() + role)
        role = b""
    for i in range(start, n):
        shown = role + event(index=i, text=f"{ids[i]:x}"[:size].ljust(size, "~"))
        role = b""
        if i == n - 1 and not apart:
            shown += b"".join(closing)
            closing = []
        out.append(f":r {i} {len(shown)} {ids[i]}\n".encode() + shown)
    out += [f":r {n} {len(shown)}\n".encode() + shown for shown in closing]
    return [*out, b":e length\n"]


def expected_stream(
    body: bytes, response_id: str, created: str, n: int, chat: bool, size: int = 8
) -> bytes:
    """What a client sees of an undisturbed stream."""
    sent = frames(
        body=body,
        response_id=response_id,
        created=created,
        n=n,
        start=0,
        chat=chat,
        stream=True,
        size=size,
    )
    return b"".join(frame.partition(b"\n")[2] for frame in sent)


def raw_response(body: bytes, response_id: str) -> list[bytes]:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/x-relume-frames\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    out = frames(
        body=body,
        response_id=response_id,
        created="1700000000",
        n=12,
        start=0,
        chat=False,
        stream=True,
        size=8,
    )
    return [head, *(b"%x\r\n%b\r\n" % (len(f), f) for f in out), b"0\r\n\r\n"]


class Engine:
    """A scripted engine; `async with` it. `script` is used up first, then `default`."""

    def __init__(self, name: str, incarnation: int = 1, created: str = "1700000000") -> None:
        self.name = name
        self.incarnation = incarnation
        self.created = created
        self.answers_probes = True
        self.cached = 0  # prompt tokens it says it found cached
        self.script: deque[Behaviour] = deque()
        self.default = Behaviour()
        self.seen: list[Seen] = []
        self.checks: list[Check] = []
        self.check_s = 0.0
        self.check_reply: tuple[int, object] | None = None  # in place of the right answer
        self.origins: dict[str, bytes] = {}
        """JSON by request: what it says of streams that began in a former log."""
        self.sought: list[str] = []
        self.methods: list[str] = []
        self.connections: set[_EngineConnection] = set()
        self.accepted = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Engine:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _EngineConnection(self), "127.0.0.1", self.port
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.stop()

    def state(self) -> bytes:
        """The answer to a probe."""
        body = json.dumps({"worker": self.name, "incarnation": self.incarnation}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        return head + b"content-length: %d\r\n\r\n" % len(body) + body

    def stop(self) -> None:
        """Close the listener and every connection, as a killed engine does."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()


class _EngineConnection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tasks: set[asyncio.Task[None]] = set()
        self.seen: Seen | None = None
        self.check: Check | None = None
        self.can_write = asyncio.Event()
        self.can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.engine.connections.add(self)
        self.engine.accepted += 1
        self.parser = httptools.HttpRequestParser(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.connections.discard(self)
        if self.seen is not None and not self.seen.finished:
            self.seen.gone = True
        if self.check is not None and not self.check.finished:
            self.check.gone = True
        for task in self.tasks:
            task.cancel()

    def pause_writing(self) -> None:
        self.can_write.clear()

    def resume_writing(self) -> None:
        self.can_write.set()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url, self.headers, self.body = b"", {}, b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        engine = self.engine
        if self.url.decode() == STATE_PATH:
            if engine.answers_probes:
                self.transport.write(engine.state())
            return
        if self.url.decode() == ORIGIN_PATH:
            request = json.loads(self.body)["request"]
            engine.sought.append(request)
            self.reply(engine.origins.get(request))
            return
        if self.url.decode() == CROSS_CHECK_PATH:
            self.check = Check(asked=json.loads(self.body))
            engine.checks.append(self.check)
            task = asyncio.get_running_loop().create_task(self.answer_again(self.check))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            return
        behaviour = engine.script.popleft() if engine.script else engine.default
        resume = self.headers.get("x-relume-resume", "")
        body, ids, notes = self.body, (), b""
        if resume:
            counts = [part.split(":") for part in resume.split()[1].split(",")]
            n = sum(int(count[0]) for count in counts)
            cut = len(body) - 4 * n - sum(int(count[1]) for count in counts if count[1:])
            ids = struct.unpack_from(f"<{n}I", body, cut)
            body, notes = body[:cut], body[cut + 4 * n :]
        self.seen = Seen(
            path=self.url.decode(),
            headers=dict(self.headers),
            body=body,
            resume=resume,
            ids=ids,
            notes=notes,
        )
        engine.seen.append(self.seen)
        engine.methods.append(self.parser.get_method().decode())
        task = asyncio.get_running_loop().create_task(self.answer(behaviour, self.seen))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def reply(self, content: bytes | None) -> None:
        """JSON, or 404."""
        status, body = (200, content) if content is not None else (404, b"{}")
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def answer_again(self, check: Check) -> None:
        """The tokens of the request once more."""
        await asyncio.sleep(self.engine.check_s)
        right = {"tokens": token_ids(str(check.asked["body"]).encode(), 12), "took_us": 1000}
        status, content = self.engine.check_reply or (200, right)
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        check.finished = True
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

    async def answer(self, how: Behaviour, seen: Seen) -> None:
        raw = how.raw if how.raw is not None else self.render(how, seen)
        pieces = [raw] if isinstance(raw, bytes) else raw
        pieces = self.scripted(how, seen, pieces)
        if how.before_s:
            await asyncio.sleep(how.before_s)
        for piece in pieces:
            if how.pause_s:
                await asyncio.sleep(how.pause_s)
            await self.can_write.wait()
            self.transport.write(piece)
        if how.hang_at is not None or how.stuck_at is not None:
            await asyncio.sleep(3600)
        if how.cut_at is not None or how.cut_after is not None:
            await asyncio.sleep(how.pause_s)
            if how.cut == "rst":
                sock = self.transport.get_extra_info("socket")
                sock.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: close sends a reset
                self.transport.abort()
            else:
                self.transport.close()
            return
        seen.finished = True
        if how.close:
            self.transport.close()

    @staticmethod
    def scripted(how: Behaviour, seen: Seen, pieces: list[bytes]) -> list[bytes]:
        """What of an answer is sent, and how it is cut."""
        joined = b"".join(pieces)
        if how.cut_at is not None:
            return [joined[: how.cut_at]]
        if how.cut_after is not None:
            return pieces[: how.cut_after]
        if how.moved_after is not None:
            end = b":x moved 4\nover"
            return [*pieces[: how.moved_after + 1], b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end)]
        if how.hang_at is not None:
            return [joined[: how.hang_at]]
        if how.stuck_at is not None:
            count = how.stuck_at - len(seen.ids)
            return pieces[: count + 1] if count > 0 else []
        if how.piece:
            return [joined[i : i + how.piece] for i in range(0, len(joined), how.piece)]
        return pieces

    def render(self, how: Behaviour, seen: Seen) -> list[bytes]:
        if how.status:
            head = f"HTTP/1.1 {how.status} X\r\ncontent-type: application/json\r\n"
            return [f"{head}content-length: {len(how.body)}\r\n\r\n".encode() + how.body]
        if "x-relume-request" not in seen.headers:
            return [
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
            ]
        if int(seen.headers["x-relume-incarnation"]) != self.engine.incarnation:
            return [b"HTTP/1.1 409 Conflict\r\ncontent-length: 17\r\n\r\nstale incarnation"]
        asked = json.loads(seen.body)
        chat = seen.path.endswith("/chat/completions")
        prefix = "chatcmpl-" if chat else "cmpl-"
        out = frames(
            body=seen.body,
            response_id=prefix + seen.headers["x-request-id"],
            created=seen.headers.get("x-relume-created", self.engine.created),
            n=how.tokens,
            start=len(seen.ids),
            chat=chat,
            stream=asked.get("stream", False),
            size=how.text_bytes,
            apart=how.apart,
        )
        if not how.shows:
            out[:-2] = [
                b":r %d 0 %d\n" % (i, id_)
                for i, id_ in enumerate(token_ids(seen.body, how.tokens - 1))
            ]
        if not how.apart:
            out[-2:] = [b"".join(out[-2:])]  # the end comes with the last bytes
        if seen.resume:
            assert list(seen.ids) == token_ids(seen.body, how.tokens)[: len(seen.ids)]
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/x-relume-frames\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        if cached := self.engine.cached:
            head = head[:-2] + b"x-relume-cached: %d\r\n\r\n" % cached
        return [head, *(b"%x\r\n%b\r\n" % (len(f), f) for f in out), b"0\r\n\r\n"]


class NoRoom:
    """Nobody waits for a busy worker."""

    def __init__(self) -> None:
        self.closed = False
        self.limit = 0

    def admit(self, arrival, caller, size, patience_s, nobody) -> bool:
        return False

    def output_limit(self, model: str) -> int:
        return self.limit

    def close(self) -> None:
        self.closed = True


@dataclass(kw_only=True)
class FakeScheduler:
    """Follows the contract by the simplest means: the first engine not yet avoided."""

    engines: list[Engine]
    log: list[tuple] = field(default_factory=list)
    arrivals: dict[str, Arrival] = field(default_factory=dict)
    hopeless: Rejected | None = None
    serving: bool = True
    wrong_incarnation: int = 0  # so many assignments name an older incarnation
    checkpoints: bool = False  # assignments name holders, later ones also sources
    busy: set[str] = field(default_factory=set)  # workers on which other requests run

    def __post_init__(self) -> None:
        self.avoid: dict[str, set[str]] = {}
        self.attempts: dict[str, int] = {}
        self.changed = asyncio.Event()
        self.names = ["m"]
        self.waiting = NoRoom()

    def model_lengths(self) -> dict[str, int]:
        return dict.fromkeys(self.models(), 4096)

    def models(self) -> list[str]:
        return self.names

    def ready(self) -> bool:
        return self.serving and bool(self.engines)

    def arrived(self, arrival: Arrival) -> Arrival:
        assert arrival.request not in self.arrivals
        self.arrivals[arrival.request] = arrival
        self.avoid[arrival.request] = set()
        self.attempts[arrival.request] = 0
        return arrival

    def assign(self, request: str, cause: str, delivered: int) -> Assignment | Rejected | None:
        self.log.append(("assign", cause, delivered))
        if self.hopeless is not None:
            return self.hopeless
        fit = [e for e in self.engines if e.name not in self.avoid[request]]
        if not fit or not self.serving:
            return None
        engine = fit[0]
        self.attempts[request] += 1
        incarnation = engine.incarnation
        if self.wrong_incarnation:
            self.wrong_incarnation -= 1
            incarnation -= 1
        verdict = self.arrivals[request].verdict
        mode = "new"
        if delivered and verdict in ("exact", "sampled"):
            mode = "continue"
        elif delivered and verdict == "replay":
            mode = "replay"
        checkpoint, restore = self._endpoints(self.attempts[request])
        return Assignment(
            request=request,
            attempt=self.attempts[request],
            worker=engine.name,
            incarnation=incarnation,
            host="127.0.0.1",
            port=engine.port,
            mode=mode,
            dispatch=base64.urlsafe_b64encode(b"decision-" + request.encode()),
            checkpoint=checkpoint,
            restore=restore,
            priority=self.arrivals[request].priority,
            alone=engine.name not in self.busy,
        )

    def _endpoints(self, attempt: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        if not self.checkpoints:
            return (), ()
        source = (f"tcp://h{attempt - 1}:1",) if attempt > 1 else ()
        return (f"tcp://h{attempt}:1", "unix:/run/d"), source

    def restart_left_s(self, model: str) -> float:
        return 0.0

    async def capacity(self, request: str, timeout_s: float) -> bool:
        self.changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.avoid[request].clear()
        return True

    def timer_fired(self, timer: str, key: str) -> None:
        assert key in self.arrivals
        self.log.append(("timer", timer))

    def observed(
        self,
        request: str,
        attempt: int,
        kind: str,
        delivered: int,
        detail: str = "",
        status: int = 0,
    ) -> None:
        assert attempt == self.attempts[request]
        self.log.append(("observed", kind, delivered))
        if kind != "stale":
            self.avoid[request].add(self.engines_of(request))

    def engines_of(self, request: str) -> str:
        fit = [e for e in self.engines if e.name not in self.avoid[request]]
        return fit[0].name if fit else ""

    def let_go(self, request: str) -> None:
        self.arrivals.pop(request, None)
        self.log.append(("let_go", request))

    def completed(self, request: str, path: str, body: bytes, tokens: object) -> None: ...

    def ended(
        self, request, outcome, status, tokens, finish, ttft_us=-1, longest_gap_us=-1, detail=""
    ):
        assert request in self.arrivals, "ended without arrival, or twice"
        del self.arrivals[request]
        self.log.append(("ended", outcome, status, tokens, finish))

    def endings(self) -> list[tuple]:
        return [entry[1:] for entry in self.log if entry[0] == "ended"]


def decoded_dispatch(seen: Seen) -> bytes:
    return base64.urlsafe_b64decode(seen.headers["x-relume-dispatch"])


def response_ids(stream: bytes) -> set[str]:
    return set(re.findall(rb'"id":"([^"]+)"', stream))
