"""I21: each kind of difference is named, and what is permitted is not."""

from __future__ import annotations

import pytest

from relume.chaos.scenario import scenario_reader
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.ground_truth import (
    EngineEnd,
    EngineLoad,
    GroundTruth,
    HeldBlocks,
    ReportKey,
)
from relume.chaos.validators.promises.log.i21_fold_is_true import check
from relume.events import vocabulary as v
from tests.policies.story import died, ended, engine_step, finished, queued
from tests.validators.builders import about, daemon, held, short, whole

QUEUED = ReportKey(1, 1, v.RequestQueued, "q1", 1)
FINISHED = ReportKey(1, 1, v.EngineFinished, "q1", 1)


def load(attempts: int = 1, left: int = 100, decoding: int = 1, context: int = 100) -> EngineLoad:
    """That of `engine_step(queued())`, whose figures are a batch of one."""
    return EngineLoad(attempts, decoding, context, left, 0, 8)


def test_a_true_fold_is_true() -> None:
    truth = GroundTruth(reports={"w0": {QUEUED: load(), FINISHED: load(0, 0)}})
    assert check(whole().groups, [], truth) == []
    assert check(whole().groups, []) == []


def test_other_prompt_tokens_left_are_named() -> None:
    truth = GroundTruth(reports={"w0": {QUEUED: load(left=83)}})
    assert "w0: after RequestQueued of q1" in about(check(whole().groups, [], truth))


def test_an_engine_with_fewer_requests_is_named() -> None:
    truth = GroundTruth(reports={"w0": {FINISHED: load(1, 0)}})
    assert "attempts=0" in about(check(whole().groups, [], truth))


def test_reports_after_lost_ones_are_not_compared() -> None:
    story = short()
    story.tell("w.w0", engine_step(lost=2), engine_step(finished()))
    story.tell("r.r0", ended())
    truth = GroundTruth(reports={"w0": {FINISHED: load(7, 7)}})
    assert check(story.groups, [], truth) == []


def test_reports_after_a_declared_loss_are_not_compared() -> None:
    story = short()
    story.tell("fleet", v.WorkerLost("w0", story.epochs["w.w0"], "lease lapsed"))
    story.tell("w.w0", engine_step(finished()))
    story.tell("r.r0", ended())
    truth = GroundTruth(reports={"w0": {FINISHED: load(7, 7)}})
    assert check(story.groups, [], truth) == []


def test_a_report_with_the_death_of_its_engine_is_not_compared() -> None:
    story = short()
    story.tell("w.w0", engine_step(queued("q2")), died())
    story.tell("r.r0", ended())
    key = ReportKey(1, 1, v.RequestQueued, "q2", 1)
    truth = GroundTruth(reports={"w0": {key: load(2, 200)}})
    assert check(story.groups, [], truth) == []


def test_coverage_that_its_daemon_lacks_is_named() -> None:
    story = short()
    acknowledged = held("w1", "q1", 64)
    story.tell("w.w1", daemon("w1"), acknowledged)
    place = "w.w1", story.heads["w.w1"][2] - 1
    truth = GroundTruth(held={place: HeldBlocks(acknowledged, "b", {"q1": (64, 640)})})
    assert check(story.groups, [], truth) == []
    truth = GroundTruth(held={place: HeldBlocks(acknowledged, "b", {"q1": (32, 320)})})
    assert "covers 64 tokens of q1; its daemon holds 32" in about(check(story.groups, [], truth))


@pytest.mark.parametrize("has_ended", [False, True])
def test_blocks_of_voided_attempts_are_not_compared(has_ended: bool) -> None:
    """Nor once their request has ended (composed 186451: acknowledgements came late)."""
    story = short()
    acknowledged = held("w1", "q1", 64)
    story.tell("w.w1", daemon("w1"), acknowledged)
    story.tell("fleet", v.CheckpointsVoided("w0", 1, (("q1", 1),)))
    if has_ended:
        story.tell("r.r0", ended())
    truth = GroundTruth(daemons={"w1": HeldBlocks(None, "b", {"q1": (64, 640)})})
    assert check(story.groups, [], truth) == []


def test_differences_at_the_end_are_named() -> None:
    story = short()
    truth = GroundTruth(
        engines={"w0": EngineEnd(incarnation=1, attempts=frozenset(["q2/1"]), load=load())},
        gateways={"r.r0": frozenset(["q2"])},
        owners={"w.w0": 1},
        found=[("r0", "something")],
    )
    said = about(check(story.groups, [], truth))
    for part in ("r0: something", "leases", "its engine ['q2/1']", "its gateway ['q2']"):
        assert part in said


def test_a_simulated_run_records_its_truth() -> None:
    scenario = scenario_reader.load(scenario_reader.find("blocks-corrupt"))
    outcome = run(scenario, 3)
    truth = outcome.truth
    assert truth is not None and truth.looks > 3 and not truth.found
    assert sum(map(len, truth.reports.values())) > 100 and truth.held
    assert len(truth.engines) == len(outcome.schedule.workers) and not truth.unwritten
    assert check(outcome.groups, [], truth) == []
