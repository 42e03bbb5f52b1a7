"""Schedulers with a fault: an engine core that dies by itself, generators in a wrong state."""

from __future__ import annotations

from typing import Any

import torch

from relume.engine_shim.engine.reporting_scheduler import relume_scheduler
from relume.engine_shim.engine.vllm_private import model_runner
from relume.engine_shim.generation import IDENTITY_KEY

FAILING_STEP = 400
"""Well behind the engine's self-test."""


class StepFailed(RuntimeError):
    """The failure put into the engine core."""


def failing_scheduler(**options: Any) -> Any:
    scheduler = relume_scheduler(**options)
    stock = scheduler.update_from_output
    steps = 0

    def update_from_output(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == FAILING_STEP:
            raise StepFailed
        return stock(*args)

    scheduler.update_from_output = update_from_output
    return scheduler


def misdrawing_scheduler(**options: Any) -> Any:
    """Takes seeded requests up one draw too late. In the engine's one process."""
    scheduler = relume_scheduler(**options)
    skip = model_runner.skip_draws
    model_runner.skip_draws = lambda runner, gen, count: skip(runner, gen, count + 1)
    return scheduler


def misrestoring_scheduler(**options: Any) -> Any:
    """Takes seeded requests up one draw too late where their blocks may be had from a holder.
    In the engine's one process."""
    scheduler = relume_scheduler(**options)
    state = model_runner._State
    stock = state.__post_init__

    def post_init(self: Any) -> None:
        stock(self)
        mark = (self.sampling_params.extra_args or {}).get(IDENTITY_KEY) or {}
        if mark.get("from") and self.generator is not None:
            torch.randint(0, 2**31, (1,), generator=self.generator)

    state.__post_init__ = post_init
    return scheduler
