"""Slow workers, by their decode steps. Both ways to measure: the present one, and that of older logs."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState
from relume.policies.decision_versions import DECISION_VERSIONS
from relume.policies.health import pace
from relume.policies.health.health_settings import HealthConfig
from relume.policies.health.health_state import DecodeSteps, StepPace
from relume.policies.state.fleet import StepTime, state_hash
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.story import MODEL, died, engine_step, replica_started, started

CONFIG = HealthConfig(hold_ticks=8, longest_ticks=64, window_ticks=20)
VERSIONS = (14, 15, DECISION_VERSIONS["health"])
of_each_version = pytest.mark.parametrize("version", VERSIONS)


def decodes(fleet: LedFleet, took_us: dict[str, int], batch: int = 1, ticks: int = 1) -> None:
    """Time passes, in which these workers of one class, well known, decode at such a pace."""
    weights = [5000.0, 0.0, 0.0, 100.0 * 16, 0.0, 0.0]
    for _ in range(ticks):
        model = StepTime(
            model=MODEL,
            weights=list(weights),
            products=[0.0] * 21,
            targets=[0.0] * 6,
            grounds="measured",
            samples=100,
        )
        fleet.fleet.steptimes["class"] = model
        if fleet.fleet.decode_times is not UNSET:
            fleet.fleet.decode_times["class"] = model
        for name, took in took_us.items():
            worker = fleet.fleet.workers[name]
            worker.steps_like = "class"
            for counted in (worker.pace, worker.decode_steps):
                if isinstance(counted, StepPace | DecodeSteps):
                    counted.steps, counted.us = 10, 10 * took
                    counted.requests = 10 * batch
            if isinstance(worker.decode_steps, DecodeSteps):
                worker.decode_steps.longest_us = took
        fleet.ticks(1)


def known(fleet: LedFleet) -> None:
    """From here on the class has a usual time."""
    fleet.ticks(1)
    fleet.fleet.decode_times = {}


def steps(fleet: LedFleet, name: str, count: int, us: int, **also: int) -> None:
    """The worker reports so many decode steps, each after a revision of its own."""
    for _ in range(count):
        number = fleet.fleet.workers[name].step + 1
        fleet.tell(
            f"w.{name}",
            msgspec.structs.replace(engine_step(us=us), step=number, **{"batch": 1, **also}),
        )


@of_each_version
def test_a_worker_whose_decode_steps_are_slow_beside_its_peers_is_a_suspect_in_three_ticks(
    version: int,
) -> None:
    fleet = LedFleet(config=CONFIG, version=version)
    known(fleet)
    for state in ("healthy", "healthy", "suspect"):
        decodes(fleet, {"w0": 20_000, "w1": 5_000, "w2": 6_000})
        assert fleet.state() == state
    assert fleet.health().failure == FailureClass.SLOW
    assert fleet.health().evidence == "its decode steps take 3.3 times those of its peers"
    assert fleet.excluded() == "" and fleet.health().price_percent == 200
    # below the limit, and not yet well below
    decodes(fleet, {"w0": 13_000}, ticks=CONFIG.window_ticks * 2)
    assert fleet.state() == HealthState.SUSPECT
    decodes(fleet, {"w0": 11_000})
    assert fleet.state() == HealthState.HEALTHY


@pytest.mark.parametrize(("version", "states"), [(15, "hhhhh"), (16, "hhhsh")])
def test_a_measure_just_below_the_limit_ends_no_row_of_slow_ones(version: int, states: str) -> None:
    """Nor does it count; one well below the limit ends the row."""
    fleet = LedFleet(config=CONFIG, version=version)
    known(fleet)
    found = ""
    for us in (20_000, 15_000, 12_400, 15_000, 9_000):
        decodes(fleet, {"w0": us, "w1": 5_000, "w2": 5_000})
        found += fleet.state()[0]
    for us in (15_000, 15_000, 9_000, 15_000, 12_400, 12_400, 15_000):
        decodes(fleet, {"w0": us, "w1": 5_000, "w2": 5_000})
        assert fleet.state() == HealthState.HEALTHY
    assert found == states


@of_each_version
def test_a_slow_worker_that_gets_no_requests_is_tried_again_after_a_while(version: int) -> None:
    fleet = LedFleet(config=CONFIG, version=version)
    known(fleet)
    decodes(fleet, {"w0": 20_000, "w1": 5_000}, ticks=3)
    assert fleet.state() == HealthState.SUSPECT
    fleet.ticks(CONFIG.window_ticks)
    assert fleet.state() == HealthState.SUSPECT
    fleet.ticks(1)
    assert fleet.state() == HealthState.HEALTHY


@of_each_version
def test_what_slows_all_workers_or_the_only_one_makes_none_a_suspect(version: int) -> None:
    """Nor do a slow tick or two, a larger batch, or a class of which little is known."""
    fleet = LedFleet(config=CONFIG, version=version)
    known(fleet)
    decodes(fleet, {"w0": 90_000}, ticks=5)
    decodes(fleet, {"w0": 90_000, "w1": 80_000, "w2": 95_000}, ticks=5)
    decodes(fleet, {"w0": 90_000, "w1": 5_000, "w2": 5_000}, ticks=2)
    decodes(fleet, {"w0": 5_000})
    decodes(fleet, {"w0": 90_000}, ticks=2)
    decodes(fleet, {"w0": 90_000}, batch=850)  # as long as it should take, by the weights
    assert fleet.decisions == []


@of_each_version
def test_idle_peers_count_by_their_last_steps(version: int) -> None:
    """The requests of a closed loop gather at the slow worker."""
    fleet = LedFleet(config=CONFIG, version=version)
    known(fleet)
    decodes(fleet, {"w0": 5_000, "w1": 5_000, "w2": 5_000})
    decodes(fleet, {"w0": 20_000}, ticks=3)
    assert fleet.state() == HealthState.SUSPECT


@of_each_version
def test_steps_that_were_all_wait_are_no_measure(version: int) -> None:
    """The only worker of its class, on a host where it got next to no CPU."""
    fleet = LedFleet(workers=1, config=CONFIG, version=version)
    known(fleet)
    decodes(fleet, {"w0": 5_000}, ticks=2)
    decodes(fleet, {"w0": 0}, ticks=2)
    assert fleet.state() == HealthState.HEALTHY
    decodes(fleet, {"w0": 5_000}, ticks=4)
    assert fleet.state() == HealthState.HEALTHY


# --- the present measure ---------------------------------------------------------------


def test_decode_steps_count_without_waits_and_without_those_that_compute_prompts() -> None:
    fleet = LedFleet(config=CONFIG)
    fleet.ticks(1)
    worker = fleet.fleet.workers["w0"]
    steps(fleet, "w0", 2, 1000, gap_us=200, wait_us=300, batch=4, sum_context=50)
    steps(fleet, "w0", 1, 9000, prefill_tokens=64, batch=4)
    steps(fleet, "w0", 1, 2000, wait_us=7000, batch=2)  # no longer than the step it is said of
    steps(fleet, "w0", 1, 3000, batch=0)
    assert worker.decode_steps == DecodeSteps(
        steps=3, us=1800, longest_us=900, requests=10, context=200
    )
    fleet.tell("w.w0", died("w0", 1), started("w0", 2))
    assert worker.decode_steps is UNSET


def test_the_usual_time_is_learnt_and_a_slow_worker_with_a_large_batch_does_not_change_it() -> None:
    """It has most of the requests, so its steps are the only ones of that size."""
    fleet = LedFleet(workers=2, config=CONFIG)
    for batch in (1, 2, 1, 3, 2) * 32:
        for name in ("w0", "w1"):
            steps(fleet, name, 10, 1000 + 50 * batch, batch=batch)
        fleet.ticks(1)
    for state in ("healthy", "healthy", "suspect", "suspect"):
        steps(fleet, "w0", 10, 4 * 1350, batch=7)
        steps(fleet, "w1", 10, 1050)
        fleet.ticks(1)
        assert fleet.state() == state
    for _ in range(60):
        steps(fleet, "w0", 10, 4 * 1350, batch=7)
        steps(fleet, "w1", 10, 1050)
        fleet.ticks(1)
    assert fleet.state() == HealthState.SUSPECT
    weights = next(iter(fleet.fleet.decode_times.values())).weights  # type: ignore[union-attr]
    usual = weights[0] + weights[3] * 7 / 16 + weights[4] * 100 / 4096
    assert 1300 < usual < 1600, weights
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_a_slow_worker_of_a_class_that_has_just_begun_is_found() -> None:
    """Its peer was measured once, before the usual time was known, and has had no request since."""
    fleet = LedFleet(workers=2, config=CONFIG)
    for name in ("w0", "w1"):
        steps(fleet, name, 10, 1000)
    fleet.ticks(1)
    for state in ("healthy", "healthy", "healthy", "healthy", "suspect"):
        steps(fleet, "w0", 10, 5000)
        fleet.ticks(1)
        assert fleet.state() == state


@pytest.mark.parametrize(("version", "states"), [(15, "hhhhhhhh"), (16, "hhhhhhss")])
def test_first_measures_that_differ_by_chance_do_not_hide_a_slow_worker(
    version: int, states: str
) -> None:
    """Microseconds, requests and context of steps on a busy host: four measures of a young class, then
    w1 takes three to four times as long, and has most of the requests."""
    fleet = LedFleet(workers=2, config=CONFIG, version=version)
    measures = [
        ((5103, 3, 378), (6696, 5, 608)), ((6152, 3, 365), (6729, 5, 589)),
        ((7405, 4, 506), (6783, 4, 456)), ((6723, 5, 549), (6122, 3, 421)),
        ((7953, 4, 470), (23_487, 4, 369)), ((5977, 2, 304), (20_410, 6, 646)),
        ((6247, 1, 135), (26_405, 7, 944)), ((7131, 3, 369), (23_742, 5, 591)),
    ]  # fmt: skip
    found = ""
    for of_both in measures:
        for name, (us, batch, context) in zip(("w0", "w1"), of_both, strict=True):
            steps(fleet, name, 10, us, batch=batch, sum_context=context)
        fleet.ticks(1)
        found += fleet.state("w1")[0]
    assert found == states
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


@pytest.mark.parametrize("batches", [(1, 100), (100, 1), (16, 256), (256, 16)])
@pytest.mark.parametrize("of_one", [10, 50, 100])
def test_batches_far_apart_make_no_worker_of_a_young_class_slow(
    batches: tuple[int, int], of_one: int
) -> None:
    """Each request makes a step longer, by so many microseconds, and one worker has many."""
    fleet = LedFleet(workers=2, config=CONFIG)
    for _ in range(30):
        for name, batch in zip(("w0", "w1"), batches, strict=True):
            steps(fleet, name, 10, 1000 + of_one * batch, batch=batch)
        fleet.ticks(1)
    assert fleet.decisions == []


def test_one_very_long_step_does_not_count() -> None:
    fleet = LedFleet(workers=2, config=CONFIG)
    for _ in range(6):
        for name in ("w0", "w1"):
            steps(fleet, name, 10, 1000)
        fleet.ticks(1)
    for _ in range(6):
        steps(fleet, "w0", 9, 1000)
        steps(fleet, "w0", 1, 100_000)
        steps(fleet, "w1", 10, 1000)
        fleet.ticks(1)
    assert fleet.decisions == []


def test_two_steps_per_tick_are_a_measure() -> None:
    """Of an engine whose steps took an eighth of a second, and take four times as long now."""
    fleet = LedFleet(workers=2, config=CONFIG)
    for _ in range(6):
        for name in ("w0", "w1"):
            steps(fleet, name, 8, 125_000)
        fleet.ticks(1)
    for _ in range(3):
        steps(fleet, "w0", 2, 500_000)
        steps(fleet, "w1", 8, 125_000)
        fleet.ticks(1)
    assert fleet.state() == HealthState.SUSPECT


def test_workers_that_take_more_load_together_are_none_of_them_slow() -> None:
    """What they measure then teaches the usual time, though it is far above the one so far."""
    fleet = LedFleet(workers=2, config=CONFIG)
    for batch, ticks in ((1, 8), (64, 30)):
        for _ in range(ticks):
            for name in ("w0", "w1"):
                steps(fleet, name, 10, 1000 + 100 * batch, batch=batch)
            fleet.ticks(1)
    assert fleet.decisions == []
    (known,) = fleet.fleet.decode_times.values()  # type: ignore[union-attr]
    usual = known.weights[0] + known.weights[3] * 64 / 16 + known.weights[4] * 100 / 4096
    assert 0.8 * 7400 < usual < 1.25 * 7400, known.weights


def test_until_every_replica_knows_it_the_older_measure_decides() -> None:
    fleet = LedFleet(config=CONFIG)
    fleet.ticks(1)
    worker = fleet.fleet.workers["w0"]
    assert isinstance(worker.decode_steps, DecodeSteps) and worker.pace is UNSET
    of_r0 = fleet.fleet.replicas["r0"].settings
    old = tuple((n, "14" if n == "version.health" else value) for n, value in of_r0.items())
    fleet.tell("r.r1", replica_started("r1", settings=old))
    fleet.ticks(1)
    assert worker.decode_steps is UNSET and isinstance(worker.pace, StepPace)
    assert pace.STEADY_VERSION == DECISION_VERSIONS["health"]


# --- the measure of older logs ---------------------------------------------------------


def test_only_whole_reports_of_decode_steps_are_measured() -> None:
    """Several steps in a revision, with gaps; a report with prompts does not count."""
    fleet = LedFleet(config=CONFIG, version=14)
    fleet.ticks(1)
    worker = fleet.fleet.workers["w0"]
    first = [(1, 900, 0), (2, 1000, 100), (3, 1000, 0)]

    def told(*made: tuple[int, int, int], prompts: int = 0) -> None:
        fleet.tell(
            "w.w0",
            *(
                msgspec.structs.replace(
                    engine_step(us=us), step=n, gap_us=gap, batch=4, prefill_tokens=prompts
                )
                for n, us, gap in made
            ),
        )

    told(*first)
    told((4, 5000, 0), (5, 5000, 0), prompts=64)
    told((6, 1000, 0))
    assert isinstance(worker.pace, StepPace)
    assert (worker.pace.steps, worker.pace.us, worker.pace.requests) == (3, 3000, 12)
    told((7, 9000, 0))
    assert worker.pace.us == 4000
    fleet.tell("w.w0", died("w0", 1), started("w0", 2))
    assert worker.pace is UNSET


@pytest.mark.parametrize(("version", "counted"), [(2, 40), (3, 2), (14, 2)])
def test_steps_that_are_not_reported_do_not_make_the_others_look_quick(
    version: int, counted: int
) -> None:
    """As when records are merged: each has the time of one step."""
    fleet = LedFleet(config=CONFIG, version=version)
    fleet.ticks(1)
    worker = fleet.fleet.workers["w0"]
    for number in (20, 40, 60):
        fleet.tell("w.w0", msgspec.structs.replace(engine_step(us=1000), step=number, batch=4))
    assert isinstance(worker.pace, StepPace)
    assert (worker.pace.steps, worker.pace.us, worker.pace.requests) == (
        counted,
        2000,
        4 * counted,
    )


def test_time_for_which_an_engine_waited_for_a_cpu_was_not_its_own_pace() -> None:
    """Its host is busy; no longer than the step it is said of, whatever a worker reports."""
    fleet = LedFleet(config=CONFIG, version=14)
    fleet.ticks(1)
    worker = fleet.fleet.workers["w0"]

    def step(number: int, us: int, waited: int) -> v.EngineStep:
        return msgspec.structs.replace(engine_step(us=us), step=number, wait_us=waited)

    fleet.tell("w.w0", step(1, 9000, 8000), step(2, 5000, 4500), step(3, 1000, 0))
    fleet.tell("w.w0", step(4, 2000, 7000))
    fleet.tell("w.w0", step(5, 1000, 0))
    fleet.tell("w.w0", step(6, 1000, 0))
    assert isinstance(worker.pace, StepPace)
    assert (worker.pace.steps, worker.pace.us) == (5, 1000 + 500 + 1000 + 0 + 1000)
