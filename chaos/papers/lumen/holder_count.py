"""Holders that die together with their primaries: one or two holders each, at random or by rack."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from relume.chaos.papers.lumen.parts.lumen_study import INPUTS, RECOVERY, Study
from relume.chaos.papers.lumen.parts.study_runs import Case
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

WORKERS, RACKS = 8, 4
WHOM = {
    "any": "any two",
    "rack": "a rack of two",
    "neighbours": "an undeclared rack",
}


def cases() -> Mapping[str, Case]:
    """Two of eight lost with their daemons."""
    found = {}
    for whom, rule, holders in product(WHOM, ("lumen", "ours"), (1, 2)):
        if (whom, rule) == ("neighbours", "lumen"):
            continue
        racks = RACKS if whom != "neighbours" else 0
        case = Case(
            rules=rule,
            workers=WORKERS,
            seed=0,
            whom=whom,
            daemons=True,
            holders=holders,
            racks=racks,
            short=True,
        )
        found[f"{WHOM[whom]}, {rule}, holders: {holders}"] = case
    found["an undeclared rack, fixed neighbour"] = Case(
        rules="neighbour", workers=WORKERS, seed=0, whom="neighbours", daemons=True, short=True
    )
    return found


def run(sampling: Sampling) -> Found:
    """The figures by lost workers and number of holders."""
    study = Study(sampling, cases())
    lines = study.table(RECOVERY)
    for whom, rule in product(WHOM.values(), ("lumen", "ours")):
        of = f"{whom}, {rule}, holders: "
        if of + "1" not in study.runs:
            continue
        lines.append(study.over(f"two holders / one, {whom}, {rule}", of + "2", of + "1"))
    figures = {
        "rack": study.value("restored", "a rack of two, ours, holders: 1"),
        "one": study.value("restored", "any two, ours, holders: 1"),
        "two": study.value("restored", "any two, ours, holders: 2"),
    }
    return Found(figures, tuple(lines))


TAIL = (
    "no holder has tokens that were in no full block, or not yet sent, when the engine died; and "
    "tokens that are computed sooner than restored are computed."
)
PLANNED = "with one holder, either of two lost workers has about a seventh of the other's blocks. "

RESULT = Result(
    name="lumen-holders",
    about="holders lost with their primaries, one and two holders, 8 workers, two lost",
    source="LUMEN; question of the review",
    published=(
        PublishedFigure(
            key="rack",
            what="restored, a known rack lost, one holder",
            value=1.0,
            within=0.1,
            because=TAIL,
        ),
        PublishedFigure(
            key="one",
            what="restored, any two lost, one holder",
            value=6 / 7,
            within=0.1,
            because=PLANNED + TAIL,
        ),
        PublishedFigure(
            key="two",
            what="restored, any two lost, two holders",
            value=1.0,
            within=0.1,
            because=TAIL,
        ),
    ),
    run=run,
    sample=True,
    inputs=(
        *INPUTS,
        "The review names no figures: 'published' is the expected value, 1 or, with one holder "
        "chosen among seven, six sevenths.",
    ),
)
