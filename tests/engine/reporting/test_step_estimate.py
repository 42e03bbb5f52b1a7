"""The longest that an engine expects its step to take."""

from __future__ import annotations

from relume.engine_shim.engine.step_estimate import PROMPT_TOKENS, StepEstimate


def test_nothing_is_expected_before_the_first_step() -> None:
    assert StepEstimate().of(1000) == -1


def test_a_step_may_take_as_long_as_the_slowest_recent_one() -> None:
    estimate = StepEstimate()
    for duration_us in (5_000, 40_000, 5_000):
        estimate.learn(duration_us, 0)
    assert 38_000 < estimate.of(0) <= 40_000
    for _ in range(200):
        estimate.learn(5_000, 0)
    assert 5_000 <= estimate.of(0) < 5_200, "one slow step is forgotten"


def test_a_longer_prompt_may_take_longer_in_proportion() -> None:
    estimate = StepEstimate()
    estimate.learn(10_000, 100)
    assert estimate.of(1000) == 100_000
    assert estimate.of(0) == 10_000
    for _ in range(200):
        estimate.learn(900, PROMPT_TOKENS - 1)  # too few to say anything
    assert estimate.of(1000) == 100_000
