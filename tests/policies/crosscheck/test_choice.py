"""Which finished request is answered again, and by which engine."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import UNSET

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import CheckCause
from relume.policies.canary.canary_state import CanaryRecord
from relume.policies.crosscheck import check_settings
from relume.policies.crosscheck.choice import CheckChoice, is_drawn
from relume.policies.crosscheck.disputes import DOUBT_TICKS
from tests.policies.crosscheck.checked_fleet import RIGHT, WRONG, CheckedFleet
from tests.policies.story import died, ready, started


def test_the_share_is_drawn_by_the_names_of_requests() -> None:
    names = [f"request-{n}" for n in range(20_000)]
    drawn = [name for name in names if is_drawn(name, 10_000)]
    assert 120 < len(drawn) < 280
    assert set(drawn) <= {name for name in names if is_drawn(name, 50_000)}
    assert all(is_drawn(name, 1_000_000) for name in names[:100])
    assert not any(is_drawn(name, 0) for name in names[:100])


def test_an_idle_engine_other_than_the_one_that_served_answers() -> None:
    fleet = CheckedFleet()
    assert fleet.choice(fleet.finished("w0")) == CheckChoice("w1", 1, CheckCause.SHARE)
    assert fleet.choice(fleet.finished("w1")) == CheckChoice("w0", 1, CheckCause.SHARE)


def test_no_request_beyond_the_share_or_the_length_is_answered_again() -> None:
    fleet = CheckedFleet(share_ppm=0)
    assert fleet.choice(fleet.finished()) is None
    fleet.set("share_ppm", 1_000_000)
    assert fleet.choice(fleet.finished(tokens=1024)) is not None
    assert fleet.choice(fleet.finished(tokens=1025)) is None


def test_logs_without_the_setting_have_no_checks() -> None:
    fleet = CheckedFleet()
    del fleet.fleet.config["crosscheck.share_ppm"]
    assert fleet.choice(fleet.finished()) is None
    assert check_settings.CrossCheckConfig().share_ppm > 0, "but replicas record their own"


def test_busy_and_excluded_engines_are_left_alone() -> None:
    fleet = CheckedFleet()
    fleet.request("w1")
    assert fleet.choice(fleet.finished("w0")) == CheckChoice("w2", 1, CheckCause.SHARE)
    effect = v.Effect("drain", "w2")
    fleet.tell(
        "fleet",
        v.EffectsDecided(decision="d", basis=v.Basis(0, 0), cause="drain", effects=(effect,)),
    )
    assert fleet.choice(fleet.finished("w0")) is None


def test_an_engine_of_another_class_is_none_to_compare_with() -> None:
    fleet = CheckedFleet(workers=2)
    assert fleet.choice(fleet.finished("w0")) is not None
    fleet.fleet.workers["w0"].canary = CanaryRecord(kind="m/a/1", incarnation=1)
    assert fleet.choice(fleet.finished("w0")) is not None, "not known of the other one"
    fleet.fleet.workers["w1"].canary = CanaryRecord(kind="m/b/1", incarnation=1)
    assert fleet.choice(fleet.finished("w0")) is None, "other weights"
    fleet.fleet.workers["w1"].canary = UNSET
    fleet.fleet.workers["w1"].steps_like = "another build"
    assert fleet.choice(fleet.finished("w0")) is None


def test_one_check_at_a_time() -> None:
    fleet = CheckedFleet(workers=2)
    begun = fleet.begin(fleet.finished("w0", "a"), "w1")
    assert fleet.choice(fleet.finished("w0", "b")) is None, "it answers one"
    fleet.end(begun)
    assert fleet.choice(fleet.finished("w0", "b")) is not None


def test_of_several_engines_the_one_that_rested_longest_answers() -> None:
    fleet = CheckedFleet()
    fleet.checks(fleet.finished("w0", "a"), "w1")
    fleet.ticks(1)
    assert fleet.choice(fleet.finished("w0", "b")) == CheckChoice("w2", 1, CheckCause.SHARE)


def test_a_check_whose_replica_is_gone_does_not_last() -> None:
    fleet = CheckedFleet(workers=2)
    fleet.begin(fleet.finished("w0", "a"), "w1")
    fleet.ticks(60)
    assert fleet.choice(fleet.finished("w0", "b")) is None
    fleet.ticks(1)
    assert fleet.choice(fleet.finished("w0", "b")) is not None


def test_an_engine_that_was_replaced_is_not_judged() -> None:
    fleet = CheckedFleet()
    finished = fleet.finished("w0")
    fleet.tell("w.w0", died("w0", 1))
    fleet.tell("w.w0", started("w0", 2), ready("w0", 2))
    assert fleet.choice(finished) is None


def test_workers_in_doubt_are_compared_beyond_share_and_budget() -> None:
    """All their requests are answered again, and they answer those of others."""
    fleet = CheckedFleet(workers=4)
    fleet.checks(fleet.finished("w0", "a"), "w1", WRONG)
    fleet.set("share_ppm", 1)
    fleet.set("budget_ppm", 1)
    assert fleet.choice(fleet.finished("w1", "b")) == CheckChoice("w2", 1, CheckCause.DOUBT)
    fleet.checks(fleet.finished("w1", "b"), "w2")
    assert fleet.choice(fleet.finished("w2", "c")) == CheckChoice("w0", 1, CheckCause.DOUBT)
    fleet.ticks(1)
    fleet.checks(fleet.finished("w2", "c"), "w0")
    assert fleet.choice(fleet.finished("w2", "d")) == CheckChoice("w1", 1, CheckCause.DOUBT)
    fleet.ticks(DOUBT_TICKS + 1)
    assert fleet.choice(fleet.finished("w2", "d")) is None


def test_an_outvoted_worker_answers_requests_of_others() -> None:
    """It gets few requests of its own, because it is a suspect."""
    fleet = CheckedFleet()
    finished = fleet.finished("w0", "a")
    for name, answer in {"w1": WRONG, "w0": RIGHT, "w2": RIGHT}.items():
        fleet.checks(finished, name, answer)
    fleet.set("share_ppm", 1)
    assert fleet.choice(fleet.finished("w0", "b")) == CheckChoice("w1", 1, CheckCause.DOUBT)
    assert fleet.choice(fleet.finished("w2", "b")) == CheckChoice("w1", 1, CheckCause.DOUBT)


def test_in_a_dispute_the_worker_itself_answers_then_others_without_regard_to_the_budget() -> None:
    fleet = CheckedFleet()
    fleet.set("budget_ppm", 1)
    finished = fleet.finished("w0", "a")
    fleet.checks(finished, "w1", WRONG)
    assert fleet.choice(finished) == CheckChoice("w0", 1, CheckCause.DISPUTE)
    fleet.checks(finished, "w0", RIGHT)
    assert fleet.choice(finished) == CheckChoice("w2", 1, CheckCause.DISPUTE)


def test_engines_in_other_disputes_are_heard_but_not_outvoted_ones() -> None:
    """Where one engine is wrong, every other one is soon in a dispute with it."""
    fleet = CheckedFleet(workers=3)
    mine, other = fleet.finished("w0", "a"), fleet.finished("w1", "b")
    fleet.checks(mine, "w1", WRONG)
    fleet.checks(other, "w2", WRONG)
    fleet.checks(mine, "w0", RIGHT)
    assert fleet.choice(mine) == CheckChoice("w2", 1, CheckCause.DISPUTE)
    record = fleet.fleet.workers["w2"].checks
    assert not isinstance(record, type(UNSET))
    record.outvoted["c"] = 1
    assert fleet.choice(mine) is None


@pytest.mark.parametrize("field", ["request", "worker", "incarnation"])
def test_a_choice_depends_on_the_request_alone(field: str) -> None:
    fleet = CheckedFleet()
    finished = fleet.finished("w0", "a")
    assert fleet.choice(finished) == fleet.choice(finished)
    changed = {"request": "b", "worker": "w9", "incarnation": 7}[field]
    another = fleet.choice(msgspec.structs.replace(finished, **{field: changed}))
    assert (another is None) == (field != "request")
