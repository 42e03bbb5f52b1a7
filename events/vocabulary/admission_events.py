"""Waiting for a worker: requests that were held back in front of busy workers, and refused."""

from __future__ import annotations

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.enums import QueueCause, ShedReason, Tier


class RequestHeld(Event, frozen=True, tag="request_held/1", kw_only=True):
    """Decision: an arrival waits in this replica's room. It goes with a `RouteDecided` of cause
    wait_over.

    Times are those of `GroupsReceived`: it waits until `until_us` at most, and its first token is
    due by `deadline_us` (0: whenever). `tokens` it is charged, of which its `tenant` gets an equal
    part within its tier; `size` bytes of body. `ahead_requests` and `ahead_tokens` go before it,
    expected to take `predicted_us` (-1: not known); `depth` requests wait now. `evicted` gave it
    their places."""

    decision: str
    basis: Basis
    request: str
    at_us: int
    cause: QueueCause
    model: str
    tier: Tier
    tenant: str
    tokens: int
    size: int
    until_us: int
    deadline_us: int
    ahead_requests: int
    ahead_tokens: int
    predicted_us: int
    depth: int
    evicted: tuple[str, ...] = ()


class RequestShed(Event, frozen=True, tag="request_shed/1", kw_only=True):
    """Decision: a request is refused, unsent.
    After a wait of `waited_us` (-1: it did not wait). `behalf`: the request that displaced it.
    Other fields as of `RequestHeld`; `retry_after_s` was sent to the client."""

    decision: str
    basis: Basis
    request: str
    at_us: int
    reason: ShedReason
    model: str
    tier: Tier
    tenant: str
    tokens: int
    size: int
    deadline_us: int
    waited_us: int
    ahead_requests: int
    ahead_tokens: int
    predicted_us: int
    depth: int
    retry_after_s: int
    behalf: str = ""
