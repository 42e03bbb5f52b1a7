"""The open workers of a fleet by cost, for `routing.least_load`, whose costs follow from the
account alone. A cost of time changes by itself, so policies that weigh time use `estimate_index`.

A worker that fails requests is not open here (`eligibility.is_failing`): it gets a request only if no
other is left, and then all workers are looked at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from relume.events.vocabulary import Candidate
from relume.policies.routing.eligibility import Check, check_of, check_with_failing
from relume.policies.routing.worker_index import WorkerIndex
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View

MODELS = 8
"""Maximum number of models with an index."""


def cost_of(worker: Worker, load: tuple[int, int], weight: int) -> int:
    """What one more request would cost there, in prompt tokens, less itself: the prompt tokens and
    the requests that it has, each for `weight`, at the worker's price."""
    cost, price = load[0] + weight * load[1], worker.price_percent
    return cost if price == 100 else (cost + weight) * price // 100 - weight


class CostIndex(WorkerIndex):
    """Of one model. Costs count `weight` for each request a worker holds."""

    def __init__(self, check: Check, model: str, weight: int) -> None:
        super().__init__(check, model)
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
                prefill, requests = self._loads[at]
                yield Candidate(
                    worker=worker.name,
                    incarnation=worker.incarnation,
                    cost=cost,
                    prefill_tokens=prefill,
                    requests=requests,
                )

    def _begin(self, view: View) -> None:
        count = len(self.workers)
        self._loads, self._costs = [(0, 0)] * count, [-1] * count
        self._levels, self._at = [], {}

    def _evaluate(self, view: View, at: int) -> None:
        worker = self.workers[at]
        load = self._loads[at] = view.load(worker)
        cost = -1 if self._excluding(view, at) else cost_of(worker, load, self.weight)
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
            if cost not in self._at:
                self._at[cost] = [at]
                insort(self._levels, cost)
            else:
                insort(self._at[cost], at)


def of(
    view: View, model: str, weight: int, failing: bool = True, spares: bool = False
) -> CostIndex:
    """The view's ranking of workers for `model`, as it is now. `failing`: those that fail requests are
    left out; `spares`: for requests that a spare takes."""
    name = (model if failing else f"{model}\n") + ("\nspares" if spares else "")
    found: CostIndex | None = view.indexes.get(name)
    if found is None or found.weight != weight:
        if len(view.indexes) >= MODELS:
            view.indexes.clear()
        check = check_with_failing(model, spares) if failing else check_of(model, spares)
        found = view.indexes[name] = CostIndex(check, model, weight)
    found.update(view)
    return found
