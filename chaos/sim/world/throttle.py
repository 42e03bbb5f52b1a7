"""A share of a core for processes whose work takes no virtual time: they stop for the rest of each
period, as under the quota of a control group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop

PERIOD_S = 0.04


class Throttle:
    """Lets the live processes of `processes` run for `share` of each period, until `end`."""

    def __init__(
        self, loop: VirtualLoop, processes: Callable[[], Sequence[Process]], share: float
    ) -> None:
        self._loop = loop
        self._processes = processes
        self._share = share
        self._paused: list[Process] = []
        self._over = False
        self._pause()

    def end(self) -> None:
        """Let them run."""
        self._over = True
        self._resume()

    def _pause(self) -> None:
        if self._over or self._share >= 1:
            return
        self._paused = [one for one in self._processes() if one.alive and not one.paused]
        for process in self._paused:
            process.pause()
        self._at((1 - self._share) * PERIOD_S, self._go)

    def _go(self) -> None:
        self._resume()
        self._at(self._share * PERIOD_S, self._pause)

    def _resume(self) -> None:
        paused, self._paused = self._paused, []
        for process in paused:
            process.resume()

    def _at(self, seconds: float, work: Callable[[], None]) -> None:
        at = self._loop.time() + seconds
        self._loop.call_at(at, work, context=self._loop.root.copy())
