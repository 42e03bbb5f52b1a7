"""Bytes for which msgspec raises none of its own errors: UnicodeDecodeError for those that are no UTF-8, and
RecursionError for arrays within arrays."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest

from relume.events.log.codec import UnreadableRecord, decode, decode_all, encode
from relume.events.log.errors import MalformedRecord
from relume.events.vocabulary import Tick

ROOT = Path(__file__).parents[2]
OWN = {"DecodeError", "MsgspecError", "UNREADABLE", "UNUSABLE"}
TEXT = {"UNREADABLE", "UNUSABLE", "UnicodeDecodeError", "UnicodeError", "ValueError", "Exception"}
DEEP = {"UNREADABLE", "UNUSABLE", "RecursionError", "Exception"}


def clauses() -> list[tuple[str, set[str]]]:
    """Every `try` of the product with an `except` that names an error of msgspec, and all that it expects."""
    found = []
    for package in ("events", "policies", "controlplane", "engine_shim"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Try):
                    names = {
                        part.attr if isinstance(part, ast.Attribute) else part.id
                        for handler in node.handlers
                        for part in (ast.walk(handler.type) if handler.type is not None else ())
                        if isinstance(part, ast.Attribute | ast.Name)
                    }
                    if names & OWN:
                        found.append((f"{path.relative_to(ROOT)}:{node.lineno}", names))
    return found


def test_msgspec_raises_another_error_for_bytes_that_are_no_text() -> None:
    with pytest.raises(UnicodeDecodeError):
        msgspec.json.decode(b'{"a": "\xff"}', type=dict[str, str])


def test_msgspec_raises_another_error_for_arrays_within_arrays() -> None:
    with pytest.raises(RecursionError):
        msgspec.json.decode(b"[" * 5000)


def test_who_expects_that_bytes_cannot_be_decoded_expects_both_too() -> None:
    found = clauses()
    assert len(found) > 20
    assert [where for where, names in found if not names & TEXT] == []
    assert [where for where, names in found if not names & DEEP] == []


@pytest.mark.parametrize(
    "start", [b"\x94\xa6tick/1\x01\x02", b"\x92\xa6tick/9", b"", b"\x92\xa6tick/1"]
)
def test_a_record_with_arrays_within_arrays_is_malformed(start: bytes) -> None:
    """Also where a reader skips a field that it does not know."""
    tick = encode(Tick(1, 2))
    nested = start + b"\x91" * 5000 + b"\xc0"
    with pytest.raises(MalformedRecord, match="recursion"):
        decode(nested)
    before, unreadable, after = decode_all([tick, nested, tick])
    assert before == after == Tick(1, 2) and type(unreadable) is UnreadableRecord
