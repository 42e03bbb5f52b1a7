"""I26, tenants: while several tenants wait, none is passed over.

In the queue of one replica, among requests of one tier: while a tenant has a request that waits, the
tokens that leave with requests of the others are bounded. Each other tenant may take what that request
costs, and twice the dearest request, before it has its turn. `FACTOR` is room for queues that give
turns in larger portions.

A tier may wait for a higher one: only requests of the same tier are counted. Requests without a tenant
are one tenant.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct, field

from relume.chaos.validators.records import Log, events_of
from relume.events import vocabulary as v

FACTOR = 2
LEAST_COST = 1024
"""A queue may give turns in portions of as many tokens."""

Line = tuple[str, str]
"""Model and tier."""


class _Tenant(Struct, kw_only=True):
    """What waits, by request; `passed`: by other tenant, tokens that left since its last turn."""

    waiting: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)

    @property
    def oldest(self) -> int:
        """Cost of its oldest request."""
        return next(iter(self.waiting.values()), 0)


class _Queue:
    """The queue of one life of a replica."""

    def __init__(self) -> None:
        self._lines: dict[Line, dict[str, _Tenant]] = {}
        self._places: dict[str, tuple[Line, str]] = {}
        self._dearest = LEAST_COST

    def add(self, event: v.RequestHeld) -> None:
        line = event.model, event.tier
        tenants = self._lines.setdefault(line, {})
        tenants.setdefault(event.tenant, _Tenant()).waiting[event.request] = event.tokens
        self._places[event.request] = line, event.tenant
        self._dearest = max(self._dearest, event.tokens)

    def leave(self, request: str, served: bool) -> Iterator[tuple[str, str]]:
        """It waits no longer. Tenants that were passed over, and how."""
        if (place := self._places.pop(request, None)) is None:
            return
        line, name = place
        tenants = self._lines[line]
        tenant = tenants[name]
        cost = tenant.waiting.pop(request)
        if served:
            tenant.passed.clear()
        if not tenant.waiting:
            del tenants[name]
        for other, waits in tenants.items() if served else ():
            if other == name:
                continue
            before = waits.passed.get(name, 0)
            waits.passed[name] = before + cost
            bound = FACTOR * (waits.oldest + 2 * self._dearest)
            if before <= bound < before + cost:
                took = f"{name or 'others'} had {before + cost} tokens of turns, bound {bound}"
                yield other, f"a request of {other or 'no tenant'} waited while {took}"


def starved_tenants(log: Log) -> Iterator[tuple[str, str]]:
    """Tenants that were passed over, and how."""
    queues: dict[str, _Queue] = {}
    for at in events_of(log, "r."):
        event, kind = at.event, type(at.event)
        if kind is v.ReplicaStarted:
            queues.pop(at.stream, None)
        elif kind is v.RequestHeld:
            queues.setdefault(at.stream, _Queue()).add(event)
        elif kind in _LEAVES and (queue := queues.get(at.stream)) is not None:
            yield from queue.leave(event.request, kind is v.RouteDecided and bool(event.worker))


_LEAVES = (v.RouteDecided, v.RequestShed, v.RequestEnded)
