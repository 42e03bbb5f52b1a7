"""Version 1 of the recorded estimate of a first token. Only for logs that were written with it.

Until version 2 a decision recorded another estimate than the one its worker was chosen by. Replay
takes the old record again with this module, so the module must not change: the frozen logs in
`tests/replay/logs` hold it. Decisions now use `worker_estimate`.

Theory of operation. A status describes an engine at the end of a step. The replica records when it
received each revision and when it decided, so a status is advanced by the time in between, in whole
steps of predicted length: prompt tokens drain by a step's budget, prompts that are computed join
the decode batch, and each decoding request grows by a token a step. Finishes are not predicted.

No news is news too. If each step is reported by itself, a step without a report has not ended, or
ended within the time that a report takes; it counts as ended about when it should, if its length is
known better than that time. If reports cover a longer time (merged, or gathered for a large fleet),
as many steps may have ended as fit into that time, and prompts sent meanwhile may be computed. An
engine that is silent for much longer gets no credit: a hung engine does not seem to become idle.

Closed form, from sums that the fold keeps; integers and scalar float64 in fixed order. Llumnix Ial:
uncomputed prefill tokens, N_batch and the sum of context, "Status forward-prediction".
"""

from __future__ import annotations

from msgspec import Struct

from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.receive_clock import received_us
from relume.policies.state.overlay.view import View
from relume.policies.state.step_times import Costs

STEP_TOKENS = 2048
"""Of a step, if the engine does not report it."""

SILENT_US = 1_500_000
"""Maximum silence of an engine with work; three of its steps if that is longer."""

REPORT_US = 2500
"""Typical delay of a step's report through the log."""

VAGUE = 0.25
"""With a greater relative error of step times, reports of each step are better than predictions."""


class Forecast(Struct, frozen=True, gc=False, kw_only=True):
    """A worker at the view's now.

    `prefill_tokens`: prompt tokens not computed yet, `flight_tokens` of them in requests that its
    engine has not confirmed. `batch` requests decode, with `context` tokens in all. `waiting`
    have no blocks yet. `kv_blocks` will be used when all of these prompts are computed. `step_us`:
    length of the step under way, `rest_us` of it left (0: idle); `chunk` prompt tokens are in it.
    `age_us` since it began, as told; `grounds` of step times: measured, class, default; `silent`:
    a report is overdue.
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


class _Status(Struct, gc=False, kw_only=True):
    """A worker's status while it is advanced.

    `left` prompt tokens of confirmed requests and `flying` of `unconfirmed` ones are not computed.
    `batch` requests decode `context` tokens. Its step of `step_us` computes `chunk` prompt tokens,
    each for `token_us`. `credit_us` is the time since it began that is not accounted for; at most
    `steps_left` steps ended in it. `grown` tokens were added to the cache, which had room for
    `room`.
    """

    left: int
    flying: int
    unconfirmed: int
    batch: int
    context: int
    budget: int
    space: int
    token_us: float
    credit_us: float
    chunk: int = 0
    step_us: float = 0.0
    steps_left: int = 0
    grown: int = 0

    def begin_step(self, costs: Costs, tokens: int, space: int) -> None:
        """The next step computes as many of `tokens` as its budget and `room` allow."""
        self.chunk = max(min(self.budget - self.batch, tokens, space), 0)
        self.step_us = (
            costs.base
            + self.chunk * self.token_us
            + self.batch * costs.request
            + self.context * costs.context
        )
        if self.chunk:
            self.step_us += costs.mixed

    def compute(self, credit_us: float, tokens: int, space: int) -> tuple[int, int]:
        """(steps, prompt tokens) that `credit_us` is enough for, of `tokens`; it is used up."""
        steps = min(
            int(credit_us / self.step_us),
            (tokens + self.chunk - 1) // self.chunk,
            self.steps_left,
        )
        done = min(steps * self.chunk, space)
        self.credit_us -= steps * self.step_us - (steps * self.chunk - done) * self.token_us
        self.steps_left -= steps
        return steps, done

    def decode(self, steps: int, joined: int, each: int) -> None:
        """The batch made `steps` tokens each; then `joined` requests with `each` tokens joined
        it."""
        self.context += self.batch * steps + joined * each
        self.batch += joined


def _forecast(view: View, worker: Worker, costs: Costs) -> Forecast:
    prefill, requests = view.load(worker)
    left = worker.prefill_left - worker.flight_left
    age = age_us(view, worker)
    used = min(worker.kv_used, worker.kv_blocks) if worker.kv_blocks else worker.kv_used
    each = worker.prefilling_tokens // worker.prefilling if worker.prefilling else 0
    status = _Status(
        left=left,
        flying=prefill - left,
        unconfirmed=requests - (len(worker.attempts) - worker.flights),
        batch=worker.decoding,
        context=worker.context,
        budget=worker.step_tokens or STEP_TOKENS,
        space=(worker.kv_blocks - used) * worker.block_size if worker.kv_blocks else left,
        token_us=costs.prompt + costs.work * (each >> 1),
        credit_us=float(age),
    )
    status.begin_step(costs, left, status.space)
    silent = _take_silence(status, age)
    arrived_us = 0.0 if silent else _arrived_us(view, worker, status)
    status.steps_left = _unreported(worker, costs, status.step_us, status.credit_us)
    _compute_confirmed(status, worker.prefilling, each)
    if arrived_us > 0 and not status.left and status.steps_left:
        _compute_unconfirmed(status, costs, arrived_us)
    if status.grown:
        status.begin_step(costs, status.left, status.space - status.grown)
    elif not status.left:
        status.begin_step(costs, 0, 0)
    _decode_on(status, costs)
    busy = bool(status.chunk or status.batch)
    left, flying = status.left, status.flying
    return Forecast(
        prefill_tokens=left + flying,
        flight_tokens=flying,
        batch=status.batch,
        context=status.context,
        waiting=max(worker.waiting, 0) + status.unconfirmed,
        kv_blocks=used + (status.grown + left + flying) // max(worker.block_size, 1),
        step_us=int(status.step_us),
        rest_us=max(int(status.step_us - status.credit_us), 0) if busy else 0,
        chunk=status.chunk,
        age_us=age,
        grounds=costs.grounds,
        silent=silent,
    )


def _take_silence(status: _Status, age: int) -> bool:
    """Settle the credit of the time since the last report; whether the engine is silent for too
    long and gets none."""
    if not (status.chunk or status.batch):
        status.credit_us = 0.0
    elif status.credit_us > SILENT_US and status.credit_us > 3 * status.step_us:
        status.credit_us = 0.0
        return True
    elif age:
        status.credit_us += REPORT_US
    return False


def _arrived_us(view: View, worker: Worker, status: _Status) -> float:
    """How long ago dispatches may have arrived that no gathered report has yet; an idle engine
    began a step with them."""
    if status.flying <= 0 or worker.report_us <= REPORT_US:
        return 0.0
    sent = view.sent_us(worker)
    arrived_us = float(view.now_us - sent - REPORT_US) if sent >= 0 else 0.0
    if not (status.chunk or status.batch):
        status.credit_us = arrived_us
    return arrived_us


def _compute_confirmed(status: _Status, coming: int, each: int) -> None:
    """Compute prompts of the `coming` requests that the engine has, of `each` tokens."""
    if not (status.chunk and status.credit_us >= status.step_us and status.steps_left):
        return
    space = min(status.left, status.space)
    steps, done = status.compute(status.credit_us, space, space)
    status.decode(steps, coming * done // status.left, each)
    status.grown = done
    status.left -= done


def _compute_unconfirmed(status: _Status, costs: Costs, arrived_us: float) -> None:
    """Compute prompts of requests that were sent and are in no report yet."""
    flying, space = status.flying, status.space - status.grown
    each = flying // max(status.unconfirmed, 1)
    status.token_us = costs.prompt + costs.work * (each >> 1)
    status.begin_step(costs, flying, space)
    credit_us = min(status.credit_us, arrived_us)
    if status.chunk and credit_us >= status.step_us:
        steps, done = status.compute(credit_us, flying, min(flying, space))
        joined = status.unconfirmed * done // flying
        status.decode(steps, joined, each)
        status.grown += done
        status.unconfirmed -= joined
        status.flying -= done


def _decode_on(status: _Status, costs: Costs) -> None:
    """Decode for the rest of the credit, if no prompt is computed."""
    if status.chunk or not status.batch or not status.steps_left:
        return
    if status.credit_us >= status.step_us:
        steps = min(int(status.credit_us / status.step_us), status.steps_left)
        status.credit_us -= steps * status.step_us
        status.context += status.batch * steps
        status.grown += status.batch * steps
        status.step_us += status.batch * steps * costs.context


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
    """How long ago the replica received the report of the step under way; 0 if unknown."""
    if view.now_us < 0 or not worker.step_revision:
        return 0
    received = received_us(view.receipts, worker.step_revision)
    return max(view.now_us - received, 0) if received >= 0 else 0


def ttft_us(
    view: View, worker: Worker, extra_tokens: int, cached: int = 0, known: Forecast | None = None
) -> int:
    """Time to first token of one more request with `extra_tokens` prompt tokens to compute behind
    `cached` ones: the rest of the step under way, then what waits ahead of it and itself, in steps
    of the engine's budget. `told`: the worker's forecast, if it is at hand."""
    costs = Costs(view.fleet, worker)
    now = known if known is not None else _forecast(view, worker, costs)
    ahead = now.prefill_tokens - (now.chunk if now.rest_us else 0)
    tokens = max(ahead, 0) + max(extra_tokens, 1)
    each = worker.prefilling_tokens // worker.prefilling if worker.prefilling else extra_tokens
    work = max(ahead, 0) * (each >> 1) + extra_tokens * (cached + (extra_tokens >> 1))
    space = max((worker.step_tokens or STEP_TOKENS) - now.batch, 1)
    steps = (tokens + space - 1) // space
    one = costs.base + costs.mixed + now.batch * costs.request + now.context * costs.context
    computing = steps * one + tokens * costs.prompt + work * costs.work
    return now.rest_us + int(computing) + worker.overhead_us


def tpot_us(
    view: View,
    worker: Worker,
    extra_requests: int = 1,
    extra_context: int = 0,
    known: Forecast | None = None,
) -> int:
    """Time per output token with `extra_requests` more in the decode batch, of `extra_context`
    tokens in all; steps that compute no prompts."""
    costs = Costs(view.fleet, worker)
    now = known if known is not None else _forecast(view, worker, costs)
    batch, context = now.batch + extra_requests, now.context + extra_context
    return int(costs.base + batch * costs.request + context * costs.context)
