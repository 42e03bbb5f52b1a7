"""The table of promises names what exists, and all of it."""

from __future__ import annotations

from deploy.docs import promises_page
from relume.chaos.scenario.catalogue import PROMISES
from relume.chaos.validators import CHECKS


def test_each_promise_with_a_check_has_a_validator_and_a_mutation() -> None:
    assert {name for name in promises_page.PROMISES if promises_page.validator_of(name)} == set(
        CHECKS
    )
    assert set(promises_page.mutations()) == set(CHECKS)


def test_each_promise_of_the_catalogue_is_in_the_table() -> None:
    assert set(PROMISES) <= set(promises_page.PROMISES)


def test_each_named_scenario_is_in_the_library() -> None:
    named = {
        scenario for promise in promises_page.PROMISES.values() for scenario in promise.scenarios
    }
    assert named - promises_page.library() == set()
    unnamed = promises_page.library() - named
    # Those of features that do not exist yet press no promise.
    assert unnamed == {"draft-mismatch", "rank-killed"}


def test_a_promise_without_a_checker_says_so() -> None:
    lines = {
        line.split(" | ")[0].strip("| "): line
        for line in promises_page.page().splitlines()
        if line.startswith("| I")
    }
    assert "no checker yet" in lines["I20"]
    assert "no checker yet" not in lines["I1"]
