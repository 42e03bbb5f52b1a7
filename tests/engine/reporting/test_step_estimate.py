"""The longest that an engine expects its step to take."""

from __future__ import annotations

from relume.engine_shim.engine.step_estimate import PROMPT_TOKENS, StepEstimate


def test_nothing_is_expected_before_the_first_step() -> None:
    assert StepEstimate().of(1000) == -1


def test_a_step_may_take_as_long_as_the_slowest_recent_one() -> None:
    estimate = StepEstimate()
    for duration_us in (5_000, 9_000, 5_000):
        estimate.learn(duration_us, 0)
    assert 8_500 < estimate.of(0) <= 9_000
    for _ in range(200):
        estimate.learn(5_000, 0)
    assert 5_000 <= estimate.of(0) < 5_200, "one slow step is forgotten"


def test_a_step_that_hung_does_not_let_the_next_hang_look_short() -> None:
    estimate = StepEstimate()
    for _ in range(50):
        estimate.learn(5_000, 0)
    estimate.learn(20_000_000, 64)
    assert estimate.of(0) == 10_000
    assert estimate.of(64) <= 10_000
    for _ in range(12):
        estimate.learn(20_000_000, 0)
    assert estimate.of(0) == 20_000_000, "steps that are long from now on are learnt"


def test_a_longer_prompt_may_take_longer_in_proportion() -> None:
    estimate = StepEstimate()
    estimate.learn(10_000, 100)
    assert estimate.of(1000) == 100_000
    assert estimate.of(0) == 10_000
    for _ in range(200):
        estimate.learn(900, PROMPT_TOKENS - 1)  # too few to say anything
    assert estimate.of(1000) == 100_000
