"""Which worker gets a request: `decide` is what the scheduler and replay call.

The two plain policies are here, `least_load` and `round_robin`, and planned moves. Policies that
compare time, prefixes and sessions are composed in `relume.policies.routing.selection`.

Least load: cost of a worker = prompt tokens it has not computed yet + REQUEST_TOKENS for each
request it holds: a decode costs a step's share, not its prompt (Llumnix Ial, "Metrics for
prefill and decode": uncomputed prefill tokens, and batch size, not raw prompt lengths).
Integers throughout. Ties rotate with the replica's count of decisions, from a start that differs
per replica, so an idle fleet is used evenly and two replicas do not herd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from relume.events.vocabulary import Candidate
from relume.events.vocabulary.enums import Exclusion
from relume.policies.degradation import effects
from relume.policies.routing import estimate_index, first_token_v1, prefix_hits, selection
from relume.policies.routing.cost_index import CostIndex, cost_of
from relume.policies.routing.cost_index import of as ranked
from relume.policies.routing.eligibility import (
    FAILED_BEFORE,
    FAILING,
    NONE,
    SPARE,
    excluded,
    excluded_for,
    excluded_open,
    fails_requests,
    is_failing,
    takes_spares,
)
from relume.policies.routing.route_query import RouteQuery
from relume.policies.routing.worker_estimate import UNHEARD_US, estimate_of
from relume.policies.routing.worker_index import WorkerIndex
from relume.policies.state import prefix_index
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View

LAST = frozenset((FAILED_BEFORE, FAILING))
"""Such workers come after all others."""
REQUEST_TOKENS = 32
"""Tokens of prefill that one held request weighs as much as."""


class Choice(Struct, frozen=True, kw_only=True):
    """The answer: worker and incarnation (empty, 0: none), and all that was looked at."""

    worker: str
    incarnation: int
    candidates: tuple[Candidate, ...]
    others: tuple[tuple[str, int], ...] = ()
    """Of those not named among the candidates: how many, by why they could not be chosen."""
    cached_tokens: int = 0
    """Of the prompt, expected to be held there."""
    refused: str = ""
    """Why the request is refused although a worker could serve it."""
    ttft_us: int = -1
    """The estimate that the worker was chosen by; -1: the policy goes by no estimate of time."""


def least_load(view: View, query: RouteQuery) -> Choice:
    """The least loaded worker that may take it.

    Workers the request failed on are used only when no other is left: health is never
    traded, past failures of this one request are.
    """
    suspected = view.suspected()
    candidates: list[Candidate] = []
    best: list[tuple[int, int, int]] = []
    second: list[tuple[int, int, int]] = []
    count = max(len(view.fleet.workers), 1)
    turn = view.turn % count
    spares = takes_spares(view, query.tier, query.lost)
    for index, worker in enumerate(view.fleet.workers.values()):
        name, incarnation = worker.name, worker.incarnation
        prefill, requests = view.load(worker)
        cost = cost_of(worker, (prefill, requests), REQUEST_TOKENS)
        reason = excluded(view, worker, query.model, suspected.get(name, 0) == incarnation)
        if spares and reason is SPARE:
            reason = NONE
        reason = reason or excluded_for(worker, query)
        if reason is NONE and is_failing(view, worker):
            reason = FAILING
        if reason is NONE:
            best.append((cost, (index - turn) % count, index))
        elif reason in LAST:
            second.append((cost, (index - turn) % count, index))
        candidates.append(
            Candidate(
                worker=name,
                incarnation=incarnation,
                cost=cost,
                prefill_tokens=prefill,
                requests=requests,
                excluded=reason,
            )
        )
    ranked = best or second
    if not ranked:
        return Choice(worker="", incarnation=0, candidates=tuple(candidates))
    chosen = candidates[min(ranked)[2]]
    return Choice(
        worker=chosen.worker, incarnation=chosen.incarnation, candidates=tuple(candidates)
    )


def round_robin(view: View, query: RouteQuery) -> Choice:
    """Each in turn, for comparison; same filters. A suspect has its turn in as many rounds as its price
    allows, in one of two with `price_percent` 200; in the others a worker without a price has it."""
    choice, in_turn = _in_turn(view, query)
    if not in_turn:
        return choice
    round_, place = divmod(view.turn, len(in_turn))
    chosen = in_turn[place]
    workers = view.fleet.workers
    paid, rest = divmod(round_ * 100, workers[chosen.worker].price_percent)
    if rest >= 100 and (free := [c for c in in_turn if workers[c.worker].price_percent == 100]):
        chosen = free[paid % len(free)]
    return _instead(choice, chosen)


def _round_robin_v1(view: View, query: RouteQuery) -> Choice:
    choice, in_turn = _in_turn(view, query)
    return _instead(choice, in_turn[view.turn % len(in_turn)]) if in_turn else choice


def _in_turn(view: View, query: RouteQuery) -> tuple[Choice, list[Candidate]]:
    """What `least_load` looked at, and the workers that may take the request."""
    choice = least_load(view, query)
    found = [c for c in choice.candidates if not c.excluded]
    return choice, found or [c for c in choice.candidates if c.excluded in LAST]


def _instead(choice: Choice, candidate: Candidate) -> Choice:
    """The same look at the fleet, and another one chosen."""
    return replace(choice, worker=candidate.worker, incarnation=candidate.incarnation)


def planned(view: View, query: RouteQuery) -> Choice:
    """The worker that the plan of the failure, or of the move, names, if it is still eligible; else
    as `least_load`. A request that was to leave a draining worker returns there if no other worker
    is left, and only its drain excludes that one."""
    return _planned(view, query, _may_return)


def _planned(
    view: View, query: RouteQuery, may_return: Callable[[View, Candidate, RouteQuery], bool]
) -> Choice:
    choice = least_load(view, query)
    plan = view.checkpoints.plan(query.request)
    if plan is None or plan.attempt != query.lost:
        return choice
    for candidate in choice.candidates:
        if candidate.worker == plan.worker and not candidate.excluded:
            return _instead(choice, candidate)
    if not choice.worker and plan.source:
        for candidate in choice.candidates:
            if candidate.worker == plan.source and may_return(view, candidate, query):
                return _instead(choice, candidate)
    return choice


def _may_return(view: View, source: Candidate, query: RouteQuery) -> bool:
    """Whether nothing but its drain speaks against the worker a request was to leave. The leader says
    no more of such a worker than that it drains, so failures there count by themselves."""
    if not _may_return_v1(view, source, query):
        return False
    worker = view.fleet.workers[source.worker]
    excluded_too = excluded_open(view, worker, suspected=False) not in (NONE, SPARE)
    return not excluded_too and not fails_requests(view, worker)


def _may_return_v1(view: View, source: Candidate, query: RouteQuery) -> bool:
    """The same as version 1 of the decision has it: the worker's health, failures there, and records
    of it that cannot be read do not count."""
    place = f"{source.worker}:{source.incarnation}"
    trusted = view.suspect(source.worker) != source.incarnation and place not in query.avoid
    return source.excluded == Exclusion.DRAINING and trusted


def selected(view: View, query: RouteQuery, policy: str) -> Choice:
    """What a policy of `relume.policies.routing.selection` chooses."""
    model = query.model
    spares = takes_spares(view, query.tier, query.lost)
    index = selection.index_of(view, model, policy, spares)
    config, count = index.config, len(index.workers)
    slo_us = config.slo_us(query.tier)
    query = replace(
        query,
        at_us=max(view.now_us, 0),
        hits=prefix_hits.of(view, model, query.prefix),
        slo_us=slo_us * effects.slo_factor(view, model) if slo_us else 0,
        shed=config.shed == "on",
    )
    whole = count <= WHOLE
    best, named, late = selection.select(
        view, index, policy, query, WHOLE if whole else NAMED,
        lambda: estimate_index.of(view, model, estimate_index.by_queue, spares),
    )  # fmt: skip
    others: tuple[tuple[str, int], ...] = ()
    if whole:
        named += selection.unasked(index, {x.worker for x in named})
    else:
        others = _others(index, len(named))
    if best is None:
        return Choice(
            worker="",
            incarnation=0,
            candidates=tuple(named),
            others=others,
            refused=Exclusion.TOO_LATE if late else "",
        )
    return Choice(
        worker=best.worker,
        incarnation=best.incarnation,
        candidates=tuple(named),
        others=others,
        cached_tokens=best.hit_tokens,
        ttft_us=best.ttft_us,
    )


POLICIES: dict[str, Callable[[View, RouteQuery], Choice]] = {
    "least_load": least_load,
    "round_robin": round_robin,
    **{name: partial(selected, policy=name) for name in selection.POLICIES},
}
"""The routing policies that can be set."""

RECORDED: dict[str, Callable[[View, RouteQuery], Choice]] = {**POLICIES, "planned": planned}
"""What decisions in the log may name."""
_OLDER: dict[tuple[str, int], Callable[[View, RouteQuery], Choice]] = {
    ("round_robin", 1): _round_robin_v1,
    ("planned", 1): partial(_planned, may_return=_may_return_v1),
}
"""Older versions of the rules, by policy and version of the decision."""

WHOLE = 16
"""Up to this fleet size a decision names all workers. Logs depend on it."""
NAMED = 8
"""Decisions of larger fleets name this number of best workers, and others that mattered; the rest
are counted. Logs depend on it."""


def first_token_us(view: View, query: RouteQuery, policy: str, choice: Choice) -> int:
    """The TTFT that the decision records: the estimate that chose the worker, or the same estimate
    if the policy uses none. -1: no worker, or no valid estimate, because the worker has not
    reported for too long."""
    ttft_us = choice.ttft_us
    found = view.fleet.workers.get(choice.worker)
    if found is None:
        return -1
    if ttft_us < 0:
        tokens = query.tokens
        tokens -= _cached_tokens(view, found, query, policy, choice)
        ttft_us = estimate_of(view, found).ttft_us(max(view.now_us, 0), tokens)
    return ttft_us if ttft_us < UNHEARD_US // 2 else -1


def first_token_us_v1(view: View, query: RouteQuery, policy: str, choice: Choice) -> int:
    """The same as version 1 of the decision recorded it: another estimate than the chosen one."""
    found = view.fleet.workers.get(choice.worker)
    if found is None:
        return -1
    cached = _cached_tokens(view, found, query, policy, choice)
    tokens = query.tokens - cached
    return first_token_v1.ttft_us(view, found, tokens, cached)


FIRST_TOKEN: dict[int, Callable[[View, RouteQuery, str, Choice], int]] = {
    1: first_token_us_v1,
    2: first_token_us,
}
"""By version of the decision (`decision_versions`): the TTFT it records."""


def _cached_tokens(
    view: View, worker: Worker, query: RouteQuery, policy: str, choice: Choice
) -> int:
    """Tokens of the prompt that the worker holds, at most all but one."""
    held = choice.cached_tokens
    if policy not in selection.POLICIES:  # it does not look at prefix caches
        held = prefix_index.hit_blocks(view, worker, query.prefix) * worker.cached.block_tokens
    return max(min(held, query.tokens - 1), 0)


def rule_of(policy: str, version: int) -> Callable[[View, RouteQuery], Choice]:
    """How `policy` chooses and names all workers. Raises KeyError for a policy that is unknown."""
    return _OLDER.get((policy, version)) or RECORDED[policy]


def decide(view: View, query: RouteQuery, policy: str, version: int = 0) -> Choice:
    """What `policy` chooses, with what the record of the decision is to hold of it. `version` of the
    decision; 0: this build's."""
    rule = rule_of(policy, version)
    count = len(view.fleet.workers)
    if count <= WHOLE or policy in selection.POLICIES:
        return rule(view, query)
    if policy == "least_load":
        return _least_load_v1(view, query) if version == 1 else _least_load(view, query)
    return _shortened(view, query, policy, rule(view, query))


def _least_load(view: View, query: RouteQuery) -> Choice:
    """Of a large fleet. Only what follows from this one request, and a fleet in which all workers
    that are left fail requests, takes a look at all of them."""
    if not query.avoid and not query.delivered:
        ranking = ranked(
            view, query.model, REQUEST_TOKENS, spares=takes_spares(view, query.tier, query.lost)
        )
        if ranking.open or FAILING not in ranking.reasons:
            return _ranked(view, ranking)
    return _shortened(view, query, "least_load", RECORDED["least_load"](view, query))


def _least_load_v1(view: View, query: RouteQuery) -> Choice:
    """The same as version 1 of the decision has it: failures count while the fold lacks one of this
    replica's, and not after that; a server without the plugin may get what a client has a part of."""
    if not query.avoid and not view.failed:
        return _ranked(view, ranked(view, query.model, REQUEST_TOKENS, failing=False))
    return _shortened(view, query, "least_load", RECORDED["least_load"](view, query))


def _ranked(view: View, ranking: CostIndex) -> Choice:
    """As `least_load`, without a look at all of them."""
    named = tuple(islice(ranking.best(view.turn % max(len(ranking.workers), 1)), NAMED))
    best = named[0] if named else None
    worker, incarnation = (best.worker, best.incarnation) if best is not None else ("", 0)
    return Choice(
        worker=worker,
        incarnation=incarnation,
        candidates=named,
        others=_others(ranking, len(named)),
    )


def _others(ranked_index: WorkerIndex, named: int) -> tuple[tuple[str, int], ...]:
    """How many are not named, by reason, with `named` of the open ones named."""
    left, more = ranked_index.reasons, ranked_index.open - named
    if not left:
        return (("", more),) if more > 0 else ()
    return tuple(sorted([*left.items(), *((("", more),) if more > 0 else ())]))


def _shortened(view: View, query: RouteQuery, policy: str, choice: Choice) -> Choice:
    """The same choice, with candidates as `decide` names them."""
    count = len(choice.candidates)
    turn = view.turn % count
    named: list[tuple[int, int, int]] = []
    rest: list[tuple[int, int, int]] = []
    for at, candidate in enumerate(choice.candidates):
        rank = candidate.cost, (at - turn) % count, at
        (rest if candidate.excluded else named).append(rank)
    named.sort()
    named, rest = named[:NAMED], named[NAMED:] + rest
    plan = view.checkpoints.plan(query.request) if policy == "planned" else None
    also = {choice.worker, *((plan.worker, plan.source) if plan is not None else ())}
    left: dict[str, int] = {}
    for rank in sorted(rest, key=lambda rank: rank[2]):
        candidate = choice.candidates[rank[2]]
        if candidate.worker in also or candidate.excluded == Exclusion.FAILED_BEFORE:
            named.append(rank)
        else:
            left[candidate.excluded] = left.get(candidate.excluded, 0) + 1
    if not left:
        return choice
    shown = tuple(choice.candidates[rank[2]] for rank in named)
    return replace(choice, candidates=shown, others=tuple(sorted(left.items())))
