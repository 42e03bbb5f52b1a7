"""What the gateway asks of the scheduler, and what it offers to the stall watch.

The gateway moves bytes and knows clients; the scheduler knows the fleet and the log.
Both live in one process and one event loop; every call here is synchronous and cheap.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Arrival(Struct, frozen=True):
    """What the gateway read from a request before accepting it.

    `verdict` says how a cut can be survived: `exact` (continue from the delivered
    tokens), `best_effort` (the same, on an engine that failed its self-test), `sampled`
    (continue validly, not identically), `replay` (generate again, compare), `restart`
    (only while the client has nothing); `reason` why not better. `needs` names what engines
    must have in their self-test for it, `fallback` is the verdict without. `prompt_tokens`
    is estimated from bytes unless `estimated` is False. `trace`: its W3C traceparent, if it
    came with one. `protected`: its route is one on which engines keep checkpoints.
    `priority`: the weight of its checkpoint when a holder must evict.
    `resumable`: digest of the claim with which its client may go on after a lost connection,
    `grace_ticks` after its gateway's death; empty: it may not. `prefix`: marks of its prompt
    (`events.prefix`), empty where it was not tokenised. `session`: digest of what its
    client calls the session it belongs to. `tier`: how soon it wants its first token.
    `countable`: its prompt is text or token ids. `share`: the tenant in whose share it waits.
    `ttft_ms`: its first token is of no use later; 0: it is.
    """

    request: str
    model: str
    route: str
    stream: bool
    prompt_tokens: int
    max_tokens: int
    verdict: str
    reason: str = ""
    estimated: bool = True
    tenant: str = ""
    client_id: str = ""
    trace: str = ""
    protected: bool = True
    needs: tuple[str, ...] = ()
    fallback: str = ""
    priority: int = 1
    resumable: str = ""
    grace_ticks: int = 0
    prefix: bytes = b""
    session: str = ""
    tier: str = ""
    countable: bool = False
    share: str = ""
    ttft_ms: int = 0


class Assignment(Struct, frozen=True):
    """Where one attempt goes. `mode`: new, continue, replay; attach: where one runs already.
    `dispatch` is the
    value of the header `x-relume-dispatch`: the encoded decision in base64url. `checkpoint`
    and `restore`: endpoints of state daemons that are to hold its blocks, or may have them;
    `priority` is its checkpoint's weight."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    host: str
    port: int
    mode: str
    dispatch: bytes
    checkpoint: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    priority: int = 1


class Hopeless(Struct, frozen=True):
    """The request cannot go on; `status` and `message` are for the client, and, if known, when it
    may try again and the error's code."""

    status: int
    message: str
    retry_after_s: int = 0
    code: str = ""


class Activity:
    """What the token path last saw of one engine incarnation; read by the stall watch.

    `last_byte` is a monotonic time in seconds (the loop's clock): of the last byte, or of
    the moment `open_streams` rose from 0. `open_streams` counts attempts that wait for
    bytes; one whose client reads too slowly is paused and does not count.
    """

    __slots__ = ("last_byte", "open_streams")

    def __init__(self, now: float) -> None:
        self.last_byte = now
        self.open_streams = 0


class ReturnsPort(Protocol):
    """Offered by relume.controlplane.returns.Returns to the gateway."""

    def known(self, request: str) -> tuple[Arrival, str] | None: ...
    def came_back(self, request: str, tokens: int, events: int) -> None: ...
    def adopt(self, arrival: Arrival, tokens: int, events: int) -> Assignment | None: ...
    def holders(self, request: str, worker: str = "") -> tuple[str, ...]: ...
    async def owned(self, request: str, timeout_s: float) -> bool: ...


class Caller(Protocol):
    """Who waits: an exchange."""

    def called(self) -> bool:
        """It is its turn: ask for a worker. False when none could take it; it waits on then."""
        ...

    def refused(self, why: Hopeless) -> None:
        """It waits no more."""
        ...


class WaitingPort(Protocol):
    """Offered by relume.controlplane.waiting.Waiting to the gateway."""

    def admit(
        self, arrival: Arrival, caller: Caller, size: int, patience_s: float, nobody: bool
    ) -> Hopeless | bool:
        """An arrival with `size` bytes of body: False when it may be sent, else it waits and
        `caller` hears of it, or is refused. `nobody`: no worker was to be had for it; for one it
        waits `patience_s` at most. Raises LogError."""
        ...

    def close(self) -> None:
        """The gateway stops: who waits is refused, and who would have to."""
        ...


class SchedulerPort(Protocol):
    """Offered by relume.controlplane.scheduler.Scheduler to the gateway."""

    @property
    def waiting(self) -> WaitingPort:
        """Where arrivals wait while workers are busy."""
        ...

    @property
    def returns(self) -> ReturnsPort:
        """What the log knows of clients that come back."""
        ...

    def let_go(self, request: str) -> None:
        """The request is another replica's now, or nobody's: nothing more is said of it."""
        ...

    def models(self) -> list[str]:
        """Names of the models some worker serves or served since start, sorted."""
        ...

    def ready(self) -> bool:
        """Whether some worker could take a request now (what `/health` says)."""
        ...

    def block_tokens(self, model: str) -> int:
        """Tokens of a block in which workers of `model` tell their prefixes; 0: none does."""
        ...

    def arrived(self, arrival: Arrival) -> Arrival:
        """The request is accepted: from here it must get exactly one `ended`.

        Returns the arrival with the verdict that the fleet can keep, which goes to the client.
        """
        ...

    def assign(self, request: str, cause: str, delivered: int) -> Assignment | Hopeless | None:
        """Choose a worker for the next attempt; None when none can take it at present.

        `cause`: arrival, reset, stall, engine_dead, engine_error, stale, refused, unreachable,
        declined, moved, wait_over.
        `delivered`: tokens the gateway holds of it (with the client when streaming).
        """
        ...

    async def capacity(self, request: str, timeout_s: float) -> bool:
        """Wait until `assign` may succeed; False when `timeout_s` went by."""
        ...

    def timer_fired(self, timer: str, key: str) -> None:
        """A timer of the token path ran out and something follows from it. `timer`: wait (no
        worker could take request `key` within the bound), retry (it is sent again to where it
        failed, nobody else being left), grace (its client did not come back). Raises LogError."""
        ...

    def observed(
        self, request: str, attempt: int, kind: str, delivered: int, detail: str = ""
    ) -> None:
        """One attempt's connection failed. `kind`: reset, eof, refused, unreachable (no
        connection in time), stale, engine_dead, engine_error, declined (a moved request
        answered with a 4xx), stall, timeout. The worker is avoided for this request's later
        attempts. Or it was moved: handed over as asked, which is nobody's failure."""
        ...

    def ended(
        self,
        request: str,
        outcome: str,
        status: int,
        tokens: int,
        finish: str,
        ttft_us: int = -1,
        longest_gap_us: int = -1,
        detail: str = "",
    ) -> None:
        """The terminal event. `outcome`: completed, cancelled, failed, rejected."""
        ...


class GatewayPort(Protocol):
    """Offered by the gateway to the stall watch, to notices and to draining."""

    activity: dict[tuple[str, int], Activity]

    def break_streams(self, worker: str, incarnation: int, cause: str, detail: str = "") -> int:
        """Fail over every attempt on that incarnation now; returns how many there were."""
        ...

    def let_go(self, request: str) -> None:
        """Another replica serves the client of that stream now."""
        ...

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Requests under way on that incarnation, and the tokens the gateway has of each."""
        ...

    def movable_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Of these the ones that may be handed over now."""
        ...

    def away_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Requests that run there for clients who are away, and can be taken up elsewhere; the
        tokens that the gateway has of each."""
        ...

    def given_up(self, request: str, attempt: int) -> None:
        """The engine handed that attempt over. If its client is away nobody reads so in its
        stream: it goes on where it is planned."""
        ...
