"""Private parts of vLLM's model runner that we touch, for 0.32.x: one fault of the CPU build.

A step that computes only a part of a prompt samples all the same and then takes the draw
of a seeded request back by moving its generator's offset. CPU generators have none, so
one seeded request with a prompt longer than a batch kills the engine ("CPU Generator does
not use offset"). Here the generator's state is kept before such a draw and put back.

Apart from `vllm_private`, since it concerns the processes that compute and nothing else.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_stock_sample = GPUModelRunner._sample
_stock_bookkeeping = GPUModelRunner._bookkeeping_sync


def install() -> None:
    """Patches this process where the fault is; idempotent."""
    if current_platform.is_cpu():
        GPUModelRunner._sample = _sample
        GPUModelRunner._bookkeeping_sync = _bookkeeping_sync


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
