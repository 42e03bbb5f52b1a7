"""Figures as the runner of benches wants them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def figure(value: float, unit: str, goal: float | None = None, digits: int = 4) -> dict[str, Any]:
    """One figure, rounded to so many decimal digits; without any (0) a whole number."""
    return {"value": round(value, digits or None), "goal": goal, "unit": unit}


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile. Raises IndexError of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
