"""LUMEN's results: what is measured of a fleet that loses engines, and how samples are compared."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.papers import registry, sampling
from relume.chaos.papers.lumen.parts.study_runs import (
    FAILS_S,
    LASTS_S,
    RULES,
    Case,
    Meter,
    RunResult,
    measure,
    returns_s,
    scenario_of,
    settings_of,
)
from relume.chaos.papers.result import compare
from relume.chaos.papers.sampling import Sampling, average, ratio
from relume.chaos.sim import sim_fleet
from relume.chaos.sim.sim_fleet import SimFleet

pytestmark = pytest.mark.full

LIGHT = Case(rules="restart", workers=4, seed=3, per_s=0.6)
SECONDS = round(LASTS_S - FAILS_S)


def test_restoring_is_distinguished_from_recomputing() -> None:
    """The same requests are lost under every rule; only one that has checkpoints moves blocks,
    and then streams go on sooner."""
    found = {rule: measure(replace(LIGHT, rules=rule)) for rule in ("restart", "lumen")}
    assert not any(run.error for run in found.values())
    figures = {rule: run.figures for rule, run in found.items()}
    assert figures["restart"]["lost_moving"] == 0 < figures["lumen"]["lost_moving"]
    assert figures["lumen"]["lost"] < figures["restart"]["lost"] <= figures["restart"]["resumed"]
    for one in figures.values():
        assert 0 < one["lost_share"] < 0.5
        assert 0 <= one["plain_queue"] < 1
        assert one["p99"] >= one["ttft"] > 0


def test_without_a_failure_nothing_is_lost_and_a_run_is_repeated() -> None:
    whole = measure(LIGHT.whole)
    assert whole.figures["lost_share"] == 0 and "lost" not in whole.figures
    assert whole == measure(LIGHT.whole)
    assert len(whole.ttft_series) == len(whole.itl_series) == SECONDS
    assert 0.01 < whole.figures["tpot"] < 0.1


def test_a_meter_holds_nothing_of_a_fleet_that_ran() -> None:
    made: list[weakref.ref[Any]] = []

    def make(*args: Any) -> SimFleet:
        fleet = SimFleet(*args)
        made.extend(map(weakref.ref, (fleet, fleet.loop, fleet.etcd)))
        return fleet

    case, meter = replace(LIGHT, short=True), Meter()
    sim_fleet.run(scenario_of(case), 3, settings=settings_of(case, meter), make=make)
    assert meter.first and [one() for one in made] == [None] * 3


def flat(value: float, count: int = 30) -> list[tuple[float, int]]:
    return [(value * 10, 10)] * count


def test_it_is_back_when_it_stays_so() -> None:
    whole = flat(1.0)
    assert returns_s(flat(1.05), whole) == 0
    assert returns_s(flat(3.0), whole) == 30
    # It rises late: the calm before does not count; a stretch of it is as slow as the mean.
    late = flat(1.0, 10) + flat(4.0, 10) + flat(1.0, 10)
    assert returns_s(late, whole) == 20
    # Where there is more to do without a failure too, that is no part of it.
    assert returns_s(late, late) == 0


def test_intervals_are_of_pairs() -> None:
    below = [1.0, 2.0, 4.0, 8.0]
    exact = ratio([2 * one for one in below], below)
    assert (exact.value, exact.low, exact.high) == (2.0, 2.0, 2.0)
    loose = ratio([2.0, 9.0, 3.0, 20.0], below)
    assert loose.low < loose.value < loose.high
    assert average([3.0]).low == average([3.0]).high == 3.0
    with pytest.raises(ValueError, match="no samples"):
        ratio([], [])


def invented(case: Case) -> RunResult:
    """A run that took no time: rules differ as their names do."""
    much = 1.0 if not case.fails else 1.5 + list(RULES).index(case.rules)
    figures = dict.fromkeys(("ttft", "p99", "plain", "tpot"), much * (1 + case.seed / 100))
    figures |= {"plain_queue": 0.5, "lost_share": 0.1}
    if case.fails:
        figures |= dict.fromkeys(("lost", "lost_queue", "lost_moving", "resumed"), much)
    return RunResult(figures, flat(much, SECONDS), flat(much, SECONDS))


@pytest.mark.parametrize("name", [name for name in registry.NAMES if registry.load(name).sample])
def test_each_sample_stands_beside_its_published_figure(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Case] = []
    monkeypatch.setattr(sampling, "measure", lambda case: seen.append(case) or invented(case))
    result = registry.load(name)
    assert result.published and result.inputs
    some = Sampling(seed=0, count=2, most=16, stored_runs=tmp_path / "kept.jsonl")
    found = result.run(some)
    assert len(compare(result, found)) == len(result.published)
    assert found.lines
    assert {case.seed for case in seen} == {0, 1} and max(case.workers for case in seen) <= 16
    once = len(seen)
    assert result.run(some) == found
    assert len(seen) == once  # what was kept is not run again


def test_a_run_that_went_wrong_is_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(invented(LIGHT), error="2 streams broke")
    monkeypatch.setattr(sampling, "measure", lambda _case: wrong)
    with pytest.raises(RuntimeError, match="2 streams broke"):
        Sampling().run([LIGHT])
