"""A random test draws what the run's seed says, and its failure names the seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.suite.test_outcomes import run

TESTS = """
import random
from hypothesis import given, strategies as st

def test_drawn(seed):
    with Path("drawn").open("a") as file:
        file.write(f"{random.Random(seed).randrange(1 << 30)}\\n")
    assert False

@given(st.integers(min_value=0, max_value=1 << 30))
def test_examples(number):
    with Path("examples").open("a") as file:
        file.write(f"{number}\\n")
"""


@pytest.mark.full
def test_the_seed_decides_what_is_drawn_and_stands_in_the_failure(tmp_path: Path) -> None:
    found: list[tuple[str, str]] = []
    for given in ((), (), ("--seed", "5"), ("--seed", "5"), ("--seed", "6")):
        _, said = run(tmp_path, TESTS, "-p", "hypothesispytest", "-p", "tests.suite.seeds", *given)
        number = given[1] if given else "0"
        assert f"seed of random tests: {number}" in said
        assert f"repeat with --seed {number}" in said
        files = [tmp_path / "drawn", tmp_path / "examples"]
        found.append((files[0].read_text(), files[1].read_text()))
        for file in files:
            file.unlink()
    assert found[0] == found[1] and found[2] == found[3]
    assert len({drawn for drawn, _ in found}) == len({numbers for _, numbers in found}) == 3
