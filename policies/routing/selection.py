"""Which of the workers that may get a request gets it: an order, exclusions, and a choice.

Theory of operation. A policy puts the open workers of an index in an order (`_ORDERS`). As few as
possible are examined, from the best on, and the first that nothing excludes is chosen
(`relume.policies.routing.eligibility`).

Health is never traded: a worker that is lost, drains or is suspected is in no index. If a limit
excludes every examined worker, the first is chosen all the same, unless late requests are to be
shed. A worker that cannot do what the request needs stays excluded.

Several replicas decide at once, and none sees for a moment what the others just did. So a replica
that is not alone draws among the workers that would be no worse than the best if each other replica
had just sent it a request like this one (`_spread`). The draw depends on seed, replica, revision
and number of the decision, so replay draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from operator import attrgetter

from relume.events.vocabulary import Candidate
from relume.events.vocabulary.enums import Exclusion
from relume.policies.routing import estimate_index
from relume.policies.routing.eligibility import (
    NONE,
    WITHOUT_PLUGIN,
    Limits,
    excluded_for,
    limited,
    limits_of,
)
from relume.policies.routing.estimate_index import EstimateIndex
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.overlay.view import View

LOOKED = 16
"""Shortlist size: number of top-ranked workers that are checked for eligibility. Logs depend on
it."""
HITS = 32
"""Number of workers with most of the prompt cached that are evaluated one by one; the prefixes of
the others only bound how far the order of all must be followed."""
SURE, SURE_US = 4, 10_000
"""TTFTs that differ by less than this fraction, and by less than this time, count as equal: the
worker with the fewest requests is chosen."""
_requests = attrgetter("requests")
BLIND = 4
"""Replicas are blind to one another for some milliseconds only: what another may have sent counts
as so much less."""

Entry = tuple[int, int, int, int]
"""(cost, two numbers that break ties, at) of a worker."""
Found = Iterator[Entry]
"""Open workers, best first."""


def predicted_ttft(view: View, index: EstimateIndex, query: RouteQuery) -> Found:
    """Where the first token is expected first: what waits there, and what of this prompt is
    not held there, each at that worker's price."""
    turn = _turn(view, index)
    plain = index.quickest(query.at_us, query.tokens, turn)
    return _merged(index, plain, query, turn) if query.hits else plain


def jsq(view: View, index: EstimateIndex, query: RouteQuery) -> Found:
    """Join the shortest queue: fewest requests."""
    return index.shortest(_turn(view, index))


def power_of_two(view: View, index: EstimateIndex, query: RouteQuery) -> Found:
    """The better of two drawn at random."""
    there = index.there
    if query.avoid:
        places = ((at, index.workers[at]) for at in there)
        fresh = [at for at, w in places if f"{w.name}:{w.incarnation}" not in query.avoid]
        there = fresh or there
    if len(there) < 2:
        return iter([(_cost(index, at, query), 0, 0, at) for at in there])
    number = draw(view, "two")
    first = number % len(there)
    second = (first + 1 + number // len(there) % (len(there) - 1)) % len(there)
    drawn = [(_cost(index, there[at], query), 0, 0, there[at]) for at in (first, second)]
    return iter(sorted(drawn, key=lambda found: found[0]))


def prefix_first(view: View, index: EstimateIndex, query: RouteQuery) -> Found:
    """Where most of the prompt is held, however long the queue there; for comparison."""
    held = []
    for name, hit in query.hits.longest():
        at = index.number_of.get(name)
        if at is not None and not index.excluded(at):
            held.append((-hit, _cost(index, at, query), at))
    held.sort()
    for hit, cost, at in held:
        yield cost, hit, 0, at
    holding = {at for _, _, at in held}
    for entry in index.quickest(query.at_us, query.tokens, _turn(view, index)):
        if entry[3] not in holding:
            yield entry


def session_affinity(view: View, index: EstimateIndex, query: RouteQuery) -> Found:
    """Where the session belongs, unless that worker has more than its share; requests without
    a session as `predicted_ttft`."""
    if not query.session:
        yield from predicted_ttft(view, index, query)
        return
    count = max(len(index.there), 1)
    most = (index.config.affinity_percent * (index.requests + 1) + 100 * count - 1) // (100 * count)
    crowded = []
    for at in index.ring.from_(query.session):
        if index.excluded(at):
            continue
        has = index.estimates[at].requests
        if has < most:
            yield has, 0, 0, at
        else:
            crowded.append((has, 0, 0, at))
    yield from crowded


Order = Callable[[View, EstimateIndex, RouteQuery], Found]
_ORDERS: dict[str, tuple[Order, estimate_index.Order, bool]] = {
    "predicted_ttft": (predicted_ttft, estimate_index.by_time, True),
    "prefix_first": (prefix_first, estimate_index.by_time, False),
    "session_affinity": (session_affinity, estimate_index.by_time, False),
    "jsq": (jsq, estimate_index.by_requests, True),
    "power_of_two": (power_of_two, estimate_index.by_time, False),
}
"""Of each policy: its order, the index it reads, whether the choice among equals is drawn."""
POLICIES = tuple(_ORDERS)


def index_of(view: View, model: str, policy: str, spares: bool = False) -> EstimateIndex:
    """What `policy` reads. `spares`: for requests that a spare takes."""
    return estimate_index.of(view, model, _ORDERS[policy][1], spares)


def select(
    view: View,
    index: EstimateIndex,
    policy: str,
    query: RouteQuery,
    named: int,
    queues: Callable[[], EstimateIndex],
) -> tuple[Candidate | None, list[Candidate], bool]:
    """The worker that `policy` chooses, the candidates (the `named` best, and those that the choice
    turned on), and whether no worker was chosen because each would be too late. The chosen one may be
    excluded too, by a limit. `queues` gives the index of the
    admission queue."""
    order, _, spread = _ORDERS[policy]
    replicas = index.replicas if spread else 1
    looked, chosen = _examine(index, order(view, index, query), query, named, replicas)
    busy = [x for x in looked if x.excluded == Exclusion.SATURATED] if chosen is None else []
    if busy:
        chosen = _open(index, queues(), query, looked)
    if chosen is None and busy:  # all are: it goes where it would go anyhow
        chosen, fit = busy[0], busy
    else:
        fit = [x for x in looked if not x.excluded]
    if chosen is not None:
        chosen = _among_equals(view, index, query, policy, chosen, fit, replicas)
    else:
        chosen, late = _beyond_limits(query, looked)
        if late:
            return None, looked[:named], True
    if len(looked) > named:
        beyond = [x for x in looked[named:] if x is chosen or x.excluded == Exclusion.FAILED_BEFORE]
        looked = looked[:named] + beyond
    return chosen, looked, False


def _among_equals(
    view: View,
    index: EstimateIndex,
    query: RouteQuery,
    policy: str,
    best: Candidate,
    fit: list[Candidate],
    replicas: int,
) -> Candidate:
    """The choice among workers that are no worse than the best: drawn if several replicas decide,
    else the one with the fewest requests. Other orders than by time take the best."""
    if replicas > 1:
        return _spread(view, index, query, policy, fit, replicas)
    if policy != "predicted_ttft":
        return best
    most = best.cost + _unsure(best)
    return min((x for x in fit if x.cost <= most), key=_requests)


def _beyond_limits(query: RouteQuery, looked: list[Candidate]) -> tuple[Candidate | None, bool]:
    """The first worker that is able to take the request, though a limit excludes each; one that fails
    requests, or failed this one before, only if there is no other. True: the request is refused, because it
    would be too late on each."""
    able = [x for x in looked if x.excluded != Exclusion.WITHOUT_PLUGIN]
    fresh = [x for x in able if x.excluded != Exclusion.FAILED_BEFORE]
    if query.shed and fresh and all(x.excluded == Exclusion.TOO_LATE for x in fresh):
        return None, True
    sound = [x for x in fresh if x.excluded != Exclusion.FAILING]
    return ((sound or fresh or able)[0] if able else None), False


def _examine(
    index: EstimateIndex, found: Found, query: RouteQuery, named: int, replicas: int
) -> tuple[list[Candidate], Candidate | None]:
    """The best of an order, each with what excludes it, and the first that
    nothing does: as many as the
    record names, and up to `LOOKED` while none of them may be chosen, or the choice is drawn."""
    looked: list[Candidate] = []
    best = None
    most = max(named, LOOKED) + len(query.avoid)
    enough = max(named, LOOKED) if replicas > 1 else named
    limits, tokens = limits_of(index.limit, query), query.tokens
    for cost, _, _, at in found:
        here = _candidate(index, at, cost, query, tokens, limits)
        looked.append(here)
        if here.excluded is WITHOUT_PLUGIN:
            enough += 1
            most += 1
        elif best is None and not here.excluded:
            best = here
        seen = len(looked)
        if seen >= enough and (best is not None or seen >= most):
            break
    return looked, best


def _candidate(
    index: EstimateIndex, at: int, cost: int, query: RouteQuery, tokens: int, limits: Limits
) -> Candidate:
    """Worker number `at` as the record names it, with what excludes it. The request has `tokens`."""
    worker, estimate = index.workers[at], index.estimates[at]
    hit = min(query.hits.of(estimate.worker), tokens) if query.hits else 0
    tokens -= hit
    ttft_us = estimate.ttft_us(query.at_us, tokens)
    excluded = NONE
    if query.delivered or query.avoid:
        excluded = excluded_for(worker, query)
    return Candidate(
        worker=estimate.worker,
        incarnation=estimate.incarnation,
        cost=cost,
        prefill_tokens=estimate.prefill_tokens,
        requests=estimate.requests,
        excluded=excluded or limited(worker, estimate, query, tokens, ttft_us, limits),
        hit_tokens=hit,
        batch=estimate.batch,
        context_tokens=estimate.context_tokens,
        kv_free=estimate.kv_free,
        ttft_us=ttft_us,
        tpot_us=estimate.tpot_us,
    )


def _open(
    index: EstimateIndex, queues: EstimateIndex, query: RouteQuery, looked: list[Candidate]
) -> Candidate | None:
    """The worker that is open when those in the shortlist are saturated, if nothing else
    excludes it."""
    _, at = queues.soonest(index.limit)
    if at < 0 or any(x.worker == index.workers[at].name for x in looked):
        return None
    found, best = _examine(index, iter([(_cost(index, at, query), 0, 0, at)]), query, 1, 1)
    looked += found
    return best


def _merged(index: EstimateIndex, plain: Found, query: RouteQuery, turn: int) -> Found:
    """The order with hits, from the order without: a worker gains at most what it holds at the
    highest price, so whatever is cheaper than the next without its hits is final."""
    hits, count = query.hits, len(index.workers)

    def entry(at: int) -> Entry:
        return (
            _cost(index, at, query),
            estimate_index.turn_of(index.estimates[at]),
            (at - turn) % count,
            at,
        )

    known, most = {}, 0
    for number, (name, tokens) in enumerate(hits.longest()):
        if number == HITS:
            most = min(tokens, query.tokens)
            break
        at = index.number_of.get(name)
        if at is not None and not index.excluded(at):
            known[at] = entry(at)
    gain = most * index.dearest // 1000 + 1 if most else 0
    waiting = sorted(known.values(), reverse=True)
    for here in plain:
        cost, at = here[0], here[3]
        while waiting and waiting[-1] < (cost - gain,):
            yield waiting.pop()
        if at in known:
            continue
        if gain:
            waiting.append(entry(at))
            waiting.sort(reverse=True)
        else:
            while waiting and waiting[-1] < here:
                yield waiting.pop()
            yield here
    yield from reversed(waiting)


def _turn(view: View, index: EstimateIndex) -> int:
    return view.turn % max(len(index.workers), 1)


def _hit(query: RouteQuery, name: str) -> int:
    hits = query.hits
    return min(hits.of(name), query.tokens) if hits else 0


def _cost(index: EstimateIndex, at: int, query: RouteQuery) -> int:
    tokens = query.tokens - _hit(query, index.workers[at].name)
    return index.estimates[at].cost_us(query.at_us, tokens)


def _unsure(best: Candidate) -> int:
    """What another's cost may be above the best one's for the two to be alike."""
    return min(best.cost // SURE, SURE_US)


def _spread(
    view: View,
    index: EstimateIndex,
    query: RouteQuery,
    policy: str,
    fit: list[Candidate],
    replicas: int,
) -> Candidate:
    """One of those that would not be worse than the best, had each other replica sent it a
    request like this one just now."""
    best = fit[0]
    slack = 0
    if policy == "predicted_ttft":
        price = index.estimates[index.number_of[best.worker]].token_ns
        own = (query.tokens - best.hit_tokens) * price // 1000
        slack = max(own * (replicas - 1) // replicas // BLIND, _unsure(best))
    alike = [x for x in fit if x.cost <= best.cost + slack]
    return alike[draw(view, "spread") % len(alike)] if len(alike) > 1 else best


def draw(view: View, what: str) -> int:
    """A number that cannot be predicted but can be repeated: a digest of the decision, the replica
    and the state of the log."""
    replica = view.fleet.replicas.get(view.replica)
    seed = replica.seed if replica is not None else 0
    text = f"{seed}:{view.replica}:{view.fleet.revision}:{view.turn}:{what}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def unasked(index: EstimateIndex, looked: set[str]) -> Iterator[Candidate]:
    """The workers that were not looked at, for small fleets, which name everybody."""
    for at, worker in enumerate(index.workers):
        if worker.name not in looked:
            of = index.estimates[at]
            yield Candidate(
                worker=worker.name,
                incarnation=worker.incarnation,
                cost=0,
                prefill_tokens=of.prefill_tokens,
                requests=of.requests,
                excluded=index.excluded(at),
            )
