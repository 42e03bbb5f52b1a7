"""Bugs put into the fold on purpose (`tests.runner.plants`): it holds what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from relume.events.vocabulary import (
    CheckpointEvicted,
    ClientReturned,
    EngineDied,
    EngineFinished,
    PrefillChunkDone,
)
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state import coverage, engine_step, fold
from relume.policies.state.lifecycles import engine_life
from relume.policies.state.lifecycles.engine_life import Step

Set = Callable[[Any, str, Any], None]


def _load_survives_death(patch: Set) -> None:
    """the death of an engine leaves what it ran in its worker's account"""
    patch(
        engine_life.LIFE[EngineDied, engine_life.Age.SAME],
        EnginePhase.READY,
        Step(EnginePhase.DEAD),
    )


def _chunk_counted_twice(patch: Set) -> None:
    """each computed chunk of a prompt is taken off twice what its engine is yet to compute"""
    chunk, also = engine_step._HANDLERS[PrefillChunkDone]

    def twice(worker: Any, key: str, change: Any) -> None:
        chunk(worker, key, replace(change, tokens=2 * change.tokens))

    patch(engine_step._HANDLERS, PrefillChunkDone, (twice, also))


def _evicted_bytes_stay(patch: Set) -> None:
    """what a state daemon evicts stays in the sum of its bytes"""
    count = coverage._set

    def only_more(site: Any, found: Any, child: int, tokens: int, held: int) -> None:
        before = site.held_bytes
        count(site, found, child, tokens, held)
        site.held_bytes = max(site.held_bytes, before)

    patch(coverage, "_set", only_more)


def _evicted_blocks_cover(patch: Set) -> None:
    """blocks that a state daemon evicted still cover their request"""
    patch(fold._HANDLERS, CheckpointEvicted, lambda fleet, stream, epoch, event: None)


def _plan_survives_end(patch: Set) -> None:
    """the decided move of a request outlives the request"""
    forget = coverage.forget

    def leave(fleet: Any, request: str) -> None:
        planned = fleet.planned.get(request)
        forget(fleet, request)
        if planned is not None:
            fleet.planned[request] = planned

    patch(coverage, "forget", leave)


def _prefix_survives_end(patch: Set) -> None:
    """an attempt that its engine finished is still expected to fill the prefix cache"""
    finished, _ = engine_step._HANDLERS[EngineFinished]
    patch(engine_step._HANDLERS, EngineFinished, (finished, None))


def _context_on_both_workers(patch: Set) -> None:
    """the context of a request that left an engine unfinished still counts there"""
    finished, also = engine_step._HANDLERS[EngineFinished]

    def stays(worker: Any, key: str, change: Any) -> None:
        decoding, context = worker.decoding, worker.context
        finished(worker, key, change)
        if change.reason == "abort":
            worker.decoding, worker.context = decoding, context

    patch(engine_step._HANDLERS, EngineFinished, (stays, also))


def _lease_survives_owner(patch: Set) -> None:
    """a stream keeps its owner when the owner's lease is gone"""
    on_owner = fold._on_owner

    def kept(fleet: Any, stream: str, epoch: int) -> None:
        if epoch or not stream.startswith("r."):
            on_owner(fleet, stream, epoch)

    patch(fold, "_on_owner", kept)


def _return_unnoticed(patch: Set) -> None:
    """a request stays with the replica that its client left"""
    patch(fold._HANDLERS, ClientReturned, lambda fleet, stream, epoch, event: None)


BUGS: tuple[tuple[str, str, Callable[[Set], None]], ...] = (
    ("I21", "agents-terminated-in-turn 2", _load_survives_death),
    ("I21", "storm 0", _chunk_counted_twice),
    ("I21", "disk-full 13", _evicted_bytes_stay),
    ("I21", "disk-full 13", _evicted_blocks_cover),
    ("I21", "agents-terminated-in-turn 2", _plan_survives_end),
    ("I21", "composed 31", _prefix_survives_end),
    ("I21", "composed 7", _context_on_both_workers),
    ("I21", "composed 15", _lease_survives_owner),
    ("I1 I21", "composed 7", _return_unnoticed),
)
"""Promises of which any finds it, scenario and seed of a run in which one did, and how to put it in."""
