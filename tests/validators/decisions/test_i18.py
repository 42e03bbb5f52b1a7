"""I18: a dispatch respects what its basis knows, and a request does not go back where it failed."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.decisions import i18_sound_dispatch
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AdminCommand, EffectKind
from tests.policies.story import Story, arrived, decided, died, observed, ready, started

BEYOND = 1 << 30
RETURNED = v.ClientReturned(request="q1", claim="c", attempt=1, tokens=0, events=0)


def found(story: Story) -> str:
    return "\n".join(map(str, i18_sound_dispatch.check(story.groups, [])))


@pytest.fixture
def story() -> Story:
    """w0 and w1 serve."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    story.leader()
    return story


def effect(kind: EffectKind, worker: str = "w0", again: int = -1) -> v.EffectsDecided:
    return v.EffectsDecided(
        decision="c",
        basis=v.Basis(0, 0),
        cause="an operator",
        effects=(v.Effect(kind, worker),),
        again=again,
    )


def send(story: Story, late: int = 0, position: int = BEYOND, **more: Any) -> None:
    """The next attempt of q1 goes to w0, decided on what was known `late` revisions ago."""
    basis = v.Basis(story.revision - late, position)
    story.tell("r.r0", replace(decided(basis=basis), **more))


def plan(worker: str = "w0") -> v.MigrationPlanned:
    """q1 is to leave the worker."""
    option = v.RecoveryOption(
        worker="w1", kind="recompute", holder="", restored=0, wait_us=0, move_us=0, compute_us=0,
        done_us=0,
    )  # fmt: skip
    choice = v.MigrationChoice(
        request="q1", attempt=1, tokens=100, left=10, chosen=0, options=(option,)
    )
    return v.MigrationPlanned(
        decision="d", basis=v.Basis(0, 0), worker=worker, incarnation=1, cause="drain", tick=1,
        choices=(choice,),
    )  # fmt: skip


def test_a_serving_worker_gets_requests(story: Story) -> None:
    send(story)
    assert found(story) == ""


def test_a_drained_worker_gets_none_until_the_drain_ends(story: Story) -> None:
    story.tell("fleet", effect(EffectKind.DRAIN))
    send(story, late=1)
    assert found(story) == "", "the basis does not know it"
    send(story)
    assert "q1/1: sent to w0:1 although it drains" in found(story)
    story.tell("fleet", effect(EffectKind.UNDRAIN), effect(EffectKind.DRAIN, again=0))
    send(story)
    assert len(found(story).splitlines()) == 1


def test_it_makes_no_difference_that_no_other_worker_is_left(story: Story) -> None:
    story.tell("w.w1", died("w1"))
    story.tell("fleet", effect(EffectKind.DRAIN))
    send(story)
    assert "it drains" in found(story)


@pytest.mark.parametrize("other", ["serves", "is dead"])
def test_a_request_returns_to_a_draining_worker_if_no_other_could_take_it(
    story: Story, other: str
) -> None:
    story.tell("r.r0", arrived())
    send(story)
    story.tell("fleet", effect(EffectKind.DRAIN))
    story.tell("r.r0", plan(), observed(kind="moved"))
    if other == "serves":
        send(story, attempt=2)
        assert "q1/2: sent to w0:1 although it drains" in found(story)
        return
    story.tell("w.w1", died("w1"))
    send(story, attempt=2)
    assert found(story) == ""
    send(story, attempt=3)
    assert "q1/3: sent to w0:1 although it drains" in found(story), "the plan is over"


def test_one_that_failed_before_its_handover_or_that_another_replica_moved_does_not(
    story: Story,
) -> None:
    story.replica("r1")
    story.tell("r.r0", arrived())
    send(story)
    story.tell("fleet", effect(EffectKind.DRAIN))
    story.tell("w.w1", died("w1"))
    story.tell("r.r0", plan(), observed(kind="declined"))
    send(story, attempt=2)
    assert "q1/2: sent to w0:1 although it drains" in found(story)
    story.tell("r.r0", plan(), observed(kind="moved"))
    story.tell("r.r1", RETURNED)
    story.tell("r.r1", decided(attempt=2, basis=v.Basis(story.revision, BEYOND)))
    assert len(found(story).splitlines()) == 2


def test_a_suspected_engine_gets_none_of_that_replica(story: Story) -> None:
    story.replica("r1")
    story.tell("r.r0", v.WorkerSuspected("w0", 1, "silent"))
    send(story, position=1)
    assert found(story) == "", "the replica's own event comes after the basis"
    story.tell("r.r1", decided("q2", basis=v.Basis(story.revision, BEYOND)))
    assert found(story) == "", "another replica does not suspect it"
    send(story, position=2, late=9)
    assert "the replica suspects it" in found(story), "its own events hold before they land"
    story.tell("r.r0", v.WorkerCleared("w0", 1, "it works"))
    send(story)
    assert len(found(story).splitlines()) == 1


def test_a_broken_connection_makes_it_suspected_and_a_new_engine_is_not(story: Story) -> None:
    story.tell("r.r0", observed(worker="w0"))
    send(story, request="q2")
    assert "q2/1: sent to w0:1 although the replica suspects it" in found(story)
    story.tell("w.w0", died(), started("w0", 2), ready("w0", 2))
    send(story, request="q3", incarnation=2)
    assert len(found(story).splitlines()) == 1


def test_dead_replaced_and_lost_engines_get_none(story: Story) -> None:
    story.tell("w.w0", died())
    send(story)
    assert "its engine is dead" in found(story)
    story.tell("w.w0", started("w0", 2))
    send(story, request="q2", incarnation=2)
    assert "q2/1: sent to w0:2 although its engine is starting" in found(story)
    story.tell("w.w0", ready("w0", 2))
    send(story, request="q3")
    assert "q3/1: sent to w0:1 although its engine is 2" in found(story)
    story.tell("fleet", v.WorkerLost("w0", story.epochs["w.w0"], "lease lapsed"))
    send(story, request="q4", incarnation=2)
    assert "q4/1: sent to w0:2 although it is lost" in found(story)
    story.own("w.w0")
    story.tell("w.w0", v.StreamResumed(1, story.epochs["w.w0"]))
    story.tell("fleet", v.WorkerLost("w0", 1, "an earlier owner"))
    send(story, request="q5", incarnation=2)
    assert "q5/1" not in found(story)


def test_a_worker_whose_agent_writes_what_cannot_be_read_gets_none_until_it_is_trusted(
    story: Story,
) -> None:
    story.tell("w.w0", b"\x92\xabtelepathy/9\x01")
    send(story, late=1)
    assert found(story) == "", "the basis does not know it"
    send(story, request="q2")
    assert "q2/1: sent to w0:1 although its agent wrote what cannot be read" in found(story)
    trust = v.AdminCommanded(command_id="c", principal="alice", command="trust", target="w0")
    story.tell("r.r0", trust)
    send(story, request="q3")
    assert "q3/1" not in found(story)


def test_a_request_goes_back_only_if_no_other_could_take_it(story: Story) -> None:
    send(story)
    story.tell("r.r0", observed(kind="declined"))
    send(story, attempt=2)
    assert "q1/2: sent back to w0:1, which failed it, and w1 could take it" in found(story)


@pytest.mark.parametrize("why", ["dead", "drained", "suspected", "failing", "failed it", "open"])
def test_it_goes_back_if_the_others_could_not(story: Story, why: str) -> None:
    if why == "dead":
        story.tell("w.w1", died("w1"))
    elif why == "drained":
        story.tell("fleet", effect(EffectKind.DRAIN, "w1"))
    elif why == "suspected":
        story.tell("r.r0", observed("q0", worker="w1"))
    elif why == "failing":
        story.tell("r.r0", observed("q0", worker="w1", kind="engine_error"))
    elif why == "failed it":
        send(story, worker="w1")
        story.tell("r.r0", observed(worker="w1", kind="declined"))
    else:
        health = v.HealthDecided(
            worker="w1", incarnation=1, state="unhealthy", failure="errors", evidence="e", since=1
        )
        story.tell("fleet", health)
    send(story, attempt=2)
    story.tell("r.r0", observed(attempt=2, kind="declined"))
    send(story, attempt=3)
    assert found(story) == ""


def test_a_late_decision_about_an_earlier_engine_takes_no_verdict_back(story: Story) -> None:
    """Composed 164411: its engine was dead and started again when the log had the decision."""

    def about(state: str) -> v.HealthDecided:
        return v.HealthDecided(
            worker="w1", incarnation=1, state=state, failure="errors", evidence="e", since=1
        )

    story.tell("fleet", about("unhealthy"))
    story.tell("w.w1", died("w1"), started("w1", 2))
    story.tell("fleet", about("dead"))
    story.tell("w.w1", ready("w1", 2))
    send(story)
    story.tell("r.r0", observed(kind="declined"))
    send(story, attempt=2)
    assert found(story) == ""


def test_a_handover_is_no_failure_and_neither_is_one_at_another_replica(story: Story) -> None:
    story.replica("r1")
    story.tell("r.r0", arrived())
    send(story)
    story.tell("r.r0", observed(kind="moved"))
    send(story, attempt=2)
    story.tell("r.r0", observed(attempt=2, kind="declined"))
    story.tell("r.r1", RETURNED)
    story.tell("r.r1", decided(attempt=3, basis=v.Basis(story.revision, BEYOND)))
    assert found(story) == ""
    story.tell("r.r0", RETURNED)
    send(story, attempt=4)
    assert found(story) == "", "it let go of the request meanwhile"


def test_the_replica_to_which_its_own_client_returns_knows_the_failures(story: Story) -> None:
    """Composed seed 9249: both workers had failed the request, and it went back to one."""
    story.tell("r.r0", arrived())
    send(story, worker="w1")
    story.tell("r.r0", observed(worker="w1", kind="declined"))
    send(story, attempt=2)
    story.tell("r.r0", RETURNED, observed(attempt=2, kind="detached"))
    send(story, attempt=3)
    assert found(story) == ""


def test_it_does_not_go_back_after_the_return_if_another_could_take_it(story: Story) -> None:
    story.tell("r.r0", arrived())
    send(story)
    story.tell("r.r0", observed(kind="declined"), RETURNED)
    send(story, attempt=2)
    assert "q1/2: sent back to w0:1, which failed it, and w1 could take it" in found(story)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_refused_trust_acknowledges_no_unreadable_record(story: Story, is_refused: bool) -> None:
    """It waited for the log in its replica's spool."""
    story.tell("fleet", v.SegmentSkipped(stream="w.w0", segment=1, after=0, reason="damaged"))
    trust = v.AdminCommanded(command_id="c", principal="o", command=AdminCommand.TRUST, target="w0")
    story.tell("r.r0", trust, arrived())
    if is_refused:
        story.tell("fleet", v.ConfigChanged("", "it waited for the log", "c"))
    send(story)
    assert ("its agent wrote what cannot be read" in found(story)) is is_refused
