"""A judged run for the page of its log (`relume-chaos report --ui`): verdict, faults, lanes over time."""

from __future__ import annotations

from msgspec import Struct

from relume.chaos.runner.artifacts import Run
from relume.chaos.runner.judge import Verdict
from relume.chaos.runner.report.timeline import Lane, Struck, Timeline, TimelineRequest
from relume.chaos.runner.report.verdict_text import bound, struck
from relume.chaos.runner.run_statistics import quantile
from relume.chaos.scenario.catalogue import FIGURES, PROMISES


class JudgedPromise(Struct, frozen=True, kw_only=True):
    """`result`: passed, failed, inconclusive, or empty: not judged."""

    name: str
    result: str
    text: str


class ReportedViolation(Struct, frozen=True, kw_only=True):
    """A broken promise. `revision`: where the log shows it; 0: it does not."""

    promise: str
    about: str
    detail: str
    revision: int


class ReportedFault(Struct, frozen=True, kw_only=True):
    """A fault of the schedule, and when it struck."""

    name: str
    what: str
    target: str
    text: str


class ReportedFigure(Struct, frozen=True, kw_only=True):
    """A figure of the run with its bound, if it has one."""

    name: str
    value: float | None
    bound: str
    meaning: str


class Latencies(Struct, frozen=True, kw_only=True):
    """Of requests of one kind, in milliseconds; None: there are none."""

    kind: str
    requests: int
    ttft_p50: float | None
    ttft_p99: float | None
    gap_p50: float | None
    gap_p99: float | None


class RunReport(Struct, frozen=True, kw_only=True):
    """A run as the page shows it above its log. Times are milliseconds from `began_ms` on."""

    scenario: str
    seed: int
    kind: str
    result: str
    why: list[str]
    command: str
    commit: str
    began_ms: int
    ends_ms: float
    promises: list[JudgedPromise]
    violations: list[ReportedViolation]
    faults: list[ReportedFault]
    struck: list[Struck]
    figures: list[ReportedFigure]
    latencies: list[Latencies]
    lanes: list[Lane]
    requests: list[TimelineRequest]


def run_report(timeline: Timeline, verdict: Verdict, run: Run) -> RunReport:
    """The report of a judged run."""
    bounds = {e.figure: e for e in verdict.expectations}
    return RunReport(
        scenario=verdict.scenario,
        seed=verdict.seed,
        kind="simulated" if run.kind == "sim" else "live",
        result=verdict.result,
        why=list(verdict.why),
        command=run.command,
        commit=(run.commit[:12] or "unknown") + (" with changes" if run.dirty else ""),
        began_ms=run.began_ms,
        ends_ms=timeline.ends_ms,
        promises=[_judged(name, verdict) for name in PROMISES],
        violations=[
            ReportedViolation(
                promise=v.promise, about=v.about, detail=v.detail, revision=v.revision or 0
            )
            for v in verdict.violations
        ],
        faults=[
            ReportedFault(name=f.name, what=f.what, target=f.target, text=struck(f))
            for f in verdict.faults
        ],
        struck=timeline.faults,
        figures=[
            ReportedFigure(
                name=name, value=value, bound=bound(bounds.get(name)), meaning=FIGURES.get(name, "")
            )
            for name, value in verdict.figures.items()
        ],
        latencies=[_latencies(timeline, interrupted) for interrupted in (False, True)],
        lanes=[*timeline.workers, *timeline.replicas],
        requests=timeline.requests,
    )


def _judged(name: str, verdict: Verdict) -> JudgedPromise:
    unproven = {text.partition(":")[0]: text for text in verdict.unproven}
    if name in verdict.broken:
        return JudgedPromise(
            name=name, result="failed", text=f"broken {verdict.broken[name]} times"
        )
    if name in unproven:
        return JudgedPromise(name=name, result="inconclusive", text=f"unproven: {unproven[name]}")
    if name in verdict.judged:
        return JudgedPromise(name=name, result="passed", text="held")
    return JudgedPromise(name=name, result="", text="not judged")


def _latencies(timeline: Timeline, interrupted: bool) -> Latencies:
    of_kind = [r for r in timeline.requests if r.interrupted is interrupted]
    ttft = [r.ttft_ms for r in of_kind if r.ttft_ms is not None]
    gaps = timeline.gaps_ms[interrupted]
    return Latencies(
        kind="interrupted" if interrupted else "undisturbed",
        requests=len(of_kind),
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        gap_p50=quantile(gaps, 0.5),
        gap_p99=quantile(gaps, 0.99),
    )
