"""A run on one HTML page that needs nothing else: no script from elsewhere, no font, no image."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from relume.chaos.runner import drawing
from relume.chaos.runner.artifacts import Run
from relume.chaos.runner.figures import quantile
from relume.chaos.runner.judge import Verdict
from relume.chaos.runner.timeline import Asked, Decision, Timeline
from relume.chaos.scenario.catalogue import FIGURES, PROMISES

MOST_DECISIONS = 1200
"""Decisions on the page; those beyond an ordinary arrival come first. The JSON has all."""
MOST_REQUESTS = 400

_STYLE = """
:root { --ink:#1d2329; --dim:#68727d; --line:#dde2e7; --back:#fff; --soft:#f5f7f9;
 --up:#dff0e2; --start:#f6e9c6; --down:#eceef0; --prefill:#9db9dd; --decode:#3f7cc4;
 --again:#7a4fb5; --bad:#c62828; --good:#2e7d32; --doubt:#b26a00; }
@media (prefers-color-scheme: dark) { :root { --ink:#e4e8ec; --dim:#98a2ad; --line:#343b43;
 --back:#15191d; --soft:#1d2328; --up:#1e3a25; --start:#4a3d17; --down:#23282d; --prefill:#4d6a91;
 --decode:#6aa5ea; --again:#b08be6; --bad:#ef6b6b; --good:#6cc070; --doubt:#e0a040; } }
body { font:14px/1.45 system-ui,sans-serif; color:var(--ink); background:var(--back);
 max-width:1180px; margin:24px auto; padding:0 12px; }
h1 { font-size:21px; margin:0 0 2px; } h2 { font-size:16px; margin:26px 0 6px; }
p { margin:4px 0; } .dim { color:var(--dim); }
code,pre { font:12px/1.4 ui-monospace,monospace; background:var(--soft); padding:1px 4px; }
pre { padding:8px; overflow:auto; max-height:340px; }
.passed { color:var(--good); } .failed { color:var(--bad); } .inconclusive { color:var(--doubt); }
.chip { display:inline-block; padding:1px 8px; margin:2px; border-radius:9px;
 background:var(--soft); border:1px solid var(--line); } .chip.failed { border-color:var(--bad); }
table { border-collapse:collapse; margin:6px 0; } td,th { padding:2px 10px 2px 0; text-align:left;
 border-bottom:1px solid var(--line); vertical-align:top; } td.n { text-align:right; }
details { border-bottom:1px solid var(--line); } summary { cursor:pointer; padding:2px 0; }
.chosen td { font-weight:600; } svg { display:block; max-width:100%; height:auto; }
svg text { font:10px system-ui,sans-serif; fill:var(--ink); } svg text.tick { fill:var(--dim); }
svg text.name { font-weight:600; } svg text.faulted { fill:var(--bad); }
.grid { stroke:var(--line); } .down { fill:var(--down); } .up { fill:var(--up); }
.starting { fill:var(--start); } .leads { fill:var(--doubt); } .prefill { fill:var(--prefill); }
.decode { fill:var(--decode); } .again { fill:var(--again); } .cut { fill:var(--bad); }
line.fault { stroke:var(--bad); stroke-width:1.2; stroke-dasharray:4 2; }
.lasting { fill:var(--bad); opacity:.16; } circle.calm { fill:var(--decode); opacity:.65; }
circle.hit { fill:var(--again); } circle.bad { fill:var(--bad); }
polyline { fill:none; stroke-width:1.6; } polyline.calm { stroke:var(--decode); }
polyline.hit { stroke:var(--again); } text.calm.key { fill:var(--decode); }
text.hit.key { fill:var(--again); }
"""


def page(told: Timeline, verdict: Verdict, run: Run) -> str:
    """The page."""
    title = f"{verdict.scenario}, seed {verdict.seed}: {verdict.result}"
    body = "\n".join(_body(told, verdict, run))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _body(told: Timeline, verdict: Verdict, run: Run) -> Iterator[str]:
    yield f"<h1>{escape(verdict.scenario)}, seed {verdict.seed}: "
    yield f'<span class="{verdict.result}">{verdict.result}</span></h1>'
    dirty = " with changes" if run.dirty else ""
    how = "simulated" if run.kind == "sim" else "live"
    yield (
        f'<p class="dim">{how}, {run.ended_ns / 1e9:.1f} s, schedule {run.digest}, commit '
        f"{run.commit[:12] or 'unknown'}{dirty}; repeat: <code>{escape(run.command)}</code></p>"
    )
    yield from (f'<p class="{verdict.result}">{escape(reason)}</p>' for reason in verdict.why)
    yield "<h2>Promises</h2><p>"
    yield "".join(_chip(name, verdict) for name in PROMISES)
    yield "</p>"
    if verdict.violations:
        yield from _table(
            ("promise", "about", "what", "revision"),
            [(v.promise, v.about, v.detail, v.revision or "") for v in verdict.violations],
        )
    yield "<h2>Faults</h2>"
    yield from _table(
        ("", "fault", "target", "struck"),
        [
            (f.name, f.what, f.target, ", ".join(f"{at / 1e9:.3f} s" for at in f.at_ns[:6])
             or (f"waits for {f.needs}" if f.needs else "did not strike"))
            for f in verdict.faults
        ],
    )  # fmt: skip
    yield "<h2>Timeline</h2>"
    yield (
        '<p class="dim">Each worker: its engine\'s lives behind the attempts it ran (light: until '
        "the first token; violet: taken up from elsewhere; red end: lost). Point at anything for "
        "what it is.</p>"
    )
    yield drawing.lanes(told)
    yield "<h2>Latencies</h2>"
    yield from _plots(told)
    yield "<h2>Figures</h2>"
    yield from _figures(verdict)
    yield "<h2>Requests</h2>"
    yield from _requests(told.requests)
    yield "<h2>Decisions</h2>"
    yield from _decisions(told.decisions)


def _chip(name: str, verdict: Verdict) -> str:
    unproven = {text.partition(":")[0]: text for text in verdict.unproven}
    if name in verdict.broken:
        kind, said = "failed", f"broken {verdict.broken[name]} times"
    elif name in unproven:
        kind, said = "inconclusive", f"unproven: {unproven[name]}"
    elif name in verdict.judged:
        kind, said = "passed", "kept"
    else:
        kind, said = "dim", "not judged"
    return f'<span class="chip {kind}" title="{escape(said)}">{name} {escape(said[:9])}</span>'


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"
    for row in rows:
        cells = (
            f'<td class="n">{cell:,}</td>' if isinstance(cell, int) else
            f"<td>{escape(str(cell))}</td>" for cell in row
        )  # fmt: skip
        yield "<tr>" + "".join(cells) + "</tr>"
    yield "</table>"


def _kind(request: Asked) -> str:
    if request.outcome != "completed":
        return "bad"
    return "hit" if request.interrupted else "calm"


def _plots(told: Timeline) -> Iterator[str]:
    for label, of in (
        ("time to first token, ms, by when it was sent", "ttft_ms"),
        ("longest gap between tokens, ms, by when it was sent", "gap_ms"),
    ):
        points = [
            (r.sent_ms, value, _kind(r), f"{r.request} {r.outcome}: {value:,.1f} ms "
             f"({' then '.join(r.workers)})")
            for r in told.requests
            if (value := getattr(r, of)) is not None
        ]  # fmt: skip
        yield drawing.scatter(points, told.ends_ms, told.faults, label)
    calm, hit = told.gaps_ms
    series = (("calm", "undisturbed", calm), ("hit", "interrupted", hit))
    yield drawing.distribution(series, "time between tokens")
    yield '<p class="dim">Blue: undisturbed; violet: interrupted; red: not completed.</p>'
    rows = []
    for name, interrupted in (("undisturbed", False), ("interrupted", True)):
        of_kind = [r for r in told.requests if r.interrupted is interrupted]
        ttft = [r.ttft_ms for r in of_kind if r.ttft_ms is not None]
        gaps = told.gaps_ms[interrupted]
        shown = [quantile(v, q) for v in (ttft, gaps) for q in (0.5, 0.99)]
        rows.append((name, len(of_kind), *("-" if q is None else f"{q:,.1f}" for q in shown)))
    head = ("requests", "count", "TTFT p50 ms", "p99", "ITL p50 ms", "p99")
    yield from _table(head, rows)


def _figures(verdict: Verdict) -> Iterator[str]:
    bounds = {e.figure: e for e in verdict.expectations}
    rows = []
    for name, value in verdict.figures.items():
        bound = ""
        if expected := bounds.get(name):
            parts = [
                f"{sign} {limit:g}"
                for sign, limit in (("≥", expected.least), ("≤", expected.most))
                if limit is not None
            ]
            bound = f"{' '.join(parts)} {'met' if expected.met else 'NOT MET'}"
        rows.append((name, "-" if value is None else f"{value:,.2f}", bound, FIGURES.get(name, "")))
    yield from _table(("figure", "value", "bound", ""), rows)


def _requests(requests: Sequence[Asked]) -> Iterator[str]:
    telling = [r for r in requests if r.interrupted or r.outcome != "completed"]
    counted = f"{len(telling)} of {len(requests)}"
    yield f"<details><summary>{counted} were interrupted or did not complete</summary>"
    yield from _table(
        ("request", "id", "outcome", "sent s", "TTFT ms", "gap ms", "tokens", "workers"),
        [
            (r.request, r.id, r.outcome, f"{r.sent_ms / 1000:.3f}", _ms(r.ttft_ms), _ms(r.gap_ms),
             r.tokens, " → ".join(r.workers))
            for r in telling[:MOST_REQUESTS]
        ],
    )  # fmt: skip
    if len(telling) > MOST_REQUESTS:
        yield f'<p class="dim">and {len(telling) - MOST_REQUESTS} more (report --json)</p>'
    yield "</details>"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _decisions(decisions: Sequence[Decision]) -> Iterator[str]:
    plain = [d for d in decisions if d.event.get("cause") == "arrival"]
    telling = [d for d in decisions if d.event.get("cause") != "arrival"]
    shown = (telling + plain[: max(MOST_DECISIONS - len(telling), 0)])[:MOST_DECISIONS]
    shown.sort(key=lambda decision: decision.at_ms)
    yield f'<p class="dim">{len(shown)} of {len(decisions)}; open one for what it chose between'
    yield " (report --json has all)</p>"
    for decision in shown:
        yield (
            f"<details><summary>{decision.at_ms / 1000:.3f} s {escape(decision.kind)} "
            f"{escape(decision.about)}: <b>{escape(decision.chosen)}</b></summary>"
        )
        yield from _choices(decision)
        yield "</details>"


def _choices(decision: Decision) -> Iterator[str]:
    event = dict(decision.event)
    candidates = event.pop("candidates", None)
    if candidates:
        head = [name for name in candidates[0] if name != "type"]
        yield "<table><tr>" + "".join(f"<th>{escape(name)}</th>" for name in head) + "</tr>"
        chosen = {event.get("worker"), *event.get("holders", ())}
        for candidate in candidates:
            mark = ' class="chosen"' if candidate.get("worker") in chosen else ""
            cells = "".join(f"<td>{escape(str(candidate[name]))}</td>" for name in head)
            yield f"<tr{mark}>{cells}</tr>"
        yield "</table>"
    yield f"<pre>{escape(json.dumps(event, indent=1))}</pre>"
