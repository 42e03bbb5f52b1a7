"""Each table of the documentation is one: rows after a blank line would be plain text."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_table_has_a_head() -> None:
    headless = []
    for path in (ROOT / "docs").rglob("*.md"):
        lines = path.read_text().splitlines()
        for is_table, rows in groupby(lines, lambda line: line.startswith("|")):
            block = list(rows)
            if is_table and not (len(block) > 1 and set(block[1]) <= set("|-: ")):
                headless.append(f"{path.relative_to(ROOT)}: {block[0][:60]}")
    assert headless == []
