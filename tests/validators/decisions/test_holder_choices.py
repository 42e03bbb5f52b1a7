"""I8, about choices of holders: each is up, has room, and is elsewhere."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.workers import i8_budget
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind
from tests.policies.story import Story, arrived, ended
from tests.validators.builders import chosen, daemon, held


@pytest.fixture
def story() -> Story:
    """w0 and w1 in domain a, w2 and w3 in b and c; each with a daemon."""
    story = Story()
    for name, domain in (("w0", "a"), ("w1", "a"), ("w2", "b"), ("w3", "c")):
        registered = v.WorkerRegistered(worker=name, domain=domain, agent_pid=1)
        story.tell(f"w.{name}", registered, daemon(name))
    story.replica()
    story.leader()
    return story


def found(story: Story) -> str:
    return "\n".join(map(str, i8_budget.check(story.groups, [])))


def choose(story: Story, holder: str, request: str = "q1", late: int = 0) -> None:
    story.tell("r.r0", chosen(request, holder, revision=story.revision - late))


def drain(*workers: str) -> v.EffectsDecided:
    effects = tuple(v.Effect(EffectKind.DRAIN, name) for name in workers)
    return v.EffectsDecided(decision="c", basis=v.Basis(0, 0), cause="an operator", effects=effects)


LOSSES: dict[str, tuple[str, v.Event]] = {
    "its daemon died": ("w.w2", v.StateDaemonLost("w2", "b", "killed")),
    "its host drains": ("fleet", drain("w2")),
    "its host left": ("w.w2", v.WorkerDeregistered("w2", "stopped")),
    "its host is lost": ("fleet", v.WorkerLost("w2", 0, "lease lapsed")),
}


@pytest.mark.parametrize("why", LOSSES)
def test_a_holder_is_up(story: Story, why: str) -> None:
    stream, event = LOSSES[why]
    if type(event) is v.WorkerLost:
        event = replace(event, epoch=story.epochs["w.w2"])
    story.tell(stream, event)
    choose(story, "w2", late=1)
    assert found(story) == "", "the basis does not know it"
    choose(story, "w2")
    assert "I8 q1: w2 is chosen as holder and is not up" in found(story)


def test_a_holder_whose_host_comes_back_counts_when_its_daemon_does(story: Story) -> None:
    story.tell("fleet", v.WorkerLost("w2", story.epochs["w.w2"], "lease lapsed"))
    story.tell("w.w2", v.StreamResumed(1, 2))
    choose(story, "w2")
    assert len(found(story).splitlines()) == 1
    story.tell("w.w2", daemon("w2"))
    choose(story, "w2")
    assert len(found(story).splitlines()) == 1


def test_hosts_elsewhere_that_drain_are_no_alternative(story: Story) -> None:
    story.tell("fleet", drain("w2"))
    choose(story, "w1", "q1")
    assert "q1: w1 is in the failure domain of w0; w3 was up" in found(story)
    story.tell("fleet", drain("w3"))
    choose(story, "w1", "q2")
    assert "q2" not in found(story)


def test_that_the_others_are_full_is_no_reason(story: Story) -> None:
    for name in ("w2", "w3"):
        story.tell(f"w.{name}", held(name, "q0", 96))
    choose(story, "w1")
    assert "q1: w1 is in the failure domain of w0; w2, w3 was up" in found(story)


def test_a_new_holder_has_room(story: Story) -> None:
    story.tell("w.w2", held("w2", "q0", 80))
    choose(story, "w2")
    assert found(story) == ""
    story.tell("w.w2", held("w2", "q0", 96))
    choose(story, "w2", "q2")
    assert "q2: w2 gets 80 bytes and has 960 of at most 1000" in found(story)
    choose(story, "w2", "q1")
    assert len(found(story).splitlines()) == 1, "it has a part of q1"


def test_what_other_requests_are_still_to_send_counts(story: Story) -> None:
    story.tell("w.w2", held("w2", "q0", 80))
    story.tell("r.r0", arrived("q1"), arrived("q2"))
    choose(story, "w2", "q1")
    choose(story, "w2", "q2", late=1)
    assert found(story) == ""
    choose(story, "w2", "q3")
    assert "q3: w2 gets 80 bytes and has 960 of at most 1000" in found(story)
    story.tell("w.w2", held("w2", "q1", 8))
    story.tell("r.r0", ended("q2"))
    choose(story, "w2", "q4")
    assert "q4" not in found(story)


def test_a_late_decision_of_an_earlier_attempt_places_nothing(story: Story) -> None:
    """A former owner of q1 wrote it after its successor had placed q1 elsewhere."""
    story.tell("w.w2", held("w2", "q0", 80))
    story.tell("r.r0", *(arrived(name) for name in ("q1", "q2", "q3")))
    later = replace(chosen("q1", "w3", revision=story.revision), attempt=2)
    story.tell("r.r0", later)
    choose(story, "w2", "q1")
    choose(story, "w2", "q2")
    choose(story, "w2", "q3")
    assert found(story) == ""
