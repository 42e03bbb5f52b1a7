"""What restarts of engines take, learnt from those that this replica saw.

A restart lasts from the engine's death (or its start, if the replica saw no death) until it is
ready. What is learnt is not in the log: it only sets how long a request waits for a worker. Nothing
that replays depends on it: a place in the admission queue is recorded with its bound, and other
waits are recorded by their end.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, EnginePhase
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View

REMEMBERED = 8
"""Restarts of a model that count: the latest."""
MARGIN = 1.5
"""A restart may take this much longer than the longest of them: others may restart beside it."""
MOST_S = 600.0
"""A restart that takes longer is not waited for, and not learnt from."""
NEVER = float("-inf")
_HELD = (EffectKind.HOLD, EffectKind.RELEASE)


class RestartTimes:
    """`now_us` is always the replica's monotonic clock in microseconds."""

    def __init__(self) -> None:
        self._begun_us: dict[str, int] = {}
        """By worker."""
        self._took_us: dict[str, deque[int]] = {}
        """By model."""
        self._suspected: dict[str, tuple[int, int]] = {}
        """By worker: the incarnation that is suspected, and since when that is known."""

    def seen(self, event: Any, now_us: int) -> None:
        """An event that was folded."""
        kind = type(event)
        if kind is v.EngineDied or kind is v.EngineStarted:
            self._begun_us.setdefault(event.worker, now_us)
        elif kind is v.EngineReady:
            took_us = now_us - self._begun_us.pop(event.worker, now_us)
            if 0 < took_us <= MOST_S * 1e6:
                latest = self._took_us.setdefault(event.model, deque(maxlen=REMEMBERED))
                latest.append(took_us)
        elif kind is v.WorkerLost or kind is v.WorkerDeregistered:
            self._begun_us.pop(event.worker, None)
            self._suspected.pop(event.worker, None)
        elif kind is v.EffectsDecided:
            for effect in event.effects:
                if effect.kind in _HELD:  # it restarts when an operator has it restart
                    self._begun_us.pop(effect.worker, None)

    def forget_begun(self) -> None:
        """Events were missed: which restarts are under way is not known."""
        self._begun_us.clear()
        self._suspected.clear()

    def left_s(self, view: View, model: str, now_us: int) -> float:
        """What restarts of engines of `model` take from now on at most, in seconds: of those under
        way, and of suspected engines, whose death the log may not have yet. 0: there are none, or
        each takes longer than restarts of the model do."""
        took_us = self._took_us.get(model)
        if not took_us:
            return 0.0
        workers = [w for w in view.fleet.workers.values() if w.model == model]
        begun_us = max((self._begun(view, w, now_us) for w in workers), default=NEVER)
        most_us = min(MARGIN * max(took_us), MOST_S * 1e6)
        return max(begun_us + most_us - now_us, 0.0) / 1e6

    def _begun(self, view: View, worker: Worker, now_us: int) -> float:
        """When the worker's engine began to restart, in microseconds."""
        if not worker.present or worker.held or worker.drains:
            return NEVER
        if worker.engine in (EnginePhase.STARTING, EnginePhase.DEAD):
            return self._begun_us.get(worker.name, NEVER)
        incarnation = worker.incarnation
        if worker.engine != EnginePhase.READY or view.suspect(worker.name) != incarnation:
            self._suspected.pop(worker.name, None)
            return NEVER
        known, since_us = self._suspected.get(worker.name, (0, 0))
        if known != incarnation:
            since_us = now_us
            self._suspected[worker.name] = incarnation, now_us
        return since_us
