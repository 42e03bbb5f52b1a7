"""I14, about model files: what an older or a broken build could let pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.workers.i14_released_files import DAMAGE, HELD_TICKS, check
from relume.chaos.validators.strikes import Strike
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import WeightsOutcome
from relume.policies.weights import comparison
from tests.policies.health.led_fleet import LedFleet
from tests.policies.health.test_canaries import restarted
from tests.policies.weights.test_model_files import (
    DAMAGED,
    RIGHT_FILES,
    digests,
    fleet_of,
    quarantined,
    released,
    right,
)

STRUCK = (
    Strike(what=DAMAGE, targets=frozenset({"w1"}), since_ms=0, until_ms=0),  # and it stays
)


def compared(fleet: LedFleet, own: str) -> LedFleet:
    """w1 has `own` files in quarantine, the others the right ones, and all canaries are right."""
    fleet.ticks(5)
    quarantined(fleet)
    for worker in ("w0", "w2"):
        digests(fleet, worker)
    digests(fleet, "w1", own)
    fleet.ticks(5)
    right(fleet)
    return fleet


def found(fleet: LedFleet, *strikes: Strike) -> list[str]:
    return [f"{one.about}: {one.detail}" for one in check(fleet.groups, strikes)]


@pytest.mark.parametrize("own", [RIGHT_FILES, DAMAGED])
def test_a_sound_log_has_none(own: str) -> None:
    fleet = compared(fleet_of(), own)
    fleet.ticks(2 * HELD_TICKS)
    assert released(fleet) == (own == RIGHT_FILES) and found(fleet) == []
    restarted(fleet, "w1", 3)
    digests(fleet, "w1")
    fleet.ticks(5)
    right(fleet)
    assert found(fleet) == []


def test_nor_has_one_of_an_earlier_version_or_before_the_raise() -> None:
    for fleet in (fleet_of(version=12), fleet_of(level=1)):
        assert released(compared(fleet, DAMAGED)) and found(fleet) == []


def test_an_operator_may_release_a_worker_with_other_files() -> None:
    fleet = compared(fleet_of(), DAMAGED)
    command = v.AdminCommanded(command_id="c", principal="ann", command="trust", target="w1")
    fleet.tell("r.r0", command)
    assert released(fleet) and found(fleet) == []


def is_never_held(*_: object) -> bool:
    return False


def test_a_worker_with_other_files_that_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_held", is_never_held)
    fleet = compared(fleet_of(), DAMAGED)
    (text,) = found(fleet)
    assert text == (
        "w1: it is released, although its model files differ from those of most healthy workers"
    )


@pytest.mark.parametrize(
    ("patched", "why"),
    [("is_held", "were not compared"), ("_majority", "differ from those of most healthy workers")],
)
def test_a_worker_that_is_released_without_a_comparison(
    monkeypatch: pytest.MonkeyPatch, patched: str, why: str
) -> None:
    """Or with one that finds no majority."""
    if patched == "is_held":
        monkeypatch.setattr(comparison, "is_held", is_never_held)
        monkeypatch.setattr(comparison, "due", lambda *_: None)
        own = RIGHT_FILES
    else:
        monkeypatch.setattr(comparison, "_majority", lambda peers, is_late: ("", ()))
        own = DAMAGED
    (text,) = found(compared(fleet_of(), own))
    assert text.startswith("w1: it is released") and why in text


def test_a_difference_is_not_forgotten_without_its_witnesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fleet = compared(fleet_of(), DAMAGED)
    monkeypatch.setattr(comparison, "due", lambda f, w, h, ticks: comparison._compare(f, w, ticks))
    for worker in ("w0", "w2"):
        fleet.tell(f"w.{worker}", v.EngineDied(worker, 1, "killed"))
    fleet.ticks(3)
    assert released(fleet)
    (text,) = found(fleet)
    assert text == "w1: it is released, although its model files were found to differ"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"digest": "made up"}, "a digest that its agent did not report"),
        ({"expected": "made up"}, "did not report made up"),
        ({"witnesses": ("w1",)}, "w1 is a witness"),
        ({"outcome": WeightsOutcome.SAME}, "are said to be same"),
        ({"outcome": WeightsOutcome.UNKNOWN}, "nothing says why"),
    ],
)
def test_a_comparison_that_is_not_true(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, object], why: str
) -> None:
    made: Callable[..., v.WeightsCompared | None] = comparison.due

    def untrue(*given: object) -> v.WeightsCompared | None:
        return replace(one, **change) if (one := made(*given)) is not None else None

    monkeypatch.setattr(comparison, "due", untrue)
    texts = found(compared(fleet_of(), DAMAGED))
    assert any(why in text for text in texts), texts


def test_a_worker_with_the_right_files_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = compared(fleet_of(), "new")
    monkeypatch.setattr(comparison, "key_of", lambda found: fleet.health("w1").weights_owed)
    for worker in ("w0", "w2"):
        restarted(fleet, worker, 2)
        digests(fleet, worker, "new")
    fleet.ticks(HELD_TICKS)
    (text,) = found(fleet)
    assert text == "w1: it is held for other model files, and they are those of most"


def test_an_agent_that_reports_the_digest_of_right_files_for_damaged_ones() -> None:
    """Where the faults of the run are known."""
    fleet = compared(fleet_of(), RIGHT_FILES)
    assert released(fleet) and found(fleet) == []
    texts = found(fleet, *STRUCK)
    assert any("have the digest of those of w0" in text for text in texts)
    assert any("it is released, although its model files differ" in text for text in texts)
    mended = replace(STRUCK[0], since_ms=-2, until_ms=-1)
    assert found(fleet, mended) == []
