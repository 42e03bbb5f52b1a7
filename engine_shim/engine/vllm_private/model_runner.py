"""Private parts of vLLM's model runner (V1) that we touch, for 0.32.x.

**Resuming a request.** The runner makes a new request's state with no output. Here one
that came with delivered tokens gets them as its output, and its generator is advanced by
what the sampler drew for them. The runner's own sampler shows what a draw consumes;
many draws are then skipped in one go where that is known to be the same (CPU: one number
a token; CUDA: a constant offset), else drawn one by one. Runner V2 needs nothing: it is
given all tokens, and its noise is a function of seed and position.

**A fault of the CPU build.** A step that computes only a part of a prompt samples all the
same and then undoes the draw of a seeded request by moving its generator's offset.
CPU generators have none, so one seeded request with a prompt longer than a batch kills the
engine ("CPU Generator does not use offset"). Here the generator's state is saved before such a draw
and restored.

Apart from `vllm_private`, since it concerns the processes that compute and nothing else.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from relume.engine_shim.engine.vllm_private.delivered_tokens import delivered_of
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint

_stock_sample = GPUModelRunner._sample
_stock_bookkeeping = GPUModelRunner._bookkeeping_sync
_stock_update_states = GPUModelRunner._update_states
_stock_execute_model = Worker.execute_model

_runner: GPUModelRunner | None = None
"""The runner whose states are being updated; one thread does that in a process."""


def install() -> None:
    """Patches this process; idempotent."""
    gpu_model_runner.CachedRequestState = _State
    GPUModelRunner._update_states = _update_states
    if failpoint_client.active:
        Worker.execute_model = _execute_model
    if current_platform.is_cpu():
        GPUModelRunner._sample = _sample
        GPUModelRunner._bookkeeping_sync = _bookkeeping_sync


# --- where a test slows it ---------------------------------------------------------

_used_s = 0.0


def _execute_model(self: Any, *args: Any, **options: Any) -> Any:
    """Passes a failpoint once a step is computed. It took the CPU time of this thread since the one
    before: with sampling, and without waits and idleness."""
    global _used_s
    output = _stock_execute_model(self, *args, **options)
    took_s = time.thread_time() - _used_s
    failpoint_client.reach(Failpoint.ENGINE_COMPUTE, took_s=took_s, rank=self.rank)
    _used_s = time.thread_time()
    return output


# --- taking a request up -----------------------------------------------------------


def _update_states(self: Any, scheduler_output: Any) -> Any:
    global _runner
    _runner = self
    try:
        return _stock_update_states(self, scheduler_output)
    finally:
        _runner = None


class _State(CachedRequestState):
    """State of a request new to the runner, as if it had sampled its delivered tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        tail = delivered_of(self.sampling_params)
        if not tail:
            return
        self.output_token_ids = tail
        if self.generator is not None:
            assert _runner is not None
            skip_draws(_runner, self.generator, len(tail))


def skip_draws(runner: Any, generator: torch.Generator, count: int) -> None:
    """Advance `generator` by what `runner` draws from it for `count` sampled tokens."""
    if generator.device.type != "cpu":
        before = generator.get_offset()
        _draw(runner, generator)
        step = generator.get_offset() - before
        generator.set_offset(before + step * count)
    elif _draws_one_number(runner):
        torch.randint(0, 2**31, (count,), generator=generator)
    else:
        for _ in range(count):
            _draw(runner, generator)


def _draw(runner: Any, generator: torch.Generator) -> None:
    """Sample once with `generator`, for the draw alone."""
    logits = torch.zeros((1, runner.model_config.get_vocab_size()), device=generator.device)
    runner.sampler.topk_topp_sampler.forward(logits, {0: generator}, None, None)


def _draws_one_number(runner: Any) -> bool:
    """Whether three samples consume what three numbers drawn together do."""
    known = getattr(runner, "_relume_one_number", None)
    if known is None:
        sampled, drawn = (torch.Generator().manual_seed(1) for _ in range(2))
        for _ in range(3):
            _draw(runner, sampled)
        torch.randint(0, 2**31, (3,), generator=drawn)
        known = runner._relume_one_number = torch.equal(sampled.get_state(), drawn.get_state())
    return known


# --- the fault of the CPU build ----------------------------------------------------


def _discarded(runner: Any) -> list[int]:
    """Rows with a seeded request whose sample of this step will be thrown away."""
    generators = runner.input_batch.generators
    if not generators:
        return []
    mask = runner.discard_request_mask.np
    return [row for row in generators if mask[row]]


def _sample(self: Any, *args: Any, **options: Any) -> Any:
    generators = self.input_batch.generators
    self._relume_states = {row: generators[row].get_state() for row in _discarded(self)}
    return _stock_sample(self, *args, **options)


def _bookkeeping_sync(self: Any, *args: Any, **options: Any) -> Any:
    rows = _discarded(self)
    if not rows:
        return _stock_bookkeeping(self, *args, **options)
    generators = self.input_batch.generators
    held = {row: generators.pop(row) for row in rows}
    for row, generator in held.items():
        generator.set_state(self._relume_states[row])
    try:
        return _stock_bookkeeping(self, *args, **options)
    finally:
        generators.update(held)
