"""Which worker takes a request. Policies that weigh time, prefixes and sessions are put together
in `policies.selectors`; here are the two plain ones that every log tells, and planned moves.

Least load: cost of a worker = prompt tokens it has not computed yet + REQUEST_TOKENS for each
request it holds: a decode costs a step's share, not its prompt (Llumnix Ial, "Metrics for
prefill and decode": uncomputed prefill tokens, and batch size, not raw prompt lengths).
Integers throughout. Ties go round by the replica's count of decisions, from a beginning
of its own, so an idle fleet is used evenly and two replicas do not herd.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

from msgspec import Struct

from relume.events.vocabulary import Candidate
from relume.policies import board as boards
from relume.policies import hits, predict, prefixes, selectors
from relume.policies.kept import Kept, Why
from relume.policies.ranking import of as ranked
from relume.policies.state import Worker
from relume.policies.view import View

REQUEST_TOKENS = 32
"""Tokens of prefill that one held request weighs as much as."""


class Query(Struct, frozen=True):
    """What is to be placed. `avoid` holds `worker:incarnation` that failed it before; `lost`
    is the attempt that was (0: none yet). `prefix`: marks of the prompt, packed (`events.prefix`);
    what workers hold of it is `policies.hits`. `session` it belongs to, `tier` of its
    answer."""

    request: str
    model: str
    prompt_tokens: int
    delivered: int
    avoid: tuple[str, ...] = ()
    lost: int = 0
    prefix: bytes = b""
    session: str = ""
    tier: str = ""


class Choice(Struct, frozen=True):
    """The answer: worker and incarnation (empty, 0: none), and all that was looked at."""

    worker: str
    incarnation: int
    candidates: tuple[Candidate, ...]
    others: tuple[tuple[str, int], ...] = ()
    """Of those not named among the candidates: how many, by why they could not be chosen."""
    cached_tokens: int = 0
    """Of the prompt, expected to be held there."""
    refused: str = ""
    """Why nobody is to take it though somebody could."""


def exclusion(view: View, worker: Worker, query: Query) -> str:
    """Why `worker` cannot take the request; empty when it can."""
    distrusted = view.suspect(worker.name) == worker.incarnation
    return _excluded(worker, query.model, distrusted) or _unable(worker, query)


def shut(model: str) -> Why:
    """Why a worker, distrusted or not, takes no request for `model`."""
    return lambda worker, distrusted: _excluded(worker, model, distrusted)


def _unable(worker: Worker, query: Query) -> str:
    """Why the worker cannot go on with what another one began."""
    return selectors.UNABLE if worker.plain and query.delivered else ""


def _excluded(worker: Worker, model: str, distrusted: bool = False) -> str:
    if worker.engine != "ready":
        return f"engine {worker.engine}"
    if worker.model != model:
        return "other model"
    if not worker.present:
        return "lost"
    if worker.draining:
        return "draining"
    return "suspected" if distrusted else ""


def least_load(view: View, query: Query) -> Choice:
    """The least loaded worker that may take it.

    Workers the request failed on are used only when no other is left: health is never
    traded, past failures of this one request are.
    """
    distrusted = view.distrusted()
    candidates: list[Candidate] = []
    best: list[tuple[int, int, int]] = []
    second: list[tuple[int, int, int]] = []
    count = max(len(view.fleet.workers), 1)
    turn = view.turn % count
    for index, worker in enumerate(view.fleet.workers.values()):
        name, incarnation = worker.name, worker.incarnation
        prefill, requests = view.load(worker)
        cost = prefill + REQUEST_TOKENS * requests
        excluded = _excluded(worker, query.model, distrusted.get(name, 0) == incarnation)
        excluded = excluded or _unable(worker, query)
        if not excluded:
            rank = (cost, (index - turn) % count, index)
            if query.avoid and f"{name}:{incarnation}" in query.avoid:
                excluded = "failed it before"
                second.append(rank)
            else:
                best.append(rank)
        candidates.append(Candidate(name, incarnation, cost, prefill, requests, excluded))
    ranked = best or second
    if not ranked:
        return Choice("", 0, tuple(candidates))
    chosen = candidates[min(ranked)[2]]
    return Choice(chosen.worker, chosen.incarnation, tuple(candidates))


def round_robin(view: View, query: Query) -> Choice:
    """Each in turn, for comparison; same filters."""
    choice = least_load(view, query)
    open_ = [c for c in choice.candidates if not c.excluded] or [
        c for c in choice.candidates if c.excluded == "failed it before"
    ]
    if not open_:
        return choice
    chosen = open_[view.turn % len(open_)]
    return Choice(chosen.worker, chosen.incarnation, choice.candidates)


def planned(view: View, query: Query) -> Choice:
    """Where the plan made for the failure, or the move, sends it, if that can still take it;
    else as `least_load`. One that was to leave a draining worker goes back there when nobody
    else is left."""
    choice = least_load(view, query)
    plan = view.checkpoints.plan(query.request)
    if plan is None or plan.attempt != query.lost:
        return choice
    for candidate in choice.candidates:
        if candidate.worker == plan.worker and not candidate.excluded:
            return Choice(candidate.worker, candidate.incarnation, choice.candidates)
    if not choice.worker and plan.source:
        for candidate in choice.candidates:
            if candidate.worker == plan.source and _may_return(view, candidate, query):
                return Choice(candidate.worker, candidate.incarnation, choice.candidates)
    return choice


def _may_return(view: View, source: Candidate, query: Query) -> bool:
    """Whether nothing but its drain speaks against the worker a request was to leave."""
    place = f"{source.worker}:{source.incarnation}"
    trusted = view.suspect(source.worker) != source.incarnation and place not in query.avoid
    return source.excluded == "draining" and trusted


def selected(view: View, query: Query, policy: str) -> Choice:
    """What a policy of `relume.policies.selectors` chooses."""
    model = query.model
    board = selectors.board_of(view, model, policy, shut(model))
    config, count = board.config, len(board.workers)
    asked = selectors.Asked(
        query.prompt_tokens + query.delivered,
        max(view.now_us, 0),
        query.session,
        query.avoid,
        hits.of(view, model, query.prefix),
        config.slo_us(query.tier),
        config.shed == "on",
        query.delivered > 0,
    )
    whole = count <= WHOLE
    best, named, late = selectors.select(
        view, board, policy, asked, WHOLE if whole else NAMED,
        lambda: boards.of(view, model, shut(model), boards.by_queue),
    )  # fmt: skip
    others: tuple[tuple[str, int], ...] = ()
    if whole:
        named += selectors.unasked(board, {x.worker for x in named})
    else:
        others = _others(board, len(named))
    if best is None:
        return Choice("", 0, tuple(named), others, refused=selectors.TOO_LATE if late else "")
    return Choice(best.worker, best.incarnation, tuple(named), others, best.hit_tokens)


POLICIES: dict[str, Callable[[View, Query], Choice]] = {
    "least_load": least_load,
    "round_robin": round_robin,
    **{name: partial(selected, policy=name) for name in selectors.POLICIES},
}
"""What a replica may be told to route by."""

RECORDED: dict[str, Callable[[View, Query], Choice]] = {**POLICIES, "planned": planned}
"""What decisions in the log may name."""

WHOLE = 16
"""Decisions of fleets of up to so many workers name them all. Logs depend on it."""
NAMED = 8
"""Those of larger fleets name so many of the best, and whom else they turned on; the rest are
counted. Logs depend on it."""


def first_token_us(view: View, query: Query, policy: str, choice: Choice) -> int:
    """Time to first token predicted for the request where `policy` sends it; -1 for nowhere."""
    found = view.fleet.workers.get(choice.worker)
    if found is None:
        return -1
    tokens = query.prompt_tokens + query.delivered
    held = choice.cached_tokens
    if policy not in selectors.POLICIES:  # has not asked who holds what
        held = prefixes.hit_blocks(view, found, query.prefix) * found.cached.block_tokens
    cached = max(min(held, tokens - 1), 0)
    return predict.ttft_us(view, found, tokens - cached, cached)


def decide(view: View, query: Query, policy: str) -> Choice:
    """What `policy` chooses, with what the record of the decision is to hold of it."""
    count = len(view.fleet.workers)
    if count <= WHOLE or policy in selectors.POLICIES:
        return RECORDED[policy](view, query)
    if policy == "least_load" and not query.avoid:
        return _ranked(view, query, count)
    return _shortened(view, query, policy, RECORDED[policy](view, query))


def _ranked(view: View, query: Query, count: int) -> Choice:
    """As `least_load`, without a look at all of them."""
    model = query.model
    ranking = ranked(view, model, shut(model), REQUEST_TOKENS)
    named = tuple(islice(ranking.best(view.turn % count), NAMED))
    best = named[0] if named else None
    worker, incarnation = (best.worker, best.incarnation) if best is not None else ("", 0)
    return Choice(worker, incarnation, named, _others(ranking, len(named)))


def _others(kept: Kept, named: int) -> tuple[tuple[str, int], ...]:
    """How many are not named, by reason, with `named` of the open ones named."""
    left, more = kept.reasons, kept.open - named
    if not left:
        return (("", more),) if more > 0 else ()
    return tuple(sorted([*left.items(), *((("", more),) if more > 0 else ())]))


def _shortened(view: View, query: Query, policy: str, choice: Choice) -> Choice:
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
        if candidate.worker in also or candidate.excluded == "failed it before":
            named.append(rank)
        else:
            left[candidate.excluded] = left.get(candidate.excluded, 0) + 1
    if not left:
        return choice
    shown = tuple(choice.candidates[rank[2]] for rank in named)
    return Choice(choice.worker, choice.incarnation, shown, tuple(sorted(left.items())))
