"""Engines save time for cross-checks before they answer any."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import CheckCause
from relume.policies import decision_versions
from relume.policies.crosscheck import check_settings
from relume.policies.crosscheck.check_budget import MARGIN_PERCENT, MOST_FINISHED, expected_us
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from relume.policies.crosscheck.choice import choose
from relume.policies.state.fleet import state_hash
from relume.policies.state.overlay.view import View
from tests.policies.crosscheck.checked_fleet import ALL, RIGHT, WRONG, CheckedFleet
from tests.policies.health.led_fleet import folded_again
from tests.policies.story import died, ended, ready, replica_started, started

BUDGET = CrossCheckConfig().budget_ppm
PROMPT, TOKENS = 40, 8


def saving(workers: int = 2, budget_ppm: int = BUDGET) -> CheckedFleet:
    """With a budget."""
    return CheckedFleet(workers, budget_ppm=budget_ppm)


def expected(
    fleet: CheckedFleet, by: str = "w1", prompt: int = PROMPT, tokens: int = TOKENS
) -> int:
    return expected_us(fleet.fleet, fleet.fleet.workers[by], prompt, tokens)


def seconds(engine_us: int, budget_ppm: int = BUDGET) -> int:
    """In which so much is saved, up to the next tick."""
    return -(-engine_us // budget_ppm)


def waited(fleet: CheckedFleet, finished: Any, most: int = 10_000) -> int:
    """Ticks until an engine may answer it."""
    for count in range(most):
        if fleet.choice(finished) is not None:
            return count
        fleet.ticks(1)
    raise AssertionError("no engine may answer it")


def test_a_new_engine_saves_before_its_first_check() -> None:
    """At 0.2 % an engine saves 2 ms a second."""
    fleet = saving()
    finished = fleet.served()
    needed = seconds(expected(fleet) * MARGIN_PERCENT // 100)
    assert needed > 20
    assert fleet.choice(finished) is None
    assert waited(fleet, finished) == needed
    assert fleet.choice(finished).cause == CheckCause.SHARE


def test_a_check_is_paid_from_what_was_saved() -> None:
    fleet = saving()
    first, second = fleet.served(name="a"), fleet.served(name="b")
    waited(fleet, first)
    took = expected(fleet)
    fleet.end(fleet.begin(first, "w1"), took_us=took)
    assert waited(fleet, second) == pytest.approx(seconds(took), abs=1), "the margin is left"


def test_a_check_that_takes_longer_than_the_margin_is_paid_later() -> None:
    fleet = saving()
    first, second = fleet.served(name="a"), fleet.served(name="b")
    waited(fleet, first)
    took = 4 * expected(fleet)
    fleet.end(fleet.begin(first, "w1"), took_us=took)
    assert waited(fleet, second) == pytest.approx(seconds(took), abs=1)


def test_no_rest_is_too_long_for_the_budget() -> None:
    """A check of 20 s is 10,000 s of savings."""
    fleet = saving()
    first, second = fleet.served(name="a"), fleet.served(name="b")
    waited(fleet, first)
    fleet.end(fleet.begin(first, "w1"), took_us=20_000_000)
    assert waited(fleet, second, 11_000) > 9_000


def test_idleness_brings_no_burst() -> None:
    """Of an hour's savings half a check is left."""
    fleet = saving()
    finished = [fleet.served(name=name) for name in "abc"]
    fleet.ticks(3600)
    took = expected(fleet)
    fleet.end(fleet.begin(finished[0], "w1"), took_us=took)
    assert waited(fleet, finished[1]) == pytest.approx(seconds(took), abs=1)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 60), st.floats(0.1, 1.5)),
        min_size=1, max_size=8,
    )
)  # fmt: skip
def test_no_window_from_the_start_has_more_than_the_budget(
    told: list[tuple[int, int, float]],
) -> None:
    """Whatever the checks, if none takes longer than the margin."""
    fleet = saving()
    began_ms, spent_us = fleet.fleet.tick_unix_ms, 0
    for number, (prompt, tokens, part) in enumerate(told):
        finished = fleet.served(name=f"q{number}", prompt=prompt, tokens=tokens)
        waited(fleet, finished)
        took = int(expected(fleet, prompt=prompt, tokens=tokens) * part)
        fleet.end(fleet.begin(finished, "w1"), took_us=took)
        spent_us += took
        assert spent_us * 1000 <= (fleet.fleet.tick_unix_ms - began_ms) * BUDGET


def test_longer_prompts_and_answers_need_more() -> None:
    fleet = saving()
    assert expected(fleet, prompt=2000) > expected(fleet)
    assert expected(fleet, tokens=64) > 7 * expected(fleet)
    fleet.fleet.workers["w1"].slowness = 2.0
    assert expected(fleet, "w1") == pytest.approx(2 * expected(fleet, "w0"), abs=1)
    short, long = fleet.served(name="short"), fleet.served(name="long", prompt=4000)
    fleet.fleet.workers["w1"].slowness = 1.0
    waited(fleet, short)
    assert fleet.choice(long) is None


def test_a_request_that_is_not_folded_is_known_by_its_arrival() -> None:
    fleet = saving()
    fleet.ticks(3600)
    open_one = fleet.request("w0", name="b")
    assert fleet.choice(fleet.finished("w0", open_one)) is not None
    assert fleet.choice(fleet.finished("w0", "unknown")) is None


def test_few_prompts_are_stored_and_only_of_requests_that_may_be_checked() -> None:
    fleet = saving()
    for number in range(MOST_FINISHED + 3):
        fleet.served(name=f"q{number}")
    stored = list(fleet.fleet.finished)
    assert len(stored) == MOST_FINISHED and stored[-1] == f"q{MOST_FINISHED + 2}"
    fleet.set("share_ppm", 0)
    fleet.served(name="none")
    fleet.set("share_ppm", ALL)
    for name, more in {"failed": {"outcome": "failed"}, "moved": {"attempts": 2}}.items():
        fleet.request("w0", name=name)
        fleet.tell("r.r0", ended(name, **more))
    fleet.served(name="last")
    assert [n for n in fleet.fleet.finished if not n.startswith("q")] == ["last"]
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_an_engine_that_starts_again_saves_anew() -> None:
    fleet = saving()
    finished = fleet.served()
    needed = waited(fleet, finished)
    fleet.tell("w.w1", died("w1", 1), started("w1", 2), ready("w1", 2))
    assert fleet.choice(finished) is None
    assert waited(fleet, finished) == pytest.approx(needed, abs=1)


def test_what_no_budget_counts_is_not_paid() -> None:
    """Checks in disputes and in doubt."""
    fleet = saving(workers=3)
    first = fleet.served(name="a")
    waited(fleet, first)
    fleet.end(fleet.begin(first, "w1"), WRONG, took_us=expected(fleet))
    spent = [fleet.fleet.workers[name].checks.rests_until_ms for name in ("w0", "w1", "w2")]
    for by in ("w0", "w2"):
        fleet.end(fleet.begin(first, by, CheckCause.DISPUTE), RIGHT, took_us=30_000_000)
    after = [fleet.fleet.workers[name].checks.rests_until_ms for name in ("w0", "w1", "w2")]
    assert after == spent


def test_in_doubt_others_are_checked_within_their_budget() -> None:
    """A drawn request between two engines that are in no doubt is one of the share."""
    fleet = saving(workers=4)
    one = fleet.served("w0", "a")
    fleet.checks(one, "w1", WRONG)
    fleet.request("w0")
    fleet.request("w1")  # both are busy
    other = fleet.served("w2", "b")
    assert fleet.choice(other) is None
    waited(fleet, other, 110)
    assert (fleet.choice(other).by, fleet.choice(other).cause) == ("w3", CheckCause.SHARE)


def test_without_a_budget_nothing_is_saved() -> None:
    fleet = saving(budget_ppm=ALL)
    assert fleet.choice(fleet.served()) is not None


def of_version(fleet: CheckedFleet, replica: str, version: int) -> None:
    """A replica starts that decides cross-checks by this version."""
    recorded = dict(decision_versions.settings()) | {"version.cross_check": str(version)}
    checks = check_settings.settings_of(CrossCheckConfig())
    given = (*checks, *recorded.items())
    fleet.tell(f"r.{replica}", replica_started(replica, "b2", settings=given))


def test_by_version_1_an_engine_rests_after_a_check_only() -> None:
    """20 ms of a budget of 0.2 % are a rest of 10 s, and 2 s one of 600 s."""
    fleet = saving()
    of_version(fleet, "r0", 1)
    begun = fleet.begin(fleet.finished("w0", "a"), "w1")
    fleet.end(begun, took_us=20_000)
    assert fleet.choice(fleet.finished("w0", "b")) is None
    assert waited(fleet, fleet.finished("w0", "b")) == 10
    fleet.end(fleet.begin(fleet.finished("w0", "b"), "w1"), took_us=2_000_000)
    assert waited(fleet, fleet.finished("w0", "c")) == 600
    assert fleet.fleet.finished is UNSET


def test_no_engine_saves_while_a_replica_does_not_know_it() -> None:
    fleet = saving()
    of_version(fleet, "r1", 1)
    assert fleet.choice(fleet.finished("w0", "a")) is not None
    fleet.tell("fleet", v.ReplicaLost("r1", fleet.fleet.replicas["r1"].epoch))
    assert fleet.choice(fleet.finished("w0", "a")) is None
    assert waited(fleet, fleet.served(name="b")) > 20


def test_a_decision_of_version_1_is_taken_again_by_it() -> None:
    fleet = saving()
    finished = fleet.served()
    view = View("r.r0", fleet.fleet)
    assert choose(view, finished) is None
    assert choose(view, finished, by_savings=False) is not None
