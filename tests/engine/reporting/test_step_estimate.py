"""The longest that an engine expects its step to take."""

from __future__ import annotations

from relume.engine_shim.engine.step_estimate import (
    FEW_TOKENS,
    LONGEST_US,
    PROMPT_TOKENS,
    StepEstimate,
)  # fmt: skip


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
        estimate.learn(5_000, 64)
    estimate.learn(20_000_000, 64)
    assert estimate.of(0) == 10_000
    assert estimate.of(64) <= 10_000
    for _ in range(12):
        estimate.learn(20_000_000, 0)
    assert estimate.of(0) == 20_000_000, "steps that are long from now on are learnt"


def test_a_longer_prompt_may_take_longer_in_proportion() -> None:
    estimate = StepEstimate()
    estimate.learn(10_000, 100)
    assert estimate.of(FEW_TOKENS) == 25_600
    assert estimate.of(0) == 10_000
    for _ in range(200):
        estimate.learn(900, PROMPT_TOKENS - 1)  # too few to say anything
    assert estimate.of(FEW_TOKENS) == 25_600


def test_the_first_long_prompt_may_take_the_square_until_it_is_known() -> None:
    """Seen on real engines: after prompts of 74 tokens (4 us each), one of 7,400 was expected to
    take 30 ms and took half a second."""
    estimate = StepEstimate()
    estimate.learn(296, 74)
    assert estimate.of(7_400) == 855_625
    assert estimate.of(100_000) == LONGEST_US
    estimate.learn(460_000, 7_400)
    assert estimate.of(7_400) == 460_000
    for _ in range(200):
        estimate.learn(900, 0)
    assert 400_000 < estimate.of(7_400) <= 460_000, "per token, when the step itself is forgotten"
    assert estimate.of(50_000) == LONGEST_US


def test_the_first_prompt_is_expected_by_the_steps_before_it() -> None:
    """An engine without a self-test computed nothing but its warm-up."""
    estimate = StepEstimate()
    estimate.learn(5_000, 0)
    assert estimate.of(320) == 100_000
    assert estimate.of(100_000) == LONGEST_US
