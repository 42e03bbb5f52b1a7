"""What a published result is here, and when it counts as reproduced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from relume.chaos.papers.sampling import Sampling

REPRODUCED = "reproduced"
EXPLAINED = "differs, explained"
OPEN = "DIFFERS, NOT EXPLAINED"


class Published(Struct, frozen=True, kw_only=True):
    """A figure as printed. `key` names ours; `within`: how far ours may be off, as a part of
    it; `because`: what is known of a difference. `calibrated`: an input was chosen to meet it,
    so that it proves nothing."""

    key: str
    what: str
    value: float
    unit: str = ""
    within: float = 0.05
    because: str = ""
    calibrated: bool = False


class Found(Struct, frozen=True):
    """What a run found: our figure of each key; further lines for people. `left_out`: keys of
    sizes that were not asked for."""

    figures: Mapping[str, float]
    lines: tuple[str, ...] = ()
    left_out: frozenset[str] = frozenset()


class Result(Struct, frozen=True, kw_only=True):
    """A published result. `source`: paper and equation, table or figure; `run`: computes it;
    `inputs`: which inputs the paper leaves out, and what stands in for them; `sample`: it is made
    of many seeded runs and takes minutes, else of one seed."""

    name: str
    about: str
    source: str
    published: tuple[Published, ...]
    run: Callable[[Sampling], Found]
    inputs: tuple[str, ...] = ()
    sample: bool = False


class Compared(Struct, frozen=True, kw_only=True):
    """A published figure beside ours."""

    what: str
    published: float
    ours: float
    ratio: float | None
    within: float
    verdict: str
    unit: str = ""
    because: str = ""


def compare(result: Result, found: Found) -> list[Compared]:
    """Every published figure that was asked for beside ours. Raises KeyError when a run has not
    one of them."""
    asked = [figure for figure in result.published if figure.key not in found.left_out]
    return [_beside(figure, found.figures[figure.key]) for figure in asked]


def _beside(figure: Published, ours: float) -> Compared:
    off = abs(ours - figure.value)
    if off <= figure.within * abs(figure.value):
        verdict = "calibrated" if figure.calibrated else REPRODUCED
    else:
        verdict = EXPLAINED if figure.because else OPEN
    return Compared(
        what=figure.what,
        published=figure.value,
        ours=ours,
        ratio=ours / figure.value if figure.value else None,
        within=figure.within,
        verdict=verdict,
        unit=figure.unit,
        because=figure.because if verdict in (EXPLAINED, OPEN) else "",
    )
