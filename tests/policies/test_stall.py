"""What counts as hung, and what is only slow."""

from __future__ import annotations

import msgspec
import pytest

from relume.policies.liveness.stall import (
    HUNG,
    ProbeEvidence,
    StallConfig,
    bound_us,
    hung,
    recovered,
)
from relume.policies.state.fleet import Worker

CONFIG = StallConfig()
BOUND = 1_000_000
OVER = BOUND + 1


def judged(look: ProbeEvidence, silent_us: int = OVER) -> bool:
    return hung(silent_us, look, BOUND, CONFIG)


@pytest.mark.parametrize("probe", ["silent", "refused", "answered"])
def test_silence_within_the_bound_is_no_stall(probe: str) -> None:
    assert not judged(ProbeEvidence(probe=probe), BOUND - 1)


def test_stopped_engine_that_does_not_answer_is_hung_at_the_cap() -> None:
    """It may be starved until then, with two busy processes beside it for a second and more."""
    assert not judged(ProbeEvidence(probe="silent"), CONFIG.cap_us - 1)
    assert judged(ProbeEvidence(probe="silent"), CONFIG.cap_us)


def test_earlier_versions_took_an_engine_without_an_answer_for_hung_at_once() -> None:
    silent, answers = ProbeEvidence(probe="silent"), ProbeEvidence(probe="answered", steps=1)
    for version, at_once in ((1, True), (2, True), (3, False)):
        assert HUNG[version](OVER, silent, BOUND, CONFIG) == at_once
        assert not HUNG[version](BOUND - 1, silent, BOUND, CONFIG)
        assert not HUNG[version](OVER, answers, BOUND, CONFIG)


def test_engine_that_makes_steps_is_not_hung_however_slow() -> None:
    assert not judged(
        ProbeEvidence(probe="answered", steps=1, step_age_us=0, cpu_us=0, held=3), 60 * OVER
    )


def test_long_prefill_that_computes_is_not_hung() -> None:
    assert not judged(
        ProbeEvidence(probe="answered", steps=0, step_age_us=8_000_000, cpu_us=150_000, held=4),
        8_000_000,
    )


def test_long_prefill_is_given_up_at_the_cap_of_a_step() -> None:
    age = CONFIG.step_cap_us + 1
    assert judged(
        ProbeEvidence(probe="answered", steps=0, step_age_us=age, cpu_us=150_000, held=4), age
    )


def test_stopped_core_behind_an_answering_server_is_hung() -> None:
    """Stock vLLM: the API server answers while EngineCore is stopped in, or between, steps."""
    assert judged(ProbeEvidence(probe="answered", steps=0, step_age_us=1_500_000, cpu_us=0, held=4))
    assert judged(ProbeEvidence(probe="answered", steps=0, step_age_us=0, cpu_us=0, held=4))


def test_engine_without_requests_is_not_hung_while_the_server_prepares_them() -> None:
    assert not judged(ProbeEvidence(probe="answered", steps=0, step_age_us=0, cpu_us=0, held=0))


def test_without_cpu_times_only_the_age_of_the_step_counts() -> None:
    assert not judged(
        ProbeEvidence(probe="answered", steps=0, step_age_us=CONFIG.cap_us - 1, cpu_us=-1, held=4)
    )
    assert judged(
        ProbeEvidence(probe="answered", steps=0, step_age_us=CONFIG.cap_us + 1, cpu_us=-1, held=4)
    )


def test_bound_follows_the_slowest_recent_step_between_floor_and_cap() -> None:
    worker = Worker(name="w0")
    assert bound_us(worker, CONFIG) == CONFIG.cap_us, "nothing known: it may be warming up"
    worker.step_us_high = 1_000
    assert bound_us(worker, CONFIG) == CONFIG.floor_us
    worker.step_us_high = 200_000
    assert bound_us(worker, CONFIG) == 1_600_000
    worker.step_us_high = 10_000_000
    assert bound_us(worker, CONFIG) == CONFIG.cap_us


def test_engine_that_works_again_or_has_nothing_to_do_has_recovered() -> None:
    assert recovered(ProbeEvidence(probe="answered", steps=0, step_age_us=0, cpu_us=0, held=0))
    assert recovered(ProbeEvidence(probe="answered", steps=2, step_age_us=0, cpu_us=0, held=3))
    assert recovered(
        ProbeEvidence(probe="answered", steps=0, step_age_us=900, cpu_us=9_000, held=3)
    )
    assert not recovered(
        ProbeEvidence(probe="answered", steps=0, step_age_us=900, cpu_us=0, held=3)
    )


EXPECTS = {"probe": "answered", "steps": 0, "turns": 0, "held": 3, "expected_us": 20_000}
"""Of an engine that says how long its step should take."""


def test_a_thread_that_spins_is_hung_though_it_computes() -> None:
    """Inside a step, which once called it alive for a minute, and between two."""
    inside = ProbeEvidence(**EXPECTS, step_age_us=OVER, cpu_us=250_000, wait_us=0)
    assert judged(inside)
    assert not recovered(inside)
    assert judged(ProbeEvidence(**EXPECTS, step_age_us=0, cpu_us=250_000, wait_us=0))


def test_a_step_may_take_a_multiple_of_what_is_expected_of_it() -> None:
    """With or without CPU time: a thread that waits for a GPU need not poll it."""
    expects = {**EXPECTS, "expected_us": 2_000_000}
    for cpu_us in (0, 250_000):
        inside = ProbeEvidence(**expects, step_age_us=7_999_999, cpu_us=cpu_us, wait_us=0)
        assert not judged(inside, 9_000_000)
        assert recovered(inside)
        beyond = ProbeEvidence(**expects, step_age_us=8_000_000, cpu_us=cpu_us, wait_us=0)
        assert judged(beyond, 9_000_000)
        assert not recovered(beyond)


def test_a_step_is_given_up_at_its_cap_whatever_is_expected_of_it() -> None:
    age = CONFIG.step_cap_us + 1
    expects = {**EXPECTS, "expected_us": age}
    assert judged(ProbeEvidence(**expects, step_age_us=age, cpu_us=9, wait_us=9), age)


def test_a_starved_thread_is_not_hung_and_has_not_recovered() -> None:
    starved = ProbeEvidence(**EXPECTS, step_age_us=OVER, cpu_us=20_000, wait_us=230_000)
    assert not judged(starved)
    assert not recovered(starved)
    assert judged(starved, CONFIG.step_cap_us + 1)
    assert judged(ProbeEvidence(**EXPECTS, step_age_us=OVER, cpu_us=20_000, wait_us=10_000))


def test_a_thread_that_used_more_cpu_time_than_its_step_may_is_hung_however_long_it_waited() -> (
    None
):
    """Beside busy processes a thread that spins gets less than half of a CPU."""
    spins = ProbeEvidence(**EXPECTS, step_age_us=OVER, cpu_us=80_001, wait_us=600_000)
    assert judged(spins)
    assert not judged(msgspec.structs.replace(spins, cpu_us=80_000))
    assert not HUNG[2](OVER, spins, BOUND, CONFIG), "earlier versions called it starved"


def test_a_loop_that_turns_without_a_step_is_alive() -> None:
    """Its requests wait, for blocks from another host or for a grammar."""
    waits = msgspec.structs.replace(ProbeEvidence(**EXPECTS), turns=5, cpu_us=900, wait_us=0)
    assert not judged(waits)
    assert recovered(waits)


def test_an_idle_engine_has_recovered_once_its_loop_takes_a_turn() -> None:
    """That its server answers says nothing of the loop behind it."""
    idle = {**EXPECTS, "held": 0}
    assert not recovered(ProbeEvidence(**idle, cpu_us=0))
    assert recovered(ProbeEvidence(**{**idle, "turns": 1}, cpu_us=0))
