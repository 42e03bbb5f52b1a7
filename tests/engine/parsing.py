"""A tokenizer for parsers of reasoning and tool calls: they want tokens of their own."""

from __future__ import annotations

import json
from pathlib import Path

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def tokenizer_with(model: Path, path: Path, marks: tuple[str, ...] = MARKS) -> Path:
    """The tokenizer of `model`, its last words replaced by `marks`; returns `path`."""
    path.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        (path / name).write_text((model / name).read_text())
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    for mark in marks:
        left, right = merges.pop()
        number = vocabulary[mark] = vocabulary.pop(left + right)
        content["added_tokens"].append(
            {
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
                "id": number,
                "content": mark,
                "special": False,
            }
        )
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


def token_of(tokenizer: Path, mark: str) -> int:
    """The id of one of the marks."""
    tokens = json.loads((tokenizer / "tokenizer.json").read_text())["added_tokens"]
    return next(token["id"] for token in tokens if token["content"] == mark)
