"""Workers that left for good are forgotten, and nobody else."""

import pytest
from msgspec import structs

from relume.events import vocabulary as v
from relume.events.wire.prefix import pack
from relume.policies.leader.duties import step
from relume.policies.state.lifecycles.departed_workers import FORGET_TICKS, REMEMBER_TICKS, due
from relume.policies.state.prefix_cache import index_of
from tests.policies.story import Story, decided, died, ready, started


def left(story: Story, name: str = "w0", word: bool = True) -> None:
    """The worker leaves; without a word its host is lost."""
    if word:
        story.tell(f"w.{name}", died(name, 1), v.WorkerDeregistered(name, "agent stopped"))
    story.lapse(f"w.{name}")
    if not word:
        story.tell("fleet", v.WorkerLost(name, story.epochs[f"w.{name}"], "lease lapsed"))


@pytest.fixture
def story() -> Story:
    told = Story()
    told.leader()
    told.replica("r0")
    told.worker("w0")
    told.worker("w1")
    told.healthy_ticks(10)
    return told


def owed_after(story: Story, ticks: int) -> list[v.WorkerForgotten]:
    event = v.Tick(story.fleet.tick + ticks, 1)
    return [e for e in step(story.fleet, event) if type(e) is v.WorkerForgotten]


def test_who_left_is_forgotten_after_a_while_and_not_before(story: Story) -> None:
    left(story)
    gone = v.WorkerForgotten("w0", story.epochs["w.w0"])
    assert owed_after(story, FORGET_TICKS - 1) == []
    assert owed_after(story, FORGET_TICKS) == [gone]
    story.tell("fleet", gone)
    assert list(story.fleet.workers) == ["w1"]
    assert "w.w0" not in story.fleet.gone
    assert owed_after(story, 10 * REMEMBER_TICKS) == []


@pytest.mark.parametrize("why", ["silent", "drained"])
def test_a_worker_that_may_continue_is_kept_longer(story: Story, why: str) -> None:
    if why == "drained":
        effect = v.Effect("drain", "w0")
        story.tell(
            "fleet",
            v.EffectsDecided(
                decision="d1", basis=v.Basis(story.revision, 0), cause="ops", effects=(effect,)
            ),
        )
    left(story, word=why != "silent")
    assert owed_after(story, REMEMBER_TICKS - 1) == []
    assert len(owed_after(story, REMEMBER_TICKS)) == 1


def test_no_present_or_returned_worker_is_removed(story: Story) -> None:
    assert due(story.fleet, 10 * REMEMBER_TICKS) == []
    left(story)
    said = v.WorkerForgotten("w0", story.epochs["w.w0"])
    story.own("w.w0")
    story.tell(
        "w.w0",
        v.WorkerRegistered(worker="w0", domain="host", agent_pid=8),
        started("w0", 2),
        ready("w0", 2),
    )
    story.tell("fleet", said)  # was on its way
    assert story.fleet.workers["w0"].engine == "ready"
    assert owed_after(story, REMEMBER_TICKS) == []


def test_nothing_stays_under_its_name_and_its_bit_is_free(story: Story) -> None:
    told = structs.replace(ready("w0", 1), step_tokens=64)
    marks = pack([1, 2, 3])
    story.tell(
        "w.w0",
        told,
        v.PrefixBlocksChanged(
            incarnation=1, stored=marks, removed=b"", reset=True, block_tokens=16
        ),
    )
    story.tell("r.r0", v.WorkerSuspected("w0", 1, "silent"), decided())
    index = index_of(story.fleet)
    assert index.masks
    left(story)
    effect = v.Effect("restart", "w0")
    story.tell(
        "fleet",
        v.EffectsDecided(
            decision="d1", basis=v.Basis(story.revision, 0), cause="ops", effects=(effect,)
        ),
    )
    story.tell("fleet", v.WorkerForgotten("w0", story.epochs["w.w0"]))
    fleet = story.fleet
    assert not index.masks and "w0" not in index.names and not index.counts
    assert not fleet.replicas["r0"].suspects and not fleet.pending_effects
    assert index.bit("w7") == 1, "the bit is another's"


def test_a_removed_worker_starts_over_under_its_name(story: Story) -> None:
    left(story)
    story.tell("fleet", v.WorkerForgotten("w0", story.epochs["w.w0"]))
    story.own("w.w0")
    story.tell(
        "w.w0",
        v.WorkerRegistered(worker="w0", domain="host", agent_pid=8),
        started("w0", 5),
        ready("w0", 5),
    )
    worker = story.fleet.workers["w0"]
    assert (worker.incarnation, worker.engine, worker.present) == (5, "ready", True)
