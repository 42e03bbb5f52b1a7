"""The states of a request, each with what it alone needs. `table` says how they follow.

A state is a value: a transition makes a new one. What outlives a state is `stream_data.Stream`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from relume.controlplane.stream.arrival import Assignment
from relume.controlplane.stream.reception import Reception
from relume.events.vocabulary.enums import RouteCause, TransportKind

Take = Callable[[bytes, float], bytes | None]


class Refusal(Struct, frozen=True):
    """A worker's 4xx, as the client may get it."""

    status: int
    body: bytes
    retry_after: str = ""


class State(Struct, frozen=True):
    """Base of all states."""

    def take(self, chunk: bytes, now: float) -> bytes | None:
        """The client's HTTP chunk for one of the worker's; None: it must go through `Data`."""
        return None


# --- before an attempt


class Counting(State, frozen=True):
    """The prompt is counted; the request is not accepted yet."""


class Queued(State, frozen=True):
    """In the admission queue, or asking it. `no_worker`: the scheduler had none."""

    no_worker: bool = False


class Waiting(State, frozen=True):
    """No worker can take it: it waits for one until `until`."""

    until: float


class Routing(State, frozen=True):
    """The scheduler looks for a worker. `back`: the state in which it waits if there is none.
    `refusal`: the answer of the previous worker, which declined it."""

    cause: RouteCause
    back: Queued | Waiting | None = None
    refusal: Refusal | None = None


class Locating(State, frozen=True):
    """The request must be generated again from its envelope: does a state daemon have it?
    `cause` and `must_pause` belong to the attempt that follows."""

    cause: RouteCause
    must_pause: bool


class BackingOff(State, frozen=True):
    """Waiting before it requests a worker because of `cause`, or sends to `planned`."""

    cause: RouteCause
    planned: Assignment | None = None


# --- an attempt


class Attempt(State, frozen=True):
    """Base of the states in which a worker has the request, or will. `to`: that worker."""

    to: Assignment


class Connecting(Attempt, frozen=True):
    """A connection is made. `attach`: to an attempt that runs there already. `lost`: how a
    reused connection died before it answered."""

    attach: bool = False
    lost: TransportKind | None = None


class Declining(Attempt, frozen=True):
    """The worker answers with a 4xx; its body is collected."""

    status: int
    parts: tuple[bytes, ...]
    retry_after: str


class HandingOver(Attempt, frozen=True):
    """Sent to another worker for an absent client: once it begins there, it is let go of."""


class Receiving(Attempt, frozen=True):
    """Base of the states in which frames come. `reception`: their parser."""

    reception: Reception


class AwaitingFirst(Receiving, frozen=True):
    """Sent; no token of this attempt has come. `has_begun`: the head of the answer has."""

    has_begun: bool = False


class Attaching(Receiving, frozen=True):
    """The worker repeats the token ids that the client has; it keeps payloads from token `base`
    on. -1: its head has not come."""

    base: int = -1


class Regenerating(Receiving, frozen=True):
    """The worker repeats bytes that the client has: they are compared, or counted, and dropped."""


class Collecting(Receiving, frozen=True):
    """Tokens of an answer in one piece come; its bytes come last."""


class Streaming(Receiving, frozen=True):
    """All that comes is for the client. `take` is the hot path: one chunk in, one chunk out."""

    take: Take  # type: ignore[assignment]  # a field, in place of the method that takes nothing


# --- relayed routes, which have no frames


class AwaitingRelayed(Attempt, frozen=True):
    """Sent; the worker's head has not come."""


class Relaying(Attempt, frozen=True):
    """The worker's answer is passed on."""

    status: int
    headers: dict[bytes, bytes]


# --- without an attempt of ours; `left`: the one that runs on


class Adopting(State, frozen=True):
    """The stream was another replica's; the log has not said yet that it is ours, nor where it
    runs. `is_ours`: the log has said that, and an engine may yet report where it runs."""

    is_ours: bool = False


class Detached(State, frozen=True):
    """The client is absent."""

    left: Assignment | None


class Delivering(State, frozen=True):
    """All is written; the client's end has not acknowledged it. `is_taken`: another replica owns
    the stream meanwhile."""

    left: Assignment
    is_taken: bool = False


class Ended(State, frozen=True):
    """Over. `outcome`: as in the terminal event; `let_go`: another replica's."""

    outcome: str
