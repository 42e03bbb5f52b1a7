"""The cost of computing a prompt token on a worker, from its recorded steps.

A step that computes prompt tokens also decodes; what it took beyond a usual step without
any is put down to them. Sums, of which old parts fade, so that a long chunk counts as long
as it was. Integers.

Recovery plans and moves are compared with this, and those in logs are repeated with it. Routing
predicts by `relume.policies.state.step_times`, which uses batch and context and is fitted for a
class of workers; the two stay separate, since a plan with another estimate would not verify.
"""

from __future__ import annotations

from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state.fleet import Fleet, Worker

FADE_TOKENS = 1 << 16
"""After this number of tokens, older ones count half."""

UNKNOWN_US = 500
"""Of a step, for each request in it, while no worker has shown any."""

ENOUGH_TOKENS = 64
"""Minimum number of tokens for an estimate."""


def learn(worker: Worker, tokens: int, took: int) -> None:
    """Take into account a step with `tokens` prompt tokens that follows the worker's last one. It
    took `took` microseconds, above 0, with the gap before it, as a usual step has one too."""
    usual = worker.decode_us
    if tokens:
        worker.prefill_us += max(took - usual, 0)
        worker.prefill_tokens += tokens
        if worker.prefill_tokens > FADE_TOKENS:
            worker.prefill_us >>= 1
            worker.prefill_tokens >>= 1
    elif usual:
        worker.decode_us = usual + ((took - usual) >> 3)
    else:
        worker.decode_us = took


def prefill_ns(fleet: Fleet, worker: Worker, unknown_ns: int) -> int:
    """Nanoseconds a prompt token takes on `worker`; of one that has not shown it, what the
    others of its model take; else `unknown_ns`."""
    if worker.prefill_tokens >= ENOUGH_TOKENS:
        return _shown_ns(worker)
    alike = [w for w in fleet.workers.values() if w.model == worker.model]
    tokens = sum(w.prefill_tokens for w in alike)
    if tokens < ENOUGH_TOKENS:
        return unknown_ns
    return max(sum(w.prefill_us for w in alike) * 1000 // tokens, 1)


def trusted_ns(fleet: Fleet, trust_percent: int) -> dict[str, tuple[int, int]]:
    """By model and hardware (`Worker.steps_like`): the bounds within which `prefill_ns` of a worker
    is believed, `trust_percent` (100 at least) being the ratio to the median of those that serve.
    Empty for 0."""
    shown: dict[str, list[int]] = {}
    for worker in fleet.workers.values() if trust_percent else ():
        if worker.engine == EnginePhase.READY and worker.prefill_tokens >= ENOUGH_TOKENS:
            shown.setdefault(worker.steps_like, []).append(_shown_ns(worker))
    part, bounds = max(trust_percent, 100), {}
    for steps_like, found in shown.items():
        median = sorted(found)[(len(found) - 1) // 2]  # of two the faster: contention only slows
        bounds[steps_like] = max(median * 100 // part, 1), median * part // 100
    return bounds


def _shown_ns(worker: Worker) -> int:
    return max(worker.prefill_us * 1000 // worker.prefill_tokens, 1)


def token_us(fleet: Fleet, worker: Worker, requests: int) -> int:
    """Microseconds between two tokens on `worker` with this number of requests: what it took last,
    and in proportion more with more of them than it had, which overstates them. A worker that has
    shown nothing takes as long as the slowest of its model."""
    if worker.decode_us:
        return worker.decode_us * max(requests, worker.batch, 1) // max(worker.batch, 1)
    alike = (w.decode_us for w in fleet.workers.values() if w.model == worker.model)
    return max(alike, default=0) or UNKNOWN_US * requests
