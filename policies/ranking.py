"""The open workers of a fleet by cost, kept from one decision to the next.

A decision of a large fleet must not look at every worker. Only those are looked at again that
the fold touched (`policies.touched`), that own events concern, or whose trust changed; what
comes out is what a pass over all of them would give.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from events.vocabulary import Candidate
from policies import touched
from policies.state import Worker
from policies.view import View

MODELS = 8
"""Rankings are kept for so many models."""

Why = Callable[[Worker, bool], str]
"""Why a worker, distrusted or not, cannot take a request; empty when it can."""


class Ranking:
    """Of one model. Costs count `weight` for each request a worker holds."""

    def __init__(self, why: Why, weight: int) -> None:
        self.weight = weight
        self.reasons: dict[str, int] = {}
        """How many workers cannot take a request, by reason."""
        self._why = why
        self._marks: touched.Touched | None = None
        self._seen = self._own_seen = self._tick = -1
        self._distrusted: dict[str, int] = {}
        self._workers: list[Worker] = []
        self._index: dict[str, int] = {}
        self._loads: list[tuple[int, int]] = []
        self._costs: list[int] = []
        """By worker; below 0: it is not open."""
        self._excluded: list[str] = []
        self._levels: list[int] = []
        """All costs there are, in order."""
        self._at: dict[int, list[int]] = {}
        """Indices of open workers of each cost, in order."""

    def bring_up(self, view: View) -> None:
        """To what the view shows now."""
        marks, fleet = touched.of(view.fleet), view.fleet
        names = marks.since(self._seen) if marks is self._marks else None
        distrusted = view.distrusted()
        if names is None or len(fleet.workers) != len(self._workers):
            self._distrusted = distrusted
            self._build(view)
        else:
            changed = {*names, *(view.moved.since(self._own_seen) or ())}
            if fleet.tick != self._tick:  # what ended early may be forgotten then
                changed.update(view.overlaid())
            if distrusted != self._distrusted:
                changed.update(distrusted, self._distrusted)
                self._distrusted = distrusted
            for name in changed:
                at = self._index.get(name)
                if at is not None:
                    self._look(view, at)
        self._marks, self._seen = marks, marks.count
        self._own_seen, self._tick = view.moved.count, fleet.tick

    def best(self, turn: int) -> Iterator[Candidate]:
        """Open workers, the cheapest first; equals go round from worker number `turn` on."""
        for cost in self._levels:
            here = self._at[cost]
            first = bisect_left(here, turn)
            for at in (*here[first:], *here[:first]):
                worker = self._workers[at]
                yield Candidate(worker.name, worker.incarnation, cost, *self._loads[at])

    @property
    def open(self) -> int:
        """How many can take a request."""
        return len(self._workers) - sum(self.reasons.values())

    def _build(self, view: View) -> None:
        self._workers = list(view.fleet.workers.values())
        self._index = {worker.name: at for at, worker in enumerate(self._workers)}
        count = len(self._workers)
        self._loads, self._costs, self._excluded = [(0, 0)] * count, [-1] * count, [""] * count
        self._levels, self._at, self.reasons = [], {}, {}
        for at in range(count):
            self._look(view, at)

    def _look(self, view: View, at: int) -> None:
        worker = self._workers[at]
        load = self._loads[at] = view.load(worker)
        distrusted = self._distrusted.get(worker.name, 0) == worker.incarnation
        why = self._why(worker, distrusted)
        cost = -1 if why else load[0] + self.weight * load[1]
        before, reason = self._costs[at], self._excluded[at]
        if reason != why:
            self._excluded[at] = why
            self._count(reason, -1)
            self._count(why, 1)
        if cost == before:
            return
        self._costs[at] = cost
        if before >= 0:
            here = self._at[before]
            del here[bisect_left(here, at)]
            if not here:
                del self._at[before]
                del self._levels[bisect_left(self._levels, before)]
        if cost >= 0:
            here = self._at.get(cost)
            if here is None:
                self._at[cost] = [at]
                insort(self._levels, cost)
            else:
                insort(here, at)

    def _count(self, reason: str, by: int) -> None:
        if reason:
            left = self.reasons.get(reason, 0) + by
            if left:
                self.reasons[reason] = left
            else:
                del self.reasons[reason]


def of(view: View, model: str, why: Why, weight: int) -> Ranking:
    """The view's ranking of workers for `model`, as it is now."""
    found: Ranking | None = view.rankings.get(model)
    if found is None or found.weight != weight:
        if len(view.rankings) >= MODELS:
            view.rankings.clear()
        found = view.rankings[model] = Ranking(why, weight)
    found.bring_up(view)
    return found
