"""A scheduler with a step that fails, to see an engine core die by itself."""

from __future__ import annotations

from typing import Any

from engine_shim.scheduler import relume_scheduler

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
