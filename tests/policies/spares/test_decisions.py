"""Which workers the leader makes spares, and when it promotes them."""

from __future__ import annotations

import pytest
from msgspec import UnsetType

from relume.events import vocabulary as v
from relume.policies.degradation import degradation_settings
from relume.policies.degradation.degradation_settings import DegradationConfig
from relume.policies.spares.spare_decisions import LOST_TICKS, PROMOTED_TICKS
from relume.policies.spares.spare_settings import SparesConfig
from tests.policies.spares.spared_fleet import CONFIG, SparedFleet
from tests.policies.story import MODEL, arrived, decided, replica_started


@pytest.mark.parametrize(
    ("workers", "share", "spares"),
    [(3, 10, 0), (4, 10, 1), (4, 0, 0), (19, 10, 1), (20, 10, 2), (40, 5, 2), (4, 50, 2)],
)
def test_a_share_of_the_workers_is_spare_from_four_on(
    workers: int, share: int, spares: int
) -> None:
    fleet = SparedFleet(workers, SparesConfig(share_percent=share, dwell_ticks=3))
    fleet.healthy_ticks(6)
    assert len(fleet.spares()) == spares


def test_without_a_share_the_state_has_no_trace_of_spares() -> None:
    fleet = SparedFleet(8, SparesConfig())
    fleet.healthy_ticks(20)
    fleet.dies("w1")
    fleet.healthy_ticks(2)
    assert fleet.decisions == []
    assert isinstance(fleet.fleet.spares, UnsetType)


def test_a_worker_becomes_a_spare_after_the_dwell_time_only() -> None:
    fleet = SparedFleet()
    fleet.healthy_ticks(3)
    assert fleet.spares() == ()
    fleet.healthy_ticks(1)
    assert fleet.spares() == ("w0",)
    assert fleet.decisions[0].short_ticks == CONFIG.dwell_ticks


def test_the_least_loaded_worker_becomes_the_spare() -> None:
    fleet = SparedFleet()
    for number, worker in enumerate(("w0", "w1", "w3")):
        request = f"q{number}"
        fleet.tell("r.r0", arrived(request), decided(request, worker=worker))
    fleet.healthy_ticks(6)
    assert fleet.spares() == ("w2",)


def test_a_suspect_worker_becomes_no_spare() -> None:
    fleet = SparedFleet()
    health = v.HealthDecided(
        worker="w0", incarnation=1, state="suspect", failure="errors", evidence="", since=0,
    )  # fmt: skip
    fleet.tell("fleet", health)
    fleet.healthy_ticks(6)
    assert fleet.spares() == ("w1",)


def test_spares_are_in_different_failure_domains() -> None:
    domains = ["a", "a", "a", "b", "a", "c", "a", "a"]
    fleet = SparedFleet(8, SparesConfig(share_percent=38, dwell_ticks=1), domains)
    fleet.healthy_ticks(6)
    assert fleet.spares() == ("w0", "w3", "w5")


def test_a_death_promotes_a_spare_before_the_next_tick() -> None:
    fleet = SparedFleet()
    fleet.healthy_ticks(6)
    tick = fleet.fleet.tick
    fleet.dies("w2")
    assert fleet.spares() == () and fleet.fleet.tick == tick
    decision = fleet.decisions[-1]
    assert (decision.was, decision.spares) == (("w0",), ())
    assert (decision.workers, decision.failed, decision.due) == (4, 1, 0)


@pytest.mark.parametrize("cause", ["unhealthy", "quarantined", "lost", "drained"])
def test_whatever_ends_requests_to_a_worker_promotes_a_spare(cause: str) -> None:
    fleet = SparedFleet()
    fleet.healthy_ticks(6)
    if cause == "lost":
        fleet.tell("fleet", v.WorkerLost("w2", fleet.fleet.workers["w2"].epoch, "lease lapsed"))
        fleet.healthy_ticks(1)
    elif cause == "drained":
        fleet.tell(
            "r.r0",
            v.AdminCommanded(command_id="c1", principal="ops", command="drain", target="w2"),
        )
        fleet.healthy_ticks(1)
    else:
        health = v.HealthDecided(
            worker="w2", incarnation=1, state=cause, failure="errors", evidence="", since=5,
        )  # fmt: skip
        fleet.tell("fleet", health)
    assert fleet.spares() == ()
    assert (fleet.decisions[-1].was, fleet.decisions[-1].failed) == (("w0",), 1)


def test_the_worker_that_returns_becomes_the_spare_behind_the_promoted_one() -> None:
    fleet = SparedFleet()
    fleet.healthy_ticks(6)
    fleet.dies("w2")
    fleet.healthy_ticks(20)
    for number, worker in enumerate(("w0", "w1", "w3")):
        request = f"q{number}"
        fleet.tell("r.r0", arrived(request), decided(request, worker=worker))
    assert fleet.spares() == ()
    fleet.returns("w2")
    fleet.healthy_ticks(CONFIG.dwell_ticks)
    assert fleet.spares() == ()
    fleet.healthy_ticks(1)
    assert fleet.spares() == ("w2",)


def test_a_worker_that_fails_again_and_again_changes_no_spares() -> None:
    fleet = SparedFleet()
    fleet.healthy_ticks(6)
    fleet.dies("w2")
    count = len(fleet.decisions)
    for incarnation in range(2, 12):
        fleet.returns("w2", incarnation)
        fleet.healthy_ticks(CONFIG.dwell_ticks - 1)
        fleet.dies("w2", incarnation)
        fleet.healthy_ticks(1)
    assert len(fleet.decisions) == count


def test_a_spare_that_dies_is_replaced_only_when_it_returns() -> None:
    fleet = SparedFleet()
    fleet.healthy_ticks(6)
    fleet.dies("w0")
    assert fleet.spares() == ()
    fleet.healthy_ticks(20)
    assert fleet.spares() == ()
    fleet.returns("w0")
    fleet.healthy_ticks(CONFIG.dwell_ticks + 1)
    assert fleet.spares() == ("w0",)


def test_a_decision_follows_those_that_are_not_folded_yet() -> None:
    """As when etcd returns after an outage: the leader folds much that others wrote meanwhile."""
    fleet = SparedFleet(20)
    fleet.healthy_ticks(6)
    count = len(fleet.decisions)
    fleet.slow = True
    fleet.dies("w5")
    fleet.land()
    fleet.dies("w6")
    fleet.healthy_ticks(1)
    assert fleet.spares() == ("w0", "w1")
    fleet.land()
    fleet.land()
    decisions = fleet.decisions[count:]
    assert [(one.was, one.spares) for one in decisions] == [
        (("w0", "w1"), ("w1",)),
        (("w1",), ()),
    ]
    assert fleet.spares() == () and fleet.divergences() == []


def test_the_next_leader_decides_what_the_last_one_could_not_write() -> None:
    fleet = SparedFleet(20)
    fleet.healthy_ticks(6)
    fleet.slow = True
    fleet.dies("w5")
    fleet.land()
    fleet.slow = False
    fleet.leader("r0", boot="c")
    fleet.healthy_ticks(1)
    assert fleet.spares() == ("w1",)


def test_one_failure_promotes_one_spare_of_two() -> None:
    fleet = SparedFleet(20)
    fleet.healthy_ticks(6)
    assert fleet.spares() == ("w0", "w1")
    fleet.dies("w7")
    assert fleet.spares() == ("w1",)
    fleet.dies("w8")
    assert fleet.spares() == ()


def test_a_spare_that_dies_does_not_take_the_place_of_the_other() -> None:
    fleet = SparedFleet(20)
    fleet.healthy_ticks(6)
    fleet.dies("w1")
    assert fleet.spares() == ("w0",)


def test_a_lost_host_counts_as_failed_for_a_time_and_one_that_left_does_not() -> None:
    fleet = SparedFleet(6)
    fleet.healthy_ticks(6)
    fleet.tell("w.w5", v.WorkerDeregistered("w5", "stopped"))
    fleet.healthy_ticks(3)
    assert fleet.spares() == ("w0",)
    fleet.tell("fleet", v.WorkerLost("w4", fleet.fleet.workers["w4"].epoch, "lease lapsed"))
    fleet.healthy_ticks(LOST_TICKS - 1)
    assert fleet.spares() == ()
    fleet.healthy_ticks(CONFIG.dwell_ticks + 1)
    assert fleet.spares() == ("w0",)
    assert fleet.decisions[-1].workers == 4


def test_spares_are_per_model() -> None:
    fleet = SparedFleet(4)
    for number in range(4):
        fleet.register(f"x{number}", "host of x", model="other")
    fleet.healthy_ticks(6)
    assert (fleet.spares(), fleet.spares("other")) == (("w0",), ("x0",))
    fleet.dies("x2")
    assert (fleet.spares(), fleet.spares("other")) == (("w0",), ())


def test_no_spare_is_due_while_a_level_limits_requests() -> None:
    levels = degradation_settings.settings_of(DegradationConfig(mode="on"))
    fleet = SparedFleet(settings=levels)
    fleet.healthy_ticks(6)
    fleet.tell("fleet", v.DegradationDecided(model=MODEL, level=1, was=0, since=6, due_ticks=3))
    fleet.healthy_ticks(1)
    assert fleet.spares() == ()
    assert (fleet.decisions[-1].failed, fleet.decisions[-1].due) == (0, 0)


def test_a_share_of_zero_promotes_all_and_clears_the_state() -> None:
    fleet = SparedFleet()
    fleet.healthy_ticks(6)
    fleet.tell("fleet", v.ConfigChanged("spares.share_percent", "0"))
    fleet.healthy_ticks(2)
    assert fleet.spares() == () and not isinstance(fleet.fleet.spares, dict)
    assert fleet.decisions[-1].due == 0


def test_a_replica_of_an_earlier_build_ends_decisions() -> None:
    fleet = SparedFleet()
    fleet.tell("r.r1", replica_started("r1"))
    fleet.healthy_ticks(20)
    assert fleet.decisions == []


def test_promotions_are_remembered_for_a_time() -> None:
    fleet = SparedFleet()
    fleet.healthy_ticks(6)
    fleet.dies("w2")
    known = fleet.fleet.spares
    assert isinstance(known, dict)
    assert known[MODEL].promoted == {"w0": fleet.fleet.tick}
    fleet.healthy_ticks(PROMOTED_TICKS)
    assert known[MODEL].promoted == {}


def test_replay_takes_each_decision_again_with_all_its_fields() -> None:
    fleet = SparedFleet(20)
    fleet.healthy_ticks(6)
    fleet.dies("w3")
    fleet.healthy_ticks(4)
    fleet.returns("w3")
    fleet.healthy_ticks(6)
    assert len(fleet.decisions) == 3
    assert fleet.divergences() == []
