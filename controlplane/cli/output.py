"""How the command line prints: aligned tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def print_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Columns as wide as they need; `empty` when there are no rows."""
    if not rows:
        print(empty)
        return
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headings), *cells]) for i in range(len(headings))]
    for row in [[h.upper() for h in headings], *cells]:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(padded).rstrip())


def milliseconds(microseconds: int) -> str:
    """Microseconds for people; `-` when there are none."""
    return "-" if microseconds < 0 else f"{microseconds / 1000:.0f} ms"
