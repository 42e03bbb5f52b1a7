"""Errors of a scenario."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

Path_ = tuple[str | int, ...]
"""Keys and indices from the top of a scenario to a value."""


class Problem(Struct, frozen=True):
    """One error: its line (from 1; 0: none), its place, message and remedy."""

    line: int
    place: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.place, self.message))) + f"; {self.remedy}"


class ScenarioError(Exception):
    """An invalid scenario, with all its problems in the order of their lines."""

    def __init__(self, file: str, problems: Sequence[Problem]) -> None:
        self.file = file
        self.problems = tuple(problems)
        lines = (f"{file}:{p.line}: {p}" if p.line else f"{file}: {p}" for p in problems)
        super().__init__("\n".join(lines))
