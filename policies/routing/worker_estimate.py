"""The one estimate of what a worker would be to a request that came now: the time to its first
token, the time of each token after it, and the KV that would be left.

Theory of operation. A worker is chosen by this estimate, the decision records it, `why` shows it,
the metrics compare it with the actual TTFT, the fold learns from the difference
(`step_times.first_token`), and replay takes it again. A request with t prompt tokens to compute
gets its first token after

    max(free_at - now, 0) + t * token + fixed

`free_at`: when the prompts that the engine already has are computed. `token`: the price of one
prompt token there, with its share of the steps. `fixed`: the rest of the step under way, one more
step, what was dispatched there but is not confirmed, and what earlier first tokens took beyond
their steps.

No part depends on the time of the decision: `free_at` is a point on the replica's clock that stays
the same while the worker's speed does. So `estimate_index` keeps workers in order from one decision
to the next. Step times are those of `relume.policies.state.step_times` as last published, and
factors of time are rounded down to a few binary digits: workers that differ by less than what can
be measured are equal. The record has the rounded figure too, because the choice was made by it.
"""

from __future__ import annotations

from msgspec import Struct

from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.overlay.receive_clock import received_us
from relume.policies.state.overlay.view import View
from relume.policies.state.step_times import DEFAULTS, SCALES

STEP_TOKENS = 2048
"""Prompt tokens of a step, if the engine does not report its budget."""
SILENT_US = 1_500_000
"""How long an engine with work may be silent, if three of its steps take less."""
REPORT_US = 2500
"""How long the report of a step takes by way of the log."""
TOKEN_DIGITS = 4
FIXED_DIGITS = 3
SLOWNESS_PARTS = 8
"""A worker's slowness is rounded to eighths."""
FASTEST = 1 / 16
_, PROMPT, WORK, REQUEST, TOKEN, MIXED = SCALES
LATE = 1 << 52
"""Later than any time of a clock, microseconds; more than any number of blocks or requests."""
UNHEARD_US = 1 << 46
"""Of a worker whose last report is older than all stored receive times: the end of its prompts is
unknown. Two years; a decision records it as a cost, and no reader takes an integer beyond 48 bits."""


class WorkerEstimate(Struct, frozen=True, gc=False, kw_only=True):
    """Of one incarnation. `free_at_us`: when the prompts that its engine has are computed (0: none).
    `token_ns`: of one prompt token, `fixed_us`: in addition, for any prompt; among this what was
    sent there and is not confirmed. `silent_at_us`: a report is overdue from then on (LATE: none is
    expected). `tpot_us`: from token to token with one request more. `kv_free`: blocks left when all
    it holds have theirs (below 0: some will wait). A prompt of `prompt_limit_blocks` blocks of
    `block_tokens` or more has no room. Of a suspect worker, choices count `price_percent` of the
    cost; what is predicted stays as it is."""

    worker: str
    incarnation: int
    free_at_us: int
    token_ns: int
    fixed_us: int
    silent_at_us: int
    tpot_us: int
    prefill_tokens: int
    requests: int
    batch: int
    context_tokens: int
    kv_free: int
    block_tokens: int = 1
    prompt_limit_blocks: int = LATE
    price_percent: int = 100
    failing: bool = False

    @property
    def price(self) -> tuple[int, int]:
        """`token_ns` and `fixed_us` as a choice counts them."""
        percent = self.price_percent
        return self.token_ns * percent // 100, self.fixed_us * percent // 100

    @property
    def priced_requests(self) -> int:
        """`requests` as a choice counts them: those of one more, at its price, less itself."""
        return (self.requests + 1) * self.price_percent // 100 - 1

    def cost_us(self, now_us: int, tokens: int) -> int:
        """`ttft_us` as a choice counts it."""
        token_ns, fixed_us = self.price
        return max(self.free_at_us - now_us, 0) + tokens * token_ns // 1000 + fixed_us

    def ttft_us(self, now_us: int, tokens: int) -> int:
        """Time to the first token of one more request with `tokens` prompt tokens to compute."""
        wait = self.free_at_us - now_us
        return (wait if wait > 0 else 0) + tokens * self.token_ns // 1000 + self.fixed_us


def estimate_of(
    view: View, worker: Worker, reserve_percent: int = 0, failing: bool = False
) -> WorkerEstimate:
    """Of `worker`, own events of the replica included. `reserve_percent` of its KV blocks are no
    room for a prompt. `failing`: see `eligibility.is_failing`."""
    base, prompt, work, request, context_token, any_prompt = _prices(view.fleet, worker)
    batch, context = worker.decoding, worker.context
    prefill, requests = view.load(worker)
    reported = worker.prefill_left - worker.flight_left
    # 1. `token`: its own price, and its share of the steps that compute prompts. A step decodes for
    #    the batch, and has room for so many prompt tokens beside it.
    decode_us = base + batch * request + context * context_token
    step_us = decode_us + any_prompt
    token_budget = max((worker.step_tokens or STEP_TOKENS) - batch, 1)
    token_us = prompt + step_us / token_budget
    # 2. `fixed`: one more step, what earlier first tokens took beyond theirs, half of the step under
    #    way, and what was dispatched there but is not confirmed.
    fixed_us = step_us + worker.overhead_us
    unconfirmed_us = (prefill - reported) * token_us
    # 3. `free_at`: from the last report on, the prompts that the engine has. Each token reads the
    #    context before it, on average half of its prompt.
    free_at, silent_at = 0, LATE
    if reported > 0 or batch:
        fixed_us += decode_us / 2
        heard = silent_at = _heard_us(view, worker.step_revision)
        patience = 3 * int(decode_us + min(reported, token_budget) * prompt)
        if reported > 0:
            prompts = worker.prefilling
            each = worker.prefilling_tokens // prompts if prompts else 0
            steps = -(-reported // token_budget)
            prompts_us = steps * step_us + reported * (prompt + work * (each >> 1))
            begun = heard
            if worker.prompts_revision > worker.step_revision:
                begun = _heard_us(view, worker.prompts_revision)
            free_at = silent_at = begun + int(prompts_us)
        # Reports are gathered: what was sent may have come and be computed, though unreported.
        is_gathered = unconfirmed_us > 0 and worker.report_us > REPORT_US
        if is_gathered and (sent := view.sent_us(worker)) >= 0:
            free_at = silent_at = max(free_at, sent + REPORT_US) + int(unconfirmed_us)
            unconfirmed_us = 0.0
        silent_at += patience if patience > SILENT_US else SILENT_US
        if heard == UNHEARD_US:
            silent_at = 1
    # 4. KV blocks left; an empty worker has room for any prompt.
    free = kv_free(worker, prefill)
    prompt_limit_blocks = LATE
    if worker.kv_blocks and requests:
        prompt_limit_blocks = free - reserve_percent * worker.kv_blocks // 100
    return WorkerEstimate(
        worker=worker.name,
        incarnation=worker.incarnation,
        free_at_us=free_at,
        token_ns=coarse(int(token_us * 1000), TOKEN_DIGITS),
        fixed_us=coarse(int(fixed_us + unconfirmed_us), FIXED_DIGITS),
        silent_at_us=silent_at,
        tpot_us=int(decode_us + request),
        prefill_tokens=prefill,
        requests=requests,
        batch=batch,
        context_tokens=context,
        kv_free=free,
        block_tokens=worker.block_size or 1,
        prompt_limit_blocks=prompt_limit_blocks,
        price_percent=worker.price_percent,
        failing=failing,
    )


def kv_free(worker: Worker, prefill_tokens: int) -> int:
    """KV blocks left on `worker` when all that it holds have theirs, `prefill_tokens` still to
    compute among it; below 0: some will wait."""
    return worker.kv_blocks - worker.kv_used - -(-prefill_tokens // (worker.block_size or 1))


def _prices(fleet: Fleet, worker: Worker) -> tuple[float, float, float, float, float, float]:
    """Microseconds of a step of nothing, of a prompt token, of that times context, of a decoding
    request, of a token of context, and of any prompt."""
    model = fleet.steptimes.get(worker.steps_like)
    w0, w1, w2, w3, w4, w5 = model.routing_weights if model is not None else DEFAULTS
    slowness = int(worker.slowness * SLOWNESS_PARTS + 0.5) / SLOWNESS_PARTS or FASTEST
    base = w0 * slowness
    return (
        base if base > 1.0 else 1.0,
        w1 * PROMPT * slowness,
        w2 * WORK * slowness,
        w3 * REQUEST * slowness,
        w4 * TOKEN * slowness,
        w5 * MIXED * slowness,
    )


def _heard_us(view: View, revision: int) -> int:
    """When the replica received what the worker reported at `revision`."""
    receipts = view.receipts
    if not receipts.revisions:
        return 0
    if revision < receipts.revisions[0]:
        return UNHEARD_US
    return received_us(receipts, revision)


def coarse(number: int, digits: int) -> int:
    """`number` with all but its first binary `digits` cleared."""
    shift = number.bit_length() - digits
    return number >> shift << shift if shift > 0 else number
