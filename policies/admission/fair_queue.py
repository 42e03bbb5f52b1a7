"""The order of several tenants: deficit round robin (Shreedhar and Varghese), by tokens.

A round grants each waiting tenant `QUANTUM` tokens; its oldest request goes when the grants cover
the request's cost. While two tenants wait, their service therefore differs by at most a quantum and
two requests, whatever either sends. A tenant's requests stay in order. A tenant without waiting
requests loses its grant; one whose request leaves without its turn keeps at most one round's.

To come, go and leave are O(log n) amortised (a request costs a step for each quantum of its
cost), for the order of tenants by how much waits.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from msgspec import Struct

QUANTUM = 1024
"""Tokens of one grant. Logs depend on it."""
MOST_COST = 1 << 17
"""The maximum charge of a request. Logs depend on it."""


class Entry(Struct, gc=False, kw_only=True):
    """One request that waits. `rank`: its tier, 0 goes first. `tokens`: its cost, `size`: bytes of
    its body. Times on the replica's clock, microseconds: `deadline_us` of its first token (0:
    none), `until_us` it waits at most. `number`: in the order of arrival."""

    request: str
    model: str
    rank: int
    tenant: str
    tokens: int
    size: int
    entered_us: int
    until_us: int
    deadline_us: int = 0
    number: int = 0

    @property
    def end_us(self) -> int:
        """When waiting on has no sense."""
        if self.deadline_us and self.deadline_us < self.until_us:
            return self.deadline_us
        return self.until_us


class Tenant:
    """One tenant's requests in their order, and what it was granted."""

    __slots__ = ("deficit", "entries", "granted", "name", "number", "tokens")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.tokens = 0
        self.deficit = 0
        self.granted = False


class FairQueue:
    """The requests of one tier."""

    def __init__(self) -> None:
        self.tenants: OrderedDict[str, Tenant] = OrderedDict()
        """In the order of their turns."""
        self.requests = 0
        self.tokens = 0
        self._numbers = 0
        self._most: list[tuple[int, int, str]] = []
        self._ages: OrderedDict[str, int] = OrderedDict()

    def add(self, entry: Entry) -> None:
        """Append it after all others of its tenant."""
        tenant = self.tenants.get(entry.tenant)
        if tenant is None:
            self._numbers += 1
            tenant = self.tenants[entry.tenant] = Tenant(entry.tenant, self._numbers)
        tenant.entries[entry.request] = entry
        self._ages[entry.request] = entry.entered_us
        self._count(tenant, entry, 1)

    def next(self) -> Entry:
        """The next request; the same until a request joins or leaves. There must be one."""
        while True:
            name, tenant = next(iter(self.tenants.items()))
            if not tenant.granted:
                tenant.granted = True
                tenant.deficit += QUANTUM
            entry = next(iter(tenant.entries.values()))
            if entry.tokens <= tenant.deficit:
                return entry
            tenant.granted = False
            self.tenants.move_to_end(name)

    def take(self, entry: Entry) -> None:
        """It had its turn."""
        tenant = self.tenants[entry.tenant]
        tenant.deficit -= entry.tokens
        self._remove(tenant, entry)

    def drop(self, entry: Entry) -> None:
        """It leaves without."""
        tenant = self.tenants[entry.tenant]
        tenant.deficit = min(tenant.deficit, QUANTUM)
        self._remove(tenant, entry)

    def largest(self) -> Tenant:
        """The tenant with most tokens waiting, of several the one longest here. There must be
        one."""
        most = self._most
        while True:
            tokens, number, name = most[0]
            tenant = self.tenants.get(name)
            if tenant is not None and (-tenant.tokens, tenant.number) == (tokens, number):
                return tenant
            heappop(most)

    def oldest_us(self) -> int:
        """When the one that waits longest came. There must be one."""
        return next(iter(self._ages.values()))

    def _remove(self, tenant: Tenant, entry: Entry) -> None:
        del tenant.entries[entry.request]
        del self._ages[entry.request]
        self._count(tenant, entry, -1)
        if not tenant.entries:
            del self.tenants[tenant.name]

    def _count(self, tenant: Tenant, entry: Entry, by: int) -> None:
        self.requests += by
        self.tokens += by * entry.tokens
        tenant.tokens += by * entry.tokens
        heappush(self._most, (-tenant.tokens, tenant.number, tenant.name))
        if len(self._most) > 4 * len(self.tenants) + 64:
            self._most = [(-t.tokens, t.number, t.name) for t in self.tenants.values()]
            heapify(self._most)
