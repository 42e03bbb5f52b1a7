"""A run on one self-contained HTML page: no external script, font or image.

The templates are `page.html.j2` and `charts.html.j2` in this folder; this module computes their
rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from relume.chaos.runner.artifacts import Run
from relume.chaos.runner.judge import Verdict
from relume.chaos.runner.report.timeline import Decision, Struck, Timeline, TimelineRequest
from relume.chaos.runner.report.verdict_text import bound, struck
from relume.chaos.runner.run_statistics import quantile
from relume.chaos.scenario.catalogue import FIGURES, PROMISES
from relume.events.vocabulary.enums import RequestOutcome

MOST_DECISIONS = 1200
"""Maximum number of decisions on the page; ordinary arrivals come last. The JSON has all."""
MOST_REQUESTS = 400
MOST_POINTS = 6000

WIDTH, LEFT, ROW, PLOT_HEIGHT = 1160, 64, 5, 230
"""Sizes in pixels: of a chart, of its names, of an attempt, of a plot."""

Row = tuple[Any, ...]


def page(timeline: Timeline, verdict: Verdict, run: Run) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    filters: dict[str, Callable[..., Any]] = {
        "tenth": lambda number: f"{number:.1f}",
        "title_of": _title,
        "chosen": lambda event: {event.get("worker"), *event.get("holders", ())},
        "without_candidates": _without_candidates,
    }
    environment.filters |= filters
    environment.globals |= {
        "WIDTH": WIDTH,
        "LEFT": LEFT,
        "ROW": ROW,
        "PLOT_HEIGHT": PLOT_HEIGHT,
        "ticks": ticks,
        "x": lambda at_ms: _x(at_ms, timeline.ends_ms),
        "rows": _lanes(timeline),
    }
    return environment.get_template("page.html.j2").render(
        timeline=timeline,
        verdict=verdict,
        run=run,
        promises=[(name, *_judged(name, verdict)) for name in PROMISES],
        violations=[(v.promise, v.about, v.detail, v.revision or "") for v in verdict.violations],
        faults=_faults(verdict),
        plots=[
            ("time to first token, ms, by when it was sent", _points(timeline, "ttft_ms")),
            ("longest gap between tokens, ms, by when it was sent", _points(timeline, "gap_ms")),
        ],
        gaps=_distribution(timeline),
        latencies=_latencies(timeline),
        figures=_figures(verdict),
        disturbed=_disturbed(timeline),
        most_requests=MOST_REQUESTS,
        decisions=_decisions(timeline.decisions),
    )


def _x(at_ms: float, ends_ms: float) -> float:
    return LEFT + (WIDTH - LEFT - 10) * min(max(at_ms / max(ends_ms, 1.0), 0.0), 1.0)


def ticks(most: float) -> list[float]:
    """Round values from 0 to `most`, about eight of them."""
    if most <= 0:
        return [0.0]
    raw = most / 8
    step = 10 ** math.floor(math.log10(raw))
    step = next(step * times for times in (1, 2, 5, 10) if step * times >= raw)
    return [index * step for index in range(int(most / step) + 1)]


def _lanes(timeline: Timeline) -> list[dict[str, Any]]:
    """Workers, then replicas, each with its vertical position."""
    rows, top = [], 34.0
    heights = [(lane, lane.rows * ROW + 8.0) for lane in timeline.workers]
    for lane, height in [*heights, *((lane, 14.0) for lane in timeline.replicas)]:
        rows.append({"lane": lane, "top": top, "height": height})
        top += height + 5
    return rows


def _title(fault: Struck) -> str:
    title = f"{fault.name} {fault.what} {fault.target}, {fault.from_ms / 1000:.3f} s"
    title += f" to {fault.to_ms / 1000:.3f} s" if fault.to_ms is not None else ""
    return title + (f": {fault.detail}" if fault.detail else "")


def _judged(name: str, verdict: Verdict) -> tuple[str, str]:
    unproven = {text.partition(":")[0]: text for text in verdict.unproven}
    if name in verdict.broken:
        return "failed", f"broken {verdict.broken[name]} times"
    if name in unproven:
        return "inconclusive", f"unproven: {unproven[name]}"
    return ("passed", "kept") if name in verdict.judged else ("dim", "not judged")


def _faults(verdict: Verdict) -> list[Row]:
    return [(f.name, f.what, f.target, struck(f)) for f in verdict.faults]


def _kind(request: TimelineRequest) -> str:
    if request.outcome != RequestOutcome.COMPLETED:
        return "bad"
    return "hit" if request.interrupted else "calm"


def _points(timeline: Timeline, figure: str) -> list[dict[str, Any]]:
    points = [
        {
            "at_ms": r.sent_ms,
            "value": value,
            "kind": _kind(r),
            "title": f"{r.request} {r.outcome}: {value:,.1f} ms ({' then '.join(r.workers)})",
        }
        for r in timeline.requests
        if (value := getattr(r, figure)) is not None
    ]
    return points[:: max(len(points) // MOST_POINTS, 1)]


def _distribution(timeline: Timeline) -> dict[str, Any]:
    """Shares of gaps up to each value (logarithmic, ms), a curve for each kind of stream."""
    every = [value for values in timeline.gaps_ms for value in values if value > 0]
    low = math.floor(math.log10(max(min(every, default=1.0), 1e-3)))
    high = max(math.ceil(math.log10(max(every, default=10.0))), low + 1)

    def x(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return LEFT + (WIDTH - LEFT - 10) * share

    curves = []
    for kind, name, values in zip(
        ("calm", "hit"), ("undisturbed", "interrupted"), timeline.gaps_ms, strict=True
    ):
        ordered = sorted(values)
        picked = range(0, len(ordered), max(len(ordered) // 400, 1))
        points = [(x(ordered[at]), (at + 1) / len(ordered)) for at in picked]
        points += [(x(ordered[-1]), 1.0)] if ordered else []
        curves.append({"kind": kind, "name": name, "count": len(ordered), "points": points})
    decades = [(x(10.0**power), f"{10.0**power:g} ms") for power in range(low, high + 1)]
    return {"decades": decades, "curves": curves}


def _latencies(timeline: Timeline) -> list[Row]:
    rows = []
    for name, interrupted in (("undisturbed", False), ("interrupted", True)):
        of_kind = [r for r in timeline.requests if r.interrupted is interrupted]
        ttft = [r.ttft_ms for r in of_kind if r.ttft_ms is not None]
        gaps = timeline.gaps_ms[interrupted]
        shown = [quantile(v, q) for v in (ttft, gaps) for q in (0.5, 0.99)]
        rows.append((name, len(of_kind), *map(_ms, shown)))
    return rows


def _figures(verdict: Verdict) -> list[Row]:
    bounds = {e.figure: e for e in verdict.expectations}
    return [
        (
            name,
            "-" if value is None else f"{value:,.2f}",
            bound(bounds.get(name)),
            FIGURES.get(name, ""),
        )
        for name, value in verdict.figures.items()
    ]


def _disturbed(timeline: Timeline) -> list[Row]:
    return [
        (r.request, r.id, r.outcome, f"{r.sent_ms / 1000:.3f}", _ms(r.ttft_ms), _ms(r.gap_ms),
         r.tokens, " → ".join(r.workers))
        for r in timeline.requests
        if r.interrupted or r.outcome != RequestOutcome.COMPLETED
    ]  # fmt: skip


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _decisions(decisions: Sequence[Decision]) -> list[Decision]:
    plain = [d for d in decisions if d.event.get("cause") == "arrival"]
    telling = [d for d in decisions if d.event.get("cause") != "arrival"]
    shown = (telling + plain[: max(MOST_DECISIONS - len(telling), 0)])[:MOST_DECISIONS]
    return sorted(shown, key=lambda decision: decision.at_ms)


def _without_candidates(event: dict[str, Any]) -> str:
    return json.dumps({k: x for k, x in event.items() if k != "candidates"}, indent=1)
