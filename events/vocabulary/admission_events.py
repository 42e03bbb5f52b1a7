"""Waiting for a worker: requests that were held back in front of busy workers, and refused."""

from __future__ import annotations

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.enums import QueueCause, ShedReason, Tier


class RequestHeld(Event, frozen=True, tag="request_held/1", kw_only=True):
    """Decision: an arrival waits in this replica's admission queue. It goes with a
    `RouteDecided` of cause wait_over. Times are those of `GroupsReceived`."""

    decision: str
    basis: Basis
    request: str
    at_us: int
    cause: QueueCause
    """Why it waits."""
    model: str
    tier: Tier
    tenant: str
    tokens: int
    """Tokens that it is charged, of which its tenant gets an equal part within its tier."""
    size: int
    until_us: int
    """Time at which its wait ends at the latest."""
    deadline_us: int
    ahead_requests: int
    ahead_tokens: int
    predicted_us: int
    depth: int
    evicted: tuple[str, ...] = ()
    """Requests that gave it their places."""


class RequestShed(Event, frozen=True, tag="request_shed/1", kw_only=True):
    """Decision: a request is refused, unsent. Fields without a meaning of their own are those
    of `RequestHeld`."""

    decision: str
    basis: Basis
    request: str
    at_us: int
    reason: ShedReason
    """Why it was refused."""
    model: str
    tier: Tier
    tenant: str
    tokens: int
    """Tokens that it was charged."""
    size: int
    deadline_us: int
    waited_us: int
    """Time in the queue; -1: it did not wait."""
    ahead_requests: int
    ahead_tokens: int
    predicted_us: int
    depth: int
    retry_after_s: int
    """What the client was asked to wait."""
    behalf: str = ""
    """The request that got its place."""
