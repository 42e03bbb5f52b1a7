"""What must hold in any fold, whatever log it folded: sums equal their parts, indexes and rows name
each other, nothing is negative, and counters keep their limits.

The simulator and the fold's own tests call these functions; a replica does not. `check` looks at
all of a fold. `of_worker` and `of_holder` look at one row and cost little, so that a reader of a
log may call them after each group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from msgspec import UnsetType

from relume.events.vocabulary.enums import EnginePhase
from relume.events.wire.prefix import MAX_REPORTED, unpack
from relume.policies.state.account import MOST_TOKENS, TOMBSTONES, key_of
from relume.policies.state.coverage import covering, share
from relume.policies.state.fleet import Fleet, Holder, Worker
from relume.policies.state.fold import RECENT_TICKS
from relume.policies.state.lifecycles.unacknowledged import MAX_ENTRIES
from relume.policies.state.prefix_cache import Index

WITHOUT_ENGINE = (EnginePhase.NONE, EnginePhase.DEAD)
"""Phases in which no engine holds anything."""


def check(fleet: Fleet) -> Iterator[str]:
    """Every broken invariant of the fold, in words."""
    for name, worker in fleet.workers.items():
        if worker.name != name:
            yield f"worker {worker.name} is stored as {name}"
        yield from of_worker(worker)
        yield from _cache(worker)
    for holder in fleet.holders.values():
        yield from of_holder(fleet, holder)
    yield from _requests(fleet)
    yield from _dispatches(fleet)
    yield from _streams(fleet)
    index: Index | None = fleet.__dict__.get("prefixes")
    if index is not None:
        yield from _prefix_index(fleet, index)
    if (counts := covering(fleet)) != Counter(r for h in fleet.holders.values() for r in h.covered):
        yield f"the index of covered requests is wrong: {counts}"


def of_worker(worker: Worker) -> Iterator[str]:
    """The sums of a worker's account, and what they sum."""
    left = flights = flight_left = prefilling = prefilling_tokens = 0
    for attempt in worker.attempts.values():
        left += attempt.left
        if not attempt.queued:
            flights += 1
            flight_left += attempt.left
        elif not attempt.decoding:
            prefilling += 1
            prefilling_tokens += attempt.tokens
        if not 0 <= attempt.left <= MOST_TOKENS or not 0 <= attempt.tokens <= MOST_TOKENS:
            yield f"{worker.name} has {attempt.left} of {attempt.tokens} tokens left of {attempt}"
    sums = left, flights, flight_left, prefilling, prefilling_tokens
    stored = (
        worker.prefill_left, worker.flights, worker.flight_left,
        worker.prefilling, worker.prefilling_tokens,
    )  # fmt: skip
    if sums != stored:
        names = "prefill_left, flights, flight_left, prefilling, prefilling_tokens"
        yield f"{worker.name} has ({names}) = {stored}; its attempts sum to {sums}"
    load = (
        worker.batch, worker.sum_context, worker.decoding, worker.context, worker.waiting,
        worker.kv_used,
    )  # fmt: skip
    if min(load) < 0:
        yield f"{worker.name} has a negative load: {load}"
    if len(worker.finished_early) > TOMBSTONES:
        yield f"{worker.name} stores {len(worker.finished_early)} early finishes"
    if worker.engine in WITHOUT_ENGINE:
        held = (*sums, *load, len(worker.finished_early), len(worker.cached.marks))
        if worker.attempts or any(held):
            yield f"{worker.name} has no engine, but holds {[*worker.attempts]}, {held}"


def of_holder(fleet: Fleet, holder: Holder) -> Iterator[str]:
    """The sums of a holder, and what they sum."""
    held = sum(sum(found.bytes.values()) for found in holder.covered.values())
    if holder.held_bytes != held:
        yield f"holder {holder.name} has {holder.held_bytes} bytes; its requests sum to {held}"
    blocks = promised = 0
    for request, placed in fleet.placed.items():
        if holder.name in placed.holders:
            its_blocks, its_bytes = share(placed, holder.covered.get(request))
            blocks += its_blocks
            promised += its_bytes
    if (holder.placed_blocks, holder.promised_bytes) != (blocks, promised):
        stored = f"{holder.placed_blocks} blocks and {holder.promised_bytes} bytes"
        yield f"holder {holder.name} expects {stored}; its placements sum to {blocks}, {promised}"
    if holder.covered and not holder.alive:
        yield f"holder {holder.name} is gone, but covers {[*holder.covered]}"
    for request, found in holder.covered.items():
        figures = (*found.tokens.values(), *found.bytes.values())
        if not figures or found.tokens.keys() != found.bytes.keys() or min(figures) < 0:
            yield f"holder {holder.name} covers {request} by {found}"


def _cache(worker: Worker) -> Iterator[str]:
    """What is known of a worker's prefix cache. Only attempts that it has are expected to fill
    it."""
    cached, recent = worker.cached, worker.recent
    if worker.prefix_marks != len(cached.marks) or len(cached.marks) > MAX_REPORTED:
        yield f"{worker.name} has {worker.prefix_marks} marks; stored are {len(cached.marks)}"
    for key in cached.expected:
        if key not in worker.attempts:
            yield f"{worker.name} expects the prefix of {key}, which it does not have"
    for key, attempt in worker.attempts.items():
        if key != key_of(attempt.request, attempt.attempt):
            yield f"{worker.name} stores {attempt} as {key}"
    if len(recent) > RECENT_TICKS or min(recent, default=0) < 0:
        yield f"{worker.name} stores requests of {len(recent)} ticks: {recent}"


def _requests(fleet: Fleet) -> Iterator[str]:
    """Live requests, and the tables about live requests only."""
    requests = fleet.requests
    if fleet.arrived - fleet.ended != len(requests):
        yield f"{fleet.arrived} requests arrived, {fleet.ended} ended, {len(requests)} are live"
    for name, request in requests.items():
        if request.request != name or request.attempt < 0 or request.orphaned < 0:
            yield f"request {name} is {request}"
    for table, rows in (("placed", fleet.placed), ("planned", fleet.planned)):
        for name in rows:
            if name not in requests:
                yield f"{name} is {table}, and no live request"
    for name, entry in fleet.unacknowledged.items():
        if name in requests or entry.replica not in fleet.replicas:
            yield f"{name} is unacknowledged, and live or of an unknown replica"
    if len(fleet.unacknowledged) > MAX_ENTRIES:
        yield f"{len(fleet.unacknowledged)} requests are unacknowledged"


def _dispatches(fleet: Fleet) -> Iterator[str]:
    """Each open dispatch of a live request is listed there, so that its end finds it."""
    for worker in fleet.workers.values():
        for key, attempt in worker.attempts.items():
            request = fleet.requests.get(attempt.request)
            if request is None or not attempt.dispatched:
                continue
            if (worker.name, key) not in request.places:
                yield f"{worker.name} has {key}, which its request does not list"


def _streams(fleet: Fleet) -> Iterator[str]:
    """Owners of streams: a stream has one, or has lost it."""
    for stream in fleet.owners:
        if stream in fleet.gone:
            yield f"{stream} has an owner, and is gone"
    for name, replica in fleet.replicas.items():
        if replica.decisions < 0 or min(replica.suspects.values(), default=1) < 0:
            yield f"replica {name} is {replica}"


def _prefix_index(fleet: Fleet, index: Index) -> Iterator[str]:
    """The index over all workers' prefix caches equals the caches."""
    masks: dict[int, int] = {}
    for worker in fleet.workers.values():
        bit = index.bits.get(worker.name, 0)
        expected = chain.from_iterable(map(unpack, worker.cached.expected.values()))
        for one in chain(worker.cached.marks, expected):
            masks[one] = masks.get(one, 0) | bit
    if masks != index.masks:
        wrong = [one for one in masks.keys() | index.masks.keys()
                 if masks.get(one) != index.masks.get(one)]  # fmt: skip
        yield f"the index of prefixes is wrong about {len(wrong)} of {len(masks)} marks"


def void_attempt(fleet: Fleet, request: str) -> int:
    """The last attempt of a live request whose blocks are not used; 0: none."""
    known = fleet.requests.get(request)
    void = known.void_attempt if known is not None else 0
    return 0 if isinstance(void, UnsetType) else void
