"""KV caches of torch tensors as vLLM's model runners lay them out, for tests."""

from __future__ import annotations

import torch

from relume.engine_shim.checkpoints.staging.copies import HostCopies
from relume.engine_shim.checkpoints.staging.staged_cache import StagedCache
from tests.state_daemon.daemon import Cache

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 8, 2, 4, 6
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
HEADS_FIRST = ("LBHNC", "LHBNC", "BLHNC", "BHLNC")
TOKENS_FIRST = ("LBNHC", "BLNHC")
SPLIT = "keys and values apart"


def values(device: str = "cpu") -> torch.Tensor:
    """`[layer][block][head][token][content]`, every element another one."""
    count = LAYERS * BLOCKS * HEADS * TOKENS * CONTENT
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    return torch.arange(count, dtype=torch.float16, device=device).reshape(shape)


def cache(layout: str, device: str = "cpu", slack: int = 0) -> dict[str, torch.Tensor]:
    """A tensor a layer, one allocation: axes from the outermost on. `slack`: elements between
    two blocks that belong to none."""
    if layout == SPLIT:
        return _split(device)
    inner, strides, size = "LBHNC", {}, 1
    for axis in reversed(layout):
        strides[axis] = size
        size *= AXES[axis]
        if axis == "B":
            size += slack
        elif slack and layout[layout.index(axis) - 1] == "B":
            size += slack
    whole = torch.zeros(size + slack * BLOCKS, dtype=torch.float16, device=device)
    shown = whole.as_strided([AXES[a] for a in inner], [strides[a] for a in inner])
    shown.copy_(values(device))
    return {f"layer{number}": shown[number] for number in range(LAYERS)}


def _split(device: str) -> dict[str, torch.Tensor]:
    """`[2][block][token][head][half of the content]`, each layer an allocation of its own."""
    found = {}
    for number, layer in enumerate(values(device)):
        halves = layer.reshape(BLOCKS, HEADS, TOKENS, 2, CONTENT // 2)
        found[f"layer{number}"] = halves.permute(3, 0, 2, 1, 4).contiguous()
    return found


def image(layout: str, block: int) -> bytes:
    """What a row is to be: layer by layer, within one in the order of its addresses."""
    parts = []
    for layer in values():
        inside = layer[block]
        if layout in TOKENS_FIRST:
            inside = inside.permute(1, 0, 2)
        elif layout == SPLIT:
            inside = inside.reshape(HEADS, TOKENS, 2, CONTENT // 2).permute(2, 1, 0, 3)
        parts.append(inside.contiguous().numpy().tobytes())
    return b"".join(parts)


def staged_over(memory: Cache) -> StagedCache:
    """That memory as a rank reads and writes it."""
    tensors = {
        f"layer{number}": torch.frombuffer(layer, dtype=torch.uint8).view(-1, memory.piece)
        for number, layer in enumerate(memory.layers)
    }
    blocks = len(memory.layers[0]) // memory.piece
    return StagedCache(tensors, blocks, lambda device: HostCopies())
