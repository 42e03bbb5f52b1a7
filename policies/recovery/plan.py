"""Where the interrupted requests of one failure go: restore or recompute, and on which
worker (LUMEN Algorithm 2, Eq. 6; and our default by the delay of all together).

All requests of a failure are decided together: each choice loads its worker (and the holder's link)
for the later ones, so a holder is not flooded. Every option that was compared is returned with its
estimate.

- `eq6`: as published. To the holder when its load is at most theta, or the checkpointed
  prefix is longer than tau; else to the least loaded worker, from scratch. Theta is
  `theta_percent` of the mean load unless given. With the published thresholds this
  redirected nothing in our simulations; it stays for comparison.
- `completion`: the earliest end of moving blocks and computing the rest, per worker and per
  holder. Long recomputations choose first (longest processing time first), since they have
  the most to lose from what is left.
- `least_delay`: the same with what a choice costs others. Computing holds up every request
  on the worker; what comes from another host takes the links of both (restored requests leave
  hardly anything to compute, so without that the first idle worker gets all of them), what
  comes from the worker's own host neither.
- `least_total`: the same, but an engine restores one request after the other, from any source; and
a request that waits for a first token waits for all that is computed in the same steps. All begin
where
  their checkpoints are; then each, those first of which least is held, goes where that costs
  all of them together least, the others staying.

Under every rule higher tiers choose first, as if there were no lower ones. A worker must have room
for the request's KV blocks; if none has, the request goes to the worker with most room. A request
is not restored if its blocks would arrive after the time budget, unless computing again would take
longer still.

Integers: microseconds, tokens, bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relume.events.vocabulary import RecoveryChoice, RecoveryOption
from relume.events.vocabulary.enums import RecoveryKind
from relume.policies.admission.admission_queue import rank_of
from relume.policies.recovery.recovery_options import (
    Estimates,
    InterruptedRequest,
    Links,
    Rules,
    Target,
)

POLICIES = ("completion", "eq6", "least_delay", "least_total")

HELD_UP = 8
"""`least_delay` and `least_total`: number of running requests with a late next token that count as
much as one that waits for its first."""

AWAY = 2
"""`least_total`: a request leaves the worker that holds its checkpoint for half the delay only:
links are slower than measured while others are restored and checkpoints stream."""


def plan(
    interrupted: Sequence[InterruptedRequest],
    targets: Sequence[Target],
    links: Links,
    rules: Rules | None = None,
    policy: str = "completion",
) -> tuple[RecoveryChoice, ...]:
    """One choice a request, in the order given.

    Raises KeyError for a policy that is not in `POLICIES`.
    """
    serial = policy == "least_total"
    considerate = serial or policy == "least_delay"
    state = Estimates(targets, links, rules or Rules(), len(interrupted), considerate, serial)
    order, choose = _ORDERS[policy], _CHOOSERS[policy]
    chosen = {}
    for alike in _by_tier(interrupted):
        homes = _at_home(alike, state) if serial else {}
        for request in order(alike):
            if home := homes.get(request.request):
                state.give_back(request, home)
            options = state.options(request, home)
            chosen[request.request] = choose(request, state, options)
    return tuple(chosen[r.request] for r in interrupted)


def _by_tier(interrupted: Sequence[InterruptedRequest]) -> list[list[InterruptedRequest]]:
    """The requests of each tier, the highest first."""
    tiers: dict[int, list[InterruptedRequest]] = {}
    for request in interrupted:
        tiers.setdefault(rank_of(request.tier), []).append(request)
    return [tiers[rank] for rank in sorted(tiers)]


def _completion(
    request: InterruptedRequest, state: Estimates, options: list[RecoveryOption]
) -> RecoveryChoice:
    open_ = [(o.done_us, o.kind != RecoveryKind.RESTORE, at) for at, o in state.eligible(options)]
    return _decide(request, state, options, min(open_)[2] if open_ else -1)


def _least_delay(
    request: InterruptedRequest, state: Estimates, options: list[RecoveryOption]
) -> RecoveryChoice:
    open_ = []
    for at, o in state.eligible(options):
        delay = o.done_us + o.compute_us * state.requests[o.worker] // HELD_UP
        open_.append((delay, o.kind != RecoveryKind.RESTORE, at))
    return _decide(request, state, options, min(open_)[2] if open_ else -1)


def _least_total(
    request: InterruptedRequest, state: Estimates, options: list[RecoveryOption]
) -> RecoveryChoice:
    open_ = []
    for at, o in state.eligible(options):
        waiting = state.waiting[o.worker]
        running = max(state.requests[o.worker] - waiting, 0)
        delay = o.done_us + o.compute_us * (HELD_UP * waiting + running) // HELD_UP
        if o.holder != o.worker:
            delay *= AWAY
        open_.append((delay, o.kind != RecoveryKind.RESTORE, at))
    return _decide(request, state, options, min(open_)[2] if open_ else -1)


def _at_home(
    interrupted: Sequence[InterruptedRequest], state: Estimates
) -> dict[str, RecoveryOption]:
    """Where requests are restored by the worker beside the checkpoint, to begin with."""
    found = {}
    for request in interrupted:
        near = [o for o in state.options(request) if o.holder == o.worker and not o.excluded]
        if near:
            found[request.request] = home = min(near, key=lambda o: (o.done_us, o.worker))
            state.take(request, home)
    return found


def _eq6(
    request: InterruptedRequest, state: Estimates, options: list[RecoveryOption]
) -> RecoveryChoice:
    """LUMEN Eq. 6. With several holders the least loaded one is h_r."""
    open_ = state.eligible(options)
    # "To the holder" is Algorithm 2's: the worker beside the checkpoint restores it.
    at_home = [
        (state.load[o.worker], at, o)
        for at, o in open_
        if o.kind == RecoveryKind.RESTORE and o.holder == o.worker
    ]
    if at_home:
        held, at, option = min(at_home, key=lambda entry: entry[:2])
        if held <= _theta(state) or option.restored > state.rules.tau:
            return _decide(request, state, options, at)
    scratch = [(state.load[o.worker], at) for at, o in open_ if o.kind == RecoveryKind.RECOMPUTE]
    return _decide(request, state, options, min(scratch)[1] if scratch else -1)


def _theta(state: Estimates) -> int:
    if state.rules.theta >= 0:
        return state.rules.theta
    loads = list(state.load.values())
    return state.rules.theta_percent * sum(loads) // (100 * max(len(loads), 1))


def _decide(
    request: InterruptedRequest, state: Estimates, options: list[RecoveryOption], at: int
) -> RecoveryChoice:
    if at >= 0:
        state.take(request, options[at])
    recorded_options, at = state.recorded(options, at)
    return RecoveryChoice(
        request=request.request,
        attempt=request.attempt,
        tokens=request.tokens,
        chosen=at,
        options=recorded_options,
        avoid=request.avoid,
        tier=request.tier,
    )


def _longest_first(interrupted: Sequence[InterruptedRequest]) -> list[InterruptedRequest]:
    return sorted(interrupted, key=lambda r: (-r.tokens, r.request))


def _as_given(interrupted: Sequence[InterruptedRequest]) -> list[InterruptedRequest]:
    return list(interrupted)


def _least_held_first(interrupted: Sequence[InterruptedRequest]) -> list[InterruptedRequest]:
    return sorted(interrupted, key=lambda r: (-_left(r), r.request))


def _left(request: InterruptedRequest) -> int:
    """Tokens that no worker holds."""
    return request.tokens - max((stored.tokens for stored in request.stored), default=0)


_ORDERS: dict[str, Callable[[Sequence[InterruptedRequest]], list[InterruptedRequest]]] = {
    "completion": _longest_first,
    "least_delay": _longest_first,
    "least_total": _least_held_first,
    "eq6": _as_given,
}
_CHOOSERS: dict[
    str, Callable[[InterruptedRequest, Estimates, list[RecoveryOption]], RecoveryChoice]
] = {
    "completion": _completion,
    "least_delay": _least_delay,
    "least_total": _least_total,
    "eq6": _eq6,
}
