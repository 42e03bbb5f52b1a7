"""Drafts of another host: what steps take, and what the engine makes of them."""

from __future__ import annotations

import itertools

import pytest

from relume.chaos.sim.engine.engine_model import EngineConfig, SimEngine
from relume.chaos.sim.engine.speed import AssistedStepCost, Drafts
from relume.chaos.sim.engine.step_cost import load
from tests.sim.test_engine import assert_empty, jobs, serve

COST = load("qwen3-32b_rtxpro6000x2")


def test_verifying_counts_beside_prompts_and_so_does_the_way_to_and_fro() -> None:
    good, plain = AssistedStepCost(COST, Drafts(acceptance=0.8, count=4)), COST.decode(8, 8000)[0]
    assert good.given == pytest.approx((1 - 0.8**5) / (1 - 0.8))  # LUMEN Eq. 3
    assert (
        good.decode(8, 8000)[0]
        < plain
        < AssistedStepCost(COST, Drafts(acceptance=0.0, count=4)).decode(8, 8000)[0]
    )
    far = AssistedStepCost(COST, Drafts(acceptance=0.8, count=4, exchange_us=5000))
    assert far.decode(8, 8000)[0] > good.decode(8, 8000)[0]
    # Beside prompts k + 1 tokens of each sequence are verified; prompts alone take what they took.
    assert good.step([(100, 0)], 8, 8000) > COST.step([(132, 0)], 8, 8000)
    assert good.step([(100, 0)], 0, 0) == COST.step([(100, 0)], 0, 0)


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_sparing_drafts_never_cost(acceptance: float) -> None:
    sparing = AssistedStepCost(COST, Drafts(acceptance=acceptance, count=4, sparing=True))
    always = AssistedStepCost(COST, Drafts(acceptance=acceptance, count=4))
    for batch in (1, 16, 128):
        assert sparing.decode(batch, 0) == min(COST.decode(batch, 0), always.decode(batch, 0))
    assert sparing.step([(100, 0)], 8, 8000) == COST.step([(100, 0)], 8, 8000)


@pytest.mark.parametrize("seed", range(4))
def test_drafts_give_the_same_tokens_sooner_and_steps_with_prompts_give_several(seed: int) -> None:
    config = EngineConfig(kv_blocks=(4000, 80)[seed % 2], max_seqs=16, max_tokens=256)
    arrivals = jobs(seed, 80)
    plain, drafted = (
        SimEngine(config, COST),
        SimEngine(config, AssistedStepCost(COST, Drafts(acceptance=0.9, count=4))),
    )
    slow, fast = serve(plain, arrivals), serve(drafted, arrivals)
    ends = {t.name: t.tokens for t in fast if t.what == "finished"}
    assert ends == {job.name: job.output_tokens for _, job in arrivals}
    assert_empty(drafted)
    # Of runs with prompts some gave several tokens; all tokens of a run are there at its end.
    assert any(run.count > 1 and not run.more_ns for run in drafted.runs)
    assert all(run.count == 1 for run in plain.runs if not run.more_ns)
    for one, other in itertools.pairwise(drafted.runs):
        assert one.before + one.count <= other.before
        assert one.end_ns(one.before + one.count) <= other.began_ns
    assert drafted.busy_ns < plain.busy_ns and fast[-1].at_ns < slow[-1].at_ns
