"""What the gateway needs of the scheduler, and what it offers to the watches.

The gateway moves bytes and knows clients; the scheduler knows the fleet and the log.
Both live in one process and one event loop; every call here is synchronous and cheap.
"""

from __future__ import annotations

from array import array
from typing import Protocol

from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected
from relume.controlplane.stream.stream_events import Owned
from relume.events.vocabulary.enums import RequestOutcome, RouteCause, TimerKind, TransportKind


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


class ResumptionsPort(Protocol):
    """Offered by relume.controlplane.replica.resumptions.StreamResumptions to the gateway."""

    @property
    def is_behind(self) -> bool: ...
    def known(self, request: str) -> tuple[Arrival, str] | None: ...
    def is_sought(self, request: str) -> bool: ...
    def is_moving(self, request: str) -> bool: ...
    def came_back(self, request: str, tokens: int, events: int) -> None: ...
    def adopt(self, arrival: Arrival, tokens: int, events: int) -> None: ...
    def holders(self, request: str, worker: str = "") -> tuple[str, ...]: ...
    async def owned(self, request: str, timeout_s: float) -> Owned: ...
    async def later_attempt(self, request: str, timeout_s: float) -> Owned: ...


class Caller(Protocol):
    """Who waits: an exchange."""

    def called(self) -> bool:
        """It is its turn: request a worker. False if no worker was available; it then continues to
        wait."""
        ...

    def refused(self, why: Rejected) -> None:
        """It waits no more."""
        ...


class AdmissionPort(Protocol):
    """Offered by relume.controlplane.replica.admission.ReplicaAdmission to the gateway."""

    def admit(
        self, arrival: Arrival, caller: Caller, size: int, patience_s: float, nobody: bool
    ) -> Rejected | bool:
        """An arrival with `size` bytes of body: False if it may be sent now, else it is queued or
        refused, and `caller` is called. `nobody`: no worker was available for it; then it waits at
        most `patience_s` for one. Raises LogError."""
        ...

    def output_limit(self, model: str) -> int:
        """Maximum of output tokens of an arrival for that model; 0: none."""
        ...

    def close(self) -> None:
        """The gateway stops: queued requests are refused, and so is each later one that would
        wait."""
        ...


class SchedulerPort(Protocol):
    """Offered by relume.controlplane.replica.scheduler.Scheduler to the gateway."""

    @property
    def waiting(self) -> AdmissionPort:
        """Where arrivals wait while workers are busy."""
        ...

    @property
    def returns(self) -> ResumptionsPort:
        """What the log has about clients that resume their streams."""
        ...

    def let_go(self, request: str) -> None:
        """The request belongs to another replica now, or to none: record nothing more about it."""
        ...

    def models(self) -> list[str]:
        """Names of the models some worker serves or served since start, sorted."""
        ...

    def model_lengths(self) -> dict[str, int]:
        """Maximum tokens of a request, by model that some worker serves: the least of its workers."""
        ...

    def ready(self) -> bool:
        """Whether some worker could take a request now (what `/health` says)."""
        ...

    def block_tokens(self, model: str) -> int:
        """Tokens per block in which workers of `model` report their prefixes; 0: none reports
        them."""
        ...

    def arrived(self, arrival: Arrival) -> Arrival:
        """The request is accepted: from here it must get exactly one `ended`.

        Returns the arrival with the resume guarantee that the fleet can give; the client receives
        it.
        """
        ...

    def assign(
        self, request: str, cause: RouteCause, delivered: int
    ) -> Assignment | Rejected | None:
        """Choose a worker for the next attempt; None if none is available.

        `delivered`: tokens the gateway holds of it (with the client when streaming).
        """
        ...

    async def capacity(self, request: str, timeout_s: float) -> bool:
        """Wait until `assign` may succeed; False when `timeout_s` went by."""
        ...

    def restart_left_s(self, model: str) -> float:
        """What a restart under way of an engine of `model` takes from now on at most, as restarts
        of the model go; 0 if none is expected to end."""
        ...

    def timer_fired(self, timer: TimerKind, key: str) -> None:
        """A timer of the token path ran out and something follows from it. Raises
        LogError."""
        ...

    def observed(
        self,
        request: str,
        attempt: int,
        kind: TransportKind,
        delivered: int,
        detail: str = "",
        status: int = 0,
    ) -> None:
        """One attempt's connection failed, or the worker answered with an error `status`.
        The worker is avoided for this request's later attempts. Or it was moved: handed over on
        request, which is no failure."""
        ...

    def completed(self, request: str, path: str, body: bytes, tokens: array[int]) -> None:
        """The client has the whole answer to `body`, sent to `path`: these token ids. Its `ended`
        follows."""
        ...

    def ended(
        self,
        request: str,
        outcome: RequestOutcome,
        status: int,
        tokens: int,
        finish: str,
        ttft_us: int = -1,
        longest_gap_us: int = -1,
        detail: str = "",
    ) -> None:
        """The terminal event."""
        ...


class GatewayPort(Protocol):
    """Offered by the gateway to the watches, to notices and to draining."""

    activity: dict[tuple[str, int], Activity]

    def break_streams(
        self, worker: str, incarnation: int, cause: TransportKind, detail: str = ""
    ) -> int:
        """Fail over every attempt on that incarnation now; returns how many there were. If it is
        corrupt, leave those too that run for absent clients."""
        ...

    def doubt_stream(self, worker: str, incarnation: int, request: str, detail: str = "") -> None:
        """Another worker had the request before and computes wrong results: move it away from this
        one, which is not blamed, so that its tokens are compared. If its client is absent, it
        waits for the client."""
        ...

    def silent_on(
        self, worker: str, incarnation: int, before: float
    ) -> dict[tuple[str, int], float]:
        """Attempts on that incarnation, as (request, attempt), that must bring tokens, can resume
        elsewhere, and were silent since a time before `before` (loop seconds): the time of their
        last byte. A stream whose client reads too slowly is none of them."""
        ...

    def withheld_on(self, worker: str, incarnation: int) -> list[tuple[str, int]]:
        """Attempts on that incarnation, as (request, attempt), that may bring nothing before their
        engine is done with them, and can resume elsewhere: replays, and answers in one piece."""
        ...

    def break_stream(
        self,
        worker: str,
        incarnation: int,
        request: str,
        attempt: int,
        cause: TransportKind,
        detail: str = "",
    ) -> bool:
        """Fail over that attempt now; False if it is not there any more."""
        ...

    def let_go(self, request: str) -> None:
        """Another replica serves the client of that stream now."""
        ...

    def is_absent(self, request: str) -> bool:
        """Whether that stream is here, and its client is not."""
        ...

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Requests under way on that incarnation, and the tokens the gateway has of each."""
        ...

    def movable_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Of these the ones that may be handed over now."""
        ...

    def away_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """Requests that run there for absent clients and can resume on another worker; with the
        number of tokens that the gateway has of each."""
        ...

    def movable_tokens(self, worker: str, incarnation: int, request: str) -> int | None:
        """The number of tokens that the gateway has of one of these requests; None: it is none of
        them any more."""
        ...

    def given_up(self, request: str, attempt: int) -> None:
        """The engine handed that attempt over. If its client is absent, the gateway does not read
        this from the stream: the request continues where it is planned."""
        ...
