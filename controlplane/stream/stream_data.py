"""What a request carries from state to state, and the effects of the event at hand."""

from __future__ import annotations

from array import array
from typing import Protocol

from msgspec import Struct

from relume.controlplane.stream.answer import NUMBERED, Answer, NumberedAnswer
from relume.controlplane.stream.arrival import Arrival
from relume.controlplane.stream.event_ids import Stamp
from relume.controlplane.stream.retry_budget import BudgetLimits, RetryBudget
from relume.controlplane.stream.stream_effects import Effect, Headers
from relume.controlplane.stream.stream_events import Position
from relume.events.vocabulary.enums import Guarantee, TransportKind
from relume.events.wire import headers as h

NEVER = float("inf")


class ResumeLimits(Protocol):
    """Bounds of resumable streams; see `gateway.config.ResumeConfig`."""

    @property
    def grace_s(self) -> int: ...
    @property
    def stream_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def streams(self) -> int: ...


class Limits(BudgetLimits, Protocol):
    """Bounds of a request; see `gateway.config.GatewayConfig`."""

    @property
    def retry_after_s(self) -> int: ...
    @property
    def max_attempts(self) -> int: ...
    @property
    def max_error_body_bytes(self) -> int: ...
    @property
    def resume(self) -> ResumeLimits: ...


class RelayedRequest(Struct, frozen=True):
    """What else is passed on of a request to a relayed route."""

    method: str
    headers: tuple[tuple[str, str], ...]


class Failover(Struct):
    """Times of the steps of a failover, seconds; 0: not reached."""

    kind: TransportKind
    noticed: float
    decided: float = 0.0
    sent: float = 0.0


class Stream:
    """One request's stream.

    `begun`: the client has bytes of the response. `out`: bytes for it that the event at hand
    brought. `created`: unix seconds that its events show. `cached`: cached tokens of its prompt as
    the first worker counted them. `absent_until`: when it ends unless the client returns; NEVER
    while a client is there. `known`: the longest run of token ids known of a resumable stream.
    `again`: it is generated from the start, from the envelope that a state daemon has. `had`: tokens
    delivered before the present attempt. `is_doubted`: some of what the client has comes from a
    worker that computes wrong results, as far as it is known here; the scheduler knows better.
    """

    __slots__ = (
        "absent_until",
        "accepted",
        "again",
        "answer",
        "arrival",
        "arrived_at",
        "begun",
        "body",
        "budget",
        "cached",
        "created",
        "effects",
        "failover",
        "had",
        "is_doubted",
        "known",
        "limits",
        "out",
        "path",
        "relayed",
        "response_id",
        "resume_token",
        "sent_at",
        "stamp",
    )

    def __init__(
        self,
        *,
        arrival: Arrival,
        path: str,
        response_id: str,
        body: bytes,
        limits: Limits,
        now: float,
        resume_token: str = "",
        created: str = "",
        relayed: RelayedRequest | None = None,
    ) -> None:
        self.arrival = arrival
        self.path = path
        self.response_id = response_id
        self.body = body
        self.limits = limits
        self.relayed = relayed
        self.resume_token = resume_token
        self.stamp = Stamp(arrival.request, resume_token) if resume_token else None
        self.answer = NumberedAnswer(self.stamp) if path in NUMBERED else Answer(self.stamp)
        self.budget = RetryBudget()
        self.effects: list[Effect] = []
        self.out: list[bytes] = []
        self.created = created.encode()
        self.cached = b""
        self.accepted = False
        self.begun = False
        self.again = self.is_doubted = False
        self.had = 0
        self.absent_until = NEVER
        self.arrived_at = self.sent_at = now
        self.failover: Failover | None = None
        self.known = array("I")

    @property
    def delivered(self) -> int:
        """Tokens that the client has, whether their ids are known here or not; of an answer in
        one piece, those that are held. None while all is generated again."""
        if self.stamp is None or self.again:
            return self.answer.count
        return max(self.answer.count, self.stamp.have[0])

    @property
    def have(self) -> Position:
        """What the client had when it connected."""
        return self.stamp.have if self.stamp is not None else (0, 0)

    @property
    def is_resumable(self) -> bool:
        """Whether the fleet can keep this stream for a client that returns."""
        return bool(self.arrival.resumable)

    @property
    def is_repeatable(self) -> bool:
        """Whether all of it can be generated again, with the same tokens."""
        return self.arrival.verdict in (Guarantee.EXACT, Guarantee.REPLAY)

    @property
    def is_absent(self) -> bool:
        """Whether its client is."""
        return self.absent_until != NEVER

    def rewind(self, have: Position) -> None:
        """Set the answer to the client's position: hold those of its tokens that are known."""
        assert self.stamp is not None
        self.known = self.known[: have[0]]
        self.answer.restart(self.known)
        self.answer.tail = b""
        self.stamp.restart((len(self.known), 0), have)
        self.out.clear()

    def obstacle(self) -> str:
        """Why another attempt cannot continue what the client has; empty if it can."""
        if not (self.begun or self.out):
            return ""
        if self.relayed is not None:
            return "the worker failed within its answer"
        if self.answer.unresumable:
            return f"the worker failed and {self.answer.unresumable}"
        if self.arrival.verdict == Guarantee.RESTART:
            why = self.arrival.reason
            return f"the worker failed and this request cannot be continued ({why})"
        return ""

    def found_corrupt(self) -> None:
        """The engine of its attempt computes wrong results. Tokens without ids are not counted: what
        the client has then came in this attempt."""
        is_uncounted = bool(self.begun or self.out) and not self.delivered
        self.is_doubted = self.is_doubted or is_uncounted or self.delivered > self.had

    def reply_headers(self) -> Headers:
        """Headers that every answer to this request carries."""
        arrival = self.arrival
        if self.relayed is not None:
            return ((h.REQUEST, arrival.request), (h.PROTECTED, "no"))
        headers: Headers = (
            (h.REQUEST, arrival.request),
            (h.VERDICT, arrival.verdict),
        )
        if arrival.reason:
            reason = arrival.reason.encode("ascii", "replace").decode()
            reason = reason.replace("\r", " ").replace("\n", " ")
            headers = (*headers, (h.REASON, reason))
        if arrival.output_limit:
            headers = (*headers, (h.MAX_TOKENS, str(arrival.output_limit)))
        if self.stamp is not None and self.is_resumable:
            grace_s = str(self.limits.resume.grace_s)
            headers = (*headers, (h.RESUMABLE, grace_s))
        return headers
