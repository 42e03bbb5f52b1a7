"""Which running requests leave their worker, and where they continue.

A move is evaluated like a recovery: every option to restore or to compute on every other worker,
with its estimate (`recovery_options`). Each choice loads its worker and its holder's link for later
ones. The cost of what follows is added: the tokens a request is still expected to make, at what a
token takes there with one request more, and here as it is.

- `drain`: by an operator's command, or since the worker's agent stops. What can be moved with a
short pause leaves. A request whose holders lag waits for them
for some ticks, since their lag would be computed again. After a deadline nothing
waits, and no pause is too long.
- `imbalance`: a worker that has had too many more requests than another for long gives some
  away, the ones with most to come first, each only while that gains more than its pause
  costs. Enough leave to make the two equal, never more, so a move cannot call for its own
  undoing; and then a time passes in which nothing is moved (hysteresis), and a longer one until
  a request that moved may move again (dwell). Replicas divide what is to migrate by the requests
  they have there. Steps of an engine beside a busy process take many times as long, so how long a
  prompt takes on a worker counts only within bounds around the median of its hardware. How long
  its decoding steps take counts as it is: a source that seems slow has too many requests anyway,
  a target that seems slow gets none.

- `promotion`: requests of tier batch leave a spare that was promoted, as from a drain, each only to a
  worker with fewer requests. Those that wait for a holder have a short time to leave.

A request whose engine was never seen to have it stays. Integers: microseconds, tokens, ticks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, UnsetType

from relume.events.vocabulary import MigrationChoice, RecoveryOption
from relume.events.vocabulary.enums import EnginePhase, Exclusion, MigrationCause, Tier
from relume.policies.admission.admission_queue import by_tier
from relume.policies.checkpoints import decisions
from relume.policies.checkpoints.decisions import Lost
from relume.policies.migration.migration_settings import MigrationConfig, config_of
from relume.policies.recovery.recovery_options import Estimates, InterruptedRequest
from relume.policies.routing.eligibility import excluded_at
from relume.policies.spares import spare_decisions
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View
from relume.policies.state.prefill_rate import token_us


class Running(Struct, frozen=True, kw_only=True):
    """A request that runs on the worker in question. `tokens`: prompt and delivered ones;
    `left`: expected still to come. `avoid`: `worker:incarnation` that failed it before. `tier`: how
    soon its client wants tokens."""

    request: str
    attempt: int
    tokens: int
    left: int
    avoid: tuple[str, ...] = ()
    tier: Tier = Tier.NONE


def sources(view: View) -> list[tuple[str, MigrationCause]]:
    """(worker, cause) of those that requests are to leave at `view`."""
    config = config_of(view)
    if config.moves == "off":
        return []
    workers = view.fleet.workers.values()
    found = [
        (w.name, MigrationCause.DRAIN)
        for w in workers
        if w.drains and w.engine == EnginePhase.READY
    ]
    found += [(w.name, MigrationCause.PROMOTION) for w in workers if _has_batch_to_leave(view, w)]
    if config.moves == "all":
        found += [(name, MigrationCause.IMBALANCE) for name in crowded(view, config)]
    return [(name, cause) for name, cause in found if decisions.takes_part(view, name)]


def _has_batch_to_leave(view: View, worker: Worker) -> bool:
    """Whether the worker was a spare until lately, and is to get all requests now."""
    return _promoted_tick(view, worker) >= 0 and not excluded_at(view, worker)


def _promoted_tick(view: View, worker: Worker) -> int:
    known = spare_decisions.models_of(view.fleet).get(worker.model)
    return known.promoted.get(worker.name, -1) if known is not None else -1


def crowded(view: View, config: MigrationConfig) -> list[str]:
    """Of each model the worker that has had most to do, if it has been too much for long."""
    most: dict[str, Worker] = {}
    open_ = [w for w in view.fleet.workers.values() if _settled(view, w, config)]
    for worker in open_:
        others = [o for o in open_ if o is not worker and o.model == worker.model]
        known = most.get(worker.model)
        if known is not None and known.recent[-1] >= worker.recent[-1]:
            continue
        if any(_sustained(worker, other, config) for other in others):
            most[worker.model] = worker
    return [worker.name for worker in most.values()]


def _settled(view: View, worker: Worker, config: MigrationConfig) -> bool:
    """Whether it takes requests, and no move has touched it lately."""
    if excluded_at(view, worker):
        return False
    if len(worker.recent) < max(config.ticks, 1):
        return False
    since = view.fleet.tick - worker.moved_tick
    return worker.moved_tick < 0 or since >= max(config.ticks, config.cool_ticks)


def _sustained(worker: Worker, other: Worker, config: MigrationConfig) -> bool:
    ticks, gap = max(config.ticks, 1), max(config.gap, 2)
    pairs = zip(worker.recent[-ticks:], other.recent[-ticks:], strict=True)
    return all(mine - theirs >= gap for mine, theirs in pairs)


def plan(
    view: View, cause: MigrationCause, worker: str, incarnation: int, running: Sequence[Running]
) -> tuple[MigrationChoice, ...]:
    """What happens to each of `running`, in their order, decided together.

    Raises KeyError for an unknown worker or cause.
    """
    lost = [Lost(r.request, r.attempt, r.tokens, r.avoid, r.tier) for r in running]
    trust_percent = config_of(view).trust_percent if cause == MigrationCause.IMBALANCE else 0
    interrupted, estimates = decisions.estimates(view, worker, incarnation, lost, trust_percent)
    wanted = list(zip(running, interrupted, strict=True))
    ways: dict[MigrationCause, type[_MigrationPlanner]] = {
        MigrationCause.DRAIN: _Drain,
        MigrationCause.IMBALANCE: _Imbalance,
        MigrationCause.PROMOTION: _Promotion,
    }
    moving = ways[cause](view, worker, estimates)
    chosen = {r.request: moving.choose(r, i) for r, i in moving.order(wanted)}
    return tuple(chosen[r.request] for r in running)


class _MigrationPlanner:
    """One plan in the making."""

    def __init__(self, view: View, worker: str, estimates: Estimates) -> None:
        self.view = view
        self.config = config_of(view)
        self.source = view.fleet.workers[worker]
        self.estimates = estimates
        self.requests = {w.name: view.load(w)[1] for w in view.fleet.workers.values()}

    def order(
        self, wanted: list[tuple[Running, InterruptedRequest]]
    ) -> Iterable[tuple[Running, InterruptedRequest]]:
        """The order in which requests choose."""
        raise NotImplementedError

    def waits(self, request: Running) -> str:
        """Why the request is not for this plan; empty when it is."""
        raise NotImplementedError

    def refuses(self, option: RecoveryOption, stay_us: int, go_us: int) -> str:
        """Why the best option is not chosen; empty if it is."""
        raise NotImplementedError

    def choose(self, request: Running, wanted: InterruptedRequest) -> MigrationChoice:
        options = self.estimates.options(wanted)
        goes = [self._go_us(request, o) for o in options]
        open_ = [
            (goes[at], self.requests[o.worker], at)
            for at, o in enumerate(options)
            if not o.excluded
        ]
        go_us, _, at = min(open_, default=(0, 0, -1))
        stay_us = request.left * self._token_us(self.source, 0)
        reason = self.waits(request) or ("" if open_ else _nobody(options))
        reason = reason or self.refuses(options[at], stay_us, go_us)
        if not reason:
            self.estimates.take(wanted, options[at])
            self.requests[options[at].worker] += 1
            self.requests[self.source.name] -= 1
        recorded_options, chosen = self.estimates.recorded(options, at)
        return MigrationChoice(
            request=request.request,
            attempt=request.attempt,
            tokens=request.tokens,
            left=request.left,
            chosen=-1 if reason else chosen,
            options=recorded_options,
            stay_us=stay_us,
            go_us=go_us,
            reason=reason,
            avoid=request.avoid,
            tier=request.tier,
        )

    def _go_us(self, request: Running, option: RecoveryOption) -> int:
        target = self.view.fleet.workers[option.worker]
        return option.done_us + request.left * self._token_us(target, 1)

    def _token_us(self, worker: Worker, more: int) -> int:
        return token_us(self.view.fleet, worker, self.requests[worker.name] + more)

    def _has_moved_lately(self, request: Running) -> bool:
        moved = self.view.checkpoints.plan(request.request)
        if moved is None or moved.tick < 0:
            return False
        ticks = self.config.cool_ticks
        if request.attempt > moved.attempt:  # else it was abandoned
            ticks = max(self.config.dwell_ticks, ticks)
        return self.view.fleet.tick - moved.tick < ticks

    def _lag(self, request: Running) -> int:
        """Tokens in its cache that no holder has; -1 when its engine does not have it."""
        entry = self.source.attempts.get(key_of(request.request, request.attempt))
        if entry is None or not entry.queued:
            return -1
        held = decisions.stored(self.view.fleet, request.request)
        covered = max((part.tokens for part in held), default=0)
        return max(entry.filled * self.source.block_size - covered, 0)


def _nobody(options: list[RecoveryOption]) -> str:
    """Why no other worker can take a request."""
    full = any(option.excluded == Exclusion.NO_KV_SPACE for option in options)
    return "no KV room elsewhere" if full else "nobody can take it"


class _Drain(_MigrationPlanner):
    def order(
        self, wanted: list[tuple[Running, InterruptedRequest]]
    ) -> Iterable[tuple[Running, InterruptedRequest]]:
        """Higher tiers first, and of these those with most to lose, as after a failure."""
        most_to_lose = sorted(wanted, key=lambda pair: (-pair[0].tokens, pair[0].request))
        return by_tier(most_to_lose, lambda pair: pair[0].tier)

    def waits(self, request: Running) -> str:
        if (lag := self._lag(request)) < 0:
            return "not begun"
        if self._is_overdue():
            return ""
        waited = self.view.fleet.tick - self._since_tick()
        slack = self.config.slack_blocks * self.source.block_size
        return "catching up" if lag > slack and waited < self.config.wait_ticks else ""

    def refuses(self, option: RecoveryOption, stay_us: int, go_us: int) -> str:
        if self._is_overdue():
            return ""
        return "too long a pause" if option.done_us > 1000 * self.config.pause_ms else ""

    def _since_tick(self) -> int:
        """When it began to drain."""
        leaves = (self.source.leaving, self.source.rolling)
        ticks = [one.since_tick for one in leaves if not isinstance(one, UnsetType)]
        since = [*ticks, self.source.drained_tick] if self.source.draining else ticks
        return min(since, default=-1)

    def _is_overdue(self) -> bool:
        """Whether a deadline is over, the operator's, the agent's that stops, or the rolling
        restart's: then what can move does, at any pause."""
        ends = (self.source.drain, self.source.leaving, self.source.rolling)
        deadlines = [end.deadline_tick for end in ends if not isinstance(end, UnsetType)]
        return any(0 <= tick <= self.view.fleet.tick for tick in deadlines)


class _Promotion(_Drain):
    def waits(self, request: Running) -> str:
        if request.tier != Tier.BATCH:
            return "not of tier batch"
        return "moved lately" if self._has_moved_lately(request) else super().waits(request)

    def refuses(self, option: RecoveryOption, stay_us: int, go_us: int) -> str:
        if self.requests[self.source.name] - self.requests[option.worker] < 2:
            return "balanced"
        return super().refuses(option, stay_us, go_us)

    def _since_tick(self) -> int:
        return _promoted_tick(self.view, self.source)


class _Imbalance(_MigrationPlanner):
    def __init__(self, view: View, worker: str, estimates: Estimates) -> None:
        super().__init__(view, worker, estimates)
        self.left = self._share()

    def order(
        self, wanted: list[tuple[Running, InterruptedRequest]]
    ) -> Iterable[tuple[Running, InterruptedRequest]]:
        """Those with most to gain first, and of these the cheapest to move."""
        return sorted(wanted, key=lambda p: (-p[0].left, p[0].tokens, p[0].request))

    def waits(self, request: Running) -> str:
        if self.left <= 0:
            return "enough leave"
        if self._has_moved_lately(request):
            return "moved lately"
        return "not begun" if self._lag(request) < 0 else ""

    def refuses(self, option: RecoveryOption, stay_us: int, go_us: int) -> str:
        if self.requests[self.source.name] - self.requests[option.worker] < 2:
            return "balanced"
        gain, cost = stay_us - (go_us - option.done_us), option.done_us
        if gain * 100 <= cost * (100 + self.config.margin_percent):
            return "too little gain"
        self.left -= 1
        return ""

    def _share(self) -> int:
        """How many may leave of this replica's. Half of the gap would make two workers equal;
        the largest remainders decide which replicas get them."""
        open_ = [
            self.requests[w.name]
            for w in self.view.fleet.workers.values()
            if w is not self.source and not excluded_at(self.view, w, self.source.model)
        ]
        gap = self.requests[self.source.name] - min(open_, default=1 << 31)
        total = min(gap // 2, self.config.at_once)
        owners: dict[str, int] = {}
        for entry in self.source.attempts.values():
            if (known := self.view.fleet.requests.get(entry.request)) is not None:
                owners[known.owner] = owners.get(known.owner, 0) + 1
        count = sum(owners.values())
        if total <= 0 or not count:
            return 0
        shares = {name: total * n // count for name, n in owners.items()}
        rest = total - sum(shares.values())
        by_remainder = sorted(owners, key=lambda name: (-(total * owners[name] % count), name))
        for name in by_remainder[:rest]:
            shares[name] += 1
        return shares.get(self.view.stream, 0)
