"""What the leader owes."""

from __future__ import annotations

from typing import Any

from relume.events import vocabulary as v
from relume.policies.leader.duties import GONE_TICKS, HEALTHY_TICKS, step
from relume.policies.state.fleet import Fleet, Replica
from relume.policies.state.fold import fold
from tests.policies.story import Story, arrived, decided, ended, replica_started


def led() -> Story:
    """A worker, two replicas with an open request each, r1 leading, a healthy log."""
    story = Story()
    story.worker()
    for name in ("r0", "r1"):
        story.replica(name)
        story.tell(f"r.{name}", arrived(f"q-{name}"), decided(f"q-{name}"))
    story.leader("r1")
    story.healthy_ticks(HEALTHY_TICKS + 1)
    return story


def owed(story: Story, stream: str, event: Any) -> list[Any]:
    """What the leader owes when `event` has been folded."""
    story.tell(stream, event)
    return step(story.fleet, event)


def tick(story: Story) -> list[Any]:
    story.healthy_ticks(1)
    return step(story.fleet, story.seen[-1])


def test_missing_lease_is_a_loss_after_some_ticks() -> None:
    story = led()
    epoch = story.fleet.workers["w0"].epoch
    story.lapse("w.w0")
    for _ in range(GONE_TICKS - 1):
        assert tick(story) == []
    assert tick(story) == [v.WorkerLost("w0", epoch, "lease lapsed")]
    assert tick(story) != [], "owed until it is in the log"
    story.tell("fleet", v.WorkerLost("w0", epoch, "lease lapsed"))
    assert tick(story) == []


def test_lease_lost_during_an_outage_is_not_a_loss() -> None:
    """Leases lapse while the log stands still; nothing is declared for one TTL after."""
    story = led()
    number = story.fleet.tick + 1
    late = v.Tick(number, story.fleet.tick_unix_ms + 15_000)
    story.lapse("w.w0")
    assert owed(story, "fleet", late) == []
    for extra in range(1, HEALTHY_TICKS):
        again = v.Tick(number + extra, late.unix_ms + 1000 * extra)
        assert owed(story, "fleet", again) == []
    story.own("w.w0")
    story.tell("w.w0", v.StreamResumed(1, story.epochs["w.w0"]))
    last = v.Tick(number + HEALTHY_TICKS, late.unix_ms + 1000 * HEALTHY_TICKS)
    assert owed(story, "fleet", last) == []


def test_new_leader_waits_one_ttl_before_it_declares_a_loss() -> None:
    """It has not seen whether the log was healthy before."""
    story = led()
    story.lapse("w.w0")
    story.own("fleet")
    story.tell("fleet", v.LeaderElected("r0", "b1"))
    for _ in range(HEALTHY_TICKS - 1):
        assert tick(story) == []
    assert [type(e) for e in tick(story)] == [v.WorkerLost]


def test_ticks_that_a_leader_kept_through_an_outage_prove_no_health() -> None:
    """It lands them when it has its stream again, and by then all leases have lapsed."""
    story = led()
    story.lapse("w.w0")
    story.lapse("fleet")
    story.own("fleet")
    for _ in range(HEALTHY_TICKS - 1):
        assert tick(story) == []
    assert [type(e) for e in tick(story)] == [v.WorkerLost]


def test_clock_that_jumps_back_counts_as_an_outage() -> None:
    story = led()
    story.lapse("w.w0")
    before = story.fleet.tick_unix_ms
    assert owed(story, "fleet", v.Tick(story.fleet.tick + 1, before - 60_000)) == []
    assert story.fleet.healthy_since_tick == story.fleet.tick


def test_worker_gone_before_anyone_looked_is_missed_too() -> None:
    """A control plane that starts later reads no deletion of the owner key."""
    story = led()
    del story.fleet.owners["w.w0"]
    assert tick(story) == []
    for _ in range(GONE_TICKS - 1):
        assert tick(story) == []
    assert [type(e) for e in tick(story)] == [v.WorkerLost]


def test_lost_replica_leaves_orphans_that_end_once() -> None:
    story = led()
    lost = v.ReplicaLost("r0", story.epochs["r.r0"])
    first = owed(story, "fleet", lost)
    assert [(e.request, e.outcome) for e in first] == [("q-r0", "failed")]
    assert owed(story, "fleet", lost) == []
    assert owed(story, "r.r0", replica_started("r0", "b2")) == []
    story.tell("fleet", *first)
    assert list(story.fleet.requests) == ["q-r1"]


def test_loss_of_an_older_life_is_ignored() -> None:
    story = led()
    old = story.epochs["r.r0"]
    story.own("r.r0")
    story.tell("r.r0", v.StreamResumed(old, story.epochs["r.r0"]))
    assert owed(story, "fleet", v.ReplicaLost("r0", old)) == []
    assert story.fleet.replicas["r0"].alive


def test_new_life_of_a_replica_orphans_the_requests_of_the_old() -> None:
    story = led()
    orphans = owed(story, "r.r0", replica_started("r0", "b2"))
    assert [e.request for e in orphans] == ["q-r0"]
    assert orphans[0].detail


def test_replica_that_stops_with_open_requests_orphans_them() -> None:
    story = led()
    assert [e.request for e in owed(story, "r.r0", v.ReplicaStopped("r0", "stop"))] == ["q-r0"]


def test_new_leader_takes_up_what_the_old_left_undone() -> None:
    story = led()
    story.tell("fleet", v.ReplicaLost("r0", story.epochs["r.r0"]))
    story.tell(
        "r.r1", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    story.own("fleet")
    out = owed(story, "fleet", v.LeaderElected("r1", "b1"))
    assert [type(e) for e in out] == [v.RequestEnded, v.EffectsDecided]
    story.tell("fleet", *out)
    story.own("fleet")
    assert owed(story, "fleet", v.LeaderElected("r1", "b1")) == []


def test_ended_requests_are_no_orphans() -> None:
    story = led()
    story.tell("r.r0", ended("q-r0"))
    assert owed(story, "fleet", v.ReplicaLost("r0", story.epochs["r.r0"])) == []


def test_command_becomes_effects_once() -> None:
    story = led()
    command = v.AdminCommanded(
        command_id="c1", principal="root", command="restart", target="w0", value="now"
    )
    (decided_,) = owed(story, "r.r1", command)
    assert decided_.effects == (v.Effect("restart", "w0", 1, "now"),)
    assert decided_.basis.revision == story.revision
    assert "root" in decided_.cause
    assert owed(story, "r.r1", command) == [], "a resend before the answer landed"
    story.tell("fleet", decided_)
    assert owed(story, "r.r1", command) == []


def test_setting_is_changed_or_refused_with_the_reason() -> None:
    story = led()
    good = v.AdminCommanded(
        command_id="c1", principal="root", command="config", target="stall.cap_us", value="5000000"
    )
    assert owed(story, "r.r1", good) == [v.ConfigChanged("stall.cap_us", "5000000", "c1")]
    for key in ("waiting.queued", "routing.overfill"):
        odd = v.AdminCommanded(
            command_id=f"c{key}", principal="root", command="config", target=key, value="soon"
        )
        story.tell("r.r1", odd)
        (answer,) = step(story.fleet, odd)
        assert (answer.key, answer.value[: len(key)]) == ("", key)
    bad = v.AdminCommanded(
        command_id="c2", principal="root", command="config", target="stall.cap_us", value="soon"
    )
    (refused,) = owed(story, "r.r1", bad)
    assert (refused.key, refused.decision) == ("", "c2")
    nobody = v.AdminCommanded(command_id="c3", principal="root", command="drain", target="w7")
    (refused,) = owed(story, "r.r1", nobody)
    assert "w7" in refused.value


def test_a_leader_asked_to_resign_answers_once_and_steps_down_only_for_another():
    fleet = Fleet(leader="r0")
    fleet.replicas["r0"] = Replica(name="r0", alive=True)
    asked = v.AdminCommanded(command_id="ada:1", principal="ada", command="resign", target="leader")
    fold(fleet, "r.r0", 1, asked)
    (refused,) = step(fleet, asked)
    assert refused == v.ConfigChanged("", "no other replica is there to lead", "ada:1")
    fleet.replicas["r1"] = Replica(name="r1", alive=True)
    decided, resigned = step(fleet, asked)
    assert (decided.decision, decided.effects) == ("ada:1", ())
    assert resigned == v.LeaderResigned("r0", "asked by ada")
    fold(fleet, "fleet", 2, decided)
    assert step(fleet, asked) == []


def test_an_election_answers_who_asked_the_leader_before_to_resign():
    fleet = Fleet(leader="r0")
    for name in ("r0", "r1"):
        fleet.replicas[name] = Replica(name=name, alive=True)
    fold(
        fleet,
        "r.r0",
        1,
        v.AdminCommanded(command_id="ada:1", principal="ada", command="resign", target="leader"),
    )
    elected = v.LeaderElected("r1", "b")
    fold(fleet, "fleet", 3, elected)
    (decided,) = step(fleet, elected)
    assert type(decided) is v.EffectsDecided and decided.decision == "ada:1"
