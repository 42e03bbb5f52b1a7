"""Why a request went where it went."""

from __future__ import annotations

from msgspec.structs import replace

from relume.controlplane.replay.rendering import brief, headline, lines_of, to_json
from relume.controlplane.replay.why import Why, why
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.events.vocabulary.enums import RestoreFailure
from tests.policies.story import (
    Story,
    arrived,
    decided,
    died,
    ended,
    engine_step,
    finished,
    observed,
    queued,
    replica_started,
    started,
)
from tests.replay.scene import Scene


def kinds(found: Why) -> list[str]:
    return [type(s.event).__name__ for s in found.steps]


def moved_story() -> Story:
    """q1 starts on w0, which dies; it goes on on w1. q2 is somebody else's."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    story.tell("r.r0", arrived(), arrived("q2"), decided(), decided("q2", worker="w1"))
    story.tell("w.w0", engine_step(queued(), v.RequestAdmitted("q1", 1, 16, 3)))
    story.tell("w.w0", engine_step(v.PrefillChunkDone("q1", 1, 84, 100), v.FirstToken("q1", 1)))
    story.tell("w.w0", died())
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1", delivered=17))
    story.tell("w.w1", engine_step(queued(attempt=2), queued("q2")))
    story.tell("w.w1", engine_step(finished(attempt=2)))
    story.tell("r.r0", ended(attempts=2))
    story.tell("w.w1", died("w1"))
    return story


def test_a_restore_that_no_holder_answered_for_is_in_the_chain() -> None:
    story = moved_story()
    failed = v.RestoreFailed(
        incarnation=1, request="q2", child=0, attempt=1, holder="tcp://h:6000", tokens=0,
        reason=RestoreFailure.UNREACHABLE,
    )  # fmt: skip
    story.tell("w.w1", failed)
    found = why(story.groups, "q2")
    assert found is not None
    assert "restored no tokens from tcp://h:6000: unreachable" in "\n".join(lines_of(found))


def test_measured_ttft_is_shown_beside_the_predicted_one() -> None:
    """On the clock of the replica that sent it, whichever record landed first."""
    story = Story()
    story.worker("w0")
    story.replica()
    sent = replace(decided(), at_us=4_000, ttft_us=9_000)
    story.tell("r.r0", v.GroupsReceived(story.revision, (0, 3_500)), arrived(), sent)
    story.tell("w.w0", engine_step(queued()))
    story.tell("w.w0", engine_step(v.FirstToken("q1", 1)))
    first = story.revision
    assert why(story.groups, "q1").first_tokens_us == {}, "not heard of yet"
    story.tell("r.r0", v.GroupsReceived(first - 1, (0, 500, 1, 10_000)), ended())
    found = why(story.groups, "q1")
    assert found is not None and found.first_tokens_us == {1: 10_000}
    text = "\n".join(lines_of(found))
    assert "predicted TTFT: 9.0 ms" in text
    assert "measured TTFT: 10.0 ms" in text


def test_chain_names_every_cause_and_nothing_else() -> None:
    found = why(moved_story().groups, "q1")
    assert found is not None
    assert kinds(found) == [
        "RequestArrived",
        "RouteDecided",
        "RequestQueued",
        "RequestAdmitted",
        "FirstToken",
        "EngineDied",
        "TransportObserved",
        "RouteDecided",
        "RequestQueued",
        "EngineFinished",
        "RequestEnded",
    ]
    assert found.ended is not None


def test_why_shows_the_chain_in_words() -> None:
    found = why(moved_story().groups, "q1")
    assert found is not None
    text = "\n".join(lines_of(found))
    assert "completed" in headline(found)
    assert "2 attempts" in headline(found)
    for words in ("sent to w0:1", "died (killed)", "saw reset", "the client has 17 tokens"):
        assert words in text
    assert to_json(found)["steps"][0]["event"]["type"] == "request_arrived"


def test_unknown_request_is_unknown() -> None:
    assert why(moved_story().groups, "q9") is None


def test_client_may_ask_by_its_own_ids() -> None:
    story = Story()
    story.worker()
    story.replica()
    fields = {f: getattr(arrived(), f) for f in v.RequestArrived.__struct_fields__}
    story.tell("r.r0", v.RequestArrived(**{**fields, "client_id": "mine"}), decided())
    for asked in ("q1", "cmpl-q1", "mine", "cmpl-mine", "chatcmpl-mine"):
        found = why(story.groups, asked)
        assert found is not None
        assert found.request == "q1"
    assert "mine" in headline(found)


def test_decision_of_a_gateway_that_died_unheard_is_in_the_journal() -> None:
    """Killed between send and append: arrival and decision never reached the log."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    candidates = (
        v.Candidate(worker="w0", incarnation=1, cost=0, prefill_tokens=0, requests=0),
        v.Candidate(worker="w1", incarnation=1, cost=132, prefill_tokens=100, requests=1),
    )
    fields = {f: getattr(decided(), f) for f in v.RouteDecided.__struct_fields__}
    lost = v.RouteDecided(**{**fields, "basis": v.Basis(7, 2), "candidates": candidates})
    story.tell("w.w0", engine_step(queued(dispatch=encode(lost))))
    story.tell("w.w0", engine_step(finished()))
    found = why(story.groups, "q1")
    assert found is not None
    assert kinds(found) == ["RouteDecided", "RequestQueued", "EngineFinished"]
    assert found.decisions == [lost]
    text = "\n".join(lines_of(found))
    assert "basis (7, 2)" in text
    assert "-> w0:1 costs 0 tokens" in text
    assert "w1:1 costs 132 tokens" in text
    assert "journal" in text
    assert to_json(found)["steps"][0]["journalled"]


def test_late_decision_is_shown_once() -> None:
    """The engine's admission landed before the decision's own record."""
    story = Story()
    story.worker()
    story.replica()
    story.tell("w.w0", engine_step(queued(dispatch=encode(decided()))))
    story.tell("r.r0", arrived(), decided())
    found = why(story.groups, "q1")
    assert found is not None
    assert len(found.decisions) == 1
    assert not any(s.journalled for s in found.steps)


def test_foreign_dispatch_is_passed_over() -> None:
    story = Story()
    story.worker()
    story.tell("w.w0", engine_step(queued(dispatch=b"\xc1 nonsense")))
    found = why(story.groups, "q1")
    assert found is not None
    assert found.decisions == []


def test_hung_engine_and_lost_gateway_are_causes() -> None:
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    story.tell("r.r0", arrived(), decided())
    judged = v.StallJudged(
        decision="d",
        basis=v.Basis(1, 1),
        worker="w0",
        incarnation=1,
        silent_us=1_500_000,
        probe="silent",
        probe_steps=-1,
        step_age_us=0,
        bound_us=1_000_000,
        hung=True,
    )
    other = v.StallJudged(
        decision="e",
        basis=v.Basis(1, 1),
        worker="w1",
        incarnation=1,
        silent_us=9,
        probe="silent",
        probe_steps=-1,
        step_age_us=0,
        bound_us=9,
        hung=True,
    )
    story.tell("r.r0", judged, other, v.WorkerSuspected("w0", 1, "silent"))
    story.tell("r.r0", observed(kind="stall"), decided(attempt=2, worker="w1"))
    story.tell("w.w0", died())
    story.tell("fleet", v.ReplicaLost("r0", 4))
    story.tell("fleet", ended(outcome="failed"))
    story.tell("r.r0", replica_started(boot="b2"))
    story.tell("w.w1", started("w1", 2))
    found = why(story.groups, "q1")
    assert found is not None
    assert kinds(found)[2:] == [
        "StallJudged",
        "WorkerSuspected",
        "TransportObserved",
        "RouteDecided",
        "EngineDied",
        "ReplicaLost",
        "RequestEnded",
    ]
    assert "judged hung" in "\n".join(lines_of(found))


async def test_every_request_of_a_scene_can_be_explained() -> None:
    async with Scene(31) as scene:
        await scene.traffic(20)
        scene.workers["w0"].die()
        await scene.traffic(10, "more")
        await scene.settled()
    for name in [f"q{n}" for n in range(20)] + [f"more{n}" for n in range(10)]:
        found = why(scene.log.groups, name)
        assert found is not None
        assert found.arrived is not None
        assert found.ended is not None
        assert found.decisions
        assert list(lines_of(found))


def test_where_weights_came_from_is_one_line() -> None:
    found = v.WeightsLoaded(
        worker="w0", incarnation=2, ranks=1, bytes=3 << 20, read_bytes=0, took_ms=40
    )
    assert brief(found) == "w0:2 loaded 3.0 MiB of weights, from memory, in 40 ms"
    alone = replace(found, read_bytes=3 << 20, why="no room")
    assert "3.0 MiB from files" in brief(alone)
