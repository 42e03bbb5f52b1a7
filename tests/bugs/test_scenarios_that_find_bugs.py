"""Bugs that few scenarios can find: each has one that does, by the promise that the bug breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.chaos.runner import fuzz
from tests.bugs.bug_table import bugs
from tests.bugs.seeding import Tree

FOUND = [
    ("worker-of-another-model-counts-as-another-worker", "two-models", 2, "I10"),
    ("the-floor-counts-workers-of-other-models", "all-drained", 1, "I27"),
    ("two-drains-of-one-group-leave-no-worker", "all-drained", 1, "I27"),
    ("acknowledgement-covers-later-records", "trusted-again", 1, "I18"),
    ("half-of-the-replicas-exclude-for-all", "half-cannot-reach", 3, "I9"),
]


@pytest.mark.full
@pytest.mark.parametrize(("bug", "scenario", "seed", "promise"), FOUND)
def test_a_scenario_finds_the_bug(
    bug: str, scenario: str, seed: int, promise: str, tmp_path: Path
) -> None:
    (planned,) = fuzz.planned_runs([scenario], seed, 1, 300.0, None)
    without = fuzz.one(planned)
    assert (without.result, without.why) == ("passed", ())
    assert promise in Tree(tmp_path / "tree").run_with(bugs()[bug], scenario, seed)
