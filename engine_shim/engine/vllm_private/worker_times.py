"""How long model steps take in the process that computes them, where the scheduler runs in another one.

Behind `vllm serve` on CPUs, and with several ranks, the scheduler waits for workers. It polls meanwhile
and gives its CPU away at each look, so on a busy host most of its time then counts as a wait for a CPU.
What the worker waited for, and what it did, only the worker knows. The worker of rank 0 adds it up on the
page on which the engine counts its steps; two readings of the clocks take 5 microseconds per call. Between
two steps it polls in the same way. So of its waits there, at most the time since the scheduler began the
step counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from relume.engine_shim.engine.cpu_clocks import WaitForCpu
from relume.engine_shim.engine.progress import Progress

PARTS = ("execute_model", "sample_tokens")
"""What the scheduler calls in each step."""


def install(progress: Progress) -> None:
    """Have the workers of this process say on that page what their steps take. Once per process."""
    times = _StepTimes(progress)
    for name in PARTS:
        setattr(Worker, name, times.measured(getattr(Worker, name)))


class _StepTimes:
    """Sums since the process started. One thread."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._cpu = WaitForCpu()
        self._took_ns = self._waited_us = self._late_us = 0
        self._step_ns = 0
        """When the step began of which it computed a part last."""

    def measured(self, part: Callable[..., Any]) -> Callable[..., Any]:
        """`part` of a worker, with its times added up if it has rank 0."""

        @wraps(part)
        def timed(worker: Any, *args: Any, **options: Any) -> Any:
            if worker.rank != 0:
                return part(worker, *args, **options)
            began_ns = self._begin()
            try:
                return part(worker, *args, **options)
            finally:
                self._took_ns += time.monotonic_ns() - began_ns
                self._waited_us += self._cpu.lap_us()
                sums = self._took_ns // 1000, self._waited_us, self._late_us
                self._progress.write_computed(*sums)

        return timed

    def _begin(self) -> int:
        """Now, in nanoseconds; notes how late the first part of a step begins."""
        waited_us, step_ns, now_ns = (
            self._cpu.lap_us(),
            self._progress.began_ns(),
            time.monotonic_ns(),
        )
        if step_ns and step_ns != self._step_ns:
            self._step_ns = step_ns
            self._late_us += min(waited_us, max(now_ns - step_ns, 0) // 1000)
        return now_ns
