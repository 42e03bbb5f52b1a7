"""The runner of seeded bugs: what it says of a bug that is noticed, and of one that is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.bugs.__main__ import by_what, page, summary
from tests.bugs.bug_table import ROOT, Bug
from tests.bugs.seeding import Noticed, Tree

ALWAYS = Bug(
    name="no-request-ends",
    part="fold",
    what="the fold does not see that a request ended",
    file="policies/state/fold.py",
    old="def _on_request_ended(",
    new="def _on_request_ended(*_: object) -> None:\n    return\n\n\ndef _ignored(",
    units=("tests/policies/health/test_health.py",),
)
NEVER = replace(ALWAYS, name="none", new="def _on_request_ended(  # the same\n    ", units=())


@pytest.mark.full
def test_a_bug_is_noticed_and_taken_out_again(tmp_path: Path) -> None:
    """Full, since it fuzzes."""
    tree = Tree(tmp_path / "tree")
    found = tree.try_bug(ALWAYS, seeds=4, everything=True)
    assert found.fuzz and found.seeds == 1 and not found.broken
    assert found.unit.startswith(ALWAYS.units)
    assert "after 1 seeds" in by_what(found)
    found = tree.try_bug(NEVER, seeds=2, everything=True)
    assert not found.by_anything and (found.seeds, found.broken) == (2, "")
    file = Path(ALWAYS.file)
    assert (tree.folder / file).read_text() == (ROOT / file).read_text()


def test_an_entry_whose_text_has_moved_on_is_refused() -> None:
    with pytest.raises(ValueError, match="stands 0 times"):
        replace(ALWAYS, old="no such text").changed()


def test_the_page_says_what_noticed_each() -> None:
    results = [
        Noticed(bug="a", fuzz=("I1", "I2"), seeds=7, scenario="calm 6"),
        Noticed(bug="b", unit="tests/x.py::test_y"),
        Noticed(bug="c"),
    ]
    said = [by_what(result) for result in results]
    assert said == ["fuzz: I1, I2 after 7 seeds (calm 6)", "tests/x.py::test_y", "**nothing**"]
    assert summary(results, 300).startswith("2 of 3 noticed; by fuzz within 300 seeds 1 (33%")
    assert page(results, 300, "abc1234").startswith("# Seeded bugs\n")
