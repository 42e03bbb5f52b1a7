"""Sets of scenarios for live runs, and the report line of each run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from relume.chaos.live.applicable import obstacles
from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import Verdict
from relume.chaos.scenario import scenario_reader as reading
from relume.chaos.scenario.language import Scenario

CI = (
    "engine-killed-in-decode",
    "engine-stopped",
    "agent-killed",
    "worker-cut-from-gateway",
    "gateway-killed",
    "etcd-leader-killed",
    "clients-gone",
    "blocks-corrupt",
    "holder-killed",
    "domain-lost",
)
"""One scenario for each kind of process, and a cut link."""

SETS = ("ci", "nightly")


def names_of(name: str) -> list[str]:
    """Scenarios of a set, ordered by the size of etcd; `nightly`: all that can run."""
    library = {known: reading.load(path) for known, path in reading.named().items()}
    chosen = CI if name == "ci" else library
    able = [known for known in chosen if not obstacles(library[known])]
    return sorted(able, key=lambda known: library[known].fleet.etcd)


def impossible() -> Mapping[str, tuple[str, ...]]:
    """Scenarios of the library that cannot run live here, and why."""
    library = {known: reading.load(path) for known, path in reading.named().items()}
    return {known: why for known, scenario in library.items() if (why := obstacles(scenario))}


class Line(Struct, frozen=True, kw_only=True):
    """One run in a report. `wrong`: what was broken or unproven, as text; empty: it passed.
    `took_s`: real time from the end of the previous run to its own, without judging, which
    overlaps the next one."""

    scenario: str
    seed: int
    result: str
    wrong: tuple[str, ...]
    fired: tuple[str, ...]
    outcomes: Mapping[str, int]
    took_s: float


def wrong_of(run: Outcome, verdict: Verdict) -> tuple[str, ...]:
    """Reasons why a run did not pass. A planned fault that did not strike is one, even if the
    scenario's bounds would allow it."""
    fired = {one.name for one in run.fired}
    missed = [
        f"{planned.name} {planned.what} has not struck"
        for planned in run.schedule.faults
        if planned.name not in fired
    ]
    return (*map(str, verdict.violations), *verdict.why, *missed)


def outcomes_of(run: Outcome) -> Mapping[str, int]:
    """How its requests ended, without the undisturbed ones."""
    return Counter(h.record.outcome for h in run.histories if not h.record.undisturbed)


def schedule_folder(name: str) -> Path:
    """Folder of a scenario's trace files."""
    return reading.find(name).parent


def scenario_of(name: str) -> Scenario:
    """A scenario of the library, or of a file. Raises ScenarioError."""
    return reading.load(reading.find(name))
