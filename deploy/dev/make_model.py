#!/usr/bin/env python3
"""Make a small seeded Qwen3 model with a tokenizer, locally and bit for bit reproducible.

    .venv/bin/python deploy/dev/make_model.py [--size tiny|draft|wide] [--seed N] [--out DIR]

Theory of operation. Tests of exact continuation need a model whose output is *worth* comparing:
random weights at the usual scale repeat one token, and then every comparison passes. So

* weights are large enough that the next token depends on the whole context: greedy outputs are
  diverse and do not fall into loops;
* the logit row of every token that would make poor reading is zero: end of text and the other
  special tokens (greedy decoding ends by length, unless `stop_token_ids` or a stop string says
  otherwise), control characters, and pieces of a UTF-8 character. Among 3,072 logits the largest
  is never 0, so greedy decoding does not choose them; sampling and `logit_bias` still can;
* every number is drawn from MT19937's uniform doubles, which are specified bit for bit. No
  transcendental function is involved, so files and digests are the same on every machine.

All sizes share one tokenizer, so `draft` can draft for `tiny` and `wide`. Weights are float32:
there greedy text does not depend on what else is in the batch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FORMAT = 1  # of the manifest; raise it when the same arguments must give other files
MANIFEST = "relume-model.json"
WORDS = Path(__file__).with_name("words.txt")
VOCABULARY_SIZE = 3072
CONTEXT_TOKENS_MAX = 8192
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
END_OF_TEXT, TURN_START, TURN_END, PADDING = SPECIAL_TOKENS

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of a Qwen3 decoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = {
    "draft": Shape(hidden=64, intermediate=128, layers=1, heads=2, kv_heads=1, head_dim=32),
    "tiny": Shape(hidden=128, intermediate=384, layers=2, heads=4, kv_heads=2, head_dim=32),
    "wide": Shape(hidden=256, intermediate=768, layers=4, heads=8, kv_heads=8, head_dim=32),
}


# ---------------------------------------------------------------- tokenizer


def byte_symbols() -> list[str]:
    """The printable character byte-level BPE writes for each of the 256 bytes (GPT-2's map)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        if byte in shown:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols


def build_vocabulary(words: list[str], size: int) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Tokens (by id, without the special ones) and merges of a byte-level BPE of `size` tokens.

    Each word contributes the chain of its prefixes: first with a leading space, which is how words
    stand in text, then bare until the size is reached. Raises ValueError when words are too few.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    known = set(tokens)
    merges: list[tuple[bytes, bytes]] = []
    for lead in (" ", ""):
        for word in words:
            text = (lead + word).encode()
            for end in range(2, len(text) + 1):
                if len(tokens) == size:
                    return tokens, merges
                if text[:end] not in known:
                    known.add(text[:end])
                    tokens.append(text[:end])
                    merges.append((text[: end - 1], text[end - 1 : end]))
    raise ValueError(f"{len(words)} words give {len(tokens)} tokens, fewer than {size}")


def tokenizer_files(
    tokens: list[bytes], merges: list[tuple[bytes, bytes]]
) -> dict[str, dict[str, object]]:
    """Contents of `tokenizer.json` and `tokenizer_config.json`."""
    symbols = byte_symbols()

    def shown(piece: bytes) -> str:
        return "".join(symbols[byte] for byte in piece)

    first_special = len(tokens)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": first_special + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, content in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {shown(piece): index for index, piece in enumerate(tokens)},
            "merges": [[shown(left), shown(right)] for left, right in merges],
        },
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS_MAX,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def reads_well(piece: bytes) -> bool:
    """Whether a token by itself is text a reader can see: whole characters, none of control."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return False
    return text.isprintable() or text == "\n"


# ------------------------------------------------------------------ weights


def model_config(shape: Shape) -> dict[str, object]:
    """`config.json` of the model."""
    end_of_text = VOCABULARY_SIZE - len(SPECIAL_TOKENS)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "eos_token_id": end_of_text,
        "pad_token_id": VOCABULARY_SIZE - 1,
        "bos_token_id": None,
    }


def build_weights(shape: Shape, seed: int, silent: np.ndarray) -> dict[str, np.ndarray]:
    """All tensors by their checkpoint name, float32; rows `silent` of the output head are zero."""
    draw = np.random.RandomState(seed)

    def uniform(rows: int, columns: int, gain: float) -> np.ndarray:
        """Standard deviation `gain / sqrt(columns)`: a unit input gives outputs of size `gain`."""
        half_width = gain * math.sqrt(3.0 / columns)
        return ((draw.random_sample((rows, columns)) * 2.0 - 1.0) * half_width).astype(np.float32)

    def constant(length: int, value: float) -> np.ndarray:
        return np.full(length, value, dtype=np.float32)

    hidden, head_dim = shape.hidden, shape.head_dim
    weights = {
        "model.embed_tokens.weight": uniform(VOCABULARY_SIZE, hidden, math.sqrt(hidden)),
        "model.norm.weight": constant(hidden, 1.0),
        "lm_head.weight": uniform(VOCABULARY_SIZE, hidden, GAINS["head"]),
    }
    weights["lm_head.weight"][silent] = 0.0
    for layer in range(shape.layers):
        name = f"model.layers.{layer}."
        weights |= {
            name + "input_layernorm.weight": constant(hidden, 1.0),
            name + "post_attention_layernorm.weight": constant(hidden, 1.0),
            name + "self_attn.q_norm.weight": constant(head_dim, GAINS["qk_norm"]),
            name + "self_attn.k_norm.weight": constant(head_dim, GAINS["qk_norm"]),
            name + "self_attn.q_proj.weight": uniform(shape.heads * head_dim, hidden, 1.0),
            name + "self_attn.k_proj.weight": uniform(shape.kv_heads * head_dim, hidden, 1.0),
            name + "self_attn.v_proj.weight": uniform(shape.kv_heads * head_dim, hidden, 1.0),
            name + "self_attn.o_proj.weight": uniform(
                hidden, shape.heads * head_dim, GAINS["attention"]
            ),
            name + "mlp.gate_proj.weight": uniform(shape.intermediate, hidden, 1.0),
            name + "mlp.up_proj.weight": uniform(shape.intermediate, hidden, 1.0),
            name + "mlp.down_proj.weight": uniform(hidden, shape.intermediate, GAINS["mlp"]),
        }
    return weights


# How strongly each part speaks, against an embedding of size 1. Chosen by measurement: see
# `tests/deploy/test_model_diversity.py`.
GAINS = {"head": 4.0, "qk_norm": 1.6, "attention": 3.0, "mlp": 3.0}


# ----------------------------------------------------------------- the files


def write_model(directory: Path, size: str, seed: int) -> None:
    """Write every file of the model, the manifest last, into an empty `directory`."""
    words = list(dict.fromkeys(WORDS.read_text(encoding="utf-8").split()))
    tokens, merges = build_vocabulary(words, VOCABULARY_SIZE - len(SPECIAL_TOKENS))
    silent = np.array(
        [index for index, piece in enumerate(tokens) if not reads_well(piece)]
        + list(range(len(tokens), VOCABULARY_SIZE))
    )
    shape = SHAPES[size]
    documents = {
        "config.json": model_config(shape),
        # Only the end: sampling defaults here would silently change what a client asked for.
        "generation_config.json": {
            "eos_token_id": len(tokens),
            "pad_token_id": VOCABULARY_SIZE - 1,
        },
        **tokenizer_files(tokens, merges),
    }
    for name, document in documents.items():
        text = json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True)
        (directory / name).write_text(text + "\n", encoding="utf-8")
    save_file(build_weights(shape, seed, silent), directory / "model.safetensors", {"format": "pt"})
    manifest = {"format": FORMAT, "size": size, "seed": seed, "files": file_digests(directory)}
    manifest["digest"] = manifest_digest(manifest)
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")


def file_digests(directory: Path) -> dict[str, str]:
    """sha256 of each file but the manifest, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.name != MANIFEST
    }


def manifest_digest(manifest: dict[str, object]) -> str:
    """One sha256 for the whole model: of its parameters and its files' digests."""
    facts = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def present(directory: Path, size: str, seed: int) -> str | None:
    """The digest of the model in `directory` if it is the one asked for and undamaged."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        wanted = {"format": FORMAT, "size": size, "seed": seed, "files": file_digests(directory)}
    except (OSError, ValueError):
        return None
    digest = manifest_digest(wanted)
    return digest if manifest == {**wanted, "digest": digest} else None


def ensure_model(directory: Path, size: str, seed: int) -> tuple[str, bool]:
    """Make the model unless it is there. Returns (digest, whether it was made now).

    The directory appears whole or not at all: it is written beside its place and renamed.
    """
    digest = present(directory, size, seed)
    if digest is not None:
        return digest, False
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        write_model(scratch, size, seed)
        scratch.chmod(0o755)  # mkdtemp and safetensors keep others out; a model is no secret
        (scratch / "model.safetensors").chmod(0o644)
        if directory.exists():
            shutil.rmtree(directory)
        os.rename(scratch, directory)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    digest = present(directory, size, seed)
    if digest is None:
        raise RuntimeError(f"{directory}: what was written does not read back; is the disk full?")
    return digest, True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Make a small seeded Qwen3 model with a tokenizer; does nothing if present."
    )
    parser.add_argument("--size", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--seed", type=int, default=1, help="0 to 4294967295 (default 1)")
    parser.add_argument(
        "--out", type=Path, help="directory (default .relume/models/SIZE in this checkout)"
    )
    options = parser.parse_args(argv)
    if not 0 <= options.seed < 2**32:
        parser.error(f"--seed {options.seed} is outside 0..{2**32 - 1}")
    checkout = Path(__file__).resolve().parents[2]
    directory = options.out or checkout / ".relume" / "models" / options.size
    if directory.exists() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        parser.error(f"{directory} holds something else; give another --out or remove it")
    digest, made = ensure_model(directory, options.size, options.seed)
    megabytes = sum(path.stat().st_size for path in directory.iterdir()) / 1e6
    state = "made" if made else "present"
    print(f"{directory}: {options.size} model {state}, {megabytes:.1f} MB, digest {digest[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
