"""The fold of checkpoints: which holder has how much of which request.

`CheckpointAcknowledged` of the holder's living boot is the only source of coverage; what
a writer sent, or a decision meant, covers nothing. A record of an older boot of the daemon
changes nothing, whatever its place in the total order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from msgspec import UnsetType

from relume.events import vocabulary as v
from relume.policies.agreement import LEADER_VERSION, has_version
from relume.policies.state.fleet import (
    Coverage,
    Fleet,
    Holder,
    Placed,
    Planned,
    Rate,
    Request,
    Worker,
)

RELEASE_TICKS = 3
"""A request's engine informs its holders of the end; after this number of ticks the leader does. It
names at most `RELEASED_AT_ONCE` in one event."""

FORGET_TICKS = 15
"""Time for which the end of a request without acknowledged blocks is stored: acknowledgements may
come late."""

RELEASED_AT_ONCE = 256

FADE_BYTES = 1 << 30
"""Of a link's restores: older ones count half after each such number of bytes."""


def covered_tokens(fleet: Fleet, holder: str, request: str) -> int:
    """Tokens of `request` that can be had from `holder`: |C_r|, of its worst child."""
    site = fleet.holders.get(holder)
    found = site.covered.get(request) if site is not None and site.alive else None
    return min(found.tokens.values(), default=0) if found else 0


def endpoint(fleet: Fleet, holder: str, worker: str) -> str:
    """Where the engine of `worker` reaches `holder`'s daemon; empty when it cannot."""
    site, own = fleet.holders.get(holder), fleet.holders.get(worker)
    if site is None or not site.alive:
        return ""
    if site.local and own is not None and own.machine == site.machine:
        return site.local
    return site.address


def bandwidth(fleet: Fleet, holder: str, worker: str) -> int:
    """Measured bytes a second from `holder` to `worker`; 0 when nothing was measured."""
    site = fleet.holders.get(holder)
    rate = site.rates.get(worker) if site is not None else None
    return rate.bytes * 1_000_000 // rate.us if rate is not None and rate.us else 0


def share(placed: Placed, covered: Coverage | None) -> tuple[int, int]:
    """What a placement is to one of its holders: blocks as Eq. 4 counts them (what is
    expected, until more is held) and bytes still to come (Eq. 5)."""
    held = sum(covered.bytes.values()) if covered is not None else 0
    per_block = max(placed.bytes // max(placed.blocks, 1), 1)
    return max(placed.blocks, held // per_block), max(0, placed.bytes - held)


def _count_share(fleet: Fleet, site: Holder, request: str, sign: int) -> None:
    placed = fleet.placed.get(request)
    if placed is not None and site.name in placed.holders:
        blocks, promised = share(placed, site.covered.get(request))
        site.placed_blocks += sign * blocks
        site.promised_bytes += sign * promised


def _place(fleet: Fleet, request: str, placed: Placed | None) -> None:
    """The request's placement is another now, or none: its holders' sums follow."""
    known = fleet.placed.get(request)
    for name in known.holders if known is not None else ():
        if site := fleet.holders.get(name):
            _count_share(fleet, site, request, -1)
    if placed is None:
        fleet.placed.pop(request, None)
        return
    fleet.placed[request] = placed
    for name in placed.holders:
        if site := fleet.holders.get(name):
            _count_share(fleet, site, request, 1)


def forget(fleet: Fleet, request: str) -> None:
    """The request ended: its placement is void. Its bytes are held until the holder says
    that they are gone. The choice of its holder may be lost with its gateway; before version 2 of `leader` such
    blocks were not released."""
    fleet.planned.pop(request, None)
    is_placed = request in fleet.placed
    if is_placed:
        _place(fleet, request, None)
    if is_placed or (held_somewhere(fleet, request) and has_version(fleet, LEADER_VERSION, 2)):
        fleet.ending[request] = max(fleet.tick, 0)


def held_somewhere(fleet: Fleet, request: str) -> bool:
    """Whether any living holder said it has blocks of `request`."""
    return request in covering(fleet)


def covering(fleet: Fleet) -> dict[str, int]:
    """By request, how many holders have blocks of it. It follows from the fold: built at the first
    question, and anew where the fold was replaced by another one."""
    known: tuple[dict[str, Holder], dict[str, int]] | None = fleet.__dict__.get("covering")
    if known is None or known[0] is not fleet.holders:
        counts = Counter(chain.from_iterable(site.covered for site in fleet.holders.values()))
        known = fleet.__dict__["covering"] = fleet.holders, dict(counts)
    return known[1]


def _uncover(fleet: Fleet, site: Holder, request: str) -> None:
    """The holder has no block of the request any more."""
    counts = covering(fleet)
    del site.covered[request]
    counts[request] -= 1
    if not counts[request]:
        del counts[request]


def settle(fleet: Fleet, tick: int) -> None:
    """Drop ended requests without held blocks."""
    due = [r for r, at in fleet.ending.items() if tick - at >= FORGET_TICKS]
    for request in due:
        if not held_somewhere(fleet, request):
            del fleet.ending[request]


def to_release(fleet: Fleet, tick: int, at_once: bool = False) -> tuple[str, ...]:
    """Ended requests whose blocks the leader must ask back; `at_once`: also those whose engine may
    do so itself. Blocks of a request that runs, and arrived in a former log, stay; before version 3 of
    `leader` they were released."""
    due = [
        request
        for request, at in fleet.ending.items()
        if (at_once or tick - at >= RELEASE_TICKS)
        and request not in fleet.requests
        and held_somewhere(fleet, request)
    ]
    if due and not at_once and has_version(fleet, LEADER_VERSION, 3):
        running = _running(fleet)
        due = [request for request in due if request not in running]
    return tuple(due[:RELEASED_AT_ONCE])


def _running(fleet: Fleet) -> set[str]:
    """Requests that an engine has, and whose end no replica wrote."""
    return {
        attempt.request
        for worker in fleet.workers.values()
        for attempt in worker.attempts.values()
        if attempt.queued and not attempt.ended
    }


def to_void(fleet: Fleet, worker: str) -> tuple[tuple[str, int], ...]:
    """Live requests with an attempt on `worker` whose blocks are still used, each with its last
    attempt, wherever that is: one that restored blocks of `worker` has written them again as its
    own, and a holder cannot tell these from others."""
    found = []
    for request in fleet.requests.values():
        numbers = [int(key.rpartition("/")[2]) for name, key in request.places if name == worker]
        if request.worker == worker:
            numbers.append(request.attempt)
        if numbers and max(numbers) > _void_attempt(request):
            found.append((request.request, max(request.attempt, *numbers)))
    return tuple(found)


def _void_attempt(request: Request) -> int:
    return 0 if isinstance(request.void_attempt, UnsetType) else request.void_attempt


class Progress(NamedTuple):
    """KV tokens in whole blocks of what runs on engines that make checkpoints: all of them,
    those the best holder of their request has, and those a holder has yet to get. What has
    no holder is not covered, and no lag. `requests` have such blocks; of `begun` a holder has
    some (the coverage rate of LUMEN's review, "Observability")."""

    tokens: int
    covered: int
    lag: int
    requests: int
    begun: int


def progress(fleet: Fleet) -> Progress:
    """How far checkpoints lag."""
    tokens = covered = lag = requests = begun = 0
    for worker in fleet.workers.values():
        for attempt in worker.attempts.values() if worker.block_bytes else ():
            request = fleet.requests.get(attempt.request)
            if request is None or request.attempt != attempt.attempt:
                continue
            placed = fleet.placed.get(attempt.request)
            holders = placed.holders if placed is not None else ()
            filled = attempt.filled * worker.block_size
            best = max((covered_tokens(fleet, h, attempt.request) for h in holders), default=0)
            tokens += filled
            covered += min(best, filled)
            lag += max(filled - best, 0) if holders else 0
            requests += filled > 0
            begun += min(best, filled) > 0
    return Progress(tokens, covered, lag, requests, begun)


def ready(fleet: Fleet, worker: Worker, event: v.EngineReady) -> None:
    """What blocks the worker's engine writes and can use."""
    worker.family = event.family
    worker.block_bytes = event.block_bytes
    if event.family and (site := fleet.holders.get(worker.name)):
        site.family = event.family


def lose(fleet: Fleet, worker: str) -> None:
    """The worker's host is lost, its state daemon with it."""
    if site := fleet.holders.get(worker):
        _empty(fleet, site)
        site.alive = False


def _empty(fleet: Fleet, site: Holder) -> None:
    for request in [*site.covered]:
        _uncover(fleet, site, request)
    site.held_bytes = site.placed_blocks = site.promised_bytes = 0
    for request in fleet.placed:
        _count_share(fleet, site, request, 1)


def _living(fleet: Fleet, stream: str, holder: str, boot: str) -> Holder | None:
    """The holder, when `stream` is its own worker's and `boot` its present life."""
    site = fleet.holders.get(holder)
    if site is None or stream != f"w.{holder}" or site.boot != boot or not site.alive:
        return None
    return site


def _on_started(fleet: Fleet, stream: str, epoch: int, event: v.StateDaemonStarted) -> None:
    site = fleet.holders.setdefault(event.worker, Holder(name=event.worker))
    if event.epoch < site.epoch:
        return
    _empty(fleet, site)
    site.boot = event.boot
    site.epoch = event.epoch
    site.address = event.address
    site.local = event.local
    site.machine = event.machine
    worker = fleet.workers.get(event.worker)
    site.family = event.family or (worker.family if worker is not None else "")
    site.figures = {}
    site.budget_bytes = event.budget_bytes + event.file_bytes
    site.alive = True


def _on_lost(fleet: Fleet, stream: str, epoch: int, event: v.StateDaemonLost) -> None:
    site = fleet.holders.get(event.worker)
    if site is not None and site.boot == event.boot:
        lose(fleet, event.worker)


def _on_reported(fleet: Fleet, stream: str, epoch: int, event: v.StateDaemonReported) -> None:
    if site := _living(fleet, stream, event.worker, event.boot):
        site.figures = dict(event.figures)


def _on_acknowledged(
    fleet: Fleet, stream: str, epoch: int, event: v.CheckpointAcknowledged
) -> None:
    site = _living(fleet, stream, event.holder, event.boot)
    if site is not None:
        _acknowledge(fleet, site, event)


def _on_all_acknowledged(
    fleet: Fleet, stream: str, epoch: int, event: v.CheckpointsAcknowledged
) -> None:
    site = _living(fleet, stream, event.holder, event.boot)
    if site is not None:
        for held in event.held:
            _acknowledge(fleet, site, held)


def _acknowledge(fleet: Fleet, site: Holder, held: v.CheckpointAcknowledged | v.HeldPrefix) -> None:
    request = fleet.requests.get(held.request)
    if request is not None and held.attempt <= _void_attempt(request):
        return  # on its way when it was voided
    _count_share(fleet, site, held.request, -1)
    found = site.covered.get(held.request)
    if found is None:
        counts = covering(fleet)
        counts[held.request] = counts.get(held.request, 0) + 1
        found = site.covered[held.request] = Coverage(held.attempt)
    found.attempt = held.attempt
    if held.request not in fleet.requests:
        # Its end is over and settled, or its arrival is not in the log yet: if it never comes, the
        # leader releases the blocks of an engine that stood still meanwhile.
        late = max(fleet.tick, 0) + FORGET_TICKS - RELEASE_TICKS
        fleet.ending.setdefault(held.request, late)
    _set(site, found, held.child, held.tokens, held.bytes)
    _count_share(fleet, site, held.request, 1)


def _set(site: Holder, found: Coverage, child: int, tokens: int, held: int) -> None:
    site.held_bytes += held - found.bytes.get(child, 0)
    found.tokens[child] = tokens
    found.bytes[child] = held


def _on_evicted(fleet: Fleet, stream: str, epoch: int, event: v.CheckpointEvicted) -> None:
    site = _living(fleet, stream, event.holder, event.boot)
    if site is None:
        return
    site.evicted += 1
    if found := site.covered.get(event.request):
        _count_share(fleet, site, event.request, -1)
        _set(site, found, event.child, event.tokens, event.bytes)
        _count_share(fleet, site, event.request, 1)


def _on_dropped(fleet: Fleet, stream: str, epoch: int, event: v.CheckpointDropped) -> None:
    site = _living(fleet, stream, event.holder, event.boot)
    found = site.covered.get(event.request) if site else None
    if site is None or found is None:
        return
    _count_share(fleet, site, event.request, -1)
    found.tokens.pop(event.child, None)
    site.held_bytes -= found.bytes.pop(event.child, 0)
    if not found.tokens:
        _uncover(fleet, site, event.request)
        if event.request in fleet.ending and not held_somewhere(fleet, event.request):
            del fleet.ending[event.request]
    _count_share(fleet, site, event.request, 1)


def _on_chosen(fleet: Fleet, stream: str, epoch: int, event: v.HolderChosen) -> None:
    fleet.decisions += 1
    known = fleet.placed.get(event.request)
    if event.request not in fleet.requests or (known and known.attempt > event.attempt):
        return
    _place(fleet, event.request, placed_by(event))


def placed_by(event: v.HolderChosen) -> Placed:
    """The placement a decision makes."""
    return Placed(
        primary=event.primary,
        attempt=event.attempt,
        holders=event.holders,
        blocks=event.expected_blocks,
        bytes=event.expected_bytes,
    )


def _on_planned(
    fleet: Fleet, stream: str, epoch: int, event: v.RecoveryPlanned | v.MigrationPlanned
) -> None:
    fleet.decisions += 1
    for choice in event.choices:
        if choice.request in fleet.requests and (planned := planned_by(event, choice)):
            fleet.planned[choice.request] = planned
            if type(event) is v.MigrationPlanned:
                for name in (event.worker, planned.worker):
                    if worker := fleet.workers.get(name):
                        worker.moved_tick = event.tick


def planned_by(
    plan: v.RecoveryPlanned | v.MigrationPlanned, choice: v.RecoveryChoice | v.MigrationChoice
) -> Planned | None:
    """The move a plan decides for one request; None when it found no way."""
    if not 0 <= choice.chosen < len(choice.options):
        return None
    option = choice.options[choice.chosen]
    if type(plan) is v.MigrationPlanned:
        return Planned(
            attempt=choice.attempt,
            worker=option.worker,
            holder=option.holder,
            source=plan.worker,
            tick=plan.tick,
        )
    return Planned(attempt=choice.attempt, worker=option.worker, holder=option.holder)


def _on_restore_started(fleet: Fleet, stream: str, epoch: int, event: v.RestoreStarted) -> None:
    _count(fleet, "started", 1)


def _on_restore_done(fleet: Fleet, stream: str, epoch: int, event: v.RestoreDone) -> None:
    _count(fleet, "done", 1)
    _count(fleet, "tokens", event.tokens)
    _on_link_measured(fleet, stream, epoch, event)


def _on_link_measured(
    fleet: Fleet, stream: str, epoch: int, event: v.RestoreDone | v.LinkMeasured
) -> None:
    for site in fleet.holders.values():
        if event.holder in (site.local, site.address, site.name):
            rate = site.rates.setdefault(stream[2:], Rate())
            rate.bytes += event.bytes
            rate.us += event.duration_us
            if rate.bytes > FADE_BYTES:
                rate.bytes //= 2
                rate.us //= 2


def _on_restore_failed(fleet: Fleet, stream: str, epoch: int, event: v.RestoreFailed) -> None:
    _count(fleet, "failed", 1)
    _count(fleet, "tokens", event.tokens)


def _on_released(fleet: Fleet, stream: str, epoch: int, event: v.CheckpointsReleased) -> None:
    for request in event.requests:
        fleet.ending.pop(request, None)


def _on_voided(fleet: Fleet, stream: str, epoch: int, event: v.CheckpointsVoided) -> None:
    """Nothing that these attempts wrote covers anything. What a later attempt has written by now is
    covered again with its next acknowledgement."""
    for name, attempt in event.attempts:
        request = fleet.requests.get(name)
        if request is None:
            continue  # it ended: all of it is released
        request.void_attempt = max(attempt, _void_attempt(request))
        for site in fleet.holders.values():
            if (found := site.covered.get(name)) is not None:
                _count_share(fleet, site, name, -1)
                site.held_bytes -= sum(found.bytes.values())
                _uncover(fleet, site, name)
                _count_share(fleet, site, name, 1)


def _count(fleet: Fleet, name: str, number: int) -> None:
    fleet.restores[name] = fleet.restores.get(name, 0) + number


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.StateDaemonStarted: _on_started,
    v.StateDaemonLost: _on_lost,
    v.StateDaemonReported: _on_reported,
    v.CheckpointAcknowledged: _on_acknowledged,
    v.CheckpointsAcknowledged: _on_all_acknowledged,
    v.CheckpointEvicted: _on_evicted,
    v.CheckpointDropped: _on_dropped,
    v.HolderChosen: _on_chosen,
    v.RecoveryPlanned: _on_planned,
    v.MigrationPlanned: _on_planned,
    v.RestoreStarted: _on_restore_started,
    v.RestoreDone: _on_restore_done,
    v.LinkMeasured: _on_link_measured,
    v.RestoreFailed: _on_restore_failed,
    v.CheckpointsReleased: _on_released,
    v.CheckpointsVoided: _on_voided,
}
