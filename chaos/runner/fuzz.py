"""Many seeds over many scenarios: which fail, and how to see each again.

Each next seed runs with the next scenario, so N seeds are N runs. The command stores the folders of
failures, and only counts the rest.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec import Struct, field

from relume.chaos.runner import pool, world
from relume.chaos.runner.artifacts import keep
from relume.chaos.runner.cases import case_of
from relume.chaos.runner.composed.compose import COMPOSED
from relume.chaos.runner.guards import take_reached
from relume.chaos.scenario import scenario_reader as reading
from relume.chaos.scenario.catalogue import applicable
from relume.chaos.scenario.problems import ScenarioError
from relume.chaos.scenario.request_traces import TraceError

INTERRUPTED = "interrupted"
TIME_OVER = "time is over"
FIRST_FAILURE = "stopped at the first failure"
"""Requested ends of `fuzz`."""


class PlannedRun(Struct, frozen=True):
    """One planned run. `limit_s` is real time; `folder`: destination of a failed run."""

    given: str
    seed: int
    limit_s: float
    folder: Path | None

    @property
    def command(self) -> str:
        return f"relume-chaos run {self.given} --seed {self.seed}"


class Ran(Struct, frozen=True, kw_only=True):
    """Result of one run: the verdict's result, its signature and reasons; `took_s`: real time,
    `events`: number in its log, `virtual_s`: its virtual duration."""

    result: str
    signature: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    took_s: float = 0.0
    events: int = 0
    virtual_s: float = 0.0
    faults: tuple[tuple[str, bool], ...] = ()
    """Kinds of the faults that were planned, and whether each struck."""
    guards: tuple[str, ...] = ()
    """Those it reached, if they are counted (`relume.chaos.runner.guards`)."""


class Tally(Struct, kw_only=True):
    """Runs of one scenario."""

    runs: int = 0
    passed: int = 0
    failed: int = 0
    inconclusive: int = 0
    took_s: float = 0.0
    events: int = 0
    virtual_s: float = 0.0
    failing: list[tuple[int, tuple[str, ...], str]] = field(default_factory=list)
    """Seeds that failed, with the signature and the first reason."""
    doubtful: list[tuple[int, str]] = field(default_factory=list)
    faults: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By kind of fault, how many were planned and how many struck."""

    def add(self, seed: int, ran: Ran) -> None:
        """Count one."""
        self.runs += 1
        self.took_s += ran.took_s
        self.events += ran.events
        self.virtual_s += ran.virtual_s
        for what, has_struck in ran.faults:
            planned, struck = self.faults.get(what, (0, 0))
            self.faults[what] = planned + 1, struck + has_struck
        reason = ran.why[0] if ran.why else ""
        if ran.result == "failed":
            self.failed += 1
            self.failing.append((seed, ran.signature, reason))
        elif ran.result == "inconclusive":
            self.inconclusive += 1
            self.doubtful.append((seed, reason))
        else:
            self.passed += 1


def usable(names: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The scenarios to run, and those left out because the simulator lacks a fault of theirs. If
    none are named: the library, with a composed one after every three. Raises ScenarioError."""
    chosen = list(names) or [*reading.named()]
    waiting = []
    for name in chosen:
        if name == COMPOSED:
            continue
        path = reading.find(name)
        if not all(applicable(fault.what) for fault in reading.load(path).faults):
            waiting.append(name)
    able = [name for name in chosen if name not in waiting]
    if not names:
        able = [name for at in range(0, len(able), 3) for name in (*able[at : at + 3], COMPOSED)]
    return able, waiting


def planned_runs(
    names: Sequence[str], first: int, count: int, limit_s: float, out: Path | None
) -> Iterator[PlannedRun]:
    """`count` runs: each seed with the next scenario."""
    for seed in range(first, first + count):
        name = names[(seed - first) % len(names)]
        folder = None if out is None else out / f"{Path(name).stem}-{seed}"
        yield PlannedRun(name, seed, limit_s, folder)


def one(given: PlannedRun) -> Ran:
    """Run and judge one case."""
    take_reached()
    try:
        case = case_of(given.given, given.seed)
    except (ScenarioError, TraceError) as error:
        return Ran(result="failed", signature=(type(error).__name__,), why=(str(error),))
    done = world.judged(lambda: world.simulate(case), given.limit_s)
    run, verdict = done.run, done.verdict
    failed = verdict is not None and verdict.result == "failed"
    if failed and run is not None and verdict is not None and given.folder is not None:
        keep(given.folder, run, verdict, case.command)
    events = sum(len(s.records) for g in run.groups for s in g.segments) if run else 0
    virtual_s = run.ended_ns / 1e9 if run else 0.0
    return Ran(
        result=done.result,
        signature=done.signature,
        why=done.why,
        took_s=done.took_s,
        events=events,
        virtual_s=virtual_s,
        faults=tuple((f.what, bool(f.at_ns)) for f in verdict.faults) if verdict else (),
        guards=take_reached(),
    )


def fuzz(
    runs: Iterator[PlannedRun],
    jobs: int,
    for_s: float | None,
    seen: Callable[[PlannedRun, Ran, dict[str, Tally]], Any],
    until_failure: bool = False,
) -> tuple[dict[str, Tally], str]:
    """Make `runs` until they, or `for_s` seconds, are over, until Ctrl-C or SIGTERM, or, with
    `until_failure`, until one fails. It calls `seen` with each, and works in the main thread only.
    Returns the tallies by scenario, and why it ended early (empty: it did not).
    """
    tallies: dict[str, Tally] = {}
    until = None if for_s is None else time.monotonic() + for_s
    late = False
    ended: list[int] = []

    def end(number: int, _frame: FrameType | None) -> None:
        ended.append(number)
        raise KeyboardInterrupt

    def stop() -> bool:
        nonlocal late
        late = until is not None and time.monotonic() >= until
        return late

    made = pool.each(one, runs, jobs, stop)
    early = ""
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for given, ran in made:
            if ended:
                raise KeyboardInterrupt  # the run swallowed the interrupt: its result does not count
            tallies.setdefault(given.given, Tally()).add(given.seed, ran)
            seen(given, ran, tallies)
            if until_failure and ran.result == "failed":
                early = FIRST_FAILURE
                break
    except KeyboardInterrupt:
        early = INTERRUPTED
    except pool.Crashed as error:
        early = str(error)
    finally:
        made.close()  # type: ignore[attr-defined]
        for number, handler in before.items():
            signal.signal(number, handler)
    return tallies, early or (TIME_OVER if late else "")
