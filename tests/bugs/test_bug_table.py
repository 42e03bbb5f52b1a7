"""The table of seeded bugs fits the code as it is."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter

import pytest

from tests.bugs.bug_table import ROOT, TABLE, Bug, bugs

BUGS = bugs()


@pytest.mark.parametrize("bug", BUGS.values(), ids=lambda bug: bug.name)
def test_each_changes_one_place_of_the_product(bug: Bug) -> None:
    changed = bug.changed()
    assert changed != (ROOT / bug.file).read_text()
    ast.parse(changed)
    assert not bug.file.startswith(("tests/", "chaos/")), "of the product, not of its judges"
    for unit in bug.units:
        assert (ROOT / unit).exists(), unit


def test_the_table_is_large_and_names_each_once() -> None:
    names = [entry["name"] for entry in tomllib.loads(TABLE.read_text())["bug"]]
    assert len(names) == len(BUGS) >= 80
    places = Counter((bug.file, bug.old, bug.new) for bug in BUGS.values())
    assert max(places.values()) == 1
    assert len({bug.part for bug in BUGS.values()}) >= 8
