"""The open workers of a fleet by cost, kept (`policies.kept`) from one decision to the next.

For `routing.least_load`, whose costs change with the account alone. What costs time, which goes
on by itself, is on `policies.board`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from relume.events.vocabulary import Candidate
from relume.policies.kept import Kept, Why
from relume.policies.view import View

MODELS = 8
"""Rankings are kept for so many models."""


class Ranking(Kept):
    """Of one model. Costs count `weight` for each request a worker holds."""

    def __init__(self, why: Why, weight: int) -> None:
        super().__init__(why)
        self.weight = weight
        self._loads: list[tuple[int, int]] = []
        self._costs: list[int] = []
        """By worker; below 0: it is not open."""
        self._levels: list[int] = []
        """All costs there are, in order."""
        self._at: dict[int, list[int]] = {}
        """Indices of open workers of each cost, in order."""

    def best(self, turn: int) -> Iterator[Candidate]:
        """Open workers, the cheapest first; equals go round from worker number `turn` on."""
        for cost in self._levels:
            here = self._at[cost]
            first = bisect_left(here, turn)
            for at in (*here[first:], *here[:first]):
                worker = self.workers[at]
                yield Candidate(worker.name, worker.incarnation, cost, *self._loads[at])

    def _begin(self, view: View) -> None:
        count = len(self.workers)
        self._loads, self._costs = [(0, 0)] * count, [-1] * count
        self._levels, self._at = [], {}

    def _look(self, view: View, at: int) -> None:
        load = self._loads[at] = view.load(self.workers[at])
        cost = -1 if self._excluding(at) else load[0] + self.weight * load[1]
        before = self._costs[at]
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


def of(view: View, model: str, why: Why, weight: int) -> Ranking:
    """The view's ranking of workers for `model`, as it is now."""
    found: Ranking | None = view.rankings.get(model)
    if found is None or found.weight != weight:
        if len(view.rankings) >= MODELS:
            view.rankings.clear()
        found = view.rankings[model] = Ranking(why, weight)
    found.bring_up(view)
    return found
