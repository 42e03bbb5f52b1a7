"""Results of a continuation, simulated or in the log, and the difference of two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

from msgspec import Struct

from relume.chaos.outcome import Outcome
from relume.chaos.runner.run_statistics import mean, quantile, real
from relume.chaos.validators.promises.requests.i10_recovery_bound import recoveries
from relume.chaos.validators.records import Log, courses, of_clients
from relume.chaos.whatif.facts import Read
from relume.chaos.whatif.start import LEAD_NS, Start
from relume.events.vocabulary.enums import RequestOutcome

MS = 1e6


class ContinuedRequest(Struct, frozen=True, kw_only=True):
    """A request after the cut. `ttft_ms` None: it had its first token before, or none came;
    `tpot_ms` covers tokens after the cut; `last_ms` is from the cut on; `workers`: its workers."""

    ttft_ms: float | None
    tpot_ms: float | None
    last_ms: float | None
    completed: bool
    workers: tuple[str, ...]


class Course(Struct, frozen=True):
    """A whole continuation."""

    requests: Mapping[str, ContinuedRequest]
    recoveries: tuple[float, ...]
    error: str = ""


class Figures(Struct, frozen=True, kw_only=True):
    """Figures of the compared requests. Times in ms, the makespan in s from the cut to the last
    token."""

    requests: int
    with_ttft: int
    ttft_ms_mean: float | None
    ttft_ms_p99: float | None
    tpot_ms_mean: float | None
    makespan_s: float | None
    recoveries: int
    recovery_ms_mean: float | None
    broken: int


def of_run(outcome: Outcome, start: Start, known: Read) -> Course:
    """The course of a simulated continuation."""
    log = Log(outcome.groups)
    histories = real(outcome)
    pairs = of_clients(courses(log), [h.record for h in histories])
    found = {}
    for history, (record, course) in zip(histories, pairs, strict=True):
        name, first, last = history.request, history.first_ns, history.last_ns
        facts, made = known.facts[name], start.made.get(name, 0)
        ttft = None
        if first is not None and not made:
            ttft = (first - history.sent_ns) / MS
            if name in known.live:
                ttft += start.at_ms - facts.arrived_ms
        tpot = None
        if first is not None and last is not None and record.token_count > 1:
            tpot = (last - first) / MS / (record.token_count - 1)
        workers = tuple(d.worker for d in course.decisions) if course is not None else ()
        ended = None if last is None else (last - LEAD_NS) / MS
        found[name] = ContinuedRequest(
            ttft_ms=ttft,
            tpot_ms=tpot,
            last_ms=ended,
            completed=record.outcome == RequestOutcome.COMPLETED,
            workers=workers,
        )
    back = tuple(float(r.back_ms - r.begun_ms) for r in recoveries(log) if r.resumed_on)
    return Course(found, back, outcome.error)


def of_log(log: Log, start: Start, known: Read) -> Course:
    """The course of the log after the cut."""
    simulated = {request.name for request in start.schedule.requests}
    found = {}
    for name, course in courses(log).items():
        facts = known.facts.get(name)
        if name not in simulated or facts is None or facts.end is None:
            continue
        end, made = facts.end, start.made.get(name, 0)
        ttft = end.ttft_us / 1000 if end.ttft_us >= 0 and not made else None
        begun = facts.arrived_ms + end.ttft_us / 1000
        tokens = end.tokens - 1
        if made:
            begun, tokens = max(begun, float(start.at_ms)), end.tokens - made
        tpot = (facts.end_ms - begun) / tokens if tokens > 0 and end.ttft_us >= 0 else None
        workers = tuple(d.worker for d in course.decisions)
        if start.pins.get(name) in workers:
            workers = workers[workers.index(start.pins[name]) :]
        last = float(facts.end_ms - start.at_ms)
        found[name] = ContinuedRequest(
            ttft_ms=ttft,
            tpot_ms=tpot,
            last_ms=last,
            completed=end.outcome == RequestOutcome.COMPLETED,
            workers=workers,
        )
    back = tuple(
        float(r.back_ms - r.begun_ms)
        for r in recoveries(log)
        if r.resumed_on and r.begun_ms >= start.at_ms
    )
    return Course(found, back)


def figures(course: Course, names: Iterable[str]) -> Figures:
    """Figures of these requests of a course."""
    lived = [course.requests[name] for name in names]
    ttft = [one.ttft_ms for one in lived if one.ttft_ms is not None]
    last = [one.last_ms for one in lived if one.last_ms is not None]
    return Figures(
        requests=len(lived), with_ttft=len(ttft), ttft_ms_mean=mean(ttft), ttft_ms_p99=quantile(ttft, 0.99),
        tpot_ms_mean=mean([one.tpot_ms for one in lived if one.tpot_ms is not None]),
        makespan_s=max(last) / 1000 if last else None,
        recoveries=len(course.recoveries), recovery_ms_mean=mean(course.recoveries),
        broken=sum(not one.completed for one in lived),
    )  # fmt: skip


SHARES = ("ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean", "makespan_s", "recovery_ms_mean")
WEIGHTY = ("ttft_ms_mean", "tpot_ms_mean", "makespan_s")


def shares(of: Figures, to: Figures) -> dict[str, float | None]:
    """Relative increase of each time from `of` to `to`."""
    found: dict[str, float | None] = {}
    for name in SHARES:
        was, is_ = getattr(of, name), getattr(to, name)
        found[name] = is_ / was - 1 if was and is_ is not None else None
    return found


class Agreement(Struct, frozen=True, kw_only=True):
    """Agreement of a simulated continuation with the log: `off`: relative errors; `each_ms`: median
    error of a request's TTFT; `same_worker`: share of requests with the same first worker;
    `judged`: close, rough, poor or unknown."""

    real: Figures
    simulated: Figures
    off: dict[str, float | None]
    each_ms: float | None
    same_worker: float | None
    judged: str


CLOSE, ROUGH = 0.10, 0.30


def agreement(really: Course, simulated: Course) -> Agreement:
    """Compare the requests that completed in the log and that both have."""
    both = [n for n, one in really.requests.items() if n in simulated.requests and one.completed]
    was, is_ = figures(really, both), figures(simulated, both)
    off = shares(was, is_)
    pairs = [(really.requests[n], simulated.requests[n]) for n in both]
    each = [
        abs(a.ttft_ms - b.ttft_ms)
        for a, b in pairs
        if a.ttft_ms is not None and b.ttft_ms is not None
    ]
    placed = [a.workers[:1] == b.workers[:1] for a, b in pairs if a.workers and b.workers]
    worst = max((abs(o) for n in WEIGHTY if (o := off[n]) is not None), default=None)
    judged = "unknown"
    if worst is not None:
        judged = "close" if worst <= CLOSE else "rough" if worst <= ROUGH else "poor"
    return Agreement(
        real=was, simulated=is_, off=off, each_ms=median(each) if each else None,
        same_worker=sum(placed) / len(placed) if placed else None, judged=judged,
    )  # fmt: skip


class ChangedRequest(Struct, frozen=True, kw_only=True):
    """A request whose time changed: TTFT if it has one in both, else the time of its end."""

    request: str
    what: str
    recorded_ms: float
    changed_ms: float
    recorded_workers: tuple[str, ...]
    changed_workers: tuple[str, ...]


def most_changed(recorded: Course, changed: Course, count: int = 5) -> list[ChangedRequest]:
    """The requests that changed most."""
    found = []
    for name, was in recorded.requests.items():
        is_ = changed.requests.get(name)
        if is_ is None:
            continue
        what, before, after = "TTFT", was.ttft_ms, is_.ttft_ms
        if before is None or after is None:
            what, before, after = "end", was.last_ms, is_.last_ms
        if before is not None and after is not None and before != after:
            found.append(
                ChangedRequest(
                    request=name,
                    what=what,
                    recorded_ms=before,
                    changed_ms=after,
                    recorded_workers=was.workers,
                    changed_workers=is_.workers,
                )
            )
    return sorted(found, key=lambda one: -abs(one.changed_ms - one.recorded_ms))[:count]
