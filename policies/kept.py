"""What is kept about workers from one decision to the next.

A decision of a large fleet must not look at every worker. Only those are looked at again that
the fold touched (`policies.touched`), that own events concern, or whose trust changed; what
comes out is what a pass over all of them would give.
"""

from __future__ import annotations

from collections.abc import Callable

from policies import touched
from policies.state import Worker
from policies.view import View

Why = Callable[[Worker, bool], str]
"""Why a worker, distrusted or not, cannot take a request; empty when it can."""


class Kept:
    """Base of what is kept. `reasons`: how many workers cannot take a request, by reason.
    With `steps`, each step of an engine counts, not only those in which its work changed."""

    steps = False

    def __init__(self, why: Why) -> None:
        self.reasons: dict[str, int] = {}
        self.workers: list[Worker] = []
        self.index: dict[str, int] = {}
        self._why = why
        self._excluded: list[str] = []
        self._marks: touched.Marks | None = None
        self._seen = self._own_seen = self._steps_seen = self._tick = -1
        self._distrusted: dict[str, int] = {}

    @property
    def open(self) -> int:
        """How many can take a request."""
        return len(self.workers) - sum(self.reasons.values())

    def bring_up(self, view: View) -> None:
        """To what the view shows now."""
        fleet = view.fleet
        marks = touched.of(fleet)
        steps = marks.steps
        names = marks.since(self._seen) if marks is self._marks else None
        distrusted = view.distrusted()
        if names is None or len(fleet.workers) != len(self.workers):
            self._distrusted = distrusted
            self._build(view)
        else:
            changed = {*names, *(view.moved.since(self._own_seen) or ())}
            if self.steps:
                changed.update(steps.since(self._steps_seen) or ())
            if fleet.tick != self._tick:  # what ended early may be forgotten then
                changed.update(view.overlaid())
            if distrusted != self._distrusted:
                changed.update(distrusted, self._distrusted)
                self._distrusted = distrusted
            for name in changed:
                at = self.index.get(name)
                if at is not None:
                    self._look(view, at)
        self._marks, self._seen = marks, marks.count
        self._steps_seen = steps.count
        self._own_seen, self._tick = view.moved.count, fleet.tick

    def behind(self, view: View, most: int) -> bool:
        """Whether more than `most` workers are to be looked at again."""
        marks = touched.of(view.fleet)
        if marks is not self._marks:
            return True
        return (
            marks.count - self._seen
            + view.moved.count - self._own_seen
            + marks.steps.count - self._steps_seen
        ) > most  # fmt: skip

    def _build(self, view: View) -> None:
        self.workers = list(view.fleet.workers.values())
        self.index = {worker.name: at for at, worker in enumerate(self.workers)}
        self._excluded = [""] * len(self.workers)
        self.reasons = {}
        self._begin(view)
        for at in range(len(self.workers)):
            self._look(view, at)

    def _excluding(self, at: int) -> str:
        """Why worker number `at` cannot take a request, from now on; it is counted."""
        worker = self.workers[at]
        why = self._why(worker, self._distrusted.get(worker.name, 0) == worker.incarnation)
        reason = self._excluded[at]
        if reason != why:
            self._excluded[at] = why
            self._count(reason, -1)
            self._count(why, 1)
        return why

    def _count(self, reason: str, by: int) -> None:
        if reason:
            left = self.reasons.get(reason, 0) + by
            if left:
                self.reasons[reason] = left
            else:
                del self.reasons[reason]

    # --- of what is kept

    def _begin(self, view: View) -> None:
        """All are looked at next; nobody was."""
        raise NotImplementedError

    def _look(self, view: View, at: int) -> None:
        """Worker number `at` may be different."""
        raise NotImplementedError
