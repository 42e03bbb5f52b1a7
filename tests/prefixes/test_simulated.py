"""What a simulated engine tells of its prefix cache is what its next requests find there."""

from __future__ import annotations

import random

from relume.chaos.sim.engine import prefix_model
from relume.chaos.sim.engine.engine_model import EngineConfig, Job, SimEngine
from relume.chaos.sim.engine.step_cost import load
from relume.events.wire import prefix

COST = load("qwen3-32b_rtxpro6000x2")
BLOCK = 16
SEGMENT = 512


def prompt(draw: random.Random) -> tuple[tuple[int, ...], int]:
    """Ids of segments, equal leading ids being equal tokens, and tokens."""
    tree, length = draw.randrange(6), draw.randrange(1, 9)
    fork = draw.randrange(length + 1)
    own = draw.randrange(3)
    ids = tuple(100 * tree + (n if n < fork else 10 * (own + 1) + n) for n in range(length))
    return ids, SEGMENT * length + draw.randrange(1, 200)


def test_what_is_told_is_what_is_found() -> None:
    draw = random.Random(5)
    engine = SimEngine(EngineConfig(kv_blocks=700), COST)
    engine.kv.moves = []
    held: set[int] = set()
    now, hits, evicted = 0, set(), 0
    for number in range(200):
        ids, tokens = prompt(draw)
        marks = prefix.unpack(prefix_model.of_prompt(ids, SEGMENT, tokens, BLOCK))
        run = next((n for n, one in enumerate(marks) if one not in held), len(marks))
        job = Job(
            name=f"j{number}",
            prompt_tokens=tokens,
            output_tokens=4,
            prefix=ids,
            prefix_block=SEGMENT,
        )
        told = engine.submit(job, now)
        while engine.next_ns is not None:
            now = engine.next_ns
            told += engine.advance(now)
        (found,) = [one.amount for one in told if one.what == "admitted"]
        assert found == prefix.blocks_at(run) * BLOCK
        hits.add(found)
        moves, engine.kv.moves = engine.kv.moves, []
        stored, removed = map(prefix.unpack, prefix_model.changed(moves))
        evicted += len(removed)
        assert not set(stored) & set(removed)
        held.difference_update(removed)
        held.update(stored)
        whole = prefix.unpack(prefix_model.changed(engine.kv.cached())[0])
        assert held == set(whole)
    assert len(hits) > 4 and evicted


def test_what_came_and_went_between_two_records_is_not_told() -> None:
    moves = [prefix_model.SegmentMove(1, 0, 8, True), prefix_model.SegmentMove(1, 0, 8, False)]
    assert prefix_model.changed(moves) == (b"", b"")
    stored, removed = prefix_model.changed([*moves, moves[1], moves[0], moves[0]])
    assert (len(stored) // 8, removed) == (8, b"")
