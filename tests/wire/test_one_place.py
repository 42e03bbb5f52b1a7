"""Formats of the wire stand in `events/wire` alone: no other module names a header of ours, writes
a frame, or knows a frame's grammar."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = ("events", "policies", "controlplane", "engine_shim", "chaos")
WIRE = "events/wire/"

HEADER = re.compile(r"x-relume-", re.IGNORECASE)
GRAMMAR = re.compile(r"(?:^|\\n|\n|\\r\\n)(?::[rwvex]$|:[rcwvex](?: |\\s))")
"""`:r` and its like at the start of a line, as literal text or inside a pattern."""
MAYBE = re.compile(r"(?:^|[\"'n}]):[rcwvex]", re.MULTILINE)
"""Whether a module may have such a string: most need no parser."""


def out_of_place(source: str) -> list[str]:
    """The strings of a module that belong into `events/wire`; docstrings may explain."""
    if not HEADER.search(source) and not MAYBE.search(source):
        return []
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in prose:
            continue
        if not isinstance(node.value, str | bytes):
            continue
        text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
        if HEADER.search(text) or GRAMMAR.search(text):
            found.append(f"{node.lineno}: {text[:60]!r}")
    return found


def test_wire_formats_stand_in_one_place() -> None:
    found = []
    modules = 0
    for package in PACKAGES:
        for path in sorted((CHECKOUT / package).rglob("*.py")):
            name = path.relative_to(CHECKOUT).as_posix()
            if not name.startswith(WIRE):
                modules += 1
                found += [f"{name}:{line}" for line in out_of_place(path.read_text())]
    assert modules > 300
    assert found == [], "use relume.events.wire.headers and relume.events.wire.frames"


@pytest.mark.parametrize(
    "source",
    [
        'name = "x-relume-request"',
        'head = f"x-relume-attempt: {n}\\r\\n"',
        'wanted = headers.get(b"X-Relume-Tier")',
        'kind = b":r"',
        'frame = b":r %d %d\\n%b" % (start, len(payload), payload)',
        'head = f":c {choice} {start}"',
        'match = re.compile(rb":r (\\d+) (\\d+)\\n").match',
        'match = re.compile(rb"[0-9a-f]+\\r\\n:r (\\d+)").match',
        'if words[0] == ":w": pass',
        'end = ":e stop\\n"',
        'frame = f"{head}:r {start} {length}\\n"',
    ],
)
def test_a_format_out_of_place_is_seen(source: str) -> None:
    assert out_of_place(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Names `x-relume-request`; a `:r` frame."""',
        'def f():\n    """`x-relume-grace`."""',
        'what = "error:r"',
        'name = "relume-request"',
        "kind = headers.REQUEST",
    ],
)
def test_other_text_is_not_taken_for_a_format(source: str) -> None:
    assert out_of_place(source) == []
