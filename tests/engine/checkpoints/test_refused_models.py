"""A model whose blocks cannot be checkpointed is refused at start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.checkpoints.restored_requests import connector
from tests.engine.fleet import Zygote

pytestmark = pytest.mark.full

HYBRID = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "float32",
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2048,
    "vocab_size": 3072, "sliding_window": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 10000.0,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "why"),
    (
        (["sliding_attention", "full_attention"], "several KV cache groups are not checkpointed"),
        (["sliding_attention"] * 2, "a cache of SlidingWindowSpec is not checkpointed"),
    ),
)
def test_a_model_whose_blocks_do_not_all_stay_is_refused_at_start(
    zygote: Zygote, tiny_model: Path, tmp_path: Path, layers: list[str], why: str
) -> None:
    for file in tiny_model.glob("tokenizer*"):
        (tmp_path / file.name).symlink_to(file)
    config = {**HYBRID, "layer_types": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ("--model", str(tmp_path), "--load-format", "dummy")
    with pytest.raises(AssertionError, match=why):
        zygote.fork(*connector(), *model)
