"""What can happen to a request: the events that its shell feeds into the machine.

There are three sources. The control plane answers the machine's effects (`Accepted` to `Owned`),
the worker and its connection (`Connected` to `ResponseEnded`, and the frames that the machine cuts
out of `Data`), the client and its gateway (`ClientGone` to `Fault`).
"""

from __future__ import annotations

from msgspec import Struct

from relume.controlplane.stream.arrival import Arrival, Assignment
from relume.events.vocabulary.enums import TransportKind

Position = tuple[int, int]
"""The position of a client: tokens it has, and events after the last of them."""


class Event(Struct, frozen=True, gc=False):
    """Base of all events. None is part of a reference cycle."""


# --- answers of the control plane


class Counted(Event, frozen=True):
    """The prompt was counted; -1: it was not, and the estimate stays. `prefix`: its marks."""

    tokens: int = -1
    prefix: bytes = b""


class Accepted(Event, frozen=True):
    """The log has the request, with the resume guarantee that the fleet can keep."""

    arrival: Arrival


class NotAccepted(Event, frozen=True):
    """The log does not take the request."""


class Admitted(Event, frozen=True):
    """The admission queue lets it pass. If there was no worker for it, it waits for one for
    `wait_s`."""

    wait_s: float


class Enqueued(Event, frozen=True):
    """The admission queue keeps it, and will say `Called` or `Rejected`
    (`arrival.Rejected`, which also answers `Admit` and `Assign`)."""


class Called(Event, frozen=True):
    """Its turn in the admission queue."""


class Assigned(Event, frozen=True):
    """The scheduler chose a worker."""

    to: Assignment


class NoWorker(Event, frozen=True):
    """No worker can take it now; it waits for one for `wait_s`."""

    wait_s: float


class CapacityKnown(Event, frozen=True):
    """A worker may take it now (`found`), or none could within the time."""

    found: bool


class EnvelopeKnown(Event, frozen=True):
    """Whether some state daemon has the request as its client sent it."""

    found: bool


class Owned(Event, frozen=True):
    """The log has decided on a stream of another replica: whether it is `ours`, and then where it
    runs, if anywhere: the other replica may have moved it before. `late`: it has not decided in
    time. `doubted`: a worker that computes wrong results had it, so that attempt is over."""

    ours: bool
    left: Assignment | None = None
    doubted: bool = False
    late: bool = False


class TimerFired(Event, frozen=True):
    """The pause set by `SetTimer` is over."""


class GraceOver(Event, frozen=True):
    """The client did not come back in time."""


# --- the worker and its connection


class Connected(Event, frozen=True):
    """There is a connection to the worker. `envelope_at`: endpoints of the state daemons from
    which the worker can get the request, if the machine regenerates."""

    envelope_at: tuple[str, ...] = ()


class ConnectFailed(Event, frozen=True):
    """`kind`: refused, unreachable."""

    kind: TransportKind
    detail: str


class Head(Event, frozen=True):
    """The head of the worker's response. Header names are in lower case."""

    status: int
    headers: dict[bytes, bytes]


class Data(Event, frozen=True):
    """Bytes of the response's body, as one read brought them."""

    data: bytes


class ResponseEnded(Event, frozen=True):
    """The response is complete as HTTP has it."""


class ConnectionLost(Event, frozen=True):
    """The connection broke. `kind`: reset, eof, timeout, engine_error. `idle`: it was a reused
    one that had brought no byte of this response."""

    kind: TransportKind
    detail: str
    idle: bool = False


class EngineGivenUp(Event, frozen=True):
    """A notice, the stall watch or an operator gave the worker's engine up."""

    cause: TransportKind
    detail: str = ""


class TokensDoubted(Event, frozen=True):
    """A worker that had the request before computes wrong results. The present one is not to
    blame."""

    detail: str = ""


class HandoverNoticed(Event, frozen=True):
    """The engine handed over the attempt that ran on for an absent client."""


# --- frames of the response (`relume.events.wire.frames`)


class Tokens(Event, frozen=True):
    """Tokens `start`.. and the bytes that show them; -1: without their ids."""

    start: int
    ids: list[int]
    shown: list[bytes]


class ChoiceTokens(Event, frozen=True):
    """The same for one of several choices."""

    choice: int
    start: int
    ids: list[int]
    shown: bytes


class Whole(Event, frozen=True):
    """The whole answer of a request that does not stream."""

    status: int
    payload: bytes


class Envelope(Event, frozen=True):
    """The request as its client sent it."""

    payload: bytes


class End(Event, frozen=True):
    """The clean end of the generation."""

    reason: str


class Broken(Event, frozen=True):
    """The generation broke in the worker. `kind`: engine, mismatch, internal, moved, taken."""

    kind: str
    message: str


# --- the client and its gateway


class ClientGone(Event, frozen=True):
    """The client closed its connection, or lost what was written to it."""


class ClientReturned(Event, frozen=True):
    """The client is here on a new connection and has everything up to `have`."""

    have: Position


class Adopted(Event, frozen=True):
    """A client came here with a stream of another replica, and has everything up to `have`."""

    have: Position


class Delivered(Event, frozen=True):
    """The client's end has acknowledged the last bytes."""


class TakenOver(Event, frozen=True):
    """Another replica serves the client from now on, or whichever it comes to."""


class ShutDown(Event, frozen=True):
    """The gateway stops."""


class Fault(Event, frozen=True):
    """Our own code failed on this request."""
