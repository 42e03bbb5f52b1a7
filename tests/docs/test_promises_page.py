"""The table of promises names what exists, and all of it."""

from __future__ import annotations

from deploy.docs import promises_page
from relume.chaos.scenario.catalogue import PROMISES
from relume.chaos.validators import CHECKS


def test_each_promise_has_a_validator_and_a_mutation() -> None:
    assert set(promises_page.PROMISES) == set(PROMISES) == set(CHECKS)
    assert all(map(promises_page.validator_of, PROMISES))
    assert set(promises_page.mutations()) == set(CHECKS)


def test_each_named_scenario_is_in_the_library() -> None:
    named = {
        scenario for promise in promises_page.PROMISES.values() for scenario in promise.scenarios
    }
    assert named - promises_page.library() == set()
    unnamed = promises_page.library() - named
    # Those of features that do not exist yet press no promise.
    assert unnamed == {"draft-mismatch", "rank-killed"}
