"""How much the workers of a model can serve. Pure.

Three figures, with their units. *Sequences*: requests that can run at once, which the KV blocks and
the engines' own limits bound. *Requests per second* and *tokens per second*: what the engines
compute, by the step times learnt from the log (`relume.policies.state.step_times`).

A count and a rate are not compared. By Little's law, S sequences that each stay for R seconds are
S / R requests per second. A request stays for one step per output token. In the steady state a step
of B sequences also computes the prompts of those that arrive: B * prompt / output tokens. So

    step(B) = base + mixed * part + B * (request + context * c + p/output * (prompt token + work * p/2))
    requests per second = B / (output * step(B))

which rises with B. `part` of the steps have a prompt: B / output begin in each, and a long one takes
several. B is bound by the sequences of the worker, and by the tokens of a step:
B * (1 + p/output) <= step_tokens. On average a sequence is half done: that many KV blocks it has. The
blocks of running requests count as capacity, since they are free again when those end: only with
them is the figure one of the worker, not of its load.

A worker whose class has shown too few steps has no known capacity, and neither has its model: then
nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import UNSET, Struct

from relume.policies.health.open_workers import is_open
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.step_times import Costs

SECOND_US = 1_000_000
UNKNOWN_SEQUENCES = 256
"""Of an engine that does not report its maximum: vLLM's default."""


class Workload(Struct, frozen=True, kw_only=True):
    """The mean request of a model: prompt tokens that an engine computes for it, and tokens that it
    generates, at least one each."""

    prompt_tokens: int
    output_tokens: int


class Capacity(Struct, frozen=True, kw_only=True):
    """Of one worker, or of all `workers` of a model together. `sequences`: requests that can run at
    once; `requests_per_ks`: requests in 1000 seconds; `tokens_per_s`: prompt and output."""

    workers: int = 0
    sequences: int = 0
    requests_per_ks: int = 0
    tokens_per_s: int = 0


def serves(fleet: Fleet, worker: Worker, model: str) -> bool:
    """Whether the worker counts for that model."""
    return worker.model == model and is_open(fleet, worker)


def capacity_of(fleet: Fleet, model: str, workload: Workload) -> Capacity | None:
    """What the serving workers of `model` can do of such requests together; None: the capacity of
    one of them is not known."""
    serving = [worker for worker in fleet.workers.values() if serves(fleet, worker, model)]
    if not all(is_measured(fleet, worker) for worker in serving):
        return None
    return total(of_worker(worker, Costs(fleet, worker), workload) for worker in serving)


def capacity_of_all(fleet: Fleet, model: str, workload: Workload) -> Capacity:
    """The same of all workers of `model` that have a known capacity, whether they serve or not."""
    return total(
        of_worker(worker, Costs(fleet, worker), workload)
        for worker in fleet.workers.values()
        if worker.model == model and is_measured(fleet, worker)
    )


def is_measured(fleet: Fleet, worker: Worker) -> bool:
    """Whether the step times of the worker's class, or of another of its model, were measured."""
    if worker.plain or not worker.kv_blocks or not worker.block_size:
        return False
    return Costs(fleet, worker).grounds != "default"


def total(parts: Iterable[Capacity]) -> Capacity:
    """Of these workers together."""
    workers = sequences = requests = tokens = 0
    for part in parts:
        workers += part.workers
        sequences += part.sequences
        requests += part.requests_per_ks
        tokens += part.tokens_per_s
    return Capacity(
        workers=workers, sequences=sequences, requests_per_ks=requests, tokens_per_s=tokens
    )


def of_worker(worker: Worker, costs: Costs, workload: Workload) -> Capacity:
    """What one worker can do of such requests."""
    prompt, output = workload.prompt_tokens, workload.output_tokens
    sequences = sequences_of(worker, prompt + output // 2)
    per_sequence = _step_us_per_sequence(costs, prompt, output)
    batch, chunks = float(sequences), 1
    if worker.step_tokens:
        batch = min(batch, worker.step_tokens * output / (output + prompt))
        chunks = -(-prompt // worker.step_tokens)
    mixed = costs.mixed * min(batch * chunks / output, 1.0)
    step_us = costs.base + mixed + batch * per_sequence
    requests_per_us = batch / (output * step_us)
    return Capacity(
        workers=1,
        sequences=sequences,
        requests_per_ks=int(requests_per_us * 1000 * SECOND_US),
        tokens_per_s=int(requests_per_us * (prompt + output) * SECOND_US),
    )


def sequences_of(worker: Worker, tokens: int) -> int:
    """Requests that run at once with `tokens` each on average: as many as its blocks hold, and as many
    as its engine takes."""
    blocks = -(-tokens // worker.block_size)
    most = UNKNOWN_SEQUENCES if worker.max_seqs is UNSET else worker.max_seqs
    return min(worker.kv_blocks // blocks, most)


def _step_us_per_sequence(costs: Costs, prompt: int, output: int) -> float:
    """What a sequence adds to a step: its own token, and its part of the prompts that arrive."""
    context = prompt + output / 2
    prompt_us = prompt * (costs.prompt + costs.work * prompt / 2)
    return costs.request + costs.context * context + prompt_us / output
