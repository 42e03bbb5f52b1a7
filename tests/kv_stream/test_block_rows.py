"""Blocks as rows, of every layout a model runner may have; and what is refused.

With a GPU the same runs on it.
"""

from __future__ import annotations

import pytest
import torch

from relume.engine_shim.checkpoints.staging.block_rows import APART, BlockRows, interior
from relume.events.wire.kv.kv_errors import Unshapeable
from tests.kv_stream import layouts
from tests.kv_stream.layouts import BLOCKS, HEADS_FIRST, SPLIT, TOKENS_FIRST, cache, image

ALL = (*HEADS_FIRST, *TOKENS_FIRST, SPLIT)
IDS = (5, 1, 7)


def read(rows: BlockRows, ids: tuple[int, ...] = IDS) -> list[bytes]:
    where = torch.tensor(ids, device=rows.device)
    parts = []
    for region in rows.regions:
        part = torch.zeros((len(ids), region.width), dtype=torch.uint8, device=rows.device)
        region.read(where, part)
        parts.append(part.cpu().numpy())
    return [b"".join(part[n].tobytes() for part in parts) for n in range(len(ids))]


@pytest.mark.parametrize("slack", (0, 3, 8))
@pytest.mark.parametrize("layout", ALL)
def test_a_row_is_the_block_layer_by_layer_and_goes_back_alone(
    layout: str, slack: int, device: str
) -> None:
    tensors = cache(layout, device, slack)
    rows = BlockRows(tensors, BLOCKS)
    assert read(rows) == [image(layout, block) for block in IDS]
    assert rows.row_bytes == len(image(layout, 0)) and rows.layers == layouts.LAYERS
    before = read(rows, tuple(range(BLOCKS)))
    where = torch.tensor((0, 2, 3, 6, 5), device=device)
    for region in rows.regions:
        part = torch.zeros((5, region.width), dtype=torch.uint8, device=device)
        region.read(torch.tensor((5, 1, 4, 7, 2), device=device), part)
        region.write(where, part)
    after = read(rows, tuple(range(BLOCKS)))
    assert after == [before[n] for n in (5, 1, 1, 4, 4, 2, 7, 7)]


def test_layers_of_one_allocation_are_read_at_once(device: str) -> None:
    for layout in (*HEADS_FIRST, *TOKENS_FIRST):
        assert len(BlockRows(cache(layout, device), BLOCKS).regions) == 1
    assert len(BlockRows(cache(SPLIT, device), BLOCKS).regions) == layouts.LAYERS
    one, two = cache("LBHNC", device), cache("LBHNC", device)
    uneven = {"a": one["layer0"], "b": one["layer2"], "c": one["layer1"], "d": two["layer0"]}
    rows = BlockRows(uneven, BLOCKS)
    assert [region.width for region in rows.regions] == [192, 96, 96]


def test_where_blocks_lie_makes_no_other_interior_but_their_inside_does() -> None:
    found = {name: BlockRows(cache(name), BLOCKS).interior for name in ALL}
    assert len({found[name] for name in HEADS_FIRST}) == 1
    assert len({found[name] for name in TOKENS_FIRST}) == 1
    assert len(set(found.values())) == 3 and found[SPLIT][0] == APART
    one_head = {"a": torch.zeros(BLOCKS, 1, 4, 6)}
    turned = {"a": torch.zeros(BLOCKS, 4, 1, 6).transpose(1, 2)}
    assert BlockRows(one_head, BLOCKS).interior == BlockRows(turned, BLOCKS).interior


def test_blocks_that_the_backend_divides_are_distinguished_from_whole_ones() -> None:
    """[parts of a block][head][token][content]: heads first within a part is another order;
    tokens first is the same."""
    heads, tokens = torch.zeros(2 * BLOCKS, 2, 2, 6), torch.zeros(2 * BLOCKS, 2, 2, 6)
    heads.copy_(torch.arange(heads.numel()).reshape(heads.shape))
    divided = BlockRows({"a": heads}, BLOCKS)
    assert divided.interior != BlockRows(cache("LBHNC"), BLOCKS).interior
    assert read(divided)[0] == heads.reshape(BLOCKS, -1)[5].numpy().tobytes()
    turned = BlockRows({"a": tokens.transpose(1, 2)}, BLOCKS)
    assert turned.interior == BlockRows(cache("LBNHC"), BLOCKS).interior


def test_interiors_leave_out_what_changes_nothing() -> None:
    assert interior([(2, 24), (4, 6), (6, 1)]) == ((48, 1),)
    assert interior([(4, 6), (1, 24), (6, 1)]) == ((24, 1),)
    assert interior([(4, 6), (2, 24), (6, 1)]) == ((4, 6), (2, 24), (6, 1))


def test_a_layer_that_shares_anothers_blocks_is_left_out() -> None:
    tensors = cache("LBNHC")
    tensors["shared"] = tensors["layer1"]
    assert BlockRows(tensors, BLOCKS).layers == layouts.LAYERS


@pytest.mark.parametrize(
    ("tensors", "why"),
    (
        ({}, "no KV cache"),
        ({"a": [torch.zeros(BLOCKS, 2)]}, "a is no tensor of blocks but list"),
        ({"a": torch.zeros(5, 3, 4, 6)}, "counts 8 blocks"),
        ({"a": torch.zeros(BLOCKS * 99)}, "counts 8 blocks"),
        ({"a": torch.zeros(1, 2, 4, 6).expand(BLOCKS, 2, 4, 6)}, "blocks overlap"),
        ({"a": torch.zeros(BLOCKS, 1, 4, 6).expand(BLOCKS, 2, 4, 6)}, "blocks overlap"),
        (
            {"a": torch.zeros(BLOCKS, 4), "b": torch.zeros(BLOCKS, 4, device="meta")},
            "layers on several devices: .'cpu', 'meta'.",
        ),
        ({"a": torch.zeros(BLOCKS, 4), "b": torch.zeros(BLOCKS, 6)}, "layers whose blocks differ"),
        (
            {"a": torch.zeros(BLOCKS, 2, 4), "b": torch.zeros(BLOCKS, 4, 2).transpose(1, 2)},
            "layers whose blocks differ",
        ),
    ),
)
def test_what_is_no_row_of_blocks_is_refused(tensors: dict[str, object], why: str) -> None:
    with pytest.raises(Unshapeable, match=why):
        BlockRows(tensors, BLOCKS)  # type: ignore[arg-type]
