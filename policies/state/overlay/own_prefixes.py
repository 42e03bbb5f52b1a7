"""Blocks that a replica's own dispatches will make, while the fold lacks these. Usually they are
few, and compared whole on a query. Beyond `FEW` (etcd is unavailable) the oldest are stored mark by
mark, so that a query costs no more for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from relume.events.vocabulary.enums import EnginePhase
from relume.events.wire.prefix import HASH_BYTES, common, unpack
from relume.policies.state.fleet import Fleet, Worker

FEW = 32

Place = tuple[str, int]
"""Worker and incarnation."""


class OwnPrefixes:
    """Pending dispatches in their order: the last few with their prefixes, the others by mark, how
    many to each place have it."""

    __slots__ = ("_marks", "_old", "_recent")

    def __init__(self) -> None:
        self._recent: deque[tuple[Place, bytes]] = deque()
        self._old = 0
        self._marks: dict[int, dict[Place, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._recent)

    def decided(self, event: Any) -> None:
        """An own `RouteDecided` that chose a worker."""
        self._recent.append(((event.worker, event.incarnation), event.prefix))
        if len(self._recent) > FEW:
            place, prefix = self._recent.popleft()
            self._old += 1
            for one in unpack(prefix):
                here = self._marks.setdefault(one, {})
                here[place] = here.get(place, 0) + 1

    def forget(self, event: Any) -> None:
        """The fold holds the oldest of them now."""
        if not self._old:
            self._recent.popleft()
            return
        self._old -= 1
        place = event.worker, event.incarnation
        for one in unpack(event.prefix):
            here = self._marks[one]
            here[place] -= 1
            if not here[place]:
                del here[place]
                if not here:
                    del self._marks[one]

    def on(self, worker: Worker, prefix: bytes) -> int:
        """How many of the leading marks the current engine of `worker` will make and report."""
        if not self._recent or not tells(worker):
            return 0
        place = worker.name, worker.incarnation
        most = max((common(prefix, p) for to, p in self._recent if to == place), default=0)
        if self._marks:
            for number, one in enumerate(unpack(prefix)):
                if place not in self._marks.get(one, ()):
                    return max(most, number)
            return len(prefix) // HASH_BYTES
        return most

    def everywhere(self, fleet: Fleet, prefix: bytes) -> Iterator[tuple[str, int]]:
        """(worker, how many) for those that will make some, as `on` has it."""
        if not self._recent:
            return
        places = {to for to, p in self._recent if p[:HASH_BYTES] == prefix[:HASH_BYTES]}
        if self._marks:
            places.update(self._marks.get(unpack(prefix[:HASH_BYTES])[0], ()))
        for name, incarnation in places:
            worker = fleet.workers.get(name)
            if worker is not None and worker.incarnation == incarnation:
                if count := self.on(worker, prefix):
                    yield name, count


def tells(worker: Worker) -> bool:
    """Whether the worker's engine says what it caches."""
    return bool(worker.cached.block_tokens) and worker.engine == EnginePhase.READY
