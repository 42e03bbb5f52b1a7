"""Decisions about checkpoints, on a view: where they go, and how lost requests continue.

The algorithms are in `placement` and in `relume.policies.recovery.plan`; here are their inputs:
Eq. 4's sums, link speeds and paces, all of them from the view. The scheduler decides by
calling these, and so does replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from relume.events.vocabulary import RecoveryChoice
from relume.events.vocabulary.enums import Exclusion, PlacementCause, Tier
from relume.policies.checkpoints import placement
from relume.policies.checkpoints.checkpoint_settings import CheckpointConfig, config_of
from relume.policies.checkpoints.placement import Demand, Index, Placement, Site, Weights
from relume.policies.health.health_life import is_quarantined
from relume.policies.recovery import plan as recovery_plan
from relume.policies.recovery.recovery_options import (
    UNLIMITED,
    Estimates,
    InterruptedRequest,
    Links,
    Rules,
    StoredBlocks,
    Target,
)
from relume.policies.routing.eligibility import excluded_as_holder, excluded_at
from relume.policies.routing.worker_estimate import kv_free
from relume.policies.state import coverage, dirty_set
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.overlay.view import View
from relume.policies.state.prefill_rate import prefill_ns, trusted_ns
from relume.policies.state.prompt_tokens import prompt_tokens

MOST_HOLDERS = 4
"""Maximum number of endpoints in a dispatch."""


class CachedIndex(Struct):
    """An index of the sites at a count of `relume.policies.state.dirty_set`, and the workers in the
    overlay then."""

    index: Index
    count: int
    overlaid: tuple[str, ...]


class Lost(Struct, frozen=True):
    """A request whose attempt was lost: `tokens` of it must be in a cache again. `avoid`:
    `worker:incarnation` that failed it before."""

    request: str
    attempt: int
    tokens: int
    avoid: tuple[str, ...] = ()
    tier: Tier = Tier.NONE


# --- where checkpoints go ----------------------------------------------------------------


def sites(view: View) -> list[Site]:
    """All holders with what Eq. 4 and 5 need, the replica's own decisions included."""
    ahead = view.checkpoints.shares()
    found = (_site(view, name, ahead) for name in view.fleet.holders)
    return [site for site in found if site is not None]


def _site(view: View, name: str, ahead: dict[str, tuple[int, int]]) -> Site | None:
    holder, worker = view.fleet.holders.get(name), view.fleet.workers.get(name)
    if holder is None or worker is None:
        return None
    blocks, promised = ahead.get(name, (0, 0))
    excluded = excluded_as_holder(worker)
    return Site(
        worker=name,
        domain=worker.domain,
        blocks=holder.placed_blocks + blocks,
        queue=view.load(worker)[1],
        budget_bytes=holder.budget_bytes,
        used_bytes=holder.held_bytes + holder.promised_bytes + promised,
        family=holder.family,
        alive=holder.alive and excluded != Exclusion.LOST,
        draining=excluded == Exclusion.DRAINING,
    )


def index_of(view: View, weights: Weights) -> Index:
    """The sites by load. Its cache stays with the view from decision to decision; it re-evaluates
    only what the fold changed since, and what is or was in the overlay."""
    ahead, marks = view.checkpoints.shares(), dirty_set.of(view.fleet)
    cached = view.checkpoints.cached_index
    overlaid = (*view.overlaid(), *ahead)
    index = _brought_up(view, cached, weights, ahead, overlaid) if cached is not None else None
    if index is None:
        now = sites(view)
        index = cached.index if cached is not None and cached.index.fits(now, weights) else None
        if index is None:
            index = Index(now, weights)
        for site in now:
            if site != index.site(site.worker):
                index.update(site)
    view.checkpoints.cached_index = CachedIndex(index, marks.count, overlaid)
    return index


def _brought_up(
    view: View,
    cached: CachedIndex,
    weights: Weights,
    ahead: dict[str, tuple[int, int]],
    overlaid: tuple[str, ...],
) -> Index | None:
    """The stored index, brought up to date; None if it must be rebuilt."""
    names = dirty_set.of(view.fleet).since(cached.count)
    if names is None or weights != cached.index.weights:
        return None
    for name in dict.fromkeys((*names, *cached.overlaid, *overlaid)):
        site, known = _site(view, name, ahead), cached.index.site(name)
        if site is None and known is None:
            continue
        if site is None or known is None:
            return None
        if (site.domain, site.family) != (known.domain, known.family):
            return None
        if site != known:
            cached.index.update(site)
    return cached.index


def expected_blocks(worker: Worker, tokens: int, max_tokens: int, config: CheckpointConfig) -> int:
    """Blocks that a request is expected to fill on `worker`: the `tokens` it has, and its future
    output, counted up to `config.output_tokens`."""
    most = min(max_tokens, config.output_tokens) if max_tokens > 0 else config.output_tokens
    whole = min(tokens + most, max(worker.max_model_len, 1))
    return -(-whole // max(worker.block_size, 1))


def takes_part(view: View, worker: str) -> bool:
    """Whether requests on `worker` can have a checkpoint: its engine makes them, and some
    daemon is there."""
    found = view.fleet.workers.get(worker)
    return bool(found and found.block_bytes) and any(h.alive for h in view.fleet.holders.values())


def place(view: View, request: str, primary: str, blocks: int) -> tuple[Placement, int]:
    """Holders for a request that runs on `primary` (LUMEN Algorithm 1), and the bytes they
    are to expect. Its present holders stay if they are still useful.

    Raises KeyError for a policy or unknown worker.
    """
    config = config_of(view)
    worker = view.fleet.workers[primary]
    size = blocks * worker.block_bytes
    demand = Demand(
        request=request,
        primary=primary,
        domain=worker.domain,
        blocks=blocks,
        bytes=size,
        family=worker.family,
        wanted=min(config.holders, MOST_HOLDERS),
        keep=reusable_holders(view, request, worker),
    )
    index = index_of(view, Weights(config.alpha, config.beta))
    return placement.choose(index, demand, config.placement), size


def reusable_holders(view: View, request: str, primary: Worker) -> tuple[str, ...]:
    """Of the request's holders those that may stay, now that it runs on `primary`."""
    placed = view.checkpoints.placement(request)
    if placed is None:
        return ()
    workers = view.fleet.workers
    return tuple(
        name
        for name in placed.holders
        if not unfit(view.fleet, name) and workers[name].domain != primary.domain
    )


def unfit(fleet: Fleet, holder: str) -> PlacementCause | None:
    """Why `holder` may not continue to hold checkpoints."""
    site, excluded = fleet.holders.get(holder), excluded_as_holder(fleet.workers.get(holder))
    if site is None or not site.alive or excluded == Exclusion.LOST:
        return PlacementCause.HOLDER_LOST
    return PlacementCause.DRAINING if excluded else None


def displaced(view: View, request: str, primary: str) -> PlacementCause | None:
    """Why the checkpoint of a request that runs on `primary` must be placed again; None: it stays.
    HOLDER_JOINED: it has too few holders."""
    placed = view.checkpoints.placement(request)
    holders = placed.holders if placed is not None else ()
    for name in holders:
        if name == primary:
            return PlacementCause.RECOVERED
        if cause := unfit(view.fleet, name):
            return cause
    config = config_of(view)
    wanted = 0 if config.placement == "none" else min(config.holders, MOST_HOLDERS)
    return PlacementCause.HOLDER_JOINED if len(holders) < wanted else None


# --- how lost requests continue --------------------------------------------------------------


def stored(fleet: Fleet, request: str) -> tuple[StoredBlocks, ...]:
    """Which living holders have a part of the request, and how much."""
    found = list[StoredBlocks]()
    if _is_doubted(fleet, request):
        return ()
    for name, site in fleet.holders.items():
        covered = site.covered.get(request) if site.alive else None
        if covered is not None and (tokens := coverage.covered_tokens(fleet, name, request)):
            found.append(StoredBlocks(name, tokens, sum(covered.bytes.values())))
    return tuple(found)


def _is_doubted(fleet: Fleet, request: str) -> bool:
    """Whether blocks of the request may come from a quarantined worker, which are not used: an attempt
    after the one there may have restored them and written them again."""
    known, placed = fleet.requests.get(request), fleet.placed.get(request)
    if known is not None and known.doubted is True:
        return True
    return placed is not None and is_quarantined(fleet.workers.get(placed.primary))


def plan(
    view: View, worker: str, incarnation: int, lost: Sequence[Lost]
) -> tuple[RecoveryChoice, ...]:
    """How the requests that one failure interrupted continue, decided together (LUMEN Algorithm 2).
    None if no worker holds any part of them: then there is nothing to compare.

    Raises KeyError for a policy or unknown worker.
    """
    config = config_of(view)
    if config.recovery == "recompute":
        return ()
    interrupted, targets, links, rules = _question(
        view, worker, incarnation, lost, Exclusion.FAILED
    )
    if not any(r.stored for r in interrupted):
        return ()
    rules = replace(rules, budget_us=1000 * config.restore_budget_ms)
    return recovery_plan.plan(interrupted, targets, links, rules, config.recovery)


def estimates(
    view: View, worker: str, incarnation: int, running: Sequence[Lost], trust_percent: int = 0
) -> tuple[list[InterruptedRequest], Estimates]:
    """The options of requests that leave a living engine. `trust_percent`: as of
    `prefill_rate.trusted_ns`.

    Raises KeyError for a unknown worker.
    """
    question = _question(view, worker, incarnation, running, Exclusion.SOURCE, trust_percent)
    interrupted, targets, links, rules = question
    return interrupted, Estimates(targets, links, rules, len(interrupted))


def _question(
    view: View,
    worker: str,
    incarnation: int,
    lost: Sequence[Lost],
    why_not: Exclusion,
    trust_percent: int = 0,
) -> tuple[list[InterruptedRequest], list[Target], Links, Rules]:
    config = config_of(view)
    failed = view.fleet.workers[worker]
    held = {r.request: stored(view.fleet, r.request) for r in lost}
    if config.recovery == "recompute":
        held = dict.fromkeys(held, ())
    interrupted = [
        InterruptedRequest(
            request=r.request,
            attempt=r.attempt,
            tokens=r.tokens,
            stored=held[r.request],
            model=failed.model,
            family=failed.family,
            avoid=r.avoid,
            tier=r.tier,
        )
        for r in lost
    ]
    holders = {s.holder for parts in held.values() for s in parts}
    at = index_of(view, Weights(config.alpha, config.beta))
    left = f"{worker}:{incarnation}"
    trusted = trusted_ns(view.fleet, trust_percent)
    targets = [_target(view, w, at, left, why_not, config, trusted) for w in _known(view)]
    rules = Rules(
        theta=-1,
        theta_percent=config.theta_percent,
        tau=config.tau,
        request_load=config.beta,
        per_block=max(failed.block_size, 1),
        alpha=config.alpha,
    )
    rates = _inferred_links if config.recovery == "least_total" else _measured_links
    return interrupted, targets, rates(view.fleet, sorted(holders), config), rules


def _known(view: View) -> list[Worker]:
    return [w for w in view.fleet.workers.values() if w.model]


def _target(
    view: View,
    worker: Worker,
    at: Index,
    left: str,
    why_not: Exclusion,
    config: CheckpointConfig,
    trusted: dict[str, tuple[int, int]],
) -> Target:
    excluded = excluded_at(view, worker)
    if excluded is Exclusion.SPARE and why_not is Exclusion.FAILED:
        excluded = Exclusion.NONE  # what a worker failed is what spares are for
    if not excluded and f"{worker.name}:{worker.incarnation}" == left:
        excluded = why_not
    site = at.site(worker.name)
    prefill, requests = view.load(worker)
    load = placement.load(site, at.weights) if site is not None else config.beta * requests
    pace = prefill_ns(view.fleet, worker, config.prefill_ns)
    if bounds := trusted.get(worker.steps_like):
        pace = min(max(pace, bounds[0]), bounds[1])
    return Target(
        worker=worker.name,
        load=load,
        wait_us=prefill * pace // 1000,
        prefill_ns_per_token=pace,
        model=worker.model,
        family=worker.family,
        excluded=excluded,
        incarnation=worker.incarnation,
        requests=requests,
        waiting=max(requests - worker.decoding, 0),
        available_blocks=_available_blocks(worker, prefill, config),
        block_tokens=worker.block_size,
    )


def _available_blocks(worker: Worker, prefill_tokens: int, config: CheckpointConfig) -> int:
    """KV blocks of `worker` that plans may give to others."""
    if not (config.headroom_percent and worker.kv_blocks):
        return UNLIMITED
    reserved = config.headroom_percent * worker.kv_blocks // 100
    return kv_free(worker, prefill_tokens) - reserved


def _measured_links(fleet: Fleet, holders: Sequence[str], config: CheckpointConfig) -> Links:
    """Measured bandwidths, and the assumed one of each tier of links not measured yet."""
    rates = {}
    for holder in holders:
        for worker in fleet.workers:
            rates[holder, worker] = _rate(fleet, holder, worker, config)
    return Links(config.link_machine, config.link_network, rates, config.latency_us)


def _inferred_links(fleet: Fleet, holders: Sequence[str], config: CheckpointConfig) -> Links:
    """The same; an unmeasured link is assumed to carry the lower of two measured maxima: what the
    sending host has sent, and what the receiving host has received. A worker's own host is no
    slower than what reaches it from others."""
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    for name, site in fleet.holders.items():
        for worker, moved in site.rates.items():
            if worker != name and moved.us and not _near(fleet, name, worker):
                speed = max(moved.bytes * 1000 // moved.us, 1)
                sent[name] = max(sent.get(name, 0), speed)
                received[worker] = max(received.get(worker, 0), speed)
    rates = {}
    for holder in holders:
        for worker in fleet.workers:
            rate = _rate(fleet, holder, worker, config)
            if rate and not coverage.bandwidth(fleet, holder, worker):
                ends = [end for end in (sent.get(holder), received.get(worker)) if end]
                if holder == worker:
                    rate = max(rate, config.link_machine, received.get(worker, 0))
                elif ends and not _near(fleet, holder, worker):
                    rate = min(ends)
            rates[holder, worker] = rate
    return Links(config.link_machine, config.link_network, rates, config.latency_us)


def _near(fleet: Fleet, holder: str, worker: str) -> bool:
    """Whether they share a machine, so that no network is between them."""
    return coverage.endpoint(fleet, holder, worker).startswith("unix:")


def _rate(fleet: Fleet, holder: str, worker: str, config: CheckpointConfig) -> int:
    """Bytes a millisecond; 0 when the worker cannot reach the holder."""
    if not (where := coverage.endpoint(fleet, holder, worker)):
        return 0
    if measured := coverage.bandwidth(fleet, holder, worker):
        return max(measured // 1000, 1)
    if where.startswith("unix:"):
        return config.link_machine
    one, other = fleet.workers.get(holder), fleet.workers.get(worker)
    near = one is not None and other is not None and one.domain == other.domain
    return config.link_domain if near else config.link_network


def tokens_lost(view: View, request: str, estimate: int, delivered: int) -> int:
    """What must be in a cache for the request to continue: its prompt (`estimate`, until an
    engine has counted it) and what was delivered, and more than its holders have."""
    held = max((part.tokens for part in stored(view.fleet, request)), default=0)
    return max(prompt_tokens(view.fleet, request, estimate) + delivered, held + 1)


def sources(view: View, request: str, worker: str, attempt: int) -> tuple[str, ...]:
    """Endpoints the engine of `worker` may have the request's blocks from, the planned one
    first; none when lost attempt `attempt` was planned to be computed again."""
    if config_of(view).recovery == "recompute":
        return ()
    planned = view.checkpoints.plan(request)
    first = ""
    if planned is not None and (planned.attempt, planned.worker) == (attempt, worker):
        first = planned.holder
        if not first:
            return ()
    parts = sorted(stored(view.fleet, request), key=lambda p: (p.holder != first, -p.tokens))
    return endpoints(view, (p.holder for p in parts), worker)


def endpoints(view: View, holders: Iterable[str], worker: str) -> tuple[str, ...]:
    """Where the engine of `worker` reaches these holders; those out of reach are left out."""
    reached = (coverage.endpoint(view.fleet, holder, worker) for holder in holders)
    return tuple(dict.fromkeys(e for e in reached if e))[:MOST_HOLDERS]
