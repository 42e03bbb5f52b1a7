"""The effects that the machine's shell carries out, in their order.

Effects that are answered come last in their batch: `Accept` by `Accepted` or `NotAccepted`, `Admit`
by `Admitted`, `Enqueued` or `Rejected`, `Assign` by `Assigned`, `NoWorker` or `Rejected`,
`LocateEnvelope` by `EnvelopeKnown`, all at once; `Open` at once or later by `Connected` or
`ConnectFailed`, `AwaitCapacity` by `CapacityKnown`, `AwaitOwnership` and `FindLaterAttempt` by `Owned`, `SetTimer` by
`TimerFired`, `AwaitDelivery` by `Delivered` or `ClientGone`.
"""

from __future__ import annotations

from msgspec import Struct

from relume.controlplane.stream.arrival import Arrival, Assignment
from relume.events.vocabulary.enums import RequestOutcome, RouteCause, TimerKind, TransportKind

Headers = tuple[tuple[str, str], ...]


class Effect(Struct, frozen=True, gc=False):
    """Base of all effects. None is part of a reference cycle."""


# --- the control plane


class Accept(Effect, frozen=True):
    """Write the arrival."""

    arrival: Arrival


class Admit(Effect, frozen=True):
    """Enter the admission queue. `no_worker`: the scheduler had none for it."""

    no_worker: bool


class Assign(Effect, frozen=True):
    """Request a worker from the scheduler."""

    cause: RouteCause
    delivered: int


class AwaitCapacity(Effect, frozen=True):
    """Wait until a worker may take it. `again`: it waited before, and the worker was gone."""

    timeout_s: float
    again: bool


class LocateEnvelope(Effect, frozen=True):
    """Look up whether some state daemon has the request."""


class AwaitOwnership(Effect, frozen=True):
    """Wait until the log has decided which replica serves the stream."""


class FindLaterAttempt(Effect, frozen=True):
    """Wait for an attempt of the stream that its former owner sent and did not write."""


class SetTimer(Effect, frozen=True):
    """Pause. `planned`: the attempt that follows: news of its engine must come here."""

    delay_s: float
    planned: Assignment | None = None


class StopWaiting(Effect, frozen=True):
    """Cancel the timer, and any count, connection or wait in progress."""


class RecordFailure(Effect, frozen=True):
    """Write that an attempt was lost or moved."""

    attempt: int
    kind: TransportKind
    delivered: int
    detail: str
    status: int = 0


class RecordTimer(Effect, frozen=True):
    """Write that a timer ran out and something follows."""

    timer: TimerKind


class RecordEnd(Effect, frozen=True, kw_only=True):
    """Write the terminal event. `unaccepted`: the arrival, which must be written first."""

    outcome: RequestOutcome
    status: int
    tokens: int
    finish: str
    ttft_us: int
    longest_gap_us: int
    detail: str
    unaccepted: Arrival | None


class LetGo(Effect, frozen=True):
    """Say nothing more of the request: it is another replica's."""


class ReportFailover(Effect, frozen=True, kw_only=True):
    """A failover is over: times of the steps, seconds; 0 for a step that was not reached."""

    kind: str
    noticed: float
    decided: float
    sent: float
    resumed: float


class ReportWaiting(Effect, frozen=True):
    """The stream of an absent client cannot continue now and waits for it."""

    reason: str


# --- the worker


class Open(Effect, frozen=True):
    """Take or make a connection. `fresh`: make one."""

    to: Assignment
    fresh: bool = False


class Send(Effect, frozen=True):
    """Send a request. `generates`: tokens are due."""

    head: bytes
    body: bytes
    tail: bytes = b""
    generates: bool = True


class Close(Effect, frozen=True):
    """The attempt is over here. `reuse`: the connection may serve others; else it is cut, and the
    engine aborts or buffers the attempt."""

    reuse: bool = False


class Release(Effect, frozen=True):
    """Inform the worker that no client will resume the attempt: it ends, and its buffer is freed.
    `tokens`: the client has them. `soon`: together with others."""

    to: Assignment
    tokens: int
    soon: bool = False


# --- the client


class Begin(Effect, frozen=True):
    """Send a head and the first bytes of the body; `last`: they are all of it."""

    status: int
    headers: Headers
    data: bytes
    last: bool = False


class ToClient(Effect, frozen=True):
    """Send more of the body."""

    data: bytes


class Finish(Effect, frozen=True):
    """Send the last bytes of the body."""

    data: bytes = b""


class Reply(Effect, frozen=True):
    """Send a whole answer. `refusal`: it is a worker's error, to be put into OpenAI's shape."""

    status: int
    body: bytes
    headers: Headers
    refusal: bool = False


class Fail(Effect, frozen=True, kw_only=True):
    """Inform the client that it cannot continue: an error event if `begun`, else a whole answer.
    `path`: of the API in whose shape that is. `event`: the event's number there; -1: unknown."""

    status: int
    message: str
    code: str
    retry_after_s: int
    headers: Headers
    begun: bool
    path: str = ""
    event: int = -1


class Cut(Effect, frozen=True):
    """Cut the client's response where it is."""


class Detach(Effect, frozen=True):
    """The client is absent from now on."""


class AwaitDelivery(Effect, frozen=True):
    """All bytes are written: watch until the client's end has acknowledged them."""
