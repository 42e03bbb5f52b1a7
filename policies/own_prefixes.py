"""Blocks that a replica's own dispatches will make, as long as the fold lacks these."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from events.prefix import unpack
from policies.state import Worker


class OwnPrefixes:
    """`marks`: by hash, how many pending dispatches to each (worker, incarnation) have it."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        self.marks: dict[int, dict[tuple[str, int], int]] = {}

    def decided(self, event: Any) -> None:
        """An own `RouteDecided` that chose a worker."""
        place = event.worker, event.incarnation
        for one in unpack(event.prefix):
            here = self.marks.setdefault(one, {})
            here[place] = here.get(place, 0) + 1

    def forget(self, event: Any) -> None:
        """The fold holds it now."""
        place = event.worker, event.incarnation
        for one in unpack(event.prefix):
            here = self.marks[one]
            here[place] -= 1
            if not here[place]:
                del here[place]
                if not here:
                    del self.marks[one]

    def on(self, worker: Worker, one: int) -> bool:
        """Whether the engine that `worker` has will make the block, and say so."""
        if not worker.cached.block_tokens or worker.engine != "ready":
            return False
        return (worker.name, worker.incarnation) in self.marks.get(one, ())

    def workers(self, one: int) -> Iterable[str]:
        """Names of workers that were sent it."""
        return [name for name, _ in self.marks.get(one, ())]
