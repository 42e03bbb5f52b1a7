"""I15 and I16: each effect is applied once, and each change by an operator is in the log."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.log import i16_admin_logged
from relume.chaos.validators.promises.workers import i15_effects_once
from relume.events import vocabulary as v
from tests.policies.story import Story, replica_started
from tests.validators.builders import about


def commanded() -> Story:
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    effects = (v.Effect("drain", "w0"),)
    story.tell(
        "fleet",
        v.EffectsDecided(
            decision="c1", basis=v.Basis(1, 0), cause="root: drain w0", effects=effects
        ),
    )
    story.tell("w.w0", v.EffectApplied("c1", 0))
    return story


# --- I15


def test_i15_finds_a_second_application() -> None:
    story = commanded()
    assert i15_effects_once.check(story.groups, []) == []
    story.tell("w.w0", v.EffectApplied("c1", 0, "already so"))
    assert i15_effects_once.check(story.groups, []) == []
    story.tell("w.w0", v.EffectApplied("c1", 0))
    assert "2 times" in about(i15_effects_once.check(story.groups, []))


def test_i15_finds_an_application_by_another_worker_or_undecided() -> None:
    story = commanded()
    story.tell("w.w1", v.EffectApplied("c1", 0, "already so"))
    assert "w.w1 applied it" in about(i15_effects_once.check(story.groups, []))
    story = commanded()
    story.tell("w.w0", v.EffectApplied("c9", 0))
    assert "undecided" in about(i15_effects_once.check(story.groups, []))


def test_i15_finds_one_decision_with_two_contents() -> None:
    story = commanded()
    effects = (v.Effect("restart", "w0"),)
    story.tell(
        "fleet", v.EffectsDecided(decision="c1", basis=v.Basis(1, 0), cause="root", effects=effects)
    )
    assert "differently" in about(i15_effects_once.check(story.groups, []))


# --- I16


def test_i16_finds_what_is_missing_or_too_much() -> None:
    story = commanded()
    assert i16_admin_logged.check(story.groups, [], [("c1", "root")]) == []
    assert "not in the log" in about(i16_admin_logged.check(story.groups, [], [("c2", "root")]))
    assert "eve's" in about(i16_admin_logged.check(story.groups, [], [("c1", "eve")]))
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    assert i16_admin_logged.check(story.groups, []) == [], "a resend is no change"
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w1")
    )
    assert "another command" in about(i16_admin_logged.check(story.groups, []))
    story = commanded()
    story.tell("fleet", v.ConfigChanged("stall.cap_us", "5", "c1"))
    assert "carried out 2 times" in about(i16_admin_logged.check(story.groups, []))
    story = commanded()
    story.tell("fleet", v.ConfigChanged("stall.cap_us", "5"))
    assert "without a command" in about(i16_admin_logged.check(story.groups, []))
    story = commanded()
    story.tell(
        "r.r0",
        v.AdminCommanded(
            command_id="c2", principal="", command="config", target="stall.cap_us", value="7"
        ),
    )
    found = about(i16_admin_logged.check(story.groups, []))
    assert "no principal" in found
    assert "carried out 0 times" in found


@pytest.mark.parametrize("elected", [True, False])
def test_i16_lets_a_new_leader_answer_a_late_command_to_resign(elected: bool) -> None:
    """Composed 185673: no leader is left that it is addressed to."""
    story, settings = commanded(), (("version.leader", "3"),)
    story.tell("r.r0", replica_started("r0", "b2", settings=settings))
    story.own("r.r0")
    resign = v.AdminCommanded(
        command_id="c2", principal="root", command="resign", target="w1", value=""
    )
    story.tell("r.r0", resign)
    if elected:
        story.leader("r0")
    basis = v.Basis(story.revision, 0)
    answer = v.EffectsDecided(decision="c2", basis=basis, cause="root: resign w1", effects=())
    story.tell("fleet", answer)
    assert (i16_admin_logged.check(story.groups, []) == []) is elected


@pytest.mark.parametrize("version", ["2", "3"])
@pytest.mark.parametrize("where", ["spool", "afterwards", "next life"])
def test_i16_finds_a_command_that_waited_for_the_log_and_was_carried_out(
    version: str, where: str
) -> None:
    story, settings = commanded(), (("version.leader", version),)
    before = story.epochs["r.r0"]
    story.tell("r.r0", replica_started("r0", "b2", settings=settings))
    epoch = story.own("r.r0")
    if where == "afterwards":
        story.tell("r.r0", v.StreamResumed(before, epoch, 0))
    elif where == "next life":
        story.tell("r.r0", replica_started("r0", "b3", settings=settings))
    config = v.AdminCommanded(
        command_id="c2", principal="root", command="config", target="stall.cap_us", value="7"
    )
    story.tell("r.r0", config, replace(config, command_id="c3"))
    story.tell("fleet", v.ConfigChanged("stall.cap_us", "7", "c2"), v.ConfigChanged("", "", "c3"))
    found = i16_admin_logged.check(story.groups, [])
    is_late = where == "spool" and version == "3"
    wrong = [("c2", "was carried out although it waited for the log")]
    assert [(x.about, x.detail) for x in found] == wrong * is_late


def test_i16_knows_limits_of_batches_by_their_tick_and_takes_nothing_else_for_one() -> None:
    def decided(decision: str, kind: str) -> str:
        story = commanded()
        story.healthy_ticks(3)
        effects = (v.Effect(kind, "w0", 1, "75"),)
        basis = v.Basis(story.revision, 0)
        story.tell(
            "fleet",
            v.EffectsDecided(decision=decision, basis=basis, cause="a level", effects=effects),
        )
        return "\n".join(map(str, i16_admin_logged.check(story.groups, [])))

    story = commanded()
    story.healthy_ticks(3)
    tick = story.fleet.tick
    assert "without a command" not in decided(f"batch.{tick}", "limit_batch")
    assert "without a command" in decided(f"batch.{tick}", "drain")
    assert "without a command" in decided(f"batch.{tick - 1}", "limit_batch")
