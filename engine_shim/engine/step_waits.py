"""For how much of a step the engine waited for a CPU."""

from __future__ import annotations

from operator import sub

from relume.engine_shim.engine.cpu_clocks import WaitForCpu
from relume.engine_shim.engine.progress import Progress


class StepWaits:
    """Of the thread that schedules, and of the process that computes, where that is another one: then
    this thread polls meanwhile, and its own waits say nothing (`vllm_private.worker_times`)."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._cpu = WaitForCpu()
        self._computed = progress.computed()

    def lap_us(self, took_us: int) -> int:
        """Microseconds since the last call, which is `took_us` ago, by the same thread."""
        waited_us, before = self._cpu.lap_us(), self._computed
        self._computed = self._progress.computed()
        return waits_us(took_us, waited_us, before, self._computed)


def waits_us(
    took_us: int, waited_us: int, before: tuple[int, int, int], after: tuple[int, int, int]
) -> int:
    """For how much of `took_us` an engine waited, whose scheduling thread waited for `waited_us`. While
    another process computes, its waits count, by what it added up `before` and `after`. In the rest of the
    time, they are those of the thread, and those of the other process from a step's begin until it computes."""
    took, waited, late = map(sub, after, before)
    if not took:
        return waited_us
    return waited + min(waited_us + late, max(took_us - took, 0))
