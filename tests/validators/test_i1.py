"""I1: each request has exactly one terminal event, and its client knows the same end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relume.chaos.validators.ground_truth import GroundTruth, QueuedReport
from relume.chaos.validators.promises.requests import i1_one_terminal_event
from relume.chaos.validators.records import ClientRecord
from relume.events import vocabulary as v
from relume.events.log.codec import encode
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
from tests.validators.builders import about, chosen, idle, short, whole


def test_i1_finds_requests_without_an_end() -> None:
    assert "no terminal event" in about(i1_one_terminal_event.check(short().groups, []))
    assert i1_one_terminal_event.check(whole().groups, []) == []


def test_i1_finds_a_second_end() -> None:
    story = whole()
    story.tell("r.r0", ended())
    assert "2 terminal events of its gateway" in about(
        i1_one_terminal_event.check(story.groups, [])
    )


def test_i1_finds_an_end_by_another_gateway() -> None:
    story = short()
    story.replica("r1")
    story.tell("r.r1", ended())
    assert "ended by r.r1" in about(i1_one_terminal_event.check(story.groups, []))


def test_i1_lets_a_stream_be_gone_that_met_full_workers_in_its_client_s_absence() -> None:
    story = short()
    story.tell("r.r0", msgspec.structs.replace(ended(outcome="rejected"), status=429))
    client = ClientRecord(request="q1", status=200, outcome="gone", token_count=3)
    assert i1_one_terminal_event.check(story.groups, [client]) == []


def test_i1_lets_a_gateway_that_came_back_have_the_last_word() -> None:
    story = short()
    story.tell("fleet", ended(outcome="failed"))
    story.tell("r.r0", ended())
    client = ClientRecord(
        request="q1", status=200, outcome="completed", token_count=64, finish="length"
    )
    assert i1_one_terminal_event.check(story.groups, [client]) == []
    late = whole()
    late.tell("fleet", ended(outcome="failed"))
    assert "after its gateway" in about(i1_one_terminal_event.check(late.groups, []))


@pytest.mark.parametrize(("ticks", "fine"), [(0, True), (3, False)])
def test_i1_lets_all_that_a_gateway_wrote_land_in_front_of_the_leaders_end(
    ticks: int, fine: bool
) -> None:
    story = Story()
    story.worker("w0")
    story.replica()
    story.tell("r.r0", arrived(), decided(), ended())
    for _ in range(ticks):
        story.tell("w.w0", idle())
    story.tell("fleet", ended(outcome="failed"))
    assert (i1_one_terminal_event.check(story.groups, []) == []) is fine


@pytest.mark.parametrize(("lost", "fine"), [("r0", True), ("r1", False)])
def test_i1_lets_the_end_of_one_that_it_took_to_be_dead_land_in_front_of_it(
    lost: str, fine: bool
) -> None:
    """Composed 130589: a gateway that had stood still wrote its ends as the leader gave it up."""
    story = short()
    story.tell("fleet", v.ReplicaLost(lost, 8))
    story.tell("r.r0", ended())
    story.tell("fleet", ended(outcome="failed"))
    assert (i1_one_terminal_event.check(story.groups, []) == []) is fine


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"outcome": "failed"}, "told of a failure"),
        ({"token_count": 63}, "63 tokens"),
        ({"finish": "stop"}, "told stop"),
        ({"outcome": "cut"}, "connection broke"),
        ({"outcome": "gone"}, "its stream is gone"),
        ({"request": "unknown"}, "does not know it"),
    ],
)
def test_i1_finds_what_log_and_client_tell_differently(changes: Any, says: str) -> None:
    client = ClientRecord(
        request="q1", status=200, outcome="completed", token_count=64, finish="length"
    )
    assert i1_one_terminal_event.check(whole().groups, [client]) == []
    other = msgspec.structs.replace(client, **changes)
    assert says in about(i1_one_terminal_event.check(whole().groups, [other]))


def test_i1_accepts_a_cut_of_a_relayed_answer_that_failed() -> None:
    client = ClientRecord(request="q1", status=200, outcome="cut", token_count=3)
    for route, outcome, fine in (
        ("/v1/embeddings", "failed", True),
        ("/v1/embeddings", "completed", False),
        ("/v1/completions", "failed", False),
    ):
        story = Story()
        story.worker("w0")
        story.replica()
        came = msgspec.structs.replace(arrived(), route=route)
        story.tell("r.r0", came, decided(), ended(outcome=outcome))
        assert (i1_one_terminal_event.check(story.groups, [client]) == []) is fine


def test_i1_accepts_a_cut_when_the_gateway_died() -> None:
    story = short()
    client = ClientRecord(request="q1", status=200, outcome="cut", token_count=3)
    story.own("r.r0")
    story.tell("r.r0", replica_started(boot="b2"))
    story.tell("fleet", ended(outcome="failed"))
    assert i1_one_terminal_event.check(story.groups, [client]) == []
    heard = ClientRecord(
        request="q1", status=200, outcome="completed", token_count=64, finish="length"
    )
    assert i1_one_terminal_event.check(story.groups, [heard]) == [], "it died before its word"
    alive = short()
    alive.tell("fleet", ended(outcome="failed"))
    assert "whole answer" in about(i1_one_terminal_event.check(alive.groups, [heard]))
    unheard = ClientRecord(request="q7", status=200, outcome="cut", token_count=1)
    assert i1_one_terminal_event.check(story.groups, [unheard]) == []
    assert i1_one_terminal_event.check(whole().groups, [unheard]) != []


@pytest.mark.parametrize(("killed", "fine"), [("r.r1", True), ("r.r0", False)])
def test_i1_asks_for_the_death_of_the_last_owner(killed: str, fine: bool) -> None:
    story = short()
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    story.own(killed)
    story.tell(killed, replica_started(killed[2:], "b2"))
    story.tell("fleet", ended(outcome="failed"))
    left = ClientRecord(request="q1", status=200, outcome="cancelled", token_count=5)
    assert (i1_one_terminal_event.check(story.groups, [left]) == []) is fine


def taken_over(resumable: str = "digest") -> Story:
    """r0 stands still; r1 takes its stream over, sends it to w1, and ends it as its client left."""
    story = Story()
    story.replica("r0")
    story.replica("r1")
    arrival = msgspec.structs.replace(arrived("q1"), client_id="q1", resumable=resumable)
    story.tell("r.r0", arrival, decided())
    back = v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=1, events=0)
    story.tell("r.r1", back, decided(attempt=2, worker="w1"))
    story.tell("r.r1", msgspec.structs.replace(ended(outcome="cancelled"), tokens=1))
    return story


@pytest.mark.parametrize(("tokens", "fine"), [(64, True), (63, False)])
def test_i1_takes_the_end_of_a_replica_that_stood_still(tokens: int, fine: bool) -> None:
    """Composed 120504: it served its client after another one had ended the stream."""
    story = taken_over()
    heard = ClientRecord(request="q1", status=200, outcome="completed", token_count=tokens)
    assert "the log says cancelled" in about(i1_one_terminal_event.check(story.groups, [heard]))
    story.tell("r.r0", ended())
    assert (i1_one_terminal_event.check(story.groups, [heard]) == []) is fine


@pytest.mark.parametrize(("resumable", "fine"), [("digest", True), ("", False)])
def test_i1_knows_clients_that_were_sent_away(resumable: str, fine: bool) -> None:
    """Composed 120533: 503, "return again", and it did not."""
    story = taken_over(resumable)
    failed = ClientRecord(request="q1", status=200, outcome="failed", token_count=1)
    assert (i1_one_terminal_event.check(story.groups, [failed]) == []) is fine


def test_i1_compares_the_status_of_refusals() -> None:
    story = short()
    refusal = v.RequestEnded(
        request="q1",
        outcome="rejected",
        status=503,
        tokens=0,
        finish="-",
        attempts=0,
        verdict="exact",
    )
    story.tell("r.r0", refusal)
    assert (
        i1_one_terminal_event.check(
            story.groups, [ClientRecord(request="q1", status=503, outcome="rejected")]
        )
        == []
    )
    found = i1_one_terminal_event.check(
        story.groups, [ClientRecord(request="q1", status=500, outcome="failed")]
    )
    assert "answered 500" in about(found)


def test_i1_does_not_expect_the_word_of_a_gateway_that_was_killed_behind_the_last_byte() -> None:
    story = Story()
    story.replica("r0")
    story.tell("r.r0", msgspec.structs.replace(arrived("q1"), client_id="c1"))
    gone = v.RequestEnded(
        request="q1",
        outcome="failed",
        status=502,
        tokens=0,
        finish="-",
        attempts=1,
        verdict="exact",
        detail="its gateway is gone",
    )
    story.tell("fleet", gone)
    client = ClientRecord(request="c1", status=200)
    assert i1_one_terminal_event.check(story.groups, [client])
    story.replica("r0", "b2")
    assert not i1_one_terminal_event.check(story.groups, [client])


def test_i1_does_not_expect_the_word_of_a_gateway_that_was_killed_after_an_error() -> None:
    """Composed 5031: its client was answered 400, and its gateway was killed before it wrote so."""
    story = Story()
    story.replica("r0")
    story.tell("r.r0", msgspec.structs.replace(arrived("q1"), client_id="c1"))
    gone = msgspec.structs.replace(ended(outcome="failed"), status=0, tokens=-1)
    story.tell("fleet", gone)
    client = ClientRecord(request="c1", status=400, outcome="rejected")
    assert "answered 400" in about(i1_one_terminal_event.check(story.groups, [client])), "it lives"
    story.replica("r0", "b2")
    assert i1_one_terminal_event.check(story.groups, [client]) == []
    story.tell("r.r0", msgspec.structs.replace(gone, status=503))
    found = i1_one_terminal_event.check(story.groups, [client])
    assert "answered 400, the log says 503" in about(found), "it wrote another end"


def test_i1_knows_answers_of_a_gateway_that_died_unheard_from_their_engines() -> None:
    def story(number: int = 2, tokens: int = 64, again: bool = True) -> Story:
        told = short()
        told.tell("r.r0", msgspec.structs.replace(chosen("q1", "w1"), decision="r0.b1.1"))
        dispatch = msgspec.structs.replace(decided("q2"), decision=f"r0.b1.{number}")
        took = msgspec.structs.replace(queued("q2"), dispatch=encode(dispatch))
        told.tell("w.w0", engine_step(took, finished()))
        told.tell("w.w0", engine_step(v.EngineFinished("q2", 1, "length", tokens)))
        told.tell("r.r0", ended())
        if again:
            told.replica("r0", "b2")
        return told

    client = ClientRecord(
        request="c2", status=200, outcome="completed", token_count=64, finish="length"
    )

    def says(told: Story, *clients: ClientRecord) -> str:
        return " ".join(map(str, i1_one_terminal_event.check(told.groups, clients)))

    assert says(story(), client) == ""
    assert "does not know" in says(story(), client, client), "one request is one client's"
    assert "does not know" in says(story(tokens=63), client)
    several = msgspec.structs.replace(client, other_tokens=70)
    assert says(story(), several) == says(story(tokens=70), several) == "", "one of its choices"
    assert "does not know" in says(story(tokens=63), several)
    left = msgspec.structs.replace(client, request="c3", outcome="cancelled", token_count=5)
    assert says(story(), left) == "", "the engine computed on without it"
    assert "does not know" in says(story(tokens=4), left), "it has more than was computed"
    assert "does not know" in says(story(), left, client), "one request is one client's"
    assert "c3: was" in says(story(), left, client), "a whole answer comes first"
    assert "does not know" in says(story(again=False), left), "its gateway lives"
    assert "does not know" in says(story(number=1), client), "it wrote of later decisions"
    assert "does not know" in says(story(again=False), client), "it lives"
    assert "does not know" in says(short(), client)


@pytest.mark.parametrize(
    ("number", "step", "incarnation", "fine"),
    [(2, 4, 1, True), (2, 9, 1, True), (2, 3, 1, False), (2, 4, 2, False), (1, 4, 1, False)],
)
@pytest.mark.parametrize("by_agent", [False, True])
def test_i1_knows_what_a_dead_gateway_did_not_write_and_no_engine_could_report(
    number: int, step: int, incarnation: int, fine: bool, by_agent: bool
) -> None:
    """Composed 161227: the agent held back two reports at once, and its gateway's writer was late."""
    dispatch = encode(msgspec.structs.replace(decided("q2"), decision=f"r0.b1.{number}"))
    truth = GroundTruth(
        attempts={"c2": [("q2/1", "w0", 5)]},
        queued={"q2/1": QueuedReport("w0", incarnation, step, dispatch)},
    )
    client = ClientRecord(
        request="c2", status=200, outcome="completed", token_count=64, finish="length"
    )

    def says(drops: bool = True, again: bool = True, changes: Any = (), known: Any = truth) -> str:
        story = short()
        story.tell("r.r0", msgspec.structs.replace(chosen("q1", "w1"), decision="r0.b1.1"))
        story.tell("w.w0", msgspec.structs.replace(engine_step(*changes, finished()), step=4))
        if drops and by_agent:
            story.tell("w.w0", v.ReportsDropped(worker="w0", incarnation=1, count=1, reason="bad"))
        lost = int(drops and not by_agent)
        story.tell("w.w0", msgspec.structs.replace(engine_step(lost=lost), step=9))
        story.tell("w.w0", msgspec.structs.replace(engine_step(), step=12))
        story.tell("r.r0", ended())
        if again:
            story.replica("r0", "b2")
        return " ".join(map(str, i1_one_terminal_event.check(story.groups, [client], known)))

    assert (says() == "") is fine
    assert "does not know" in says(drops=False), "the log lacks no report"
    assert "does not know" in says(again=False), "its gateway lives"
    assert "does not know" in says(changes=[queued("q2")]), "its engine reported it"
    assert "does not know" in says(known=GroundTruth()), "no engine took it"
    assert "does not know" in says(known=None)


@pytest.mark.parametrize(
    ("step", "again", "fine"), [(7, True, True), (7, False, False), (3, True, False)]
)
def test_i1_knows_that_reports_end_with_their_agent(step: int, again: bool, fine: bool) -> None:
    """Composed 188432: etcd was away, a gateway, the agent of its engine, and then its host were lost."""
    dispatch = encode(msgspec.structs.replace(decided("q2"), decision="r0.b1.2"))
    truth = GroundTruth(
        attempts={"c2": [("q2/1", "w0", 5)]}, queued={"q2/1": QueuedReport("w0", 1, step, dispatch)}
    )
    client = ClientRecord(
        request="c2", status=200, outcome="completed", token_count=64, finish="length"
    )
    story = short()
    story.tell("r.r0", msgspec.structs.replace(chosen("q1", "w1"), decision="r0.b1.1"))
    story.tell("w.w0", msgspec.structs.replace(engine_step(finished()), step=4))
    if again:
        story.tell("w.w0", v.WorkerRegistered(worker="w0", domain="host", agent_pid=8))
    story.tell("r.r0", ended())
    story.replica("r0", "b2")
    found = i1_one_terminal_event.check(story.groups, [client], truth)
    assert (found == []) is fine


def test_i1_has_the_leader_end_what_only_an_engine_told_of() -> None:
    def story(behind: int = 6) -> Story:
        told = short()
        event = decided("q2", basis=v.Basis(0, behind))
        dispatch = encode(msgspec.structs.replace(event, decision="r0.b1.9"))
        told.tell("w.w0", engine_step(queued("q2", dispatch=dispatch), finished("q2"), finished()))
        told.tell("r.r0", ended())
        told.replica("r0", "b2")
        told.leader("r0", "b2")
        told.healthy_ticks(i1_one_terminal_event.SLACK_TICKS + 2)
        return told

    def says(told: Story) -> str:
        return " ".join(map(str, i1_one_terminal_event.check(told.groups, [])))

    assert says(story()) == "I1 q2: has no terminal event"
    good = story()
    end = v.RequestEnded(
        request="q2", outcome="failed", status=0, tokens=-1, finish="error", attempts=1, verdict=""
    )
    good.tell("fleet", end)
    assert says(good) == ""
    good.tell("fleet", end)
    assert "2 terminal events of the leader" in says(good)
    never = story()
    never.tell("fleet", end, msgspec.structs.replace(end, request="q3"))
    assert says(never) == "I1 q3: ended without having arrived"
