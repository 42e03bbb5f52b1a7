"""Blocks between unequal setups: nothing is lost, doubled or misplaced."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.engine_shim.checkpoints.link import reshape
from relume.engine_shim.checkpoints.link.reshape import Setup
from relume.events.wire.kv.kv_errors import Unshapeable

HEAD = 8


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Setup, Setup]:
    heads = draw(st.sampled_from((1, 2, 4, 8)))
    layers = draw(st.integers(1, 7))

    def setup() -> Setup:
        pp = draw(st.integers(1, layers))
        tp = draw(st.sampled_from((1, 2, 4, 8)))
        uneven: tuple[int, ...] = ()
        if draw(st.booleans()):
            cuts = sorted(draw(st.permutations(range(1, layers)))[: pp - 1])
            uneven = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
        return Setup(
            layers=layers, kv_heads=heads, head_bytes=HEAD, tp=tp, pp=pp, stage_layers=uneven
        )

    return setup(), setup()


def whole_model(setup: Setup, seed: int = 1) -> dict[tuple[int, int], bytes]:
    chance = random.Random(seed)
    return {
        (layer, head): chance.randbytes(HEAD)
        for layer in range(setup.layers)
        for head in range(setup.kv_heads)
    }


def laid_out(setup: Setup, model: dict[tuple[int, int], bytes]) -> dict[int, memoryview]:
    """What each rank holds, straight from the definition."""
    blocks = {}
    for rank in range(setup.ranks):
        first, layers = reshape.layers_of(setup, rank)
        head, heads = reshape.heads_of(setup, rank)
        blocks[rank] = memoryview(
            b"".join(
                model[layer, h]
                for layer in range(first, first + layers)
                for h in range(head, head + heads)
            )
        )
    return blocks


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_converted_blocks_are_what_the_destination_would_have_computed(
    pair: tuple[Setup, Setup],
) -> None:
    source, destination = pair
    model = whole_model(source)
    converted = reshape.convert(source, destination, laid_out(source, model))
    assert converted == laid_out(destination, model)


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_every_destination_part_has_exactly_one_source(pair: tuple[Setup, Setup]) -> None:
    source, destination = pair
    seen: list[tuple[int, int, int]] = []
    for move in reshape.moves(source, destination):
        seen += [
            (move.destination, layer, head)
            for layer in range(move.layer, move.layer + move.layers)
            for head in range(move.head, move.head + move.heads)
        ]
    wanted = [
        (rank, layer, head)
        for rank in range(destination.ranks)
        for layer in range(*_range(reshape.layers_of(destination, rank)))
        for head in range(*_range(reshape.heads_of(destination, rank)))
    ]
    assert sorted(seen) == sorted(wanted)


def _range(first_count: tuple[int, int]) -> tuple[int, int]:
    return first_count[0], sum(first_count)


@pytest.mark.parametrize(
    "setup",
    (
        Setup(layers=4, kv_heads=4, head_bytes=8, tp=3),
        Setup(layers=2, kv_heads=4, head_bytes=8, pp=3),
        Setup(layers=4, kv_heads=4, head_bytes=8, pp=2, stage_layers=(3, 2)),
        Setup(layers=0, kv_heads=4, head_bytes=8),
    ),
)
def test_setups_no_engine_runs_are_refused(setup: Setup) -> None:
    with pytest.raises(Unshapeable):
        reshape.moves(setup, setup)


def test_another_model_or_a_missing_rank_is_refused() -> None:
    one = Setup(layers=2, kv_heads=4, head_bytes=8, tp=2)
    with pytest.raises(Unshapeable):
        reshape.moves(one, Setup(layers=2, kv_heads=4, head_bytes=16))
    with pytest.raises(Unshapeable):
        reshape.convert(one, Setup(layers=2, kv_heads=4, head_bytes=8), {0: memoryview(bytes(32))})
