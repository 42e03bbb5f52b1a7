"""What counts as hung, and what is only slow."""

from __future__ import annotations

import pytest

from relume.policies.liveness.stall import ProbeEvidence, StallConfig, bound_us, hung, recovered
from relume.policies.state.fleet import Worker

CONFIG = StallConfig()
BOUND = 1_000_000
OVER = BOUND + 1


def judged(look: ProbeEvidence, silent_us: int = OVER) -> bool:
    return hung(silent_us, look, BOUND, CONFIG)


@pytest.mark.parametrize("probe", ["silent", "refused", "answered"])
def test_silence_within_the_bound_is_no_stall(probe: str) -> None:
    assert not judged(ProbeEvidence(probe=probe), BOUND - 1)


def test_stopped_engine_that_does_not_answer_is_hung() -> None:
    assert judged(ProbeEvidence(probe="silent"))


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
