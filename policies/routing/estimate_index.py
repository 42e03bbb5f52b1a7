"""The open workers of a fleet in the order of their estimates.

Theory of operation. What a request waits for on a worker changes with every microsecond, but the
order of workers with the same prices does not: it is the order in which their prompts end. So
workers with one token price and one fixed part form a group, sorted by the end of their prompts. A
decision merges the groups' best entries as far as it needs them: it looks at the heads of a few
groups, not at all workers.

Equals: first a worker without prompts and with the fewest requests, then the one whose prompts
ended first, then in rotation, so that an idle fleet is used evenly.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from operator import is_not

from relume.events.vocabulary.enums import Exclusion
from relume.policies.admission.admission_settings import config_of as admission_config_of
from relume.policies.routing import worker_estimate
from relume.policies.routing.eligibility import (
    Check,
    QueueLimit,
    check_of,
    is_failing,
    queue_limit,
)
from relume.policies.routing.routing_settings import RoutingConfig, config_of
from relume.policies.routing.session_affinity import Ring
from relume.policies.routing.worker_estimate import LATE, WorkerEstimate
from relume.policies.routing.worker_index import WorkerIndex
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View

INDEXES = 16
"""Maximum number of indexes, by model and order."""
NOBODY = (-1, -1)
BEHIND = (LATE << 12, 0, 0, 0)
"""Greater than any entry of an order."""

Group = tuple[int, int]
Order = Callable[[WorkerEstimate], tuple[Group, int]]
"""The group of a worker, and its place there."""


def by_time(of: WorkerEstimate) -> tuple[Group, int]:
    """Token price and what it costs at least; its turn among those alike."""
    group = (of.token_ns, of.fixed_us) if of.price_percent == 100 else of.price
    return group, turn_of(of)


def turn_of(of: WorkerEstimate) -> int:
    """The end of its prompts; of a worker that has none, its requests: fewest come first."""
    return of.free_at_us or of.requests - LATE


def by_requests(of: WorkerEstimate) -> tuple[Group, int]:
    """All together; requests, then the end of its prompts."""
    return (0, 0), of.priced_requests * LATE + of.free_at_us


def by_queue(of: WorkerEstimate) -> tuple[Group, int]:
    """Requests that do not decode yet; the end of its prompts."""
    return (of.requests - of.batch, 0), of.free_at_us


class EstimateIndex(WorkerIndex):
    """Of one model. `at` is a worker's number in the fleet."""

    steps = True

    def __init__(self, check: Check, model: str, order: Order) -> None:
        super().__init__(check, model)
        self.config = RoutingConfig()
        self.limit = QueueLimit()
        """What saturates a worker, where policies go by it."""
        self.estimates: list[WorkerEstimate] = []
        self.there: list[int] = []
        """Open workers."""
        self.requests = 0
        """Of all of them."""
        self._order = order
        self._places: list[tuple[Group, int] | None] = []
        self._groups: dict[Group, list[tuple[int, int]]] = {}
        self._ring: Ring | None = None
        self._settings: object = None
        self._prices: list[list[float]] = []
        self._heard: list[tuple[int, int]] = []
        """(revision, at) of what counts for busy workers: their receive times are dropped at some
        time."""
        self.idle = 0
        self.replicas = 0
        """How many decide at once."""

    def update(self, view: View) -> None:
        super().update(view)
        heard = view.receipts.revisions
        while self._heard and heard and self._heard[0][0] < heard[0]:
            revision, at = heappop(self._heard)
            if revision in _heard_by(self.workers[at], view.replica):
                self._evaluate(view, at)

    def _prepare(self, view: View) -> None:
        fleet = view.fleet
        prices = [model.routing_weights for model in fleet.steptimes.values()]
        if len(prices) != len(self._prices) or any(map(is_not, prices, self._prices)):
            self._prices, self._marks = prices, None  # all are to be looked at
        mark = view.settings_mark
        if (
            mark != self._settings
        ):  # as after any rare change, the set of living workers may differ too
            self._settings, self.config, self._marks = mark, config_of(view), None
            self.replicas = sum(replica.alive for replica in fleet.replicas.values())
            admission = admission_config_of(view)
            spread = self.config.overfill == "off" and admission.requests
            self.limit = queue_limit(view, admission) if spread else QueueLimit()

    def quickest(self, at_us: int, tokens: int, turn: int) -> Iterator[tuple[int, int, int, int]]:
        """(microseconds to its first token, end of its prompts, its turn, at) of open workers in
        that order, for a request with `tokens` to compute. For an index `by_time`."""
        count, heads = len(self.workers), []
        for (token_ns, fixed_us), here in self._groups.items():
            own, settled = tokens * token_ns // 1000 + fixed_us, 1
            free_at, at = here[0]
            if len(here) > 1 and here[1][0] == free_at:
                here, settled = _turned(here, 0, turn)
                at = here[0][1]
            cost = free_at - at_us + own if free_at > at_us else own
            heads.append(((cost, free_at, (at - turn) % count, at), own, here, 1, settled))
        heapify(heads)
        while heads:  # from the best group, as long as it is that
            entry, own, here, following, settled = heappop(heads)
            others, last = heads[0][0] if heads else BEHIND, len(here)
            while entry < others:
                yield entry
                if following == last:
                    break
                free_at, at = here[following]
                if following >= settled:
                    settled = following + 1
                    if settled < last and here[settled][0] == free_at:
                        here, settled = _turned(here, following, turn)
                        at = here[following][1]
                cost = free_at - at_us + own if free_at > at_us else own
                entry = cost, free_at, (at - turn) % count, at
                following += 1
            else:
                heappush(heads, (entry, own, here, following, settled))

    def shortest(self, turn: int) -> Iterator[tuple[int, int, int, int]]:
        """(requests, 0, 0, at) of open workers in that order. For an index `by_requests`."""
        for here in self._groups.values():
            settled = 0
            for number in range(len(here)):
                if number == settled:
                    here, settled = _turned(here, number, turn)
                place, at = here[number]
                yield place // LATE, 0, 0, at

    def soonest(self, limit: QueueLimit) -> tuple[int, int]:
        """The earliest end of prompts on workers that their requests do not saturate, and who that
        is, the first of equals; (-1, -1): there is none. For an index `by_queue`."""
        soonest = NOBODY
        for (waiting, _), here in self._groups.items():
            if limit.reached(waiting, 0):
                continue
            for entry in here:
                if NOBODY != soonest <= entry:
                    break
                at = entry[1]
                unheard = self.estimates[at].requests - len(self.workers[at].attempts)
                if not limit.reached(waiting, unheard):
                    soonest = entry
                    break
        return soonest

    @property
    def dearest(self) -> int:
        """The highest price of a prompt token there is, nanoseconds."""
        return max((token_ns for token_ns, _ in self._groups), default=0)

    @property
    def ring(self) -> Ring:
        """Where sessions belong."""
        if self._ring is None:
            self._ring = Ring(self.number_of)
        return self._ring

    def excluded(self, at: int) -> Exclusion:
        """Why worker number `at` gets no request."""
        return self._excluded[at]

    def _begin(self, view: View) -> None:
        count = len(self.workers)
        self.estimates = [None] * count  # type: ignore[list-item]
        self._places = [None] * count
        self._groups, self.there, self.requests = {}, [], 0
        self._ring = None
        self._heard = []

    def _evaluate(self, view: View, at: int) -> None:
        before, was = self._places[at], self.estimates[at]
        excluded = self._excluding(view, at)
        reserve_percent = self.config.kv_reserve_percent
        worker = self.workers[at]
        failing = is_failing(view, worker)
        of = worker_estimate.estimate_of(view, worker, reserve_percent, failing)
        self.estimates[at] = of
        now = None if excluded else self._order(of)
        if of.silent_at_us != LATE:
            oldest = view.receipts.revisions[0] if view.receipts.revisions else 0
            for revision in _heard_by(worker, view.replica):
                if revision >= oldest:
                    heappush(self._heard, (revision, at))
        if before is not None:
            self.requests -= was.requests
        if now is not None:
            self.requests += of.requests
        if before == now:
            return
        self._places[at] = now
        if before is not None:
            group, place = before
            here = self._groups[group]
            del here[bisect_left(here, (place, at))]
            if not here:
                del self._groups[group]
            if now is None:
                del self.there[bisect_left(self.there, at)]
        if now is not None:
            group, place = now
            if group in self._groups:
                insort(self._groups[group], (place, at))
            else:
                self._groups[group] = [(place, at)]
            if before is None:
                insort(self.there, at)


def _heard_by(worker: Worker, replica: str) -> tuple[int, ...]:
    """Revisions whose receive time is in the estimate of a worker."""
    found = [worker.step_revision]
    if worker.prompts_revision > worker.step_revision:
        found.append(worker.prompts_revision)
    if worker.sent_revision and worker.sent_by != replica:
        found.append(worker.sent_revision)
    return tuple(found)


def _turned(
    here: list[tuple[int, int]], begin: int, turn: int
) -> tuple[list[tuple[int, int]], int]:
    """The entries, with those that share the place of number `begin` from worker number `turn` on
    and round; and where these end."""
    place = here[begin][0]
    end = bisect_right(here, (place, LATE), begin)
    first = bisect_left(here, (place, turn), begin, end)
    return here[:begin] + here[first:end] + here[begin:first] + here[end:], end


def of(view: View, model: str, order: Order, spares: bool = False) -> EstimateIndex:
    """The view's index of workers for `model`, as it is now. `spares`: for requests that a spare
    takes."""
    name = f"{model}\n{order.__name__}" + ("\nspares" if spares else "")
    found: EstimateIndex | None = view.indexes.get(name)
    if found is None:
        if len(view.indexes) >= INDEXES:
            view.indexes.clear()
        found = view.indexes[name] = EstimateIndex(check_of(model, spares), model, order)
    found.update(view)
    found.idle = 0
    return found


FORGET = 4096
"""An index is dropped after the fold advanced so often without a decision that used it."""


def keep_up(view: View) -> None:
    """Look again at what changed since: the fold has advanced, and a decision is not to wait for
    it."""
    for name, indexed in list(view.indexes.items()):
        if type(indexed) is EstimateIndex:
            indexed.idle += 1
            if indexed.idle > FORGET:
                del view.indexes[name]
            else:
                indexed.update(view)


def forget(view: View) -> None:
    """The next decision looks at all workers: what was kept cannot be relied on."""
    view.indexes.clear()
