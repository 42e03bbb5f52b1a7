"""DéjàVu Appendix B, the search: the shortest makespan of each way to use D machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise

from msgspec import Struct

from relume.chaos.papers.dejavu.inputs import (
    BATCHES,
    PROMPT_TOKENS,
    Machine,
    Model,
    fits,
    lengths,
    prompt_ns,
    token_ns,
)
from relume.chaos.papers.dejavu.pipeline import apart, together


class Run(Struct, frozen=True, order=True):
    """A configuration's makespan; `shape`: as in `dejavu_tables.Best`."""

    makespan_s: float
    shape: tuple[int, ...]


class _Way(Struct, frozen=True):
    """A configuration to try. `least_s`: the work of its busiest stage, a lower bound of its
    makespan; `took`: computes its makespan."""

    least_s: float
    shape: tuple[int, ...]
    took: Callable[[], float]


def _best(ways: Iterable[_Way]) -> Run | None:
    """The shortest; skips configurations whose lower bound exceeds the best so far."""
    best: Run | None = None
    for way in sorted(ways, key=lambda way: (way.least_s, way.shape)):
        if best is None or way.least_s <= best.makespan_s:
            run = Run(way.took(), way.shape)
            best = run if best is None else min(best, run)
    return best


def one_pipeline(
    model: Model, machine: Machine, machines: int, batch: int, given: Sequence[int]
) -> float:
    """Makespan in seconds of microbatches of `given` lengths in one pipeline."""
    prompt = prompt_ns(model, machine, batch) // machines
    token = token_ns(model, machine, batch) // machines
    return max(together(given, machines, prompt, token), default=0) / 1e9


def two_pipelines(
    model: Model, machine: Machine, prompts: int, tokens: int, batch: int, given: Sequence[int]
) -> float:
    """The same with `prompts` machines for prompts and `tokens` for tokens; streaming hidden."""
    prompt = prompt_ns(model, machine, batch) // prompts
    token = token_ns(model, machine, batch) // tokens
    return max(apart(given, prompts, tokens, prompt, token)) / 1e9


def baseline(model: Model, machine: Machine, machines: int, seed: int) -> Run | None:
    """Baseline: one pipeline of all machines; shape (batch,)."""
    return _best(
        _Way(
            _work_s(model, machine, batch, given) / machines,
            (batch,),
            partial(one_pipeline, model, machine, machines, batch, given),
        )
        for batch, given in _batches(seed)
        if fits(model, machine, machines, batch)
    )


def data_parallel(model: Model, machine: Machine, machines: int, seed: int) -> Run | None:
    """Baseline-DP: d equal pipelines, each with its part of the requests in order; shape
    (d, depth, batch)."""

    def took(depth: int, batch: int, parts: list[list[int]]) -> float:
        return max(one_pipeline(model, machine, depth, batch, part) for part in parts)

    ways = []
    for pipelines in (d for d in range(2, machines + 1) if machines % d == 0):
        depth = machines // pipelines
        for batch, given in _batches(seed):
            if fits(model, machine, depth, batch):
                cuts = [i * len(given) // pipelines for i in range(pipelines + 1)]
                parts = [given[a:b] for a, b in pairwise(cuts)]
                least = max(_work_s(model, machine, batch, part) for part in parts) / depth
                shape = (pipelines, depth, batch)
                ways.append(_Way(least, shape, partial(took, depth, batch, parts)))
    return _best(ways)


def disaggregated(model: Model, machine: Machine, machines: int, seed: int) -> Run | None:
    """DéjàVu: every division of the machines; shape (prompt machines, token machines, batch)."""
    ways = []
    for prompts in range(1, machines):
        tokens = machines - prompts
        for batch, given in _batches(seed):
            if fits(model, machine, prompts, batch, PROMPT_TOKENS) and fits(
                model, machine, tokens, batch
            ):
                prompt_s = prompt_ns(model, machine, batch) * len(given) / prompts / 1e9
                token_s = token_ns(model, machine, batch) * sum(given) / tokens / 1e9
                took = partial(two_pipelines, model, machine, prompts, tokens, batch, given)
                ways.append(_Way(max(prompt_s, token_s) - 0.01, (prompts, tokens, batch), took))
    return _best(ways)


def _batches(seed: int) -> list[tuple[int, list[int]]]:
    return [(batch, lengths(batch, seed)) for batch in BATCHES]


def _work_s(model: Model, machine: Machine, batch: int, given: Sequence[int]) -> float:
    """Machine seconds of all microbatches; a little less, since a stage's times are rounded."""
    prompts = prompt_ns(model, machine, batch) * len(given)
    return (prompts + token_ns(model, machine, batch) * sum(given)) / 1e9 - 0.01
