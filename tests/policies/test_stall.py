"""What counts as hung, and what is only slow."""

from __future__ import annotations

import pytest

from relume.policies.stall import Look, StallConfig, bound_us, hung, recovered
from relume.policies.state import Worker

CONFIG = StallConfig()
BOUND = 1_000_000
OVER = BOUND + 1


def judged(look: Look, silent_us: int = OVER) -> bool:
    return hung(silent_us, look, BOUND, CONFIG)


@pytest.mark.parametrize("probe", ["silent", "refused", "answered"])
def test_silence_within_the_bound_is_no_stall(probe: str) -> None:
    assert not judged(Look(probe), BOUND - 1)


def test_stopped_engine_that_does_not_answer_is_hung() -> None:
    assert judged(Look("silent"))


def test_engine_that_makes_steps_is_not_hung_however_slow() -> None:
    assert not judged(Look("answered", steps=1, step_age_us=0, cpu_us=0, held=3), 60 * OVER)


def test_long_prefill_that_computes_is_not_hung() -> None:
    assert not judged(Look("answered", 0, 8_000_000, 150_000, 4), 8_000_000)


def test_long_prefill_is_given_up_at_the_cap_of_a_step() -> None:
    age = CONFIG.step_cap_us + 1
    assert judged(Look("answered", 0, age, 150_000, 4), age)


def test_stopped_core_behind_an_answering_server_is_hung() -> None:
    """Stock vLLM: the API server answers while EngineCore is stopped in, or between, steps."""
    assert judged(Look("answered", 0, 1_500_000, 0, 4))
    assert judged(Look("answered", 0, 0, 0, 4))


def test_engine_without_requests_is_not_hung_while_the_server_prepares_them() -> None:
    assert not judged(Look("answered", 0, 0, 0, 0))


def test_without_cpu_times_only_the_age_of_the_step_counts() -> None:
    assert not judged(Look("answered", 0, CONFIG.cap_us - 1, -1, 4))
    assert judged(Look("answered", 0, CONFIG.cap_us + 1, -1, 4))


def test_bound_follows_the_slowest_recent_step_between_floor_and_cap() -> None:
    worker = Worker("w0")
    assert bound_us(worker, CONFIG) == CONFIG.cap_us, "nothing known: it may be warming up"
    worker.step_us_high = 1_000
    assert bound_us(worker, CONFIG) == CONFIG.floor_us
    worker.step_us_high = 200_000
    assert bound_us(worker, CONFIG) == 1_600_000
    worker.step_us_high = 10_000_000
    assert bound_us(worker, CONFIG) == CONFIG.cap_us


def test_engine_that_works_again_or_has_nothing_to_do_has_recovered() -> None:
    assert recovered(Look("answered", 0, 0, 0, 0))
    assert recovered(Look("answered", 2, 0, 0, 3))
    assert recovered(Look("answered", 0, 900, 9_000, 3))
    assert not recovered(Look("answered", 0, 900, 0, 3))
