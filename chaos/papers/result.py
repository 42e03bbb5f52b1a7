"""Types of published results, and the rule by which one counts as reproduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from relume.chaos.papers.sampling import Sampling

REPRODUCED = "reproduced"
EXPLAINED = "differs, explained"
OPEN = "DIFFERS, NOT EXPLAINED"
CHANGED = "CHANGED"


class PublishedFigure(Struct, frozen=True, kw_only=True):
    """A figure as printed. `key` names ours; `within`: tolerance as a share of it. `because`: the
    known reason of a difference; then `recorded` is ours as PAPERS.md has it, and ours may differ
    from that by the share `recorded_within`. `calibrated`: an input was chosen to meet it, so it
    proves nothing."""

    key: str
    what: str
    value: float
    unit: str = ""
    within: float = 0.05
    because: str = ""
    recorded: float | None = None
    recorded_within: float = 0.02
    calibrated: bool = False


class Found(Struct, frozen=True):
    """Result of a run: our figure for each key; further lines for people. `left_out`: keys of
    sizes that were not requested."""

    figures: Mapping[str, float]
    lines: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


class Result(Struct, frozen=True, kw_only=True):
    """A published result. `source`: paper and equation, table or figure; `run`: computes it;
    `inputs`: inputs that the paper leaves out, and their substitutes; `sample`: it comes from many
    seeded runs and needs minutes, else from one seed."""

    name: str
    about: str
    source: str
    published: tuple[PublishedFigure, ...]
    run: Callable[[Sampling], Found]
    inputs: tuple[str, ...] = ()
    sample: bool = False


class FigureComparison(Struct, frozen=True, kw_only=True):
    """A published figure and ours."""

    what: str
    published: float
    ours: float
    ratio: float | None
    within: float
    verdict: str
    unit: str = ""
    because: str = ""


def compare(result: Result, found: Found) -> list[FigureComparison]:
    """Every requested published figure with ours. Raises KeyError if a run lacks one of them."""
    requested = [figure for figure in result.published if figure.key not in found.left_out]
    return [_beside(figure, found.figures[figure.key]) for figure in requested]


def _beside(figure: PublishedFigure, ours: float) -> FigureComparison:
    verdict = OPEN
    if _near(ours, figure.value, figure.within):
        verdict = "calibrated" if figure.calibrated else REPRODUCED
    elif figure.because and figure.recorded is not None:
        known = _near(ours, figure.recorded, figure.recorded_within)
        verdict = EXPLAINED if known else CHANGED
    return FigureComparison(
        what=figure.what,
        published=figure.value,
        ours=ours,
        ratio=ours / figure.value if figure.value else None,
        within=figure.within,
        verdict=verdict,
        unit=figure.unit,
        because=_reason(figure, verdict),
    )


def _near(ours: float, value: float, within: float) -> bool:
    return abs(ours - value) <= within * abs(value)


def _reason(figure: PublishedFigure, verdict: str) -> str:
    if verdict == CHANGED:
        known = f"{figure.recorded:g} within {figure.recorded_within * 100:g} %"
        return f"{figure.what}: PAPERS.md has {known}"
    return figure.because if verdict == EXPLAINED else ""
