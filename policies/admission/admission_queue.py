"""The admission queue of one replica: which requests wait for a worker, which is next, and which
are refused. Pure.

Theory of operation. Arrivals that would only lengthen an engine's own queue
(`relume.policies.routing.saturation`) wait here instead, where they can still be ordered. Tiers
have strict priority: lower tiers cost a higher one nothing. To prevent starvation, a request that
has waited `age_ms` gives its tier a credit of a token for each `AGED_PART` that higher tiers get,
and one of that tier goes as soon as the credit covers it. Within a tier tenants take turns
(`relume.policies.admission.fair_queue`); a tenant's requests stay in order.

The queue has a maximum number of requests and of bytes, and a maximum share for each named tenant;
requests without a tenant count in no share. A newcomer to a full queue is refused, or displaces a
request of lower value: in the lowest tier present, the newest one of the tenant with most waiting.

The expected wait of a newcomer follows from recent departures and from what is ahead of it: all
requests of higher tiers, and of its own tier what tenants with equal shares would get before it. If
its first token would be late, it is refused on arrival. If its time ends while it waits, it is
refused then.

Everything is a function of what came in, in order, with the times given; so replay, which has the
same events, has the same room (`relume.controlplane.replay.checks.verify_waiting`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeVar

from msgspec import Struct

from relume.events.vocabulary.enums import ShedReason, Tier
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.admission.fair_queue import MOST_COST, Entry, FairQueue
from relume.policies.routing.routing_settings import TIERS, USUAL_TIER

T = TypeVar("T")

AGED_PART = 8
"""Logs depend on it."""
WINDOW = 64
"""Departures from which the drain rate is estimated. Logs depend on it."""
ENOUGH = 8
"""With fewer nothing is foretold. Logs depend on it."""
LINES = 64
"""With more models, those without waiting requests are dropped. Logs depend on it."""
USUAL_OUTPUT = 256
MOST_OUTPUT = 1024
"""Tokens a request is expected to make that does not say, and that says more."""
LEAST_RETRY_S, MOST_RETRY_S = 1, 60

DEADLINE, EXPIRED, TOO_LONG = ShedReason.DEADLINE, ShedReason.EXPIRED, ShedReason.TOO_LONG
FULL, DISPLACED, SHARE = ShedReason.QUEUE_FULL, ShedReason.DISPLACED, ShedReason.TENANT_SHARE
NO_WORKER, STOPPING = ShedReason.NO_WORKER, ShedReason.STOPPING
DEGRADED = ShedReason.DEGRADED
REASONS = tuple(ShedReason)


class QueueDecision(Struct, frozen=True, kw_only=True):
    """The answer for a newcomer: `refused` says why it may not wait (empty: it waits), `evicted`
    names the requests that it displaces. `ahead_requests` and `ahead_tokens` are before it and are
    expected to take `predicted_us` (-1: unknown)."""

    refused: str
    evicted: tuple[str, ...]
    ahead_requests: int
    ahead_tokens: int
    predicted_us: int


class _Line:
    """The waiting requests of one model."""

    def __init__(self) -> None:
        self.tiers = [FairQueue() for _ in TIERS]
        self.credit = 0
        self.left = 0
        """Tokens that left with a worker."""
        self.first_us = 0
        """From leaving to the first token, as lately expected."""
        self.window: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    @property
    def requests(self) -> int:
        return sum(tier.requests for tier in self.tiers)

    @property
    def tokens(self) -> int:
        return sum(tier.tokens for tier in self.tiers)


class _Share(Struct, gc=False):
    requests: int = 0
    size: int = 0


class AdmissionQueue:
    """All waiting requests. `size`: bytes of their bodies."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.size = 0
        self._lines: dict[str, _Line] = {}
        self._shares: dict[str, _Share] = {}
        self._ends: list[tuple[int, int, str]] = []
        self._number = 0

    # --- coming

    def enter(self, entry: Entry, now_us: int, config: WaitingConfig) -> QueueDecision:
        """Queue it, or say why not. The requests that it displaces have left."""
        line = self._line(entry.model)
        requests, tokens = self._ahead(line, entry)
        predicted_us = self._predicted_us(line, tokens, now_us)
        refused = ""
        evicted: tuple[str, ...] = ()
        at_worker_us = now_us + max(predicted_us, 0) + line.first_us
        if entry.deadline_us and now_us >= entry.deadline_us:
            refused = EXPIRED
        elif entry.deadline_us and predicted_us >= 0 and at_worker_us > entry.deadline_us:
            refused = DEADLINE
        else:
            refused, evicted = self._evict_for(line, entry, config)
        if not refused:
            self._add(line, entry, now_us)
        return QueueDecision(
            refused=refused,
            evicted=evicted,
            ahead_requests=requests,
            ahead_tokens=tokens,
            predicted_us=predicted_us,
        )

    def put(self, entry: Entry, now_us: int) -> None:
        """Queue it without any check."""
        self._add(self._line(entry.model), entry, now_us)

    def _line(self, model: str) -> _Line:
        line = self._lines.get(model)
        if line is None:
            if len(self._lines) >= LINES:
                self._lines = {name: one for name, one in self._lines.items() if one.requests}
            line = self._lines[model] = _Line()
        return line

    def _ahead(self, line: _Line, entry: Entry) -> tuple[int, int]:
        """(requests, tokens) that go before it; at most as many tokens of each other tenant of its
        tier as of its own."""
        higher = line.tiers[: entry.rank]
        tier = line.tiers[entry.rank]
        tenant = tier.tenants.get(entry.tenant)
        own, count = (tenant.tokens, len(tenant.entries)) if tenant is not None else (0, 0)
        others = len(tier.tenants) - (tenant is not None)
        tokens = own + min(tier.tokens - own, others * (own + entry.tokens))
        requests = count + min(tier.requests - count, others * (count + 1))
        return (
            requests + sum(t.requests for t in higher),
            tokens + sum(t.tokens for t in higher),
        )

    def _predicted_us(self, line: _Line, tokens: int, now_us: int) -> int:
        if len(line.window) <= ENOUGH:
            return -1
        since_us, before = line.window[0]
        left = line.left - before
        return max(now_us - since_us, 1) * tokens // left if left else -1

    def _evict_for(
        self, line: _Line, entry: Entry, config: WaitingConfig
    ) -> tuple[str, tuple[str, ...]]:
        most_bytes = config.mb << 20
        if entry.size > most_bytes or not config.requests:
            return FULL, ()
        evicted: list[Entry] = []
        refused = ""
        while not refused:
            if self._beyond_share(entry, config):
                victim, refused = self._of_tenant(line, entry), SHARE
            elif len(self.entries) >= config.requests or self.size + entry.size > most_bytes:
                victim, refused = self._of_all(entry), FULL
            else:
                break
            if victim is not None:
                refused = ""
                self._drop(victim)
                evicted.append(victim)
        if refused:  # then none is displaced
            for other in reversed(evicted):
                self._put(self._lines[other.model], other)
            return refused, ()
        return "", tuple(other.request for other in evicted)

    def _beyond_share(self, entry: Entry, config: WaitingConfig) -> bool:
        if not entry.tenant:
            return False
        share = self._shares.get(entry.tenant)
        requests, size = (share.requests, share.size) if share is not None else (0, 0)
        percent = config.tenant_percent
        return (requests + 1) * 100 > max(config.requests * percent, 100) or (
            size > 0 and (size + entry.size) * 100 > (config.mb << 20) * percent
        )

    def _of_tenant(self, line: _Line, entry: Entry) -> Entry | None:
        """The tenant's own newest of its lowest tier below the newcomer's."""
        for rank in range(len(line.tiers) - 1, entry.rank, -1):
            tenant = line.tiers[rank].tenants.get(entry.tenant)
            if tenant is not None:
                return _newest(tenant.entries)
        return None

    def _of_all(self, entry: Entry) -> Entry | None:
        """The requests of lower value than the newcomer: in the lowest tier present, the newest
        ones of the tenant with most waiting."""
        for rank in range(len(TIERS) - 1, entry.rank - 1, -1):
            tiers = [line.tiers[rank] for line in self._lines.values()]
            tenants = [tier.largest() for tier in tiers if tier.requests]
            if not tenants:
                continue
            most = max(tenants, key=lambda tenant: tenant.tokens)
            if rank == entry.rank:
                own = self._lines[entry.model].tiers[rank].tenants.get(entry.tenant)
                has = own.tokens if own is not None else 0
                if most is own or has + entry.tokens >= most.tokens:
                    return None
            return _newest(most.entries)
        return None

    def _add(self, line: _Line, entry: Entry, now_us: int) -> None:
        if not line.requests:
            line.window.clear()
            line.window.append((now_us, line.left))
        self._number += 1
        entry.number = self._number
        self._put(line, entry)
        heappush(self._ends, (entry.end_us, entry.number, entry.request))
        if len(self._ends) > 2 * len(self.entries) + 64:
            self._ends = sorted((e.end_us, e.number, e.request) for e in self.entries.values())

    def _put(self, line: _Line, entry: Entry) -> None:
        line.tiers[entry.rank].add(entry)
        self.entries[entry.request] = entry
        self.size += entry.size
        share = self._shares.setdefault(entry.tenant, _Share())
        share.requests += 1
        share.size += entry.size

    # --- leaving

    def next(
        self, model: str, now_us: int, config: WaitingConfig, least_rank: int = 0
    ) -> Entry | None:
        """The next request, of those whose tier has `least_rank` or comes after it; None: no such
        request waits for that model."""
        line = self._lines.get(model)
        if line is None or not self.waiting(model, least_rank):
            return None
        top, aged = _ranks(line, now_us, config, least_rank)
        if aged >= 0:
            entry = line.tiers[aged].next()
            if line.credit >= AGED_PART * entry.tokens:
                return entry
        return line.tiers[top].next()

    def take(self, request: str, now_us: int, first_us: int, config: WaitingConfig) -> None:
        """It goes to a worker, where its first token is expected after `first_us` (-1: not known).
        It must wait."""
        entry = self.entries[request]
        line = self._lines[entry.model]
        top, aged = _ranks(line, now_us, config)
        if aged < 0:
            line.credit = 0
        elif entry.rank == top:
            line.credit = min(line.credit + entry.tokens, AGED_PART * MOST_COST)
        elif entry.rank == aged:
            line.credit = max(line.credit - AGED_PART * entry.tokens, 0)
        self._forget(entry)
        line.tiers[entry.rank].take(entry)
        line.left += entry.tokens
        line.window.append((now_us, line.left))
        if first_us >= 0:
            line.first_us += first_us - line.first_us >> 3 if line.first_us else first_us

    def leave(self, request: str) -> Entry | None:
        """It does not wait any more; None: it did not."""
        entry = self.entries.get(request)
        if entry is not None:
            self._drop(entry)
        return entry

    def extend(self, request: str, until_us: int) -> None:
        """It waits until then at most, if its first token is not due earlier. It must wait."""
        entry = self.entries[request]
        entry.until_us = until_us
        heappush(self._ends, (entry.end_us, entry.number, request))

    def over(self, now_us: int, most: int) -> list[Entry]:
        """At most `most` requests whose time to wait is over, soonest first. They stay in the
        queue."""
        found: list[Entry] = []
        ends = self._ends
        while ends and ends[0][0] <= now_us and len(found) < most:
            entry = self._at(heappop(ends))
            if entry is not None:
                found.append(entry)
        for entry in found:
            heappush(ends, (entry.end_us, entry.number, entry.request))
        return found

    def next_end_us(self) -> int:
        """When the next one's time is over; -1: the queue is empty."""
        while self._ends and self._at(self._ends[0]) is None:
            heappop(self._ends)
        return self._ends[0][0] if self._ends else -1

    def _at(self, end: tuple[int, int, str]) -> Entry | None:
        end_us, number, request = end
        entry = self.entries.get(request)
        if entry is None or (entry.end_us, entry.number) != (end_us, number):
            return None
        return entry

    def _drop(self, entry: Entry) -> None:
        self._forget(entry)
        self._lines[entry.model].tiers[entry.rank].drop(entry)

    def _forget(self, entry: Entry) -> None:
        del self.entries[entry.request]
        self.size -= entry.size
        share = self._shares[entry.tenant]
        share.requests -= 1
        share.size -= entry.size
        if not share.requests:
            del self._shares[entry.tenant]

    # --- what it shows

    def waiting(self, model: str, least_rank: int = 0) -> bool:
        """Whether anybody waits for that model, of a tier that has `least_rank` or comes after it."""
        line = self._lines.get(model)
        return line is not None and any(tier.requests for tier in line.tiers[least_rank:])

    def models(self) -> list[str]:
        """Models with waiting requests."""
        return [model for model, line in self._lines.items() if line.requests]

    def depths(self) -> list[tuple[Tier, int, int]]:
        """(tier, requests, tokens) that wait, of all models."""
        found = []
        for rank, name in enumerate(TIERS):
            tiers = [line.tiers[rank] for line in self._lines.values()]
            found.append((name, sum(t.requests for t in tiers), sum(t.tokens for t in tiers)))
        return found

    def retry_s(self, model: str, now_us: int, unknown_s: int) -> int:
        """When a refused client may retry: by then all requests that wait now are expected to have
        left; `unknown_s` without an estimate."""
        line = self._lines.get(model)
        drained_us = self._predicted_us(line, line.tokens, now_us) if line is not None else -1
        if drained_us < 0:
            return unknown_s
        return min(max(-(-drained_us // 1_000_000), LEAST_RETRY_S), MOST_RETRY_S)


def cost(prompt_tokens: int, max_tokens: int) -> int:
    """What a request is charged, in tokens: its prompt, and what it is expected to make."""
    made = min(max_tokens, MOST_OUTPUT) if max_tokens > 0 else USUAL_OUTPUT
    return min(max(prompt_tokens + made, 1), MOST_COST)


def rank_of(tier: str) -> int:
    """Place of a tier, 0 first; an unknown tier has the place of the standard one."""
    return TIERS.index(tier if tier in TIERS else USUAL_TIER)


def by_tier(items: Iterable[T], tier_of: Callable[[T], str]) -> list[T]:
    """The items of higher tiers first, those of one tier in the given order."""
    return sorted(items, key=lambda item: rank_of(tier_of(item)))


def _newest(entries: object) -> Entry:
    return entries[next(reversed(entries))]  # type: ignore[index, call-overload, no-any-return]


def _ranks(line: _Line, now_us: int, config: WaitingConfig, least_rank: int = 0) -> tuple[int, int]:
    """The highest tier with a waiting request, and the lower tier of the request that waits
    longest, if that is long enough (-1: none); tiers before `least_rank` do not count."""
    top, aged, oldest_us = -1, -1, now_us - config.age_ms * 1000
    for rank, tier in enumerate(line.tiers):
        if rank < least_rank or not tier.requests:
            continue
        if top < 0:
            top = rank
        elif (since_us := tier.oldest_us()) <= oldest_us:
            aged, oldest_us = rank, since_us
    return top, aged
