"""Splitting and merging KV blocks between unequal inference setups, as pure functions.

DéjàVu, 4.1.2 and 4.2.1: the two ends of a stream may differ in pipeline depth and in
tensor-parallel size. A rank holds the layers of its stage and the
KV heads of its tensor slice; `moves` says which layers and heads go from which source
rank to which destination rank, `split` and `merge` do it to the bytes of one block.

Ranks are numbered stage by stage: `rank = stage * tp + tensor_rank`. When there are more
tensor ranks than KV heads, heads are replicated (vLLM does that), in equal groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from relume.events.wire.kv.kv_errors import Unshapeable


class Setup(Struct, frozen=True, kw_only=True):
    """How a model's KV cache lies over the ranks of one worker. `head_bytes`: bytes of one
    block, one layer, one KV head (keys and values). `stage_layers`: layers of each
    pipeline stage; empty means as even as can be, the first stages larger by one."""

    layers: int
    kv_heads: int
    head_bytes: int
    tp: int = 1
    pp: int = 1
    stage_layers: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


class Move(Struct, frozen=True, kw_only=True):
    """Layers `[layer, layer+layers)` and heads `[head, head+heads)`, counted in the whole
    model, go from rank `source` to rank `destination`."""

    source: int
    destination: int
    layer: int
    layers: int
    head: int
    heads: int


def check(setup: Setup) -> None:
    """Raises Unshapeable for a setup no engine runs."""
    if min(setup.layers, setup.kv_heads, setup.head_bytes, setup.tp, setup.pp) < 1:
        raise Unshapeable(f"not positive: {setup}")
    if setup.pp > setup.layers:
        raise Unshapeable(f"{setup.pp} stages of {setup.layers} layers")
    if setup.stage_layers and (
        len(setup.stage_layers) != setup.pp
        or sum(setup.stage_layers) != setup.layers
        or min(setup.stage_layers) < 1
    ):
        raise Unshapeable(f"stages {setup.stage_layers} of {setup.layers} layers")
    larger, smaller = max(setup.kv_heads, setup.tp), min(setup.kv_heads, setup.tp)
    if larger % smaller:
        raise Unshapeable(f"{setup.kv_heads} KV heads over {setup.tp} ranks")


def layers_of(setup: Setup, rank: int) -> tuple[int, int]:
    """(first, count) of the layers on `rank`."""
    stage = rank // setup.tp
    if setup.stage_layers:
        return sum(setup.stage_layers[:stage]), setup.stage_layers[stage]
    base, more = divmod(setup.layers, setup.pp)
    return stage * base + min(stage, more), base + (stage < more)


def heads_of(setup: Setup, rank: int) -> tuple[int, int]:
    """(first, count) of the KV heads on `rank`."""
    tensor_rank = rank % setup.tp
    if setup.tp >= setup.kv_heads:
        return tensor_rank * setup.kv_heads // setup.tp, 1
    count = setup.kv_heads // setup.tp
    return tensor_rank * count, count


def size_of(setup: Setup, rank: int) -> int:
    """Bytes of one block on `rank`, tokens not counted."""
    return layers_of(setup, rank)[1] * heads_of(setup, rank)[1] * setup.head_bytes


def moves(source: Setup, destination: Setup) -> tuple[Move, ...]:
    """What must go where so that every destination rank gets each of its (layer, head)
    once. Of replicated heads the first rank that has them is the source.

    Raises Unshapeable.
    """
    check(source)
    check(destination)
    if (source.layers, source.kv_heads, source.head_bytes) != (
        destination.layers,
        destination.kv_heads,
        destination.head_bytes,
    ):
        raise Unshapeable("not the same model, block size and dtype")
    found = []
    for to in range(destination.ranks):
        wanted_layers, wanted_heads = layers_of(destination, to), heads_of(destination, to)
        seen: set[tuple[int, int]] = set()
        for rank in range(source.ranks):
            layers = _common(layers_of(source, rank), wanted_layers)
            heads = _common(heads_of(source, rank), wanted_heads)
            if layers[1] and heads[1] and (layers[0], heads[0]) not in seen:
                seen.add((layers[0], heads[0]))
                found.append(
                    Move(
                        source=rank,
                        destination=to,
                        layer=layers[0],
                        layers=layers[1],
                        head=heads[0],
                        heads=heads[1],
                    )
                )
    return tuple(found)


def _common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    first = max(a[0], b[0])
    return first, max(0, min(a[0] + a[1], b[0] + b[1]) - first)


def _runs(setup: Setup, rank: int, move: Move) -> list[tuple[int, int]]:
    """(offset, length) of the move's bytes in the rank's block, layer by layer."""
    first_layer, _ = layers_of(setup, rank)
    first_head, heads = heads_of(setup, rank)
    row = heads * setup.head_bytes
    length = move.heads * setup.head_bytes
    skip = (move.head - first_head) * setup.head_bytes
    return [
        ((layer - first_layer) * row + skip, length)
        for layer in range(move.layer, move.layer + move.layers)
    ]


def split(source: Setup, rank: int, block: memoryview, move: Move) -> list[memoryview]:
    """The pieces of the source rank's block that `move` takes; no bytes are copied."""
    return [block[at : at + length] for at, length in _runs(source, rank, move)]


def merge(
    destination: Setup, rank: int, block: memoryview, move: Move, pieces: Sequence[memoryview]
) -> None:
    """Puts what `split` gave for `move` in its place in the destination rank's block."""
    for (at, length), piece in zip(_runs(destination, rank, move), pieces, strict=True):
        block[at : at + length] = piece


def convert(
    source: Setup, destination: Setup, blocks: Mapping[int, memoryview]
) -> dict[int, bytearray]:
    """One block on all ranks of `source` as it lies on all ranks of `destination`.

    Raises Unshapeable, also when a source block has not the size its rank's must have.
    """
    plan = moves(source, destination)
    for rank in {move.source for move in plan}:
        if rank not in blocks or len(blocks[rank]) != size_of(source, rank):
            raise Unshapeable(f"source rank {rank} lacks its block of this size")
    result = {r: bytearray(size_of(destination, r)) for r in range(destination.ranks)}
    for move in plan:
        pieces = split(source, move.source, blocks[move.source], move)
        merge(destination, move.destination, memoryview(result[move.destination]), move, pieces)
    return result
