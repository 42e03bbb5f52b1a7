"""Fingerprint of this engine's KV cache, from vLLM's configuration and the real tensors."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform

from relume.engine_shim.checkpoints.staging.block_rows import Interior, interior
from relume.events.wire.kv.fingerprint import HEADS, OPAQUE, TOKENS, Fingerprint
from relume.events.wire.kv.kv_errors import Unshapeable
from relume.events.wire.kv.kv_messages import MAX_IMAGE_BYTES

SAMPLE_BYTES = 1 << 20


def model_digest(model: str) -> str:
    """Of the configuration, and of each weight file: name, size, header, first and last
    megabyte. Two models that differ in between only would be a miracle of size and header;
    weights damaged in memory are the canaries' business."""
    digest = hashlib.blake2b(digest_size=16)
    directory = Path(model)
    if not directory.is_dir():
        digest.update(model.encode())
        return digest.hexdigest()
    for path in sorted(directory.glob("*")):
        if path.name == "config.json":
            digest.update(json.dumps(json.loads(path.read_bytes()), sort_keys=True).encode())
        elif path.suffix in (".safetensors", ".bin", ".pt"):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as file:
                digest.update(file.read(SAMPLE_BYTES))
                file.seek(max(0, size - SAMPLE_BYTES))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def effective_digest(files: str, model: Any) -> str:
    """`files` together with the engine's options for them: overrides of the
    configuration, quantization, the type it computes in. `model` is vLLM's ModelConfig."""
    config = {
        name: value
        for name, value in model.hf_config.to_dict().items()
        if not name.startswith("_") and name != "transformers_version"
    }
    parts = [files, config, str(model.dtype), str(model.quantization)]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def build_name(config: Any, spec: Any) -> str:
    """What decides the inside of a block: versions, and the kernels' instruction set; on a
    device its name, the backend if one was configured, and how the cache is quantized.
    `config` is vLLM's, `spec` an AttentionSpec."""
    device = config.device_config.device_type
    if device == "cpu":
        kernels = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    else:
        # Workers alone refine the name of the cache's type, but not to this one.
        e5m2 = "e5m2" if "e5m2" in str(config.cache_config.cache_dtype) else ""
        how = f"{config.attention_config.backend} {spec.kv_quant_mode.name}{e5m2}"
        kernels = f"{current_platform.get_device_name()} {how}"
    return f"vllm {vllm.__version__} torch {torch.__version__} {device} {kernels}"


def interior_of(config: Any, spec: Any) -> Interior:
    """The order within a block's layer as vLLM resolved it: of `[head][token][content]`, what
    comes first in memory. `spec` is an AttentionSpec."""
    content = spec.state_content_size_bytes // spec.dtype.itemsize
    dims = {
        1: (spec.num_heads, spec.num_states * content),
        2: (spec.num_states, content),
        3: (content, 1),
    }
    order = config.cache_config.get_resolved_kv_cache_layout().layer_view_order
    return interior([dims[axis] for axis in order if axis])


def layout_of(config: Any, spec: Any) -> str:
    """As a fingerprint has it. What is not keys and values of a head side by side (quantized with
    scales, latent, in separate slots) is identified by its order and sizes."""
    if config.device_config.device_type == "cpu":
        return OPAQUE
    order = interior_of(config, spec)
    heads = len(order) == 1
    plain = (
        spec.num_head_slots is None
        and spec.state_content_bytes is None
        and spec.tokens_per_state == 1
        and spec.head_size_v == spec.head_size
    )
    if plain:
        return HEADS if heads else TOKENS
    sizes = f"{spec.num_heads}x{spec.num_states}x{spec.state_content_size_bytes}"
    return f"{HEADS if heads else TOKENS} {sizes}"


def fingerprint_of(config: Any, spec: Any, layers: int) -> Fingerprint:
    """`config` is vLLM's, `spec` of its cache. Raises Unshapeable for parallelism with unknown
    block layouts, for adapters, and for blocks too large for an image."""
    parallel, model = config.parallel_config, config.model_config
    if (
        getattr(parallel, "decode_context_parallel_size", 1) > 1
        or parallel.pipeline_parallel_size > 1
    ):
        raise Unshapeable("checkpoints of pipeline- or context-parallel workers")
    lora = config.lora_config is not None
    if lora:
        raise Unshapeable("checkpoints with LoRA adapters: blocks depend on the adapter")
    found = Fingerprint(
        model=effective_digest(model_digest(model.model), model),
        build=build_name(config, spec),
        dtype=str(spec.dtype).removeprefix("torch."),
        block_size=config.cache_config.block_size,
        layers=layers,
        kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        piece_bytes=spec.unpadded_page_size_bytes,
        tp=parallel.tensor_parallel_size,
        pp=parallel.pipeline_parallel_size,
        layout=layout_of(config, spec),
    )
    if found.image_bytes > MAX_IMAGE_BYTES:
        raise Unshapeable(
            f"checkpoints of KV blocks of {found.image_bytes} bytes a rank (at most "
            f"{MAX_IMAGE_BYTES}); a smaller --block-size makes them possible"
        )
    return found
