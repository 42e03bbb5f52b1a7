"""How the command line prints: aligned tables for people, JSON for programs.

What people see holds texts of clients, engines and operators: model names, request ids, reasons,
errors. A terminal obeys control characters in them, and a line break forges a line. So everything
for people goes through here, with such characters as escapes (`visible`). JSON escapes them itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from relume.controlplane.telemetry.visible_text import visible


def print_json(value: Any) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def print_line(text: str = "") -> None:
    """One line for people, at once also in a pipe."""
    print(visible(text), flush=True)


def print_lines(lines: Iterable[str]) -> None:
    """Lines for people."""
    for line in lines:
        print(visible(line))


def print_error(text: str) -> None:
    """One line of standard error."""
    print(visible(text), file=sys.stderr)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Columns as wide as they need; `empty` when there are no rows."""
    if not rows:
        print(empty)
        return
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(headings), *cells]) for i in range(len(headings))]
    for row in [[h.upper() for h in headings], *cells]:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(padded).rstrip())


def milliseconds(microseconds: int) -> str:
    """Microseconds for people; `-` when there are none."""
    return "-" if microseconds < 0 else f"{microseconds / 1000:.0f} ms"
