"""Which silent streams are stuck, and which are silent for a good reason."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState, ProbeResult, TransportKind
from relume.policies import decision_versions
from relume.policies.liveness import overdue
from relume.policies.liveness.overdue import Judgement, OverdueConfig, Silence
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import (
    Story,
    arrived,
    decided,
    ended,
    engine_step,
    finished,
    queued,
    replica_started,
)
from tests.policies.story import observed as lost

CONFIG = OverdueConfig()
OVER_US = CONFIG.floor_us
ENGINE, STREAM = ("w0", 1), ("q1", 1)
QUEUED, ADMITTED = queued("q1"), v.RequestAdmitted("q1", 1, 0, 7)
CHUNK = v.PrefillChunkDone("q1", 1, 100, 100)
FIRST = v.FirstToken("q1", 1)
PREEMPTED = v.RequestPreempted("q1", 1, 110)
SEEN = Silence(silent_us=OVER_US, from_step=1, probe=ProbeResult.ANSWERED)


def engine(*changes: Any, steps: int = CONFIG.steps, us: int = 900) -> Story:
    """Worker w0 reported these changes of request q1, then made steps."""
    story = Story()
    story.worker()
    story.tell("r.r0", replica_started(), arrived(), decided())
    for change in changes:
        story.tell("w.w0", engine_step(change, us=us))
    for step in range(2, 2 + steps):
        story.tell("w.w0", replace(engine_step(us=us), step=step))
    return story


def judged(story: Story, seen: Silence = SEEN) -> Judgement:
    return overdue.judge(story.fleet, ENGINE, STREAM, seen, CONFIG)


def test_a_stream_that_its_engine_decodes_and_that_gets_nothing_is_stuck() -> None:
    found = judged(engine(QUEUED, ADMITTED, CHUNK, FIRST))
    assert found == Judgement(steps=32, decodes=True, finished=False, bound_us=OVER_US, stuck=True)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param((), id="its engine did not report it"),
        pytest.param((QUEUED,), id="it waits"),
        pytest.param((QUEUED, ADMITTED), id="its prompt is computed"),
        pytest.param((QUEUED, ADMITTED, v.PrefillChunkDone("q1", 1, 40, 40)), id="in chunks"),
        pytest.param((QUEUED, ADMITTED, CHUNK, FIRST, PREEMPTED), id="it is preempted"),
        pytest.param((QUEUED, ADMITTED, CHUNK, FIRST, PREEMPTED, ADMITTED), id="computed again"),
        pytest.param(
            (QUEUED, queued("q1#1"), ADMITTED, CHUNK, FIRST, v.FirstToken("q1#1", 1), finished()),
            id="another choice of it is not over",
        ),
        pytest.param((queued("q1", 2), v.FirstToken("q1", 2)), id="another attempt of it decodes"),
    ],
)
def test_a_stream_that_is_owed_no_token_is_not_stuck(changes: tuple[Any, ...]) -> None:
    found = judged(engine(*changes), replace(SEEN, silent_us=100 * OVER_US))
    assert not found.decodes and not found.finished and not found.stuck


def test_a_stream_that_its_engine_finished_and_whose_end_does_not_come_is_stuck() -> None:
    """Also if the engine makes no step any more: it has nothing to do."""
    story = engine(QUEUED, FIRST, finished(), steps=0)
    assert judged(story) == Judgement(
        steps=0, decodes=False, finished=True, bound_us=OVER_US, stuck=True
    )
    assert not judged(story, replace(SEEN, silent_us=OVER_US - 1)).stuck
    assert not judged(story, replace(SEEN, probe=ProbeResult.SILENT)).stuck
    story.tell("w.w0", v.EngineDied("w0", 1, "killed"))
    assert not judged(story).stuck, "what it held is gone with it"


def test_an_attempt_whose_end_is_folded_before_its_dispatch_is_finished() -> None:
    story = Story()
    story.worker()
    story.tell("w.w0", engine_step(queued(), FIRST, finished()))
    assert not judged(story).finished, "nothing is known of its dispatch"
    story.tell("r.r0", replica_started(), arrived(), decided())
    assert judged(story).finished and judged(story).stuck
    by_v1 = overdue.judge(story.fleet, ENGINE, STREAM, SEEN, CONFIG, overdue.RULES[1])
    assert not by_v1.finished, "version 1 of the decision goes by the places of the request"


@pytest.mark.parametrize("changes", [(), (QUEUED,), (QUEUED, FIRST)])
def test_a_stream_whose_engine_says_that_it_has_no_request_is_stuck(
    changes: tuple[Any, ...],
) -> None:
    """Also while nothing that the engine reports comes through the log."""
    story = engine(*changes, steps=0)
    idle = replace(SEEN, held=0)
    assert judged(story, idle).stuck
    assert not judged(story, replace(idle, silent_us=OVER_US - 1)).stuck
    assert not judged(story, replace(idle, probe=ProbeResult.SILENT)).stuck
    for held in (-1, 1, 7):
        assert not judged(story, replace(SEEN, held=held, silent_us=1 << 40)).stuck
    by_v3 = overdue.judge(story.fleet, ENGINE, STREAM, idle, CONFIG, overdue.RULES[3])
    assert not by_v3.stuck, "version 3 of the decision goes by the log alone"
    story.tell("w.w0", v.EngineDied("w0", 1, "killed"))
    assert not judged(story, idle).stuck, "what it held is gone with it"


def test_a_preempted_stream_is_owed_tokens_once_it_decodes_again() -> None:
    again = v.PrefillChunkDone("q1", 1, 110, 110)
    assert judged(engine(QUEUED, ADMITTED, FIRST, PREEMPTED, ADMITTED, again)).stuck


def test_without_steps_in_the_log_nothing_is_judged() -> None:
    """Also while a replica is cut from the log, or an engine hangs."""
    for steps in (0, 1, CONFIG.steps - 1):
        found = judged(engine(QUEUED, FIRST, steps=steps), replace(SEEN, silent_us=1 << 40))
        assert (found.steps, found.stuck) == (steps, False)


def test_records_lost_by_the_agent_make_the_account_doubtful() -> None:
    story = engine(QUEUED, FIRST)
    story.tell("w.w0", replace(engine_step(lost=3), step=40))
    assert not judged(story).stuck


def test_short_silence_is_no_evidence_and_slow_steps_widen_the_bound() -> None:
    assert not judged(engine(QUEUED, FIRST), replace(SEEN, silent_us=OVER_US - 1)).stuck
    slow = engine(QUEUED, FIRST, us=700_000)
    found = judged(slow)
    assert (found.steps, found.bound_us, found.stuck) == (32, 2_800_000, False)
    assert judged(slow, replace(SEEN, silent_us=2_800_000)).stuck


@pytest.mark.parametrize("probe", ["silent", "refused", "none"])
def test_a_server_that_answers_no_probe_renders_no_output_for_any_stream(probe: str) -> None:
    found = judged(engine(QUEUED, FIRST), replace(SEEN, probe=ProbeResult(probe)))
    assert not found.stuck


@pytest.mark.parametrize("is_over", [False, True])
def test_an_engine_that_makes_steps_and_answers_no_probe_for_longer_is_out_of_reach(
    is_over: bool,
) -> None:
    story = engine(QUEUED, FIRST, *(finished(),) * is_over)
    silent = replace(SEEN, probe=ProbeResult.SILENT, silent_us=CONFIG.unanswered_us)
    found = judged(story, silent)
    assert (found.bound_us, found.stuck) == (CONFIG.unanswered_us, True)
    assert not judged(story, replace(silent, silent_us=CONFIG.unanswered_us - 1)).stuck
    assert not judged(story, replace(silent, probe=ProbeResult.REFUSED)).stuck
    by_v4 = overdue.judge(story.fleet, ENGINE, STREAM, silent, CONFIG, overdue.RULES[4])
    assert (by_v4.bound_us, by_v4.stuck) == (OVER_US, False)


def test_one_that_answers_no_probe_says_nothing_of_its_requests() -> None:
    silent = replace(SEEN, probe=ProbeResult.SILENT, silent_us=1 << 40, held=0)
    for changes in ((), (QUEUED,), (QUEUED, FIRST)):
        assert not judged(engine(*changes, steps=0), silent).stuck
    assert not judged(engine(QUEUED), silent).stuck, "it waits"


def test_another_incarnation_and_a_worker_without_reports_are_not_judged() -> None:
    story = engine(QUEUED, FIRST)
    other = overdue.judge(story.fleet, ("w0", 2), STREAM, SEEN, CONFIG)
    assert not other.stuck
    assert not overdue.judge(story.fleet, ("w9", 1), STREAM, SEEN, CONFIG).stuck
    plain = Story()
    plain.worker()
    assert not judged(plain, replace(SEEN, from_step=0, silent_us=1 << 40)).stuck


@pytest.mark.parametrize("is_over", [False, True])
def test_a_stream_whose_request_the_leader_ended_is_judged_by_its_engine(is_over: bool) -> None:
    """Its gateway stood still and returned, and so did its client. Only a replica that has the stream
    asks."""
    story = engine(QUEUED, FIRST)
    story.tell("fleet", v.ReplicaLost("r0", 1), ended(outcome="failed"))
    if is_over:
        story.tell("w.w0", engine_step(finished()))
    found = judged(story)
    assert (found.decodes, found.finished, found.stuck) == (not is_over, is_over, True)
    by_v2 = overdue.judge(story.fleet, ENGINE, STREAM, SEEN, CONFIG, overdue.RULES[2])
    assert not by_v2.decodes and not by_v2.finished and not by_v2.stuck


@pytest.mark.parametrize("changes", [(QUEUED,), (QUEUED, ADMITTED, CHUNK, FIRST, PREEMPTED)])
def test_one_that_waits_is_not_stuck_though_the_leader_ended_it(changes: tuple[Any, ...]) -> None:
    story = engine(*changes)
    story.tell("fleet", v.ReplicaLost("r0", 1), ended(outcome="failed"))
    assert not judged(story, replace(SEEN, silent_us=100 * OVER_US)).stuck


def test_replicas_judge_only_while_all_living_ones_can_read_it() -> None:
    story = Story()
    assert not overdue.is_known(story.fleet)
    story.tell("r.r0", replica_started(settings=decision_versions.settings()))
    assert overdue.is_known(story.fleet)
    story.tell("r.r1", replica_started("r1"))
    assert not overdue.is_known(story.fleet), "r1 is of an older build"
    story.tell("r.r1", v.ReplicaStopped("r1", "upgrade"))
    assert overdue.is_known(story.fleet)


def test_a_stuck_stream_counts_against_its_worker_by_request_and_excludes_it_for_nobody() -> None:
    fleet = LedFleet(workers=3)
    stuck = TransportKind.STUCK.value
    for request in ("q1", "q1", "q2"):
        fleet.tell("r.r0", arrived(request), decided(request), lost(request, kind=stuck))
    assert fleet.state() == HealthState.SUSPECT and fleet.excluded() == ""
    assert "w0" not in fleet.fleet.replicas["r0"].suspects
    fleet.tell("r.r0", arrived("q3"), decided("q3"), lost("q3", kind=stuck))
    assert fleet.state() == HealthState.UNHEALTHY
    assert fleet.health().failure == FailureClass.ERRORS
