"""I9: nothing is sent to an open breaker, and at most k requests to a half-open one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relume.chaos.validators.promises.health import i9_breakers, i9_cross_checks
from relume.events import vocabulary as v
from relume.policies.crosscheck.check_state import CheckRecord
from relume.policies.health.health_settings import HealthConfig
from relume.policies.routing import eligibility
from relume.policies.state.overlay.view import View
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import arrived, decided, died, ready, started


def violations(fleet: LedFleet) -> str:
    return "\n".join(map(str, i9_breakers.check(fleet.groups, [])))


def send(fleet: LedFleet, name: str, replica: str = "r0", late: int = 0) -> None:
    """A request goes to w0, decided on what was known `late` revisions ago."""
    basis = v.Basis(fleet.revision - late, 0)
    incarnation = fleet.fleet.workers["w0"].incarnation
    fleet.tell(f"r.{replica}", arrived(name), decided(name, incarnation=incarnation, basis=basis))


@pytest.fixture
def opened() -> LedFleet:
    fleet = LedFleet(replicas=2, config=HealthConfig(hold_ticks=2))
    for _ in range(3):
        fleet.fails()
    assert fleet.excluded() == "unhealthy" and violations(fleet) == ""
    return fleet


def test_a_dispatch_to_an_open_breaker_is_found(opened: LedFleet) -> None:
    send(opened, "bad")
    assert "bad: sent to w0 although it is unhealthy: 3 requests failed" in violations(opened)


def test_a_decision_on_an_earlier_basis_is_none(opened: LedFleet) -> None:
    send(opened, "early", late=1)
    assert violations(opened) == ""


def test_neither_is_one_to_the_next_engine(opened: LedFleet) -> None:
    opened.tell("w.w0", died(), started("w0", 2), ready("w0", 2))
    send(opened, "next")
    assert violations(opened) == ""


@pytest.mark.parametrize(("replica", "fine"), [("r0", True), ("r1", False)])
def test_a_probed_engine_checks_answers_only_for_the_replica_that_probes_it(
    opened: LedFleet, replica: str, fine: bool
) -> None:
    """Composed 50390."""
    opened.ticks(2)
    prober = opened.fleet.workers["w0"].health.prober
    assert prober == "r0"
    basis = v.Basis(opened.fleet.revision, 0)
    check = v.CrossCheckDecided(
        decision="c1", basis=basis, request="q1", worker="w1", incarnation=1, by="w0",
        by_incarnation=1, cause="doubt", tokens=9, answer=b"",
    )  # fmt: skip
    opened.tell(f"r.{replica}", check)
    found = [str(one) for one in i9_cross_checks.check(opened.groups)]
    assert any("although it is probing" in text for text in found) is not fine


@pytest.mark.parametrize(("incarnation", "fine"), [(1, False), (2, True)])
def test_a_doubt_without_end_is_found_unless_its_engine_is_gone(
    opened: LedFleet, incarnation: int, fine: bool
) -> None:
    worker = opened.fleet.workers["w0"]
    worker.checks = CheckRecord(incarnation=1, disputed={"q1": opened.fleet.tick})
    worker.incarnation = incarnation
    opened.fleet.tick += 200
    found = list(i9_cross_checks._endless(opened.fleet))
    assert (found == []) is fine


def test_probes_beyond_the_number_and_of_another_replica_are_found(opened: LedFleet) -> None:
    opened.ticks(2)
    assert opened.excluded() == ""
    send(opened, "probe")
    assert violations(opened) == ""
    opened.ends("probe")
    send(opened, "next")
    assert violations(opened) == ""
    send(opened, "more")
    assert "more: probe number 2 of w0, of at most 1" in violations(opened)
    send(opened, "foreign", replica="r1")
    assert "foreign: sent to w0 by r1, but r0 probes it" in violations(opened)


def _any_replica(view: View, worker: object, health: object) -> bool:
    return True


SEEDED: dict[str, tuple[str, object]] = {
    "open breakers are ignored": ("_BY_HEALTH", {}),
    "probes are not counted": ("_may_probe", _any_replica),
}


@pytest.mark.parametrize("bug", SEEDED)
def test_a_seeded_bug_in_eligibility_is_found(
    bug: str, monkeypatch: pytest.MonkeyPatch, opened: LedFleet
) -> None:
    """The choice goes to w0 whenever it is eligible, as to a worker that fails fast."""
    name, value = SEEDED[bug]
    sent: Callable[[str], None] = lambda name: (  # noqa: E731
        send(opened, name) if opened.excluded() == "" else None
    )
    for phase in range(2):
        for number in range(3):
            sent(f"q{phase}.{number}")
        opened.ticks(2)
    assert violations(opened) == "" and opened.excluded() == "probing"
    opened.saw("q1.0", "w0", "engine_error", 500)
    assert opened.excluded() == "unhealthy"
    monkeypatch.setattr(eligibility, name, value)
    for phase in range(2, 4):
        for number in range(3):
            sent(f"q{phase}.{number}")
        opened.ticks(2)
    assert violations(opened) != ""
