"""The whole what-if: the first decision that other settings change, and the continuations."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from relume.chaos.validators.records import Log, events_of
from relume.chaos.whatif import facts
from relume.chaos.whatif.continuation import go_on, rules_of
from relume.chaos.whatif.costs import cost_of, paces
from relume.chaos.whatif.outcome_statistics import (
    Agreement,
    ChangedRequest,
    Course,
    Figures,
    agreement,
    figures,
    most_changed,
    of_log,
    of_run,
    shares,
)
from relume.chaos.whatif.start import Start, start_of
from relume.controlplane.replay.debugger.folded_log import Timeline
from relume.controlplane.replay.recorded_log import History
from relume.controlplane.replay.what_if import Outcome, what_if
from relume.events import vocabulary as v


class Begun(Struct, frozen=True, kw_only=True):
    """Beginning of the continuation: the log's revision, its time in unix ms, the number of live
    and of later requests, the faults, and the parts of the log that it lacks."""

    revision: int
    at_ms: int
    live: int
    coming: int
    faults: tuple[str, ...]
    down: tuple[str, ...]
    left_out: dict[str, int]


class Continuation(Struct, frozen=True, kw_only=True):
    """Both continuations: `changes` as shares of the recorded ones'. `telling`: the change of
    the mean TTFT is larger than the simulator's error; None: unknown. `errors`: simulations that
    came to no end."""

    begun: Begun
    cost: str
    seed: int
    recorded: Figures
    changed: Figures
    changes: dict[str, float | None]
    agreement: Agreement
    telling: bool | None
    most_changed: list[ChangedRequest]
    errors: tuple[str, ...] = ()


class Answer(Struct, frozen=True):
    """`outcome`: the first divergence. `continuation` None: nothing differs, or the log itself does
    not replay."""

    outcome: Outcome
    continuation: Continuation | None = None


def ask(
    history: History,
    settings: dict[str, str],
    since: int = 0,
    cost: str = "",
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Answer:
    """Run the what-if; `say` gets the progress. Raises NoStart, NoCost, LogError."""
    outcome = what_if(history, settings, since)
    if outcome.first is None or outcome.broken is not None:
        return Answer(outcome)
    log = Log(history.groups)
    events = list(events_of(log))
    cut, at_ms, until = facts.cut_of(events, outcome.first)
    known = facts.read(events, cut, at_ms, until, history.base)
    fold = Timeline(history).copy(events[cut].revision - 1)
    start = start_of(fold, events, cut, known, seed)
    steps = [at.event for at in events if type(at.event) is v.EngineStep]
    formula, source = cost_of(steps, start.scenario.fleet.model, cost)
    own = paces(events, formula)
    if own:
        source += "; each worker at its own recorded pace"
    first = outcome.first
    lasts_s = max(events[-1].at_ms - at_ms, 0) / 1000
    courses: list[Course] = []
    for changed, goes in (({}, first.recorded), (settings, first.other)):
        pin = {first.about: goes.partition(":")[0]} if first.kind == "route" else {}
        pin = {} if first.about in start.pins else pin
        how = " ".join(f"{key}={value}" for key, value in changed.items())
        say(f"simulating {len(start.schedule.requests)} requests with {how or 'recorded settings'}")
        rules = rules_of(first.stream, fold, changed)
        course = go_on(start, formula, own, rules, known.routed | pin, lasts_s)
        courses.append(of_run(course, start, known))
    revision = events[cut].revision
    return Answer(outcome, _continuation(log, start, known, courses, revision, source, seed))


def _continuation(
    log: Log, start: Start, known: facts.Read, courses: list[Course], revision: int, source: str,
    seed: int,
) -> Continuation:  # fmt: skip
    recorded, changed = courses
    names = [name for name in recorded.requests if name in changed.requests]
    was, is_ = figures(recorded, names), figures(changed, names)
    changes, fit = shares(was, is_), agreement(of_log(log, start, known), recorded)
    moved, off = changes["ttft_ms_mean"], fit.off["ttft_ms_mean"]
    faults = tuple(
        f"{f.what} {f.target} at {(f.at_ns or 0) / 1e9:.2f} s" for f in start.schedule.faults
    )
    begun = Begun(
        revision=revision,
        at_ms=start.at_ms,
        live=len(start.made),
        coming=len(start.schedule.requests) - len(start.made),
        faults=faults,
        down=tuple(start.down),
        left_out=start.left_out,
    )
    return Continuation(
        begun=begun, cost=source, seed=seed, recorded=was, changed=is_, changes=changes, agreement=fit,
        telling=None if moved is None or off is None else abs(moved) > abs(off),
        most_changed=most_changed(recorded, changed),
        errors=tuple(course.error for course in courses if course.error),
    )  # fmt: skip
