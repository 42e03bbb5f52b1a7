"""The token path of a stream whose events carry ids (`event_ids`), so that its client can come
back to it: what goes to the engine that keeps it, and what comes.

The exchange either dispatches the request, or attaches to an attempt that runs already. The
engine then gives the ids of all tokens first, so the exchange that attaches knows what the
one before it knew. What the engine has no more is generated again behind the tokens the
client has; where worker and gateway are gone, all of it is, from what a holder has.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import msgspec
from msgspec import Struct

from relume.controlplane.gateway.delivered import Delivered
from relume.controlplane.gateway.errors import FrameError
from relume.controlplane.gateway.event_ids import Position, Stamp
from relume.controlplane.gateway.frames import FrameParser
from relume.controlplane.gateway.ports import Assignment
from relume.controlplane.gateway.relay import DONE_CHUNK, ONE_FRAME, Exchange
from relume.controlplane.gateway.releases import asking, post
from relume.controlplane.gateway.replies import Reply, error_reply
from relume.controlplane.gateway.upstream import Upstream

NEWLINE = b"\n"[0]
LOST = "the worker that kept the stream is gone together with its gateway"
NOWHERE = f"{LOST}, and no holder has the request: send it anew"
UNREPEATABLE = (
    f"{LOST}, and what was sampled without a seed cannot be generated again: "
    "what you received stands; send the request anew for another answer"
)


class _Envelope(Struct):
    """Head of what a worker keeps of a request; the client's body follows it."""

    path: str
    id: str
    created: str


_envelope = msgspec.json.Decoder(_Envelope).decode


class Stamped(Exchange):
    """One request whose events carry ids. `claim` is what its client shows to come back."""

    __slots__ = ("_again", "_attaching", "_base", "_claim", "_deaf", "_known", "_run", "_stamp")

    def __init__(self, *at: Any, claim: str, created: str) -> None:
        """`at`: as of `Exchange`. `created`: unix seconds its events show; empty: as the
        first one has them."""
        super().__init__(*at)
        self._claim = claim
        self._created = created.encode()
        self._stamp = Stamp(self.arrival.request, claim)
        self._attaching = False
        self._again = False  # generated from the start, from what a holder has of the request
        self._base = 0  # first token whose payload the engine still has
        self._deaf = False  # the rest of this read is of no use
        self._known = array("I")  # tokens of the client's, while the engine repeats them
        self._run: list[bytes] = []  # frames of one token each that are being taken

    @property
    def resumable(self) -> bool:
        """Whether the fleet can keep this stream."""
        return bool(self.arrival.resumable)

    @property
    def delivered(self) -> int:
        """Tokens that the client has, whether their ids are known here or not; none where it
        is all generated again."""
        return self._held.count if self._again else max(self._held.count, self._stamp.have[0])

    def _restore(self, have: Position) -> None:
        """Hold those of the client's tokens that are known."""
        self._known = self._known[: have[0]]
        self._held = Delivered()
        self._held.ids.extend(self._known)
        self._stamp.restart((len(self._known), 0), have)
        self._tail = self._skip = b""
        self._out.clear()

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
        upstream.send(self, *asking(to, "attach", self._named(to)))

    def _named(self, to: Assignment) -> dict[str, Any]:
        return {
            "request": to.request,
            "attempt": to.attempt,
            "incarnation": to.incarnation,
            "claim": self._claim,
            "tokens": self._stamp.have[0],
        }

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

    def _release(self, to: Assignment | None) -> None:
        """Tell the engine that nobody will come for the attempt: it ends, with its buffer."""
        if to is not None and self.resumable:
            self.ctx.spawn(post(self.ctx, to, "release", self._named(to)))

    def _parser(self) -> FrameParser:
        """An id tells at which frame of the engine's it stands, so none are merged."""
        return FrameParser(self, merge=False)

    # --- from the engine

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        if not self._attaching:
            super().on_head(status, headers)
            if self._again and status == 424:
                self.fail(502, NOWHERE)
            elif self._again and status == 200:
                self._greet()
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
        if len(shown) > 1:  # frames of one token each
            if self._attaching or self._skip:
                for n in range(len(ids)):
                    self.on_tokens(start + n, ids[n : n + 1], shown[n : n + 1])
                return
            self._run = shown
            try:
                super().on_tokens(start, ids, shown)
            finally:
                self._run = []
            return
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
            self._release(self.assignment)
            self.attempt_failed("detached", "the worker keeps too little of the stream")

    def _take(self, payload: bytes, shows_tokens: bool) -> None:
        super()._take(payload, shows_tokens)
        if self._run:
            self._out[-1] = self._stamp.run(self._run)
            return
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
            or data.find(b"\n", at) != at + size - 2  # one line, so one event
            or data[at + size - 1] != NEWLINE
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

    # --- failures

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
            self._release(self.assignment)
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

    def tell_failure(self, reply: Reply, message: str) -> None:
        """A stream that is lost is not to be asked for again, as OpenAI's clients would."""
        if message.startswith(LOST):
            headers = (*reply.headers, ("x-should-retry", "false"))
            reply = error_reply(reply.status, message, code="stream_lost", headers=headers)
        super().tell_failure(reply, message)

    def reply_headers(self) -> tuple[tuple[str, str], ...]:
        headers = super().reply_headers()
        if self.resumable:
            headers += (("x-relume-resumable", str(self.ctx.config.resume.grace_s)),)
        return headers
