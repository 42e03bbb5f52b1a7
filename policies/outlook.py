"""What a worker would be to a request that came now: when its prompts are through, what a prompt
token costs there, what it decodes, how much of its KV is free.

Nothing here depends on when it is asked. `free_at_us` is a point of the replica's clock that
stays where it is while the worker keeps its pace, so `policies.board` may keep workers in order
of it from one decision to the next; what is asked of one worker at one moment is
`policies.predict`. Step times are those of `policies.steptime` as last made known, and factors
of time are rounded down to a few binary digits: workers that differ by less than what can be
measured are alike.
"""

from __future__ import annotations

from msgspec import Struct

from relume.policies.predict import REPORT_US, SILENT_US, STEP_TOKENS
from relume.policies.receipts import received_us
from relume.policies.state import Fleet, Worker
from relume.policies.steptime import DEFAULTS, SCALES
from relume.policies.view import View

TOKEN_DIGITS = 4
FIXED_DIGITS = 3
SLOWNESS_PARTS = 8
"""A worker's slowness is taken in eighths."""
FASTEST = 1 / 16
_, PROMPT, WORK, REQUEST, TOKEN, MIXED = SCALES
UNHEARD_US = 1 << 50
"""Of a worker that has not been heard of since before anything is remembered: when its prompts are
through, nobody knows."""


class Outlook(Struct, frozen=True, gc=False):
    """`free_at_us`: when the prompts that its engine has are computed (0: it has none).
    `token_ns`: of one prompt token, `fixed_us`: besides, whatever the prompt; among this what was
    sent there and is not confirmed. `silent_at_us`: it should have been heard of by then (0: it
    has nothing to say). `tpot_us`: from token to token with one request more. `kv_free`: blocks
    left when all it holds have theirs (below 0: some will wait)."""

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


def outlook(view: View, worker: Worker) -> Outlook:
    """Of `worker`, own events of the replica included."""
    base, prompt, work, request, token, mixed = _prices(view.fleet, worker)
    prefill, requests = view.load(worker)
    left = worker.prefill_left - worker.flight_left
    batch, context = worker.decoding, worker.context
    one = base + batch * request + context * token
    room = (worker.step_tokens or STEP_TOKENS) - batch
    if room < 1:
        room = 1
    each_step = one + mixed
    price = prompt + each_step / room
    fixed = each_step + worker.overhead_us
    flying = (prefill - left) * price
    free_at = silent_at = 0
    if left > 0 or batch:
        fixed += one / 2  # of the step under way
        heard = silent_at = _heard_us(view, worker.step_revision)
        patience = 3 * int(one + min(left, room) * prompt)
        if left > 0:
            coming = worker.prefilling
            each = worker.prefilling_tokens // coming if coming else 0
            took = -(-left // room) * each_step + left * (prompt + work * (each >> 1))
            begun = heard
            if worker.prompts_revision > worker.step_revision:
                begun = _heard_us(view, worker.prompts_revision)
            free_at = silent_at = begun + int(took)
        if flying > 0 and worker.report_us > REPORT_US and (sent := view.sent_us(worker)) >= 0:
            # reports are gathered: what was sent may have come and be computed, though untold
            free_at = silent_at = max(free_at, sent + REPORT_US) + int(flying)
            flying = 0.0
        silent_at += SILENT_US if SILENT_US > patience else patience
        if heard == UNHEARD_US:
            silent_at = 1
    return Outlook(
        free_at,
        coarse(int(price * 1000), TOKEN_DIGITS),
        coarse(int(fixed + flying), FIXED_DIGITS),
        silent_at,
        int(one + request),
        prefill,
        requests,
        batch,
        context,
        worker.kv_blocks - worker.kv_used - -(-prefill // (worker.block_size or 1)),
    )


def _prices(fleet: Fleet, worker: Worker) -> tuple[float, float, float, float, float, float]:
    """Microseconds of a step of nothing, of a prompt token, of that times context, of a decoding
    request, of a token of context, and of any prompt."""
    model = fleet.steptimes.get(worker.steps_like)
    w0, w1, w2, w3, w4, w5 = model.told if model is not None else DEFAULTS
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
    """When the replica heard of what the worker said at `revision`."""
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
