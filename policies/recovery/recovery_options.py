"""What every way to take up an interrupted request costs, on every worker, from every holder.

A plan chooses one request after the other. Each choice loads its worker and the links that it uses,
so the estimates of the later ones contain the earlier ones.

Integers: microseconds, tokens, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from relume.events.vocabulary import RecoveryOption
from relume.events.vocabulary.enums import Exclusion, RecoveryKind, Tier

RECOMPUTE = RecoveryKind.RECOMPUTE
UNLIMITED = 1 << 52
"""More than any number of blocks."""
MAX_OPTIONS = 4096
"""Options of one plan that are recorded; of each request the chosen one and the next best."""


class StoredBlocks(Struct, frozen=True):
    """One holder's checkpoint of a request: `tokens` covered, `bytes` to move for them."""

    holder: str
    tokens: int
    bytes: int


class InterruptedRequest(Struct, frozen=True, kw_only=True):
    """A request that lost its worker. `tokens`: prompt and delivered ones, all of which
    must be in a cache before the next one comes. `model`, `family`: what it needs. `avoid`:
    `worker:incarnation` that failed it before. `tier`: how soon its client wants tokens."""

    request: str
    attempt: int
    tokens: int
    stored: tuple[StoredBlocks, ...] = ()
    model: str = ""
    family: str = ""
    avoid: tuple[str, ...] = ()
    tier: Tier = Tier.NONE


class Target(Struct, frozen=True, kw_only=True):
    """A worker that may take requests. `load`: Eq. 4, `blocks` of it checkpoints (times
    alpha); `wait_us`: until what is queued there is computed; `prefill_ns_per_token`:
    measured; `excluded` says why it takes none; `requests` it has, of which `waiting` have no
    token yet. `available_blocks` KV blocks, of `block_tokens` each, may be given to others."""

    worker: str
    load: int
    wait_us: int
    prefill_ns_per_token: int
    model: str = ""
    family: str = ""
    excluded: Exclusion = Exclusion.NONE
    incarnation: int = 0
    requests: int = 0
    waiting: int = 0
    available_blocks: int = UNLIMITED
    block_tokens: int = 1


class Links(Struct, frozen=True):
    """Bandwidth in bytes a millisecond: measured ones by (holder, worker); of one host; and of
    any other pair. 0: no way between them. `latency_us` once a restore."""

    local: int
    remote: int
    measured: dict[tuple[str, str], int] = {}
    latency_us: int = 500

    def rate(self, holder: str, worker: str) -> int:
        """Bytes a millisecond from `holder` to `worker`."""
        usual = self.local if holder == worker else self.remote
        return self.measured.get((holder, worker), usual)

    def move_us(self, holder: str, worker: str, size: int) -> int:
        """Microseconds to move `size` bytes."""
        return self.latency_us + size * 1000 // max(self.rate(holder, worker), 1)


class Rules(Struct, frozen=True, kw_only=True):
    """Eq. 6's thresholds: `theta` in units of Eq. 4 (-1: `theta_percent` of the mean load),
    `tau` in tokens; `request_load`: what one more request adds to Eq. 4 (beta); `per_block`
    tokens and `alpha` turn a checkpoint's tokens into its share of Eq. 4. `budget_us`: time that a
    client may wait for blocks while computing again would be sooner; 0: any."""

    theta: int = -1
    theta_percent: int = 200
    tau: int = 512
    request_load: int = 4
    per_block: int = 16
    alpha: int = 1
    budget_us: int = 0


class Estimates:
    """Every option to resume a request, given what the earlier choices have done to the workers and
    the holders' links. `max_recorded`: maximum number of options of one request in the record."""

    def __init__(
        self,
        targets: Sequence[Target],
        links: Links,
        rules: Rules,
        requests: int = 1,
        considerate: bool = False,
        serial: bool = False,
    ) -> None:
        """`requests`: for this number of requests. `considerate`: as `least_delay` counts links;
        `serial`: and a worker restores one request after the other, from any source."""
        self.targets = targets
        self.links = links
        self.rules = rules
        self.max_recorded = max(2, MAX_OPTIONS // max(requests, 1))
        self.free_us = {t.worker: t.wait_us for t in targets}
        self.link_us = {t.worker: 0 for t in targets}
        self.considerate = considerate
        self.serial = serial
        self.received_us = {t.worker: 0 for t in targets}
        self.local_us = {t.worker: 0 for t in targets}
        self.requests = {t.worker: t.requests for t in targets}
        self.waiting = {t.worker: t.waiting for t in targets}
        self.load = {t.worker: t.load for t in targets}
        self.available_blocks = {t.worker: t.available_blocks for t in targets}
        self._block_tokens = {t.worker: max(t.block_tokens, 1) for t in targets}

    def options(
        self, request: InterruptedRequest, home: RecoveryOption | None = None
    ) -> list[RecoveryOption]:
        """Every way to take the request up, in a fixed order. `home`: the way it has until it
        chooses: that one keeps its place in the queue of restores."""
        found = []
        for target in self.targets:
            excluded, full = _excluded(request, target), self._full(request, target)
            found.append(self._recompute(request, target, excluded or full))
            for stored in request.stored:
                if stored.tokens <= 0:
                    continue
                unfit = excluded or self._unfit(request, target, stored)
                found.append(self._restore(request, target, stored, unfit or full))
        return self._timely(found, home) if self.rules.budget_us else found

    def _timely(
        self, options: list[RecoveryOption], home: RecoveryOption | None
    ) -> list[RecoveryOption]:
        """`options` without restores whose blocks arrive after the time budget, if computing again
        gives the next token sooner."""
        computed = [o.done_us for o in options if o.kind == RECOMPUTE and not o.excluded]
        if not computed:
            return options
        soonest, found = min(computed), []
        for option in options:
            known = option
            if home is not None and (option.worker, option.holder) == (home.worker, home.holder):
                known = home
            late = known.move_us > self.rules.budget_us and known.done_us > soonest
            if late and not option.excluded:
                option = replace(option, excluded=Exclusion.OVER_TIME_BUDGET)
            found.append(option)
        return found

    def eligible(self, options: list[RecoveryOption]) -> list[tuple[int, RecoveryOption]]:
        """Those of `options` that may be chosen, with their places: those that nothing excludes. If
        nothing but room for KV blocks is missing, those of the worker with most room."""
        fit = [(at, o) for at, o in enumerate(options) if not o.excluded]
        if fit:
            return fit
        full = [(at, o) for at, o in enumerate(options) if o.excluded == Exclusion.NO_KV_SPACE]
        most = max((self.available_blocks[o.worker] for _, o in full), default=0)
        return [(at, o) for at, o in full if self.available_blocks[o.worker] == most]

    def recorded(
        self, options: list[RecoveryOption], at: int
    ) -> tuple[tuple[RecoveryOption, ...], int]:
        """The options that the record has, and the index there of option `at`."""
        if len(options) <= self.max_recorded:
            return tuple(options), at
        ranked = sorted(range(len(options)), key=lambda n: (n != at, _rank(options[n]), n))
        return tuple(options[n] for n in ranked[: self.max_recorded]), min(at, 0)

    def _full(self, request: InterruptedRequest, target: Target) -> Exclusion:
        """Whether the worker has no room for the request's blocks. An empty one has."""
        if not self.requests[target.worker]:
            return Exclusion.NONE
        short = self.blocks(request, target.worker) > self.available_blocks[target.worker]
        return Exclusion.NO_KV_SPACE if short else Exclusion.NONE

    def blocks(self, request: InterruptedRequest, worker: str) -> int:
        """KV blocks that the request needs on `worker` for its next token."""
        return request.tokens // self._block_tokens[worker] + 1

    def _unfit(
        self, request: InterruptedRequest, target: Target, stored: StoredBlocks
    ) -> Exclusion:
        if target.family != request.family:
            return Exclusion.FINGERPRINT
        reached = self.links.rate(stored.holder, target.worker)
        return Exclusion.NONE if reached else Exclusion.UNREACHABLE

    def _recompute(
        self, request: InterruptedRequest, target: Target, excluded: Exclusion
    ) -> RecoveryOption:
        wait = self.free_us[target.worker]
        compute = request.tokens * target.prefill_ns_per_token // 1000
        return RecoveryOption(
            worker=target.worker,
            kind=RECOMPUTE,
            holder="",
            restored=0,
            wait_us=wait,
            move_us=0,
            compute_us=compute,
            done_us=wait + compute,
            excluded=excluded,
        )

    def _restore(
        self, request: InterruptedRequest, target: Target, stored: StoredBlocks, excluded: Exclusion
    ) -> RecoveryOption:
        """Blocks move while the worker is busy with others; at least one token is left to
        compute, which gives the next."""
        move = self.links.move_us(stored.holder, target.worker, stored.bytes)
        arrived = self._free_us(stored.holder, target.worker) + move
        wait = max(self.free_us[target.worker] - arrived, 0)
        left = max(request.tokens - stored.tokens, 1)
        compute = left * target.prefill_ns_per_token // 1000
        return RecoveryOption(
            worker=target.worker,
            kind=RecoveryKind.RESTORE,
            holder=stored.holder,
            restored=min(stored.tokens, request.tokens),
            wait_us=wait,
            move_us=arrived,
            compute_us=compute,
            done_us=arrived + wait + compute,
            excluded=excluded,
        )

    def _free_us(self, holder: str, worker: str) -> int:
        """When all that is on the way from `holder` to `worker` is free."""
        if not self.considerate:
            return self.link_us.get(holder, 0)
        if holder == worker:
            return self.local_us[worker]
        if self.serial:
            return max(self.link_us.get(holder, 0), self.local_us[worker])
        return max(self.link_us.get(holder, 0), self.received_us[worker])

    def _carry(self, stored: StoredBlocks, worker: str) -> None:
        """What `stored` is of goes to `worker`."""
        free = self._free_us(stored.holder, worker)
        arrived = free + self.links.move_us(stored.holder, worker, stored.bytes)
        if self.serial:
            self.local_us[worker] = arrived
        if self.considerate and stored.holder == worker:
            self.local_us[worker] = arrived
            return
        self.link_us[stored.holder] = arrived
        if self.considerate:
            self.received_us[worker] = arrived

    def take(self, request: InterruptedRequest, option: RecoveryOption) -> None:
        """The choice is made: the worker computes for it, the holder's link carries it, and
        whatever else was stored of it is no part of anyone's load (Eq. 4, from state)."""
        worker = option.worker
        self.free_us[worker] += option.compute_us
        self.load[worker] += self.rules.request_load
        self.requests[worker] += 1
        self.waiting[worker] += 1
        self.available_blocks[worker] -= self.blocks(request, worker)
        for stored in request.stored:
            if stored.holder in self.load:
                share = self.rules.alpha * (stored.tokens // self.rules.per_block)
                self.load[stored.holder] = max(0, self.load[stored.holder] - share)
            if option.kind == RecoveryKind.RESTORE and stored.holder == option.holder:
                self._carry(stored, worker)

    def give_back(self, request: InterruptedRequest, home: RecoveryOption) -> None:
        """Undo the choice of a worker that holds the checkpoint itself."""
        worker = home.worker
        self.free_us[worker] -= home.compute_us
        self.requests[worker] -= 1
        self.waiting[worker] -= 1
        self.available_blocks[worker] += self.blocks(request, worker)
        for stored in request.stored:
            if stored.holder == worker:
                self.local_us[worker] -= self.links.move_us(worker, worker, stored.bytes)


def _excluded(request: InterruptedRequest, target: Target) -> Exclusion:
    if target.excluded:
        return target.excluded
    if f"{target.worker}:{target.incarnation}" in request.avoid:
        return Exclusion.FAILED_BEFORE
    return Exclusion.OTHER_MODEL if target.model != request.model else Exclusion.NONE


def _rank(option: RecoveryOption) -> tuple[bool, int]:
    return bool(option.excluded), option.done_us
