"""The leader's decisions about levels: from the fold alone, once per change."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relume.controlplane.admin.models import degradation_of
from relume.controlplane.telemetry.state_families import degradation
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Tier
from relume.policies.degradation import effects
from relume.policies.degradation.degradation_settings import DegradationConfig
from relume.policies.state.fleet import dump, state_hash
from relume.policies.state.overlay.view import View
from tests.policies.degradation.short_fleet import ON, ShortFleet
from tests.policies.story import MODEL, replica_started


@pytest.fixture
def fleet() -> ShortFleet:
    return ShortFleet()


def test_a_fleet_that_loses_workers_degrades_and_recovers_in_reverse_order(
    fleet: ShortFleet,
) -> None:
    rate = fleet.rate()
    fleet.ticks(8, rate)
    assert fleet.decisions == []
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    assert [d.level for d in fleet.decisions] == [3]
    decision = fleet.decisions[0]
    assert (decision.was, decision.workers, decision.wanted) == (0, 1, 4)
    assert decision.usable_per_ks * 1000 // decision.demand_per_ks == decision.share
    for name in ("w1", "w2", "w3"):
        fleet.worker(name, incarnation=2)
    fleet.ticks(30, rate)
    assert [d.level for d in fleet.decisions] == [3, 2, 1, 0]
    assert fleet.level() == 0


DOCS = Path(__file__).resolve().parents[3] / "docs"


@pytest.mark.parametrize("lost", [0, 3])
def test_an_autoscaler_reads_as_many_workers_as_the_demand_needs(
    fleet: ShortFleet, lost: int
) -> None:
    """From the metric and from where the documentation has KEDA look. Twice the demand that nine tenths of
    four workers serve needs eight, however many of them are there."""
    rate, each = 2 * fleet.rate(), fleet.usable_per_ks() / 4
    fleet.lose(*(f"w{number}" for number in range(lost)))
    fleet.ticks(12, rate)
    expected = math.ceil(rate * 1000 / each)
    assert expected in (7, 8)
    text = (DOCS / "operations/degradation.md").read_text()
    found: Any = msgspec.to_builtins(degradation_of(fleet.fleet, MODEL))
    (path,) = re.findall(r'valueLocation: "(.*)"', text)
    for part in path.split("."):
        found = found[int(part) if part.isdigit() else part]
    assert found == expected
    samples = [s for family in degradation(fleet.fleet) for s in family.samples]
    metric = [s.value for s in samples if s.name == "relume_workers_wanted"]
    assert metric == [expected] and "`relume_workers_wanted`" in text


def test_each_level_refuses_its_tiers_and_recovery_lifts_that(fleet: ShortFleet) -> None:
    rate, view = fleet.rate(), View("r.r0", fleet.fleet)
    seen: dict[int, tuple[bool, bool]] = {0: (False, False)}
    fleet.lose("w0", "w1", "w2", "w3")
    fleet.ticks(8, rate)
    for name in ("w0", "w1", "w2", "w3"):
        fleet.worker(name, incarnation=2)
    for _ in range(40):
        refused = [effects.refuses(view, MODEL, tier) for tier in (Tier.BATCH, Tier.STANDARD)]
        seen[fleet.level()] = refused[0], refused[1]
        fleet.ticks(1, rate)
    assert seen == {
        4: (True, True), 3: (True, False), 2: (True, False), 1: (False, False), 0: (False, False),
    }  # fmt: skip


def test_nothing_is_decided_before_the_mean_request_is_known() -> None:
    fleet = ShortFleet()
    fleet.demand().outputs = 0
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(20, 500)
    assert fleet.decisions == []


def test_nothing_is_decided_before_step_times_are_known() -> None:
    fleet = ShortFleet(measured=False)
    fleet.ticks(20, 500)
    assert fleet.decisions == []


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_only_mode_on_touches_requests(mode: str) -> None:
    fleet = ShortFleet()
    rate = fleet.rate()
    fleet.tell("fleet", v.ConfigChanged("degradation.mode", mode))
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(10, rate)
    assert fleet.level() == 0
    assert [d.level for d in fleet.decisions] == ([3] if mode == "observe" else [])


def test_a_fleet_that_switches_levels_off_returns_to_normal_at_once(fleet: ShortFleet) -> None:
    rate = fleet.rate()
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    assert fleet.level() == 3
    fleet.tell("fleet", v.ConfigChanged("degradation.mode", "off"))
    assert fleet.level() == 0
    fleet.ticks(1, rate)
    assert [d.level for d in fleet.decisions] == [3, 0]
    assert fleet.decisions[-1].due_ticks == -1
    assert not isinstance(fleet.fleet.demand, dict), "nothing of it is left in the state"


def test_a_replica_of_an_earlier_build_suspends_all_of_it(fleet: ShortFleet) -> None:
    rate = fleet.rate()
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    fleet.tell("r.r1", replica_started("r1"))
    assert fleet.level() == 0
    fleet.ticks(1, rate)
    assert [d.level for d in fleet.decisions] == [3, 0]


def test_a_log_without_levels_has_no_trace_of_them() -> None:
    fleet = ShortFleet(config=DegradationConfig())
    fleet.ticks(30, 100)
    assert b"demand" not in dump(fleet.fleet)
    assert fleet.decisions == []


def test_arrivals_of_an_outage_that_land_at_once_are_no_demand(fleet: ShortFleet) -> None:
    rate = fleet.rate()
    fleet.ticks(6, rate // 4)
    number = fleet.fleet.tick + 1
    fleet.tell("fleet", v.Tick(number, fleet.fleet.tick_unix_ms + 60_000))
    for at in range(20):
        number += 1
        for _ in range(rate * 20 if at == 6 else 0):
            fleet.request()
        fleet.tell("fleet", v.Tick(number, fleet.fleet.tick_unix_ms + 1000))
    assert fleet.decisions == []


def test_demand_of_models_that_no_worker_serves_is_not_counted(fleet: ShortFleet) -> None:
    for number in range(50):
        fleet.tell("r.r0", _arrival(f"x{number}", f"made-up-{number}"))
    assert list(fleet.fleet.demand) == [MODEL]  # type: ignore[arg-type]


def _arrival(name: str, model: str) -> v.RequestArrived:
    return v.RequestArrived(
        request=name, model=model, route="completions", stream=True, prompt_tokens=5,
        max_tokens=5, verdict="exact",
    )  # fmt: skip


def test_replay_takes_each_decision_again(fleet: ShortFleet) -> None:
    rate = fleet.rate()
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    fleet.tell("fleet", v.StateHashed(fleet.fleet.revision, state_hash(fleet.fleet)))
    assert fleet.divergences() == []


@pytest.mark.parametrize("change", [{"level": 2}, {"demand_per_ks": 1}, {"wanted": 9}])
def test_replay_finds_a_decision_that_does_not_follow(fleet: ShortFleet, change: Any) -> None:
    rate = fleet.rate()
    fleet.change = change
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    assert fleet.divergences()


def test_replay_finds_a_decision_that_was_not_taken(fleet: ShortFleet) -> None:
    rate = fleet.rate()
    fleet.silent = True
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    assert fleet.divergences()


def test_clients_return_when_the_excess_is_served(fleet: ShortFleet) -> None:
    rate, view = fleet.rate(), View("r.r0", fleet.fleet)
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    at_three = effects.retry_after_s(view, MODEL)
    known = fleet.demand()
    excess = known.demand_per_ks - known.usable_per_ks
    assert at_three == -(-4 * excess // known.usable_per_ks), "the excess of the window of 4 s"
    fleet.lose("w0")
    fleet.ticks(4, rate)
    assert effects.retry_after_s(view, MODEL) == effects.MOST_RETRY_S


def test_arrivals_get_a_limit_of_output_tokens(fleet: ShortFleet) -> None:
    rate, view = fleet.rate(), View("r.r0", fleet.fleet)
    assert effects.output_limit(view, MODEL) == 0
    fleet.lose("w3")
    fleet.ticks(8, rate)
    assert effects.output_limit(view, MODEL) == ON.max_tokens
    assert effects.slo_factor(view, MODEL) == 1
    fleet.lose("w2", "w1")
    fleet.ticks(8, rate)
    assert effects.slo_factor(view, MODEL) == 2
