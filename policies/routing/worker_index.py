"""Base class of incrementally maintained worker indexes: it evaluates only dirty workers again.

Theory of operation. A decision of a large fleet must not look at every worker, so an index of
workers stays from one decision to the next. A worker may look different after three things: the
fold changed it (`relume.policies.state.dirty_set` has its name), an event of this replica that the
fold lacks concerns it (the view's `moved`), or this replica began or ceased to suspect it. A spare may
also look different because of the others (`eligibility.held_back`).
`update` evaluates these workers again and no others. The result equals an evaluation of all
workers; property tests compare the two. Where the names of dirty workers are lost, because
something rare happened, all are evaluated.

`cost_index` orders workers by cost, `estimate_index` by estimate.
"""

from __future__ import annotations

from relume.events.vocabulary.enums import Exclusion
from relume.policies.routing.eligibility import NO_NAMES, Check, held_back
from relume.policies.state import dirty_set
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View


class WorkerIndex:
    """Base class for incrementally maintained worker indexes. `reasons`: how many workers get
    no request, by reason. With `steps`, each step of an engine counts, not only those in which
    its work changed."""

    steps = False

    def __init__(self, check: Check, model: str) -> None:
        self.model = model
        self.reasons: dict[Exclusion, int] = {}
        self.workers: list[Worker] = []
        self.number_of: dict[str, int] = {}
        self._check = check
        self._excluded: list[Exclusion] = []
        self._marks: dirty_set.FleetDirtySet | None = None
        self._stand = (-1, -1, -1, -1)
        self._suspected: dict[str, int] = {}
        self._held_back = NO_NAMES

    @property
    def open(self) -> int:
        """How many may get a request."""
        return len(self.workers) - (sum(self.reasons.values()) if self.reasons else 0)

    def update(self, view: View) -> None:
        """To what the view shows now."""
        fleet, moved = view.fleet, view.moved
        marks = dirty_set.of(fleet)
        steps, suspected = marks.steps, view.suspected()
        stand = marks.count, moved.count, steps.count, fleet.tick
        if marks is self._marks and stand == self._stand and suspected == self._suspected:
            return
        self._prepare(view)
        names = own = stepped = None
        if marks is self._marks and len(fleet.workers) == len(self.workers):
            names, own = marks.since(self._stand[0]), moved.since(self._stand[1])
            stepped = steps.since(self._stand[2]) if self.steps else ()
        before, self._held_back = self._held_back, held_back(view, self.model)
        if names is None or own is None or stepped is None:
            self._suspected = suspected
            self._build(view)
        else:
            changed = {*names, *own, *stepped, *(before ^ self._held_back)}
            if fleet.tick != self._stand[3]:  # early ends may be dropped then
                changed.update(view.overlaid())
            if suspected != self._suspected:
                changed.update(suspected, self._suspected)
                self._suspected = suspected
            for name in changed:
                at = self.number_of.get(name)
                if at is not None:
                    self._evaluate(view, at)
        self._marks, self._stand = marks, stand

    def _build(self, view: View) -> None:
        self.workers = list(view.fleet.workers.values())
        self.number_of = {worker.name: at for at, worker in enumerate(self.workers)}
        self._excluded = [Exclusion.NONE] * len(self.workers)
        self.reasons = {}
        self._begin(view)
        for at in range(len(self.workers)):
            self._evaluate(view, at)

    def _excluding(self, view: View, at: int) -> Exclusion:
        """Why worker number `at` gets no request, from now on; it is counted."""
        worker = self.workers[at]
        now = self._check(view, worker, self._suspected.get(worker.name, 0) == worker.incarnation)
        before = self._excluded[at]
        if before != now:
            self._excluded[at] = now
            self._count(before, -1)
            self._count(now, 1)
        return now

    def _count(self, reason: Exclusion, by: int) -> None:
        if reason:
            left = self.reasons.get(reason, 0) + by
            if left:
                self.reasons[reason] = left
            else:
                del self.reasons[reason]

    # --- of what is kept

    def _prepare(self, view: View) -> None:
        """Something changed; workers are looked at next."""

    def _begin(self, view: View) -> None:
        """All workers are evaluated next; none has been."""
        raise NotImplementedError

    def _evaluate(self, view: View, at: int) -> None:
        """Worker number `at` may be different."""
        raise NotImplementedError
