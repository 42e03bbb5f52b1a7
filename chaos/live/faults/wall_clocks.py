"""Wrong wall clocks of agents and replicas, each as its file says (`relume.chaos.live.clock`)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

DRIFT_STEP_S = 0.1
"""Period in which a drifting clock is moved."""


class WallClocks:
    """The errors of clocks, by the name of the agent's worker or of the replica.

    `file_of(name)`: the file with the error of that clock in seconds.
    """

    def __init__(self, file_of: Callable[[str], Path]) -> None:
        self._file_of = file_of
        self._errors: defaultdict[str, float] = defaultdict(float)

    def jump(self, name: str, seconds: float) -> None:
        """Move a clock, forward or back, from where it is."""
        self._errors[name] += seconds
        file = self._file_of(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(".new")
        written.write_text(str(self._errors[name]))
        written.replace(file)

    async def drift(self, name: str, ppm: float) -> None:
        """Move a clock by its error in `ppm`, step after step, until cancelled."""
        loop = asyncio.get_running_loop()
        moved = loop.time()
        while True:
            await asyncio.sleep(DRIFT_STEP_S)
            now = loop.time()
            self.jump(name, (now - moved) * ppm / 1e6)
            moved = now
