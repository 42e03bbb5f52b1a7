"""I18, spares: wrong decisions, promotions that do not come, and requests that spares should not get."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.decisions import i18_sound_dispatch
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Tier
from tests.policies.spares.spared_fleet import CONFIG, SparedFleet
from tests.policies.story import arrived, decided, observed


def found(fleet: SparedFleet) -> str:
    return "\n".join(map(str, i18_sound_dispatch.check(fleet.groups, [])))


@pytest.fixture
def fleet() -> SparedFleet:
    """w0 is the spare of four workers."""
    fleet = SparedFleet()
    fleet.healthy_ticks(CONFIG.dwell_ticks + 1)
    assert fleet.spares() == ("w0",)
    return fleet


def send(fleet: SparedFleet, late: int = 0, **more: Any) -> None:
    """q1 goes to w0, decided on what was known `late` revisions ago."""
    basis = v.Basis(fleet.revision - late, 1 << 30)
    fleet.tell("r.r0", arrived(), replace(decided(basis=basis), **{"tier": Tier.STANDARD, **more}))


def test_promotion_and_return_keep_the_promise(fleet: SparedFleet) -> None:
    fleet.dies("w2")
    fleet.healthy_ticks(5)
    fleet.returns("w2")
    fleet.healthy_ticks(10)
    assert len(fleet.decisions) == 3
    assert found(fleet) == ""


def test_a_lost_host_and_one_that_left_keep_the_promise() -> None:
    fleet = SparedFleet(6)
    fleet.healthy_ticks(6)
    fleet.tell("w.w5", v.WorkerDeregistered("w5", "stopped"))
    fleet.healthy_ticks(3)
    fleet.tell("fleet", v.WorkerLost("w4", fleet.fleet.workers["w4"].epoch, "lease lapsed"))
    fleet.healthy_ticks(620)
    assert [d.spares for d in fleet.decisions] == [("w0",), (), ("w0",)]
    assert found(fleet) == ""


@pytest.mark.parametrize("cause", ["killed", "lost", "drained", "unhealthy"])
def test_a_promotion_that_does_not_come_is_named(fleet: SparedFleet, cause: str) -> None:
    fleet.silent = True
    if cause == "killed":
        fleet.dies("w2")
    elif cause == "lost":
        fleet.tell("fleet", v.WorkerLost("w2", fleet.fleet.workers["w2"].epoch, "lease lapsed"))
    elif cause == "drained":
        fleet.tell(
            "r.r0",
            v.AdminCommanded(command_id="c1", principal="ops", command="drain", target="w2"),
        )
    else:
        health = v.HealthDecided(
            worker="w2", incarnation=1, state=cause, failure="errors", evidence="", since=5,
        )  # fmt: skip
        fleet.tell("fleet", health)
    fleet.healthy_ticks(1)
    assert found(fleet) == ""
    fleet.healthy_ticks(1)
    assert "['w0'] are still spares a tick after at most 0 might be" in found(fleet)


@pytest.mark.parametrize("returned", [True, False])
def test_a_spare_may_be_decided_between_two_ticks_with_a_drained_worker(
    fleet: SparedFleet, returned: bool
) -> None:
    """Composed 182686: an operator drained one worker after another for half a second each."""

    def command(number: int, what: str, target: str) -> None:
        event = v.AdminCommanded(
            command_id=f"c{number}", principal="ops", command=what, target=target
        )
        fleet.tell("r.r0", event)

    command(0, "drain", "w2")
    fleet.healthy_ticks(3)
    assert fleet.spares() == ()
    fleet.silent = True
    if returned:
        command(1, "undrain", "w2")
    last = fleet.decisions[-1]
    fleet.tell(
        "fleet",
        replace(last, spares=("w0",), was=(), failed=0, due=1, short_ticks=3, since=last.since + 3),
    )
    command(2, "drain", "w1")
    fleet.healthy_ticks(1)
    assert ("are still spares" in found(fleet)) is not returned


def test_a_new_leader_has_its_first_tick_to_promote(fleet: SparedFleet) -> None:
    fleet.silent = True
    fleet.dies("w2")
    fleet.leader("r0")
    fleet.healthy_ticks(1)
    assert found(fleet) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"was": ("w1",)}, "was ['w1'], but [] were"),
        ({"due": 2}, "2 due, but 1 of 4 with 0 failed"),
        ({"failed": 1}, "1 due, but 0 of 4 with 1 failed"),
        ({"spares": ("w0", "w1")}, "more than the 1 that are due"),
        ({"short_ticks": 2}, "a new one after 2 ticks, not 3"),
    ],
)
def test_a_decision_that_does_not_follow_is_named(change: dict[str, Any], text: str) -> None:
    fleet = SparedFleet()
    fleet.change = change
    fleet.healthy_ticks(CONFIG.dwell_ticks + 1)
    assert text in found(fleet)


def test_a_request_that_a_spare_should_not_get_is_named(fleet: SparedFleet) -> None:
    send(fleet)
    assert "sent to w0, which is a spare, and w1 could take it" in found(fleet)


def test_what_a_spare_may_get_keeps_the_promise() -> None:
    fleet = SparedFleet()
    before = fleet.revision
    fleet.healthy_ticks(6)
    assert fleet.spares() == ("w0",)
    send(fleet, tier=Tier.BATCH)
    send(fleet, attempt=2)
    send(fleet, late=fleet.revision - before)
    for number in (1, 2, 3):
        fleet.tell("r.r0", observed(worker=f"w{number}"))
    send(fleet)
    assert found(fleet) == ""


@pytest.mark.parametrize("before", [True, False])
def test_failures_that_land_with_the_decision_count_if_they_stand_before_it(
    fleet: SparedFleet, before: bool
) -> None:
    """Composed 120058: by a slow link, failures and the decision after them landed at once."""
    failed = [observed(f"f{n}", worker=f"w{n}", kind="engine_error") for n in (1, 2, 3)]
    basis = v.Basis(fleet.revision, 1 << 30)
    sent = [arrived(), replace(decided(basis=basis), tier=Tier.STANDARD)]
    fleet.tell("r.r0", *(failed + sent if before else sent + failed))
    assert ("which is a spare" in found(fleet)) is not before
