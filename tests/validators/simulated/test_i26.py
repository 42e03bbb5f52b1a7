"""I26: each mechanism that was not seen is named."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.service.i26_lost_speed import check
from relume.chaos.validators.strikes import THE_LOG, Strike
from relume.controlplane.replica.death_notices import SEEN_DEAD
from relume.events import vocabulary as v
from tests.policies.story import (
    MODEL,
    Story,
    arrived,
    decided,
    died,
    ended,
    engine_step,
    finished,
    queued,
)
from tests.validators.builders import chosen, daemon, held, short

KILLED = Strike(what="engine-kill", targets=frozenset(("w0",)), since_ms=10_000, until_ms=10_000)
AWAY = Strike(what="etcd-stop", targets=frozenset((THE_LOG,)), since_ms=9000, until_ms=12_000)


def found(log: Story, *strikes: Strike, **more: Any) -> str:
    return "; ".join(map(str, check(log.groups, [], strikes, **more)))


# --- deaths


def death(noticed_ms: int | None) -> Story:
    """The engine of w0 is killed after 10 s, and r0 suspects it then."""
    log = short()
    log.at_ms = 10_010
    log.tell("w.w0", died())
    if noticed_ms is not None:
        log.at_ms = noticed_ms
        log.tell("r.r0", v.WorkerSuspected("w0", 1, "its agent saw it die"))
    return log


def test_a_death_that_is_noticed_late_is_named() -> None:
    assert "r.r0 suspected it after 1500 ms" in found(death(11_500), KILLED)
    assert "r.r0 suspected it never" in found(death(None), KILLED)


def test_a_late_writer_of_suspicions_may_be_as_late_as_it_is() -> None:
    """Composed 150955."""
    assert found(death(11_500), KILLED, late_ms={"r.r0": 500}) == ""
    assert "after 1500 ms" in found(death(11_500), KILLED, late_ms={"r.r0": 499, "r.r1": 900})


def test_one_noticed_at_once_is_not() -> None:
    assert found(death(10_020), KILLED) == ""


def test_nothing_is_asked_while_the_log_is_away() -> None:
    assert found(death(None), KILLED, AWAY) == ""


def test_a_replica_that_is_as_young_as_the_kill_is_not_asked() -> None:
    log = death(None)
    log.at_ms = 9000
    log.tell("r.r1", v.ReplicaStarted(replica="r1", boot="b", host="", port=1, pid=1))
    assert "r.r1" not in found(log, KILLED)


def believed(at_ms: int, *, is_dead: bool = False) -> Story:
    """r0 suspects the engine of w0 by a notice after 10 s, and it reports a step then."""
    log = short()
    log.at_ms = 10_000
    log.tell("r.r0", v.WorkerSuspected("w0", 1, SEEN_DEAD))
    log.at_ms = at_ms
    log.tell("w.w0", engine_step())
    if is_dead:
        log.tell("w.w0", died())
    return log


def test_a_notice_that_is_believed_though_the_engine_lives_is_named() -> None:
    """Also in a real run, whose faults are not all known."""
    lie = "its engine 1 did not die; r.r0 believed a notice that it had"
    assert lie in found(believed(12_000))
    assert lie in str(check(believed(12_000).groups, []))


def test_what_an_engine_reported_before_it_died_is_no_sign_of_life() -> None:
    assert found(believed(10_900)) == found(believed(12_000, is_dead=True)) == ""


def test_an_absurd_notice_is_no_reason_to_notice_a_death_late() -> None:
    absurd = replace(KILLED, what="notice-absurd", since_ms=6000, until_ms=6000)
    assert "r.r0 suspected it never" in found(death(None), KILLED, absurd)
    stopped = replace(absurd, what="agent-stop")
    assert found(death(None), KILLED, stopped) == ""


# --- restores


def lost_streams(
    count: int, restored: int, covered: int = 96, us: int = 200_000, over: bool = False
) -> Story:
    """So many streams of w0, whose blocks w1 holds, continue on w2, which restores some of them. `over`:
    the leader ended them before, since it had declared their replica lost."""
    log = short()
    log.worker("w2")
    log.tell("w.w1", daemon("w1", 1 << 20))
    step = replace(engine_step(us=us), sum_context=0, prefill_tokens=1000)
    log.tell("w.w2", step)
    for number in range(count):
        name = f"s{number}"
        log.tell("r.r0", arrived(name), decided(name), chosen(name, "w1"))
        log.tell("w.w1", held("w1", name, covered))
        if over:
            log.tell("fleet", ended(name, "failed"))
        again = decided(name, 2, "w2", delivered=8, basis=v.Basis(log.revision, 0))
        log.tell("r.r0", replace(again, mode="continue", cause="engine_dead"))
        log.tell("w.w2", engine_step(queued(name, 2)))
        if number < restored:
            log.tell(
                "w.w2",
                v.RestoreStarted(
                    incarnation=1, request=name, child=0, attempt=2, holder="w1", tokens=covered
                ),
            )
    return log


def test_blocks_that_no_engine_restores_are_named() -> None:
    assert "6 of 6 streams were not restored" in found(lost_streams(6, 0))
    assert "4 of 6 streams were not restored" in found(lost_streams(6, 2))


def test_half_of_them_may_have_a_reason() -> None:
    assert found(lost_streams(6, 3)) == ""
    assert found(lost_streams(3, 0)) == ""


def test_what_the_leader_had_ended_need_not_be_restored() -> None:
    """Composed 189201: a replica stood still for 18 s, and continued its streams then."""
    assert found(lost_streams(6, 0, over=True)) == ""


def test_what_is_not_worth_it_need_not_be_restored() -> None:
    assert found(lost_streams(6, 0, covered=32)) == ""  # too little of it
    assert found(lost_streams(6, 0, us=5000)) == ""  # computed as soon as moved


def test_a_fault_of_the_holder_is_a_reason() -> None:
    cut = Strike(what="cut", targets=frozenset(("w1",)), since_ms=0, until_ms=1000)
    assert found(lost_streams(6, 0), cut) == ""


@pytest.mark.parametrize(("before_ms", "is_fine"), [(2, True), (400, False)])
def test_an_engine_may_die_before_its_dispatch_is_written(before_ms: int, is_fine: bool) -> None:
    """Composed 173691: the replica did not know it yet."""
    died_ms = -before_ms
    killed = Strike(
        what="engine-kill", targets=frozenset(("w2",)), since_ms=died_ms, until_ms=died_ms
    )
    assert (found(lost_streams(6, 0), killed) == "") is is_fine


def test_an_engine_that_lost_reports_may_have_restored_them() -> None:
    """Composed 100033."""
    log = lost_streams(6, 0)
    log.tell("w.w1", engine_step(lost=20))
    assert "6 of 6" in found(log), "that is another engine"
    log.tell("w.w2", engine_step(lost=20))
    assert found(log) == ""
    log = lost_streams(6, 0)
    log.tell("w.w2", engine_step(*(finished(f"s{number}", 2) for number in range(6))))
    log.tell("w.w2", engine_step(lost=20))
    assert "6 of 6" in found(log), "what was lost came after them"


def test_blocks_of_an_answer_that_was_generated_whole_are_dropped() -> None:
    """Composed 110042."""
    log = lost_streams(6, 0)
    log.tell("w.w0", engine_step(*(finished(f"s{number}") for number in range(3))))
    assert found(log) == "", "three are left"
    earlier = lost_streams(6, 0)
    earlier.tell("w.w0", engine_step(*(finished(f"s{number}", 0) for number in range(6))))
    assert "6 of 6" in found(earlier), "another attempt has run since"
    aborted = lost_streams(6, 0)
    ends = (v.EngineFinished(f"s{number}", 1, "abort", 8) for number in range(6))
    aborted.tell("w.w0", engine_step(*ends))
    assert "6 of 6" in found(aborted)


# --- holders


def lost_holder(after_ms: int, *then: Any) -> Story:
    """The holder of q1 is lost; something follows after that time."""
    log = short()
    log.tell("w.w1", daemon("w1"))
    log.tell("w.w2", daemon("w2"))
    log.tell("r.r0", chosen("q1", "w1"))
    log.tell("w.w1", v.StateDaemonLost("w1", "b", "killed"))
    log.at_ms += after_ms
    log.tell("r.r0", *then)
    return log


def test_a_request_without_a_holder_for_long_is_named() -> None:
    log = lost_holder(5000, ended())
    assert "its holder w1 was lost, and it had no other for 5000 ms" in found(log)
    assert "no other for 3000 ms" in found(lost_holder(3000, chosen("q1", "w2")))


def test_a_loss_that_lands_late_counts_from_when_the_log_has_it() -> None:
    """Composed 24051: the agent of w1 writes a second late."""
    log = short()
    log.tell("w.w1", daemon("w1"))
    log.tell("w.w2", daemon("w2"))
    log.tell("r.r0", chosen("q1", "w1"))
    written_ms = log.at_ms
    log.at_ms += 1000
    log.tell("r.r0", arrived("q2"))
    log.at_ms = written_ms
    log.tell("w.w1", v.StateDaemonLost("w1", "b", "killed"))
    log.at_ms += 1000
    log.tell("r.r0", chosen("q1", "w2"))
    assert found(log) == ""


@pytest.mark.parametrize(
    ("what", "worker", "fine"),
    [("link-slow", "w1", True), ("holder-kill", "w1", False), ("link-slow", "w2", False)],
)
def test_a_fault_of_the_holder_s_host_may_delay_the_news(
    what: str, worker: str, fine: bool
) -> None:
    """Composed 188372: the agent wrote that its state daemon was dead over a link of 0.5 s."""
    strike = Strike(what=what, targets=frozenset((worker,)), since_ms=0, until_ms=1 << 60)
    assert (found(lost_holder(535, chosen("q1", "w2")), strike) == "") is fine


def test_one_that_gets_another_soon_is_not() -> None:
    assert found(lost_holder(100, chosen("q1", "w2"))) == ""
    assert found(lost_holder(450, ended())) == ""


@pytest.mark.parametrize(("attempt", "is_fine"), [(1, True), (2, False)])
@pytest.mark.parametrize("early", [False, True])
def test_what_its_engine_has_finished_needs_none(attempt: int, is_fine: bool, early: bool) -> None:
    """Composed 130069: the choice landed after the end."""
    log = short()
    log.tell("w.w1", daemon("w1"))
    log.tell("w.w2", daemon("w2"))
    both = [("r.r0", chosen("q1", "w1")), ("w.w0", engine_step(finished("q1", attempt)))]
    for stream, event in reversed(both) if early else both:
        log.tell(stream, event)
    log.tell("w.w1", v.StateDaemonLost("w1", "b", "killed"))
    log.at_ms += 5000
    log.tell("r.r0", ended())
    assert (found(log) == "") is is_fine


@pytest.mark.parametrize(("lost", "is_fine"), [("w0", True), ("w2", False)])
def test_nothing_is_due_while_the_log_has_lost_its_worker(lost: str, is_fine: bool) -> None:
    """Composed 162144: its agent was cut from etcd, and its engine's last report came much later."""
    log = short()
    log.tell("w.w1", daemon("w1"))
    log.tell("w.w2", daemon("w2"))
    log.tell("r.r0", chosen("q1", "w1"))
    log.tell("fleet", v.WorkerLost(lost, 1, "lease lapsed"))
    log.tell("w.w1", v.StateDaemonLost("w1", "b", "killed"))
    log.at_ms += 5000
    log.tell("r.r0", ended())
    assert (found(log) == "") is is_fine


@pytest.mark.parametrize(
    ("after_ms", "struck", "is_fine"), [(400, "", True), (5000, "", False), (5000, "w0", True)]
)
def test_one_that_ran_long_without_is_named_though_its_engine_finished_it(
    after_ms: int, struck: str, is_fine: bool
) -> None:
    """The reports of an engine that a fault struck may come late."""
    log = lost_holder(after_ms, arrived("q2"))
    log.tell("w.w0", engine_step(finished()))
    log.at_ms += 5000
    log.tell("r.r0", ended())
    strike = Strike(what="cut", targets=frozenset((struck,)), since_ms=0, until_ms=4000)
    says = found(log, strike)
    assert (says == "") is is_fine
    assert is_fine or f"no other for {after_ms} ms" in says


@pytest.mark.parametrize(("holder", "is_fine"), [("w1", True), ("w2", False)])
def test_a_holder_whose_host_has_a_new_daemon_need_not_be_replaced(
    holder: str, is_fine: bool
) -> None:
    """Composed 120726: it came with the same transaction, and is offered the blocks again."""
    log = short()
    log.tell("w.w1", daemon("w1"))
    log.tell("w.w2", daemon("w2"))
    log.tell("r.r0", chosen("q1", "w1"))
    log.tell("w.w1", v.StateDaemonLost("w1", "b", "killed"))
    log.tell(f"w.{holder}", replace(daemon(holder), boot="b2"))
    log.at_ms += 5000
    log.tell("r.r0", ended())
    assert (found(log) == "") is is_fine


def test_a_late_writer_may_be_as_late_as_it_is() -> None:
    """Composed 90185: the choice had the time of its segment, 1.2 s after it was made."""
    log = lost_holder(1200, chosen("q1", "w2"))
    assert found(log, late_ms={"r.r0": 1200}) == ""
    assert "no other for 1200 ms" in found(log, late_ms={"r.r0": 600})
    assert "no other for 1200 ms" in found(log, late_ms={"r.r1": 1200})


def test_none_is_asked_for_where_no_daemon_is_left() -> None:
    log = short()
    log.tell("w.w1", daemon("w1"))
    log.tell("r.r0", chosen("q1", "w1"))
    log.tell("w.w1", v.StateDaemonLost("w1", "b", "killed"))
    log.at_ms += 5000
    log.tell("r.r0", ended())
    assert found(log) == ""


def test_its_replica_may_have_been_struck() -> None:
    stopped = Strike(what="leader-stop", targets=frozenset(("r0",)), since_ms=0, until_ms=4000)
    assert found(lost_holder(5000, ended()), stopped) == ""


def test_a_real_run_is_not_asked() -> None:
    assert check(lost_holder(5000, ended()).groups, []) == []


# --- tenants


def waits(name: str, tenant: str, tokens: int = 500, tier: str = "standard") -> v.RequestHeld:
    return v.RequestHeld(
        decision=f"d{name}", basis=v.Basis(0, 0), request=name, at_us=0, cause="saturated",
        model=MODEL, tier=tier, tenant=tenant, tokens=tokens, size=9, until_us=1 << 40,
        deadline_us=0, ahead_requests=0, ahead_tokens=0, predicted_us=-1, depth=1,
    )  # fmt: skip


def queue(order: str, tier: str = "standard") -> Story:
    """Requests of `many` and one of `few` wait. They leave in this order, by first letters."""
    log = short()
    names = [f"{tenant}{number}" for number, tenant in enumerate(order)]
    tenants = {"m": "many", "f": "few"}
    log.tell("r.r0", waits("f_first", "few", tier=tier))
    log.tell("r.r0", *(waits(name, tenants[name[0]]) for name in names))
    log.tell("r.r0", *(decided(name) for name in names))
    return log


def test_a_tenant_that_is_passed_over_is_named() -> None:
    said = found(queue("m" * 12))
    assert "I26 few: a request of few waited while many had" in said


def test_turns_are_not_named() -> None:
    assert found(queue("mf" * 12)) == ""
    assert found(queue("m" * 6)) == ""


def test_a_lower_tier_may_wait() -> None:
    assert found(queue("m" * 12, tier="batch")) == ""
