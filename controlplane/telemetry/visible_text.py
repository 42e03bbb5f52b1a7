"""Texts of clients, engines and operators, as people may see them.

A terminal obeys control characters, and a line break forges a line.
"""

from __future__ import annotations

import json
from typing import Any
from unicodedata import category


def visible(text: str) -> str:
    r"""`text` for a terminal: control characters (also of C1), line breaks, bidirectional and
    invisible ones, and lone surrogates as escapes (`\x1b`, `\n`, `\u202e`). Text in any language
    stays."""
    if text.isprintable():
        return text
    return "".join(c if _is_safe(c) else c.encode("unicode_escape").decode() for c in text)


def _is_safe(character: str) -> bool:
    return character.isprintable() or category(character) == "Zs"


def visible_data(value: Any) -> Any:
    """`value` as JSON has it, with each text `visible`."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {visible_data(name): visible_data(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [visible_data(member) for member in value]
    return value


def visible_json(text: str) -> str:
    """A line of JSON without such characters: the same data."""
    if text.isprintable():
        return text
    return "".join(c if _is_safe(c) else json.dumps(c)[1:-1] for c in text)
