"""The token path of a request whose client may come back after a lost connection.

Every event carries an id (`event_ids`). When the client is gone the exchange lets go of its
engine, which goes on into a bounded buffer (`engine_shim.detached`); whoever shows the last
id attaches to that buffer, here or at any other replica. The engine gives its ids of all
tokens first, so the exchange that attaches knows what the one before it knew. What the
engine has no more is generated again behind the tokens the client has.
"""

from __future__ import annotations

import asyncio
import hmac
from array import array
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from controlplane.gateway.attempts import ClientPort, Context
from controlplane.gateway.delivered import Delivered
from controlplane.gateway.errors import FrameError, UpstreamError
from controlplane.gateway.event_ids import Position, Stamp
from controlplane.gateway.frames import FrameParser
from controlplane.gateway.ports import Arrival, Assignment
from controlplane.gateway.relay import DONE_CHUNK, ONE_FRAME, Exchange
from controlplane.gateway.replies import JSON, Reply, error_reply
from controlplane.gateway.upstream import Upstream

log = structlog.get_logger("relume.gateway")

NEVER = float("inf")
LOST = "the worker that kept the stream is gone together with its gateway"
NOWHERE = f"{LOST}, and no holder has the request: send it anew"
UNREPEATABLE = (
    f"{LOST}, and what was sampled without a seed cannot be generated again: "
    "what you received stands; send the request anew for another answer"
)
OWNED_S = 10.0
"""A client that comes to another replica waits so long until the log has it there."""


class _Envelope(Struct):
    """Head of what a worker keeps of a request; the client's body follows it."""

    path: str
    id: str
    created: str


_envelope = msgspec.json.Decoder(_Envelope).decode


class _Nobody:
    """The client's side while there is none."""

    chunked = False

    def reply(self, reply: Reply) -> None: ...
    def begin(self, head: bytes, first: bytes, last: bool = False) -> None: ...
    def write(self, data: bytes) -> None: ...
    def write_chunk(self, chunk: bytes) -> None: ...
    def finish(self, data: bytes = b"", close: bool = False) -> None: ...
    def break_off(self) -> None: ...


NOBODY = _Nobody()


def gone(message: str) -> Reply:
    """There is no such stream for this client."""
    return error_reply(410, message, code="stream_gone")


class Resumable(Exchange):
    """One request whose stream may go on on another connection of its client.

    `detached_until`: when it ends unless the client comes back; never while one is there.
    `others`: all such exchanges of the gateway, by request."""

    __slots__ = (
        "_again",
        "_attaching",
        "_base",
        "_claim",
        "_deaf",
        "_known",
        "_left",
        "_others",
        "_owned",
        "_stamp",
        "detached_until",
    )

    def __init__(
        self,
        ctx: Context,
        client: ClientPort,
        arrival: Arrival,
        path: str,
        response_id: str,
        body: bytes,
        *,
        claim: str,
        created: str,
        others: dict[str, Resumable],
    ) -> None:
        super().__init__(ctx, client, arrival, path, response_id, body)
        self._claim = claim
        self._created = created.encode()
        self._others = others
        self._stamp = Stamp(arrival.request, claim)
        self._left: Assignment | None = None  # the attempt that goes on without us
        self._attaching = False
        self._again = False  # generated from the start, from what a holder has of the request
        self._base = 0  # first token whose payload the engine still has
        self._deaf = False  # the rest of this read is of no use
        self._known = array("I")  # tokens of the client's, while the engine repeats them
        self._owned = True  # the log has the request at this replica
        self.detached_until = NEVER

    def start(self) -> None:
        self._others[self.arrival.request] = self
        super().start()

    # --- the client goes and comes

    def holds(self, claim: str, tenant: str) -> bool:
        """Whether who shows `claim` may have this stream."""
        same = hmac.compare_digest(claim.encode(), self._claim.encode())
        return same and tenant == self.arrival.tenant and self.resumable

    @property
    def resumable(self) -> bool:
        """Whether the fleet can keep this stream."""
        return bool(self.arrival.resumable)

    @property
    def delivered(self) -> int:
        """Tokens that the client has, whether their ids are known here or not; none where it
        is all generated again."""
        return self._held.count if self._again else max(self._held.count, self._stamp.have[0])

    @property
    def detached(self) -> bool:
        """Whether nobody is there."""
        return self.client is NOBODY

    def client_gone(self) -> None:
        if self.over:
            return
        if self.resumable and (self._begun or self._stamp.have > (0, 0)):
            self._detach()
        else:
            super().client_gone()

    def _detach(self) -> None:
        """Nobody is there: let go of the engine and wait."""
        self.client = NOBODY
        self.paused = False
        self._out.clear()
        self.detached_until = self.ctx.clock() + self.ctx.config.resume.grace_s
        self._let_engine_go()

    def _let_engine_go(self) -> None:
        to, self.assignment = self.assignment, None
        if to is not None:
            self._left = to
            self._leave(to)
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def came_back(self, client: ClientPort, have: Position) -> None:
        """The client is here again, with everything up to `have`. The newest connection wins.
        Raises LogError."""
        self.ctx.scheduler.returns.came_back(self.arrival.request, *have)
        old, self.client = self.client, client
        old.break_off()
        self._let_engine_go()
        self._known = max(self._known, self._held.ids, key=len)
        self._rewind(have)
        if self._owned:
            self._go_on()

    def take_over(self, have: Position) -> None:
        """The client of another replica's stream came here, with everything up to `have`.
        Raises LogError."""
        self._left = self.ctx.scheduler.returns.adopt(self.arrival, *have)
        self._owned = False
        self._rewind(have)
        self._others[self.arrival.request] = self
        self.ctx.counters.in_flight += 1
        self.ctx.spawn(self._until_owned())

    async def _until_owned(self) -> None:
        """The request is ours once the log says so."""
        try:
            owned = await self.ctx.scheduler.returns.owned(self.arrival.request, OWNED_S)
            if self.over:
                return
            if not owned:
                client, self.client = self.client, NOBODY
                self.let_go()
                client.reply(gone("the stream is over, or the log does not answer"))
                return
            self._owned = True
            if self.client is not NOBODY:
                self._go_on()
        except Exception as error:  # the edge of one request: all others share the task group
            self.on_fault(error)

    def _rewind(self, have: Position) -> None:
        """Stand where the client stands."""
        self._restore(have)
        self._begun = self._plain = self._done = False
        self._finish = ""
        self.detached_until = NEVER

    def _restore(self, have: Position) -> None:
        """Hold those of the client's tokens that are known."""
        self._known = self._known[: have[0]]
        self._held = Delivered()
        self._held.ids.extend(self._known)
        self._stamp.restart((len(self._known), 0), have)
        self._tail = self._skip = b""
        self._out.clear()

    def _go_on(self) -> None:
        """Take the stream up where it runs, else have it generated from here."""
        to, self._left = self._left, None
        if to is None:
            if refusal := self.may_retry():
                self.fail(502, refusal)
            else:
                self._assign("returned")
        else:
            self._attaching = True
            self._tries -= 1
            self._dispatch(to)

    def expire(self) -> None:
        """The client did not come back."""
        seconds = self.ctx.config.resume.grace_s
        self._fired("grace")
        self._end("cancelled", 499, f"the client did not come back within {seconds} s")

    def let_go(self) -> None:
        """Another replica owns the request, or nobody does: end here without a word in the
        log. The client, if one is there, may connect again."""
        if self.over:
            return
        self.over = True
        self.ctx.counters.in_flight -= 1
        self._forget()
        self._let_engine_go()
        self.ctx.scheduler.let_go(self.arrival.request)
        if self.client is not NOBODY and self._begun:
            self.client.break_off()

    # --- its worker drains while nobody is there

    def away_on(self, worker: str, incarnation: int) -> bool:
        """Whether the attempt there goes on without us, and can be taken up behind what the
        client has."""
        left = self._left
        if left is None or (left.worker, left.incarnation) != (worker, incarnation):
            return False
        if not self.detached or not self._owned or self.over or self._finish or self._done:
            return False
        if self._attaching or self._again or not self.body:
            return False
        return len(self._held.ids) >= self._stamp.have[0] and not Exchange.may_retry(self)

    def given_up(self, attempt: int) -> None:
        """The attempt that went on without us was handed over: let it be taken up elsewhere,
        and go on there without us."""
        to = self._left
        if to is None or to.attempt != attempt or not self.away_on(to.worker, to.incarnation):
            return
        self._release()
        self._left, self.assignment = None, to
        self.handed_over()

    def fail(self, status: int, message: str, why: str = "") -> None:
        """While nobody is there to be told, it waits for the client and is tried again then."""
        if self.detached and status >= 502 and not self.over:
            log.info("stream_waits", reason=message, **self.about())
            self._let_engine_go()
            self._left = None
        else:
            super().fail(status, message, why)

    def tell_failure(self, reply: Reply, message: str) -> None:
        """A stream that is lost is not to be asked for again, as OpenAI's clients would."""
        if message.startswith(LOST):
            headers = (*reply.headers, ("x-should-retry", "false"))
            reply = error_reply(reply.status, message, code="stream_lost", headers=headers)
        super().tell_failure(reply, message)

    def _forget(self) -> None:
        if self._others.get(self.arrival.request) is self:
            del self._others[self.arrival.request]

    def _release(self) -> None:
        """Tell the engine that nobody will come for the attempt: it ends, with its buffer."""
        to = self.assignment or self._left
        if to is not None and self.resumable:
            self.ctx.spawn(self._released(to))

    async def _released(self, to: Assignment) -> None:
        try:
            upstream = self.ctx.pool.take(to) or await self.ctx.pool.open(to)
        except UpstreamError:
            return  # it ends by itself
        upstream.send(_Unheard(upstream), *self._asking("release", to), generates=False)

    # --- towards the engine

    def send(self, to: Assignment, upstream: Upstream) -> None:
        self._deaf = False
        if not self._attaching:
            if self._again and not self._holders(to):
                self.fail(502, NOWHERE)
            else:
                super().send(to, upstream)
            return
        self._frames = self._parser()
        self._status = 0
        self._error.clear()
        self._held = Delivered()
        self._stamp.restart((0, 0), self._stamp.have)
        upstream.send(self, *self._asking("attach", to))

    def _asking(self, what: str, to: Assignment) -> tuple[bytes, bytes]:
        asked = {
            "request": to.request,
            "attempt": to.attempt,
            "incarnation": to.incarnation,
            "claim": self._claim,
            "tokens": self._stamp.have[0],
        }
        body = msgspec.json.encode(asked)
        head = (
            f"POST /relume/{what} HTTP/1.1\r\nhost: {to.host}:{to.port}\r\n"
            f"content-type: {JSON}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode(), body

    def dispatch_headers(self, to: Assignment) -> str:
        if not self.resumable:
            return ""
        bounds = self.ctx.config.resume
        found = ""
        if self._again:
            found = f"x-relume-envelope: {','.join(self._holders(to))}\r\n"
        return found + (
            f"x-relume-grace: {bounds.grace_s} {bounds.stream_bytes} {bounds.total_bytes} "
            f"{bounds.streams}\r\nx-relume-claim: {self._claim}\r\n"
        )

    def _holders(self, to: Assignment) -> tuple[str, ...]:
        """Where the worker may get the request as the client sent it."""
        return self.ctx.scheduler.returns.holders(self.arrival.request, to.worker)

    def _parser(self) -> FrameParser:
        """Frame by frame: an id tells at which frame of the engine's it stands."""
        return FrameParser(self, merge=False)

    # --- from the engine

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        if not self._attaching:
            to = self.assignment
            super().on_head(status, headers)
            if self._again and status == 424:
                self.fail(502, NOWHERE)
            elif self._again and status == 200:
                self._greet()
            elif self.detached and status == 200 and self.assignment is to:
                self._failover = None
                self._let_engine_go()  # it has begun there, and is kept
            return
        if status != 200:
            kind = "stale" if status == 409 else "detached"
            self.attempt_failed(kind, f"the worker answered {status}: its stream is not there")
            return
        self._status = status
        self._base = int(headers.get(b"x-relume-from", b"0"))
        self._cached = headers.get(b"x-relume-cached", b"")
        if self._base <= self._stamp.have[0]:
            self._greet()

    def _greet(self) -> None:
        """The stream goes on: the client's answer begins."""
        if not self._begun:
            self._begun = True
            self.client.begin(self._head(), b"")

    def on_envelope(self, payload: bytes) -> None:
        head, _, body = payload.partition(b"\n")
        try:
            told = _envelope(head)
        except msgspec.MsgspecError as error:
            raise FrameError("not an envelope") from error
        self.path, self.response_id, self.body = told.path, told.id, body
        self._created = told.created.encode()
        self._again = False

    def on_tokens(self, start: int, ids: list[int], shown: list[bytes]) -> None:
        if self._deaf:
            return
        stamp = self._stamp
        if ids and shown and stamp.straddles(len(ids)):
            raise FrameError("the stream is cut elsewhere than where the client stands")
        super().on_tokens(start, ids, shown)
        if self.over or self.assignment is None:
            return
        if ids and not shown:
            stamp.skipped(len(ids))
        if self._attaching and len(self._held.ids) >= stamp.have[0]:
            if self._base <= stamp.have[0]:
                self._attaching = False
            else:
                self._deaf = True
                asyncio.get_running_loop().call_soon(self._regenerate)

    def _regenerate(self) -> None:
        """The engine dropped the part that the client lacks: its tokens are known now."""
        if self._attaching and not self.over:
            self._release()
            self.attempt_failed("detached", "the worker keeps too little of the stream")

    def _take(self, payload: bytes, shows_tokens: bool) -> None:
        super()._take(payload, shows_tokens)
        tokens = len(self._held.ids) - self._stamp.at[0] if shows_tokens else 0
        self._out[-1] = self._stamp.frame(payload, tokens)

    def take_chunk(self, data: bytes, now: float) -> bool:
        if not self._plain:
            return False
        match = ONE_FRAME(data)
        if match is None:
            return False
        chunk, start, length, token = match.groups()
        ids = self._held.ids
        at, size = match.end(), int(length)
        place = len(ids) + 1
        if (
            len(data) != at + size + 2
            or int(chunk, 16) != at + size - len(chunk) - 2
            or int(start) != place - 1
            or data.find(b"\n\n", at) != at + size - 2
            or data.endswith(DONE_CHUNK)
            or (place, 0) <= self._stamp.have
        ):
            return False
        ids.append(int(token))
        gap = now - self._last_at
        if gap > self._longest_gap:
            self._longest_gap = gap
        self._last_at = now
        self._tail = b""
        stamp = self._stamp
        stamp.at = (place, 0)
        line = b"%b%d\n" % (stamp.prefix, place)
        self.client.write_chunk(b"%x\r\n%b%b" % (size + len(line), line, data[at:]))
        return True

    def on_broken(self, kind: str, message: str) -> None:
        if kind == "taken":  # the log will say by whom
            self.client.break_off()
            self._detach()
            return
        super().on_broken(kind, message)

    # --- failures and ends

    def _stop_attaching(self) -> bool:
        """The attempt that was to be attached to is over; False when none was."""
        if not self._attaching or self.assignment is None:
            return False
        self._attaching = False
        self._known = max(self._known, self._held.ids, key=len)
        self._restore(self._stamp.have)
        return True

    def handed_over(self) -> None:
        self._stop_attaching()
        super().handed_over()

    def attempt_failed(self, kind: str, detail: str, status: int = 0) -> None:
        if not self._stop_attaching() and kind in ("stall", "timeout", "engine_error"):
            self._release()
        super().attempt_failed(kind, detail, status)

    @property
    def movable(self) -> bool:
        """Not while it is being taken up itself."""
        return not self._attaching and not self._again and super().movable

    def may_retry(self) -> str:
        exact = self.arrival.verdict in ("exact", "replay")
        if self.body and (len(self._held.ids) >= self._stamp.have[0] or exact):
            return super().may_retry()
        if not exact:
            return UNREPEATABLE
        if not self.ctx.scheduler.returns.holders(self.arrival.request):
            return NOWHERE
        self._again = True
        self._known = array("I")
        self._restore(self._stamp.have)
        return ""

    def _end(self, outcome: str, status: int, detail: str = "", finish: str = "-") -> bool:
        if not self.over and outcome != "completed":
            self._release()
        self._forget()
        self.detached_until = NEVER
        return super()._end(outcome, status, detail, finish)

    def reply_headers(self) -> tuple[tuple[str, str], ...]:
        headers = super().reply_headers()
        if self.resumable:
            headers += (("x-relume-resumable", str(self.ctx.config.resume.grace_s)),)
        return headers


class _Unheard:
    """Takes an answer nobody needs."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...
    def take_chunk(self, data: bytes, now: float) -> bool:
        return False

    def on_data(self, data: bytes) -> None: ...
    def on_complete(self) -> None:
        self._upstream.release()

    def on_lost(self, kind: str, detail: str) -> None: ...
    def on_fault(self, error: Exception) -> Any: ...
