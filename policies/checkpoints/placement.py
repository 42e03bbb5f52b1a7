"""Where a request's checkpoint goes: load-aware holders (LUMEN Algorithm 1, Eq. 4, 5).

Expected recovery load of a worker (Eq. 4): L(w) = alpha * blocks of the checkpoints placed
on it + beta * requests it runs. It is computed from the fold each time, never by the
increments Algorithm 1 and 2 print: those drop alpha, count a recovered request's blocks
twice and never subtract a discarded checkpoint. A placed request counts with what it is
expected to hold until more has been acknowledged, so that a burst of arrivals spreads.

The holder is the least loaded worker outside the primary's failure domain whose budget
(Eq. 5) has room; several holders are in different domains if there are enough. Workers
that could not use the blocks (another fingerprint family) come after all that could. No
room anywhere: no checkpoint, and the request is recomputed if it must be. Only when no
other domain has a living daemon may a holder be in the primary's domain.

`Index` keeps the loads in a tournament tree ordered by domain: the least loaded outside one
domain is the lesser of two ranges, O(log W), and so is an update. All integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from relume.events.vocabulary import HolderCandidate
from relume.events.vocabulary.enums import Exclusion

POLICIES = ("load_aware", "neighbour", "none")
FAR = 1 << 62


class Weights(Struct, frozen=True):
    """Eq. 4's factors: `alpha` a block to restore, `beta` a request in the queue."""

    alpha: int = 1
    beta: int = 4


class Site(Struct, frozen=True, kw_only=True):
    """One worker as a holder. `blocks` placed on it, `queue` requests it runs,
    `budget_bytes` of which `used_bytes` are held or promised."""

    worker: str
    domain: str
    blocks: int
    queue: int
    budget_bytes: int
    used_bytes: int
    family: str = ""
    alive: bool = True
    draining: bool = False

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.used_bytes)


class Demand(Struct, frozen=True, kw_only=True):
    """What is to be placed: the primary, the size expected, and how many holders. `keep`:
    holders it has already that are to stay."""

    request: str
    primary: str
    domain: str
    blocks: int
    bytes: int
    family: str = ""
    wanted: int = 1
    keep: tuple[str, ...] = ()


class Placement(Struct, frozen=True):
    """The answer. `reason` says why there are fewer holders than wanted; empty if not."""

    holders: tuple[str, ...]
    candidates: tuple[HolderCandidate, ...]
    reason: str = ""


def load(site: Site, weights: Weights) -> int:
    """LUMEN Eq. 4, in blocks."""
    return weights.alpha * site.blocks + weights.beta * site.queue


class Index:
    """Sites by load, for O(log W) decisions. Mutable, but no part of the state: it is
    built from `checkpoints.sites`, and kept up by `update` when a site changes."""

    def __init__(self, sites: Sequence[Site], weights: Weights | None = None) -> None:
        self._weights = weights or Weights()
        ordered = sorted(sites, key=lambda s: (s.domain, s.worker))
        self._sites = ordered
        self._place = {site.worker: at for at, site in enumerate(ordered)}
        self._domains: dict[str, tuple[int, int]] = {}
        for at, site in enumerate(ordered):
            first, _ = self._domains.get(site.domain, (at, at))
            self._domains[site.domain] = (first, at + 1)
        self._size = 1
        while self._size < max(len(ordered), 1):
            self._size *= 2
        families = sorted({site.family for site in ordered})
        self._trees = {family: [FAR] * (2 * self._size) for family in families}
        for site in ordered:
            self._write(site)

    def site(self, worker: str) -> Site | None:
        at = self._place.get(worker)
        return None if at is None else self._sites[at]

    def fits(self, sites: Sequence[Site], weights: Weights) -> bool:
        """Whether the index has the same sites (whatever their loads) and the same weights."""
        return (
            weights == self._weights
            and len(sites) == len(self._sites)
            and all(self._same(site) for site in sites)
        )

    def _same(self, site: Site) -> bool:
        known = self.site(site.worker)
        return known is not None and (known.domain, known.family) == (site.domain, site.family)

    @property
    def weights(self) -> Weights:
        return self._weights

    @property
    def sites(self) -> Sequence[Site]:
        return self._sites

    def update(self, site: Site) -> None:
        """The site's new loads; worker, domain and family do not change."""
        self._sites[self._place[site.worker]] = site
        self._write(site)

    def _write(self, site: Site) -> None:
        key = load(site, self._weights) if usable(site) else FAR
        tree = self._trees[site.family]
        at = self._place[site.worker] + self._size
        tree[at] = key
        while at > 1:
            at //= 2
            tree[at] = min(tree[2 * at], tree[2 * at + 1])

    def least(self, families: Sequence[str], avoid: Sequence[tuple[int, int]]) -> int:
        """Place of the least loaded site outside the ranges `avoid` (sorted, disjoint);
        -1 when there is none. Ties go to the first by domain and name."""
        best_key, best_at = FAR, -1
        for low, high in _complement(avoid, len(self._sites)):
            for family in families:
                key, at = self._lowest(self._trees[family], low, high)
                if key < best_key or (key == best_key < FAR and at < best_at):
                    best_key, best_at = key, at
        return best_at

    def _lowest(self, tree: list[int], low: int, high: int) -> tuple[int, int]:
        """(key, place) of the first least leaf in [low, high)."""
        left, right = low + self._size, high + self._size
        nodes_left, nodes_right = [], []
        while left < right:
            if left & 1:
                nodes_left.append(left)
                left += 1
            if right & 1:
                right -= 1
                nodes_right.append(right)
            left //= 2
            right //= 2
        node, key = 0, FAR
        for candidate in nodes_left + nodes_right[::-1]:
            if tree[candidate] < key:
                node, key = candidate, tree[candidate]
        if not node:
            return FAR, -1
        while node < self._size:
            node *= 2
            if tree[node] != key:
                node += 1
        return key, node - self._size

    def domain_range(self, domain: str) -> tuple[int, int]:
        """Places of a domain's sites; empty when it has none."""
        return self._domains.get(domain, (0, 0))

    def families(self) -> list[str]:
        return list(self._trees)


def usable(site: Site) -> bool:
    return site.alive and not site.draining


def _complement(ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    found, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low))
        at = max(at, high)
    if at < size:
        found.append((at, size))
    return found


def choose(index: Index, demand: Demand, policy: str = "load_aware") -> Placement:
    """Holders for `demand` (Algorithm 1), with every site that was looked at.

    Raises KeyError for a policy that is not in `POLICIES`.
    """
    return _CHOOSERS[policy](index, demand)


def _load_aware(index: Index, demand: Demand) -> Placement:
    looked: list[HolderCandidate] = []
    holders = [s for s in map(index.site, demand.keep) if s is not None][: demand.wanted]
    home = index.domain_range(demand.domain)
    mine = [f for f in index.families() if f == demand.family]
    others = [f for f in index.families() if f != demand.family]
    full = False
    for families in (mine, others):
        # the primary's domain, and sites without room
        blocked = [home]
        while len(holders) < demand.wanted:
            taken = [index.domain_range(site.domain) for site in holders]
            at = index.least(families, [*blocked, *taken])
            if at < 0:
                break
            site = index.sites[at]
            short = site.free_bytes < demand.bytes
            looked.append(_candidate(index, site, short))
            full = full or short
            if short:
                blocked.append((at, at + 1))
            else:
                holders.append(site)
    if not holders and not full:
        holders = _within_domain(index, demand, looked)
    if len(holders) < demand.wanted:
        holders += _same_domains_again(index, demand, holders, looked)
    reason = "" if len(holders) == demand.wanted else "budget" if full else "alone"
    return Placement(tuple(s.worker for s in holders), tuple(looked), reason)


def _candidate(index: Index, site: Site, short: bool) -> HolderCandidate:
    excluded = Exclusion.BUDGET if short else Exclusion.NONE
    return HolderCandidate(site.worker, load(site, index.weights), site.free_bytes, excluded)


def _within_domain(index: Index, demand: Demand, looked: list[HolderCandidate]) -> list[Site]:
    """No other domain is up: another worker of the primary's own is better than none."""
    low, high = index.domain_range(demand.domain)
    open_ = [
        site for site in index.sites[low:high] if usable(site) and site.worker != demand.primary
    ]
    open_.sort(key=lambda s: (s.family != demand.family, load(s, index.weights), s.worker))
    found = []
    for site in open_:
        short = site.free_bytes < demand.bytes
        looked.append(_candidate(index, site, short))
        if not short:
            found.append(site)
        if len(found) == demand.wanted:
            break
    return found


def _same_domains_again(
    index: Index, demand: Demand, holders: list[Site], looked: list[HolderCandidate]
) -> list[Site]:
    """Fewer domains than holders wanted: further workers of domains that have one."""
    found: list[Site] = []
    names = {site.worker for site in holders}
    home = index.domain_range(demand.domain)
    blocked = [(at, at + 1) for at, s in enumerate(index.sites) if s.worker in names]
    if not holders or holders[0].domain == demand.domain:
        return found
    while len(holders) + len(found) < demand.wanted:
        at = index.least(
            [demand.family] if demand.family in index.families() else [], [home, *blocked]
        )
        if at < 0:
            break
        site = index.sites[at]
        blocked.append((at, at + 1))
        short = site.free_bytes < demand.bytes
        looked.append(_candidate(index, site, short))
        if not short:
            found.append(site)
    return found


def _neighbour(index: Index, demand: Demand) -> Placement:
    """DéjàVu: the next workers in the ring, whatever their load, for comparison. The ring
    is by name; workers of the primary's domain are passed over while another is up."""
    ring = sorted(index.sites, key=lambda s: s.worker)
    after = [s for s in ring if s.worker > demand.primary]
    before = [s for s in ring if s.worker < demand.primary]
    up = [s for s in after + before if usable(s)]
    away = [s for s in up if s.domain != demand.domain]
    chosen = (away or up)[: demand.wanted]
    fitting = [s for s in chosen if s.free_bytes >= demand.bytes]
    looked = tuple(_candidate(index, s, s.free_bytes < demand.bytes) for s in chosen)
    reason = "" if len(fitting) == demand.wanted else "budget" if chosen else "alone"
    return Placement(tuple(s.worker for s in fitting), looked, reason)


def _none(index: Index, demand: Demand) -> Placement:
    """No checkpoints, for comparison."""
    return Placement((), (), "policy")


_CHOOSERS: dict[str, Callable[[Index, Demand], Placement]] = {
    "load_aware": _load_aware,
    "neighbour": _neighbour,
    "none": _none,
}
