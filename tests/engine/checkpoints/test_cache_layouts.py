"""Layouts of device caches, laid out by vLLM's own code: what is told of them from the
configuration (by the scheduler) is what their tensors show (to a rank), byte by byte."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relume.engine_shim.checkpoints.staging.block_rows import BlockRows
from relume.events.wire.kv.fingerprint import HEADS, TOKENS, Fingerprint, usable
from tests.state_daemon.daemon import fingerprint

pytestmark = pytest.mark.full
LAYERS = ("a", "b", "c")
MEMORY = 1 << 18
TOKENS_FIRST = ("LBNHC", "BLNHC")


def specs() -> dict[str, Any]:
    """By what is told of them: keys and values of heads; in slots of their own; latent."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    plain = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    return {
        "": plain,
        " 4x32x16": replace(plain, num_head_slots=4, state_content_bytes=16),
        " 1x32x20": MLAAttentionSpec(
            block_size=32, num_kv_heads=1, head_size=10, dtype=torch.bfloat16
        ),
    }


def config_of(layout: str) -> Any:
    from vllm.config import CacheConfig

    cache = CacheConfig(block_size=32)
    cache.kv_cache_layout = layout
    return SimpleNamespace(
        cache_config=cache,
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        device_config=SimpleNamespace(device_type="cuda"),
    )


def laid_out(config: Any, spec: Any, kernel: int = 32) -> tuple[dict[str, torch.Tensor], int]:
    """As the runner of a device has it, filled with noise; and how many blocks. `kernel`:
    tokens of the backend's blocks."""
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec
    from vllm.v1.worker.utils import allocate_kv_cache

    torch.manual_seed(1)
    group = KVCacheGroupSpec(list(LAYERS), spec)
    found = get_kv_cache_config_from_groups(config, [group], MEMORY)
    order = config.cache_config.get_resolved_kv_cache_layout()
    tensors = allocate_kv_cache(found, torch.device("cpu"), order, [kernel])
    for number, tensor in enumerate(tensors.values()):
        noise = torch.randint(0, 250, (prod(tensor.shape) * tensor.element_size(),))
        shaped = noise.to(torch.uint8).add_(number).view(tensor.dtype).reshape(tensor.shape)
        tensor.copy_(shaped)
    return tensors, found.num_blocks


def row(rows: BlockRows, block: int) -> bytes:
    parts = []
    for region in rows.regions:
        part = torch.zeros((1, region.width), dtype=torch.uint8)
        region.read(torch.tensor([block]), part)
        parts.append(part.numpy().tobytes())
    return b"".join(parts)


def test_what_is_said_of_a_layout_is_what_its_tensors_show() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from relume.engine_shim.checkpoints.cache_fingerprint import interior_of, layout_of

    seen = set()
    for layout in KVCacheLayout:
        for name, spec in specs().items():
            config = config_of(layout.name)
            tensors, blocks = laid_out(config, spec)
            rows = BlockRows(tensors, blocks)
            assert rows.interior == interior_of(config, spec), (layout, name)
            assert rows.piece_bytes == spec.unpadded_page_size_bytes
            assert len(rows.regions) == 1, "all layers are read at once"
            turned = layout.name in TOKENS_FIRST
            expected = b""
            for tensor in tensors.values():
                inside = tensor[5].transpose(0, 1) if turned else tensor[5]
                expected += inside.contiguous().view(torch.uint8).numpy().tobytes()
            assert row(rows, 5) == expected, (layout, name)
            heads = not turned or spec.num_heads == 1
            assert layout_of(config, spec) == (HEADS if heads else TOKENS) + name
            seen.add(layout_of(config, spec))
    assert len(seen) == 5


def test_blocks_that_a_backend_divides_are_as_said_or_told_from_it() -> None:
    from relume.engine_shim.checkpoints.cache_fingerprint import interior_of

    for layout, same in (("LBNHC", True), ("LBHNC", False)):
        config, spec = config_of(layout), specs()[""]
        tensors, blocks = laid_out(config, spec, kernel=16)
        assert tensors["a"].shape[0] == 2 * blocks
        rows = BlockRows(tensors, blocks)
        assert (rows.interior == interior_of(config, spec)) is same
        assert rows.piece_bytes == spec.unpadded_page_size_bytes


def test_only_blocks_of_heads_are_cut_and_other_orders_are_not_used() -> None:
    def mine(**changes: Any) -> Fingerprint:
        return fingerprint(**changes)

    for layout, found in ((HEADS, "convert"), (TOKENS, ""), (f"{HEADS} 4x32x16", "")):
        assert usable(mine(layout=layout), mine(layout=layout)) == "same"
        assert usable(mine(layout=layout), mine(layout=layout, tp=2, piece_bytes=64)) == found
    assert not usable(mine(layout=HEADS), mine(layout=TOKENS))


def test_a_device_its_backend_and_quantization_are_in_the_build() -> None:
    from relume.engine_shim.checkpoints.cache_fingerprint import build_name

    spec, one, other = specs()[""], config_of("LBNHC"), config_of("LBNHC")
    assert build_name(one, spec) == build_name(other, spec)
    other.attention_config.backend = "FLASHINFER"
    assert build_name(one, spec) != build_name(other, spec)
    e5m2 = config_of("LBNHC")
    e5m2.cache_config.cache_dtype = "fp8_e5m2"
    assert build_name(one, spec) != build_name(e5m2, spec)
