"""An outcome's verdict: promises, expectations, and whether the run proves anything.

A run *failed* if it broke a promise, missed a bound, or ended with an error. Otherwise it is
*inconclusive* if too little traffic flowed, planned faults did not strike, or there was nothing to
judge a promise by: such a run is no proof. A client's broken connection leaves the end of its
answer unknown (`Verdict.unknown` counts these); of such an answer, the validators check only the
part that arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from relume.chaos.outcome import Kind, Outcome
from relume.chaos.runner.run_facts import facts_of
from relume.chaos.runner.run_statistics import figures_of, real
from relume.chaos.scenario.catalogue import FAULTS, PROMISES, applicable
from relume.chaos.scenario.schedule import PlannedFault
from relume.chaos.validators import CHECKS, former_log, untracked, violations
from relume.chaos.validators.records import THE_RUN, Log, Violation

Result = Literal["passed", "failed", "inconclusive"]
OF_TRAFFIC = ("requests", "faults_fired")
"""Figures whose lower bounds say how much a run must contain to prove anything."""
MOST_LISTED = 50
"""Maximum number of violations in a verdict, per promise."""


class Expectation(Struct, frozen=True, kw_only=True):
    """A bound of the scenario, the figure's value (None: the run gave none), whether it holds."""

    figure: str
    value: float | None
    least: float | None
    most: float | None
    met: bool


class Struck(Struct, frozen=True, kw_only=True):
    """A planned fault: its target and times (ns from the start). No times: it did not strike.
    `needs` names the feature that it lacks."""

    name: str
    what: str
    target: str
    at_ns: tuple[int, ...]
    needs: str = ""


class Verdict(Struct, frozen=True, kw_only=True):
    """Verdict of a run. `why`: reasons why it did not pass, as text. `judged`: the promises
    checked; `unproven`: those without evidence in this run, and why; `not_yet`: promises and
    faults whose feature does not exist. `broken` counts violations by promise, also those beyond
    the limit of `violations`."""

    result: Result
    kind: Kind
    scenario: str
    seed: int
    digest: str
    why: tuple[str, ...]
    violations: tuple[Violation, ...]
    broken: dict[str, int]
    judged: tuple[str, ...]
    unproven: tuple[str, ...]
    not_yet: tuple[str, ...]
    expectations: tuple[Expectation, ...]
    figures: dict[str, float | None]
    faults: tuple[Struck, ...]
    unknown: int = 0
    error: str = ""

    @property
    def signature(self) -> tuple[str, ...]:
        """The failures, in words that are equal in two runs with one failure."""
        missed = [e.figure for e in self.expectations if not e.met]
        failed = [f"bound:{figure}" for figure in missed] if self.result == "failed" else []
        return (*sorted(self.broken), *(("error",) if self.error else ()), *failed)


def judge(run: Outcome) -> Verdict:
    """The verdict of `run`. Raises LogError if its log cannot be read."""
    log = Log(run.groups, run.truth.clock_ms if run.truth is not None else None)
    wanted = run.scenario.promises or PROMISES
    # I12 needs a fleet that came to rest by itself, so it is not judged where the run broke off.
    rested = run.drained or not run.error
    judged = [name for name in wanted if name in CHECKS and (name != "I12" or rested)]
    with untracked():
        clients = [history.record for history in run.histories]
        found = list(violations(log, clients, judged, facts_of(run, log)))
        if run.former:
            found += former_log.violations(run.former, run.groups)
        figures = figures_of(run, log)
    # A validator without anything to check reports that about the run.
    unproven = [f"{v.promise}: {v.detail}" for v in found if v.about == THE_RUN]
    if "I12" in wanted and not run.drained and not any(v.promise == "I12" for v in found):
        unproven.append("I12: the fleet had not come to rest")
    wrong = [v for v in found if v.about != THE_RUN]
    expectations = tuple(_expectations(run, figures))
    faults = tuple(_faults(run))
    broken: dict[str, int] = {}
    for violation in wrong:
        broken[violation.promise] = broken.get(violation.promise, 0) + 1
    missed = [e for e in expectations if not e.met]
    bad = [*_broken(broken), *(_missed(e) for e in missed if not _thin(e))]
    if run.error:
        bad.append(f"the run itself: {run.error}")
    thin = [*(_missed(e) for e in missed if _thin(e)), *_doubts(run, faults), *unproven]
    return Verdict(
        result="failed" if bad else "inconclusive" if thin else "passed",
        kind=run.kind,
        scenario=run.scenario.name,
        seed=run.schedule.seed,
        digest=run.schedule.digest(),
        why=(*bad, *thin),
        violations=tuple(_listed(wrong)),
        broken=dict(sorted(broken.items())),
        judged=tuple(judged),
        unproven=tuple(unproven),
        not_yet=tuple(not_yet()),
        expectations=expectations,
        figures=figures,
        faults=faults,
        unknown=sum(h.record.outcome == "cut" for h in real(run)),
        error=run.error,
    )


def not_yet() -> list[str]:
    """Promises without a validator and faults without their feature."""
    promises = [name for name in PROMISES if name not in CHECKS]
    return promises + [
        f"{name} (needs {kind.needs})" for name, kind in FAULTS.items() if not applicable(name)
    ]


def _expectations(run: Outcome, figures: dict[str, float | None]) -> Iterator[Expectation]:
    for bound in run.scenario.expect:
        value = figures.get(bound.figure)
        met = value is not None
        if value is not None and bound.least is not None:
            met = met and value >= bound.least
        if value is not None and bound.most is not None:
            met = met and value <= bound.most
        yield Expectation(
            figure=bound.figure, value=value, least=bound.least, most=bound.most, met=met
        )


def _thin(missed: Expectation) -> bool:
    """Whether a missed bound means that too little happened."""
    if missed.value is None:
        return True
    return missed.figure in OF_TRAFFIC and missed.least is not None and missed.value < missed.least


def _missed(missed: Expectation) -> str:
    if missed.value is None:
        return f"{missed.figure} has no value"
    bounds = [
        f"{word} {bound:g}"
        for word, bound in (("at least", missed.least), ("at most", missed.most))
        if bound is not None
    ]
    return f"{missed.figure} is {missed.value:g}, not {' and '.join(bounds)}"


def _broken(broken: dict[str, int]) -> Iterator[str]:
    for promise, count in sorted(broken.items(), key=lambda item: int(item[0][1:])):
        yield f"{promise} is broken" + (f" {count} times" if count > 1 else "")


def _faults(run: Outcome) -> Iterator[Struck]:
    for planned in run.schedule.faults:
        hits = [fired for fired in run.fired if fired.name == planned.name]
        targets = dict.fromkeys(fired.target for fired in hits)
        needs = "" if planned.applicable else FAULTS[planned.what].needs or ""
        yield Struck(
            name=planned.name, what=planned.what, target=", ".join(targets) or _target(planned),
            at_ns=tuple(fired.at_ns for fired in hits), needs=needs,
        )  # fmt: skip


def _target(planned: PlannedFault) -> str:
    return f"{planned.target} to {planned.peer}" if planned.peer else planned.target


def _doubts(run: Outcome, faults: tuple[Struck, ...]) -> Iterator[str]:
    if not real(run):
        yield "no request was sent"
    enough = any(b.figure == "faults_fired" and b.least is not None for b in run.scenario.expect)
    for fault in faults:
        if fault.needs:
            yield f"{fault.name} {fault.what} is not yet applicable: needs {fault.needs}"
        elif not fault.at_ns and not enough:
            yield f"{fault.name} {fault.what} did not strike {fault.target}"


def _listed(wrong: list[Violation]) -> Iterator[Violation]:
    counts: dict[str, int] = {}
    for violation in wrong:
        counts[violation.promise] = counts.get(violation.promise, 0) + 1
        if counts[violation.promise] <= MOST_LISTED:
            yield violation
