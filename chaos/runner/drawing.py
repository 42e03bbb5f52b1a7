"""Inline SVG: lanes over time, scatter plots, distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from relume.chaos.runner.timeline import Attempt, Lane, Life, Struck, Timeline

WIDTH = 1160
LEFT = 64
_ROW = 5
_PLOT_HEIGHT = 230
_MOST_POINTS = 6000


def _x(at_ms: float, ends_ms: float) -> float:
    return LEFT + (WIDTH - LEFT - 10) * min(max(at_ms / max(ends_ms, 1.0), 0.0), 1.0)


def _rect(
    x: float, y: float, width: float, height: float, kind: str, title: str = "", least: float = 0.8
) -> str:
    told = f"<title>{escape(title)}</title>" if title else ""
    wide = max(width, least)
    place = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{height:.1f}"'
    return f'<rect class="{kind}" {place}>{told}</rect>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(height: float, parts: Iterable[str], label: str) -> str:
    body = "\n".join(parts)
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">\n{body}\n</svg>'


def ticks(most: float) -> list[float]:
    """Round values from 0 to `most`, about eight of them."""
    if most <= 0:
        return [0.0]
    raw = most / 8
    step = 10 ** math.floor(math.log10(raw))
    step = next(step * times for times in (1, 2, 5, 10) if step * times >= raw)
    return [index * step for index in range(int(most / step) + 1)]


def _time_axis(ends_ms: float, top: float, bottom: float) -> Iterator[str]:
    for second in ticks(ends_ms / 1000):
        x = _x(second * 1000, ends_ms)
        yield f'<line class="grid" x1="{x:.1f}" y1="{top:.0f}" x2="{x:.1f}" y2="{bottom:.0f}"/>'
        yield _text(x + 2, bottom + 11, f"{second:g} s", "tick")


def lanes(told: Timeline) -> str:
    """Each worker with its engine's lives and the attempts it ran, each replica with its lives
    and its time as leader; faults across all of them."""
    parts: list[str] = []
    top = 34.0
    places: dict[str, tuple[float, float]] = {}
    for lane in told.workers:
        height = lane.rows * _ROW + 8
        places[lane.name] = top, height
        parts += _worker(lane, top, height, told.ends_ms)
        top += height + 5
    for lane in told.replicas:
        places[lane.name] = top, 14.0
        parts += _replica(lane, top, told.ends_ms)
        top += 19
    axis = list(_time_axis(told.ends_ms, 30, top))
    marks = list(_faults(told.faults, places, top, told))
    return _svg(top + 18, [*axis, *parts, *marks], "workers and replicas over time")


def _worker(lane: Lane, top: float, height: float, ends_ms: float) -> Iterator[str]:
    yield _text(4, top + height / 2 + 4, f"{lane.name} {lane.domain}", "name")
    yield _rect(LEFT, top, WIDTH - LEFT - 10, height, "down")
    for life in lane.lives:
        yield from _life(life, top, height, ends_ms)
    for attempt in lane.attempts:
        yield from _attempt(attempt, top + 4 + attempt.row * _ROW, ends_ms)


def _life(life: Life, top: float, height: float, ends_ms: float) -> Iterator[str]:
    end = life.to_ms if life.to_ms is not None else ends_ms
    ready = life.ready_ms if life.ready_ms is not None else end
    start, middle, stop = (_x(at, ends_ms) for at in (life.from_ms, ready, end))
    yield _rect(start, top, middle - start, height, "starting", f"life {life.number} starts", 0)
    title = f"life {life.number}, {ready / 1000:.2f} to {end / 1000:.2f} s {life.reason}"
    yield _rect(middle, top, stop - middle, height, "up", title, 0)


def _attempt(attempt: Attempt, y: float, ends_ms: float) -> Iterator[str]:
    end = attempt.to_ms if attempt.to_ms is not None else ends_ms
    first = attempt.first_ms if attempt.first_ms is not None else end
    start, middle, stop = (_x(at, ends_ms) for at in (attempt.from_ms, first, end))
    told = f", {attempt.restored} tokens restored" if attempt.restored else ""
    title = (
        f"{attempt.request}/{attempt.attempt}: {attempt.from_ms / 1000:.3f} s, first token "
        f"{first / 1000:.3f} s, {attempt.end or 'open'} {end / 1000:.3f} s{told}"
    )
    yield _rect(start, y, middle - start, _ROW - 1, "prefill", title)
    kind = "again" if attempt.attempt > 1 else "decode"
    yield _rect(middle, y, stop - middle, _ROW - 1, kind, title)
    if attempt.end not in ("finished", ""):
        yield _rect(stop - 1, y - 0.5, 2, _ROW, "cut", title)


def _replica(lane: Lane, top: float, ends_ms: float) -> Iterator[str]:
    yield _text(4, top + 11, lane.name, "name")
    yield _rect(LEFT, top, WIDTH - LEFT - 10, 14, "down")
    for life in lane.lives:
        yield from _life(life, top, 14, ends_ms)
    for life in lane.leads:
        end = life.to_ms if life.to_ms is not None else ends_ms
        start, stop = _x(life.from_ms, ends_ms), _x(end, ends_ms)
        yield _rect(start, top + 4, stop - start, 6, "leads", f"{lane.name} leads", 0)


def _faults(
    faults: Sequence[Struck], places: dict[str, tuple[float, float]], bottom: float, told: Timeline
) -> Iterator[str]:
    for index, fault in enumerate(faults):
        x = _x(fault.from_ms, told.ends_ms)
        title = f"{fault.name} {fault.what} {fault.target}, {fault.from_ms / 1000:.3f} s"
        title += f" to {fault.to_ms / 1000:.3f} s" if fault.to_ms is not None else ""
        title += f": {fault.detail}" if fault.detail else ""
        yield (
            f'<line class="fault" x1="{x:.1f}" y1="26" x2="{x:.1f}" y2="{bottom:.0f}">'
            f"<title>{escape(title)}</title></line>"
        )
        yield _text(min(x + 2, WIDTH - 130), 11 + 12 * (index % 2), f"{fault.name} {fault.what}",
                    "faulted")  # fmt: skip
        if fault.to_ms is not None:
            stop = _x(fault.to_ms, told.ends_ms)
            for target in fault.target.split(","):
                top, height = places.get(target, (26.0, bottom - 26))
                yield _rect(x, top, stop - x, height, "lasting", title)


def scatter(
    points: Sequence[tuple[float, float, str, str]],
    ends_ms: float,
    faults: Sequence[Struck],
    label: str,
) -> str:
    """(time, value, class, title) of each point; values in ms, over the time of the run."""
    shown = points[:: max(len(points) // _MOST_POINTS, 1)]
    most = max((value for _, value, _, _ in shown), default=1.0) or 1.0
    bottom, top = _PLOT_HEIGHT - 20.0, 16.0

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / most

    parts = [*_time_axis(ends_ms, top, bottom)]
    for value in ticks(most):
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - 10}" '
            f'y2="{y(value):.1f}"/>'
        )
        parts.append(_text(4, y(value) + 4, f"{value:,.0f}", "tick"))
    for fault in faults:
        x = _x(fault.from_ms, ends_ms)
        title = escape(f"{fault.name} {fault.what} {fault.target}")
        parts.append(
            f'<line class="fault" x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}">'
            f"<title>{title}</title></line>"
        )
    for at, value, kind, title in shown:
        parts.append(
            f'<circle class="{kind}" cx="{_x(at, ends_ms):.1f}" cy="{y(value):.1f}" r="2.6">'
            f"<title>{escape(title)}</title></circle>"
        )
    parts.append(_text(LEFT + 6, 11, label, "name"))
    return _svg(_PLOT_HEIGHT, parts, label)


def distribution(series: Sequence[tuple[str, str, Sequence[float]]], label: str) -> str:
    """Shares of values up to each value (logarithmic, ms), a line for each (class, name)."""
    every = [value for _, _, values in series for value in values if value > 0]
    low = math.floor(math.log10(max(min(every, default=1.0), 1e-3)))
    high = max(math.ceil(math.log10(max(every, default=10.0))), low + 1)
    bottom, top = _PLOT_HEIGHT - 20.0, 16.0

    def x(value: float) -> float:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return LEFT + (WIDTH - LEFT - 10) * share

    parts = []
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}"/>')
        parts.append(_text(min(at + 2, WIDTH - 50), bottom + 11, f"{10.0**power:g} ms", "tick"))
    for share in (0, 25, 50, 75, 100):
        y = bottom - (bottom - top) * share / 100
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{WIDTH - 10}" y2="{y}"/>')
        parts.append(_text(4, y + 4, f"{share} %", "tick"))
    for index, (kind, name, values) in enumerate(series):
        ordered = sorted(values)
        if not ordered:
            continue
        picked = range(0, len(ordered), max(len(ordered) // 400, 1))
        points = [(ordered[at], (at + 1) / len(ordered)) for at in picked] + [(ordered[-1], 1.0)]
        line = " ".join(f"{x(v):.1f},{bottom - (bottom - top) * s:.1f}" for v, s in points)
        parts.append(f'<polyline class="{kind}" points="{line}"/>')
        parts.append(
            _text(LEFT + 150 + 220 * index, 11, f"{name} ({len(ordered):,})", f"{kind} key")
        )
    parts.append(_text(LEFT + 6, 11, label, "name"))
    return _svg(_PLOT_HEIGHT, parts, label)
