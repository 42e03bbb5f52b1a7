"""What a worker's load is at the view's now, and what one more request would meet there.

A status tells how an engine stood when a step ended; questions come at any time. Since the
replica records when it received each revision and when it was asked, a status is advanced by the
time it has been here, in whole steps of predicted length: prompt tokens drain by a step's
budget, prompts done join the decode batch, and each request that decodes grows by a token a
step. Finishes are not predicted.

No news is news too. Where each step is reported by itself, one that was not reported has not
ended, or within the time a report takes; it counts as ended about when it should, if its length
is known better than that time. Where reports bring what happened in some longer time (merged, or
gathered for a large fleet), as many may have ended as fit into that, and what was sent there
meanwhile may have come and be computed, though nothing told of it. An engine that has said
nothing for much longer than that is given no credit: a hung one does not seem to become idle.

Closed form, from sums that the fold keeps; integers and scalar float64 in fixed order.
Llumnix Ial: uncomputed prefill tokens, N_batch and the sum of context, "Status forward-prediction".
"""

from __future__ import annotations

from msgspec import Struct

from relume.policies.receipts import received_us
from relume.policies.state import Worker
from relume.policies.steptime import Costs
from relume.policies.view import View

STEP_TOKENS = 2048
"""Of a step, where the engine does not tell."""

SILENT_US = 1_500_000
"""An engine with work may be silent so long, or for three of its steps."""

REPORT_US = 2500
"""A report of a step takes about so long by way of the log."""

VAGUE = 0.25
"""With a greater relative error of step times, reports that come step by step tell more than
predictions do."""


class Forecast(Struct, frozen=True, gc=False):
    """A worker at the view's now.

    `prefill_tokens`: prompt tokens not computed yet, `flight_tokens` of them in requests that its
    engine has not confirmed. `batch` requests decode, with `context` tokens in all. `waiting`
    have no blocks yet. `kv_blocks` will be used when all of these prompts are computed. `step_us`:
    length of the step under way, `rest_us` of it left (0: idle); `chunk` prompt tokens are in it.
    `age_us` since it began, as told; `grounds` of step times: measured, class, default; `silent`:
    it should have been heard of.
    """

    prefill_tokens: int
    flight_tokens: int
    batch: int
    context: int
    waiting: int
    kv_blocks: int
    step_us: int
    rest_us: int
    chunk: int
    age_us: int
    grounds: str
    silent: bool = False


def forecast(view: View, worker: Worker) -> Forecast:
    """The worker at `view.now_us`, own dispatches included. O(own dispatches not folded)."""
    return _forecast(view, worker, Costs(view.fleet, worker))


def _forecast(view: View, worker: Worker, costs: Costs) -> Forecast:
    prefill, requests = view.load(worker)
    left = worker.prefill_left - worker.flight_left
    flying = prefill - left
    unconfirmed = requests - (len(worker.attempts) - worker.flights)
    batch, context, coming = worker.decoding, worker.context, worker.prefilling
    each = worker.prefilling_tokens // coming if coming else 0
    age = age_us(view, worker)
    most = worker.step_tokens or STEP_TOKENS
    used = min(worker.kv_used, worker.kv_blocks) if worker.kv_blocks else worker.kv_used
    free = (worker.kv_blocks - used) * worker.block_size if worker.kv_blocks else left
    chunk = max(min(most - batch, left, free), 0)
    per_token = costs.prompt + costs.work * (each >> 1)
    step = costs.base + chunk * per_token + batch * costs.request + context * costs.context
    if chunk:
        step += costs.mixed
    credit, silent = float(age), False
    if not (chunk or batch):
        credit = 0.0
    elif credit > SILENT_US and credit > 3 * step:
        credit, silent = 0.0, True
    elif age:
        credit += REPORT_US
    coming_in = 0.0
    if flying > 0 and worker.report_us > REPORT_US and not silent:
        sent = view.sent_us(worker)
        coming_in = view.now_us - sent - REPORT_US if sent >= 0 else 0.0
        if not (chunk or batch):
            credit = coming_in  # it began with what was sent
    most_steps = _unreported(worker, costs, step, credit)
    grown = 0
    if chunk and credit >= step and most_steps:
        room = min(left, free)
        steps = min(int(credit / step), (room + chunk - 1) // chunk, most_steps)
        done = min(steps * chunk, room)
        credit -= steps * step - (steps * chunk - done) * per_token
        most_steps -= steps
        joined = coming * done // left
        context += batch * steps + joined * each
        grown = done
        batch += joined
        left -= done
    if coming_in > 0 and not left and most_steps:
        each = flying // max(unconfirmed, 1)
        chunk = max(min(most - batch, flying, free - grown), 0)
        per_token = costs.prompt + costs.work * (each >> 1)
        step = costs.base + chunk * per_token + batch * costs.request + context * costs.context
        step += costs.mixed
        behind = min(credit, coming_in)
        if chunk and behind >= step:
            steps = min(int(behind / step), (flying + chunk - 1) // chunk, most_steps)
            done = min(steps * chunk, flying, free - grown)
            credit -= steps * step - (steps * chunk - done) * per_token
            most_steps -= steps
            joined = unconfirmed * done // flying
            context += batch * steps + joined * each
            grown += done
            batch += joined
            unconfirmed -= joined
            flying -= done
    if grown:
        chunk = max(min(most - batch, left, free - grown), 0)
        step = costs.base + chunk * per_token + batch * costs.request + context * costs.context
        if chunk:
            step += costs.mixed
    elif not left:
        chunk = 0
        step = costs.base + batch * costs.request + context * costs.context
    if not chunk and batch and credit >= step and most_steps:
        steps = min(int(credit / step), most_steps)
        credit -= steps * step
        context += batch * steps
        grown += batch * steps
        step += batch * steps * costs.context
    busy = bool(chunk or batch)
    block = max(worker.block_size, 1)
    return Forecast(
        left + flying,
        flying,
        batch,
        context,
        max(worker.waiting, 0) + unconfirmed,
        used + (grown + left + flying) // block,
        int(step),
        max(int(step - credit), 0) if busy else 0,
        chunk,
        age,
        costs.grounds,
        silent,
    )


def _unreported(worker: Worker, costs: Costs, step: float, credit: float) -> int:
    """How many steps may have ended without a report so far, `credit` after they began."""
    within = worker.report_us if worker.report_us > REPORT_US else REPORT_US
    if costs.spread > VAGUE and within < 4 * step:
        return 0
    unsure = costs.spread * step
    if within >= step:
        fit = 1 + int(within / step)
        return fit if credit <= fit * step + within + 2 * unsure else 0
    overdue = credit - step
    return int(0.6 * unsure < within and 0 <= overdue <= within + 2 * unsure)


def age_us(view: View, worker: Worker) -> int:
    """How long ago the replica heard of the step under way; 0 where that is not known."""
    if view.now_us < 0 or not worker.step_revision:
        return 0
    received = received_us(view.receipts, worker.step_revision)
    return max(view.now_us - received, 0) if received >= 0 else 0


def ttft_us(
    view: View, worker: Worker, extra_tokens: int, cached: int = 0, told: Forecast | None = None
) -> int:
    """Time to first token of one more request with `extra_tokens` prompt tokens to compute behind
    `cached` ones: the rest of the step under way, then what waits ahead of it and itself, in steps
    of the engine's budget. `told`: the worker's forecast, if it is at hand."""
    costs = Costs(view.fleet, worker)
    now = told if told is not None else _forecast(view, worker, costs)
    ahead = now.prefill_tokens - (now.chunk if now.rest_us else 0)
    tokens = max(ahead, 0) + max(extra_tokens, 1)
    each = worker.prefilling_tokens // worker.prefilling if worker.prefilling else extra_tokens
    work = max(ahead, 0) * (each >> 1) + extra_tokens * (cached + (extra_tokens >> 1))
    room = max((worker.step_tokens or STEP_TOKENS) - now.batch, 1)
    steps = (tokens + room - 1) // room
    one = costs.base + costs.mixed + now.batch * costs.request + now.context * costs.context
    computing = steps * one + tokens * costs.prompt + work * costs.work
    return now.rest_us + int(computing) + worker.overhead_us


def tpot_us(
    view: View,
    worker: Worker,
    extra_requests: int = 1,
    extra_context: int = 0,
    told: Forecast | None = None,
) -> int:
    """Time per output token with `extra_requests` more in the decode batch, of `extra_context`
    tokens in all; steps that compute no prompts."""
    costs = Costs(view.fleet, worker)
    now = told if told is not None else _forecast(view, worker, costs)
    batch, context = now.batch + extra_requests, now.context + extra_context
    return int(costs.base + batch * costs.request + context * costs.context)
