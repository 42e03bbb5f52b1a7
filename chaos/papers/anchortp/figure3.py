"""AnchorTP Figure 3: 1,024 rows on four ranks, one dies, three continue."""

from __future__ import annotations

from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling
from relume.policies.elastic.reshard import Plan, after_failure, continuous, keep_in_place

ROWS = 1024
DEAD = 1  # the figure's GPU:2


def plans() -> tuple[Plan, Plan]:
    """The published plan, and ours."""
    held = after_failure(ROWS, 4, [DEAD])
    return continuous(held, sorted(held), ROWS), keep_in_place(held, sorted(held), ROWS)


def run(_: Sampling) -> Found:
    plan, ours = plans()
    figures: dict[str, float] = {kind: plan.units(kind) for kind in ("reload", "peer", "keep")}
    for rank, gpu in ((0, 1), (2, 3), (3, 4)):
        figures[f"reload_{gpu}"] = plan.units("reload", rank)
        figures[f"keep_{gpu}"] = plan.units("keep", rank)
    figures["peer_4"] = plan.units("peer", 3)
    lines = [
        f"GPU:{m.target + 1} [{m.start}, {m.end}) {m.kind}"
        + (f" from GPU:{m.source + 1}" if m.kind == "peer" else "")
        for m in plan.moves
    ]
    said = f"{ours.units('reload')} rows reloaded, {ours.units('peer')} copied"
    busiest = f"busiest reload {ours.busiest('reload')} rows, there {plan.busiest('reload')}"
    return Found(figures, (*lines, f"keep_in_place: {said}, {busiest}"))


def _exact(key: str, what: str, value: float) -> PublishedFigure:
    return PublishedFigure(key=key, what=what, value=value, unit="rows", within=0.0)


RESULT = Result(
    name="anchortp-figure3",
    about="rows retained, copied and reloaded when one of four ranks dies",
    source="AnchorTP Fig. 3, Alg. 1",
    published=(
        _exact("reload", "reloaded in all", 256),
        _exact("peer", "copied between ranks", 86),
        _exact("keep", "kept", 682),
        _exact("keep_1", "GPU:1 keeps", 256),
        _exact("reload_1", "GPU:1 reloads", 85),
        _exact("reload_3", "GPU:3 reloads", 171),
        _exact("keep_3", "GPU:3 keeps", 170),
        _exact("peer_4", "GPU:4 receives", 86),
        _exact("keep_4", "GPU:4 keeps", 256),
    ),
    run=run,
)
