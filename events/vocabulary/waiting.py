"""Waiting for a worker: requests that were held back in front of busy workers, and refused."""

from __future__ import annotations

from relume.events.vocabulary.base import Basis, Event


class RequestHeld(Event, frozen=True, tag="request_held/1"):
    """Decision: an arrival waits in this replica's room. `cause`: saturated (no worker has use for
    one more), no worker (none is open), behind (others wait already). It goes with a `RouteDecided`
    of cause wait_over.

    Times are those of `GroupsReceived`: it waits until `until_us` at most, and its first token is
    due by `deadline_us` (0: whenever). `tokens` it is charged, of which its `tenant` gets an equal
    part within its tier; `size` bytes of body. `ahead_requests` and `ahead_tokens` go before it,
    expected to take `predicted_us` (-1: not known); `depth` requests wait now. `evicted` gave it
    their places."""

    decision: str
    basis: Basis
    request: str
    at_us: int
    cause: str
    model: str
    tier: str
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


class RequestShed(Event, frozen=True, tag="request_shed/1"):
    """Decision: a request is refused, unsent. `reason`: deadline (its first token is expected too
    late), expired (it is late already), too long (nobody waits so long), room full, displaced (the
    room was full), tenant share, no worker (none in time), stopping (the gateway).
    After a wait of `waited_us` (-1: it did not wait). `behalf`: the request that has its place.
    Other fields as of `RequestHeld`; `retry_after_s` was told to the client."""

    decision: str
    basis: Basis
    request: str
    at_us: int
    reason: str
    model: str
    tier: str
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
