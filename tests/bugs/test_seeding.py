"""The runner of seeded bugs: what it says of a bug that is noticed, and of one that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.bugs.__main__ import by_what, page, summary, try_all
from tests.bugs.bug_table import ROOT, TABLE, Bug, bugs, remember
from tests.bugs.probes import by_file, insert, take_met
from tests.bugs.results_file import OtherCommit, ResultsFile
from tests.bugs.seeding import Noticed, Tree, drawn

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
    met = tree.seeds_that_meet([ALWAYS, NEVER], 2)
    assert met == {ALWAYS.name: (0, 1), NEVER.name: ()}
    found = tree.try_bug(ALWAYS, 2, met[ALWAYS.name], everything=True)
    assert found.fuzz and found.seeds == 1 and found.tried == 2 and not found.broken
    assert found.unit.startswith(ALWAYS.units)
    assert "within 1 seeds" in by_what(found)
    found = tree.try_bug(replace(ALWAYS, seed=1), 2, (0, 1), everything=False)
    assert found.fuzz and found.seeds == 2, "the seed that found it before is tried first"
    found = tree.try_bug(NEVER, 2, (0, 1), everything=True)
    assert not found.by_anything and (found.seeds, found.broken) == (2, "")
    failing = Path("tests/test_failing.py")
    (tree.folder / failing).write_text("def test_it() -> None:\n    raise AssertionError\n")
    found = tree.try_bug(replace(NEVER, units=(str(failing),)), 0, (), everything=True)
    assert not found.by_anything and "fails without the bug" in found.broken
    file = Path(ALWAYS.file)
    assert (tree.folder / file).read_text() == (ROOT / file).read_text()


def test_an_entry_whose_text_has_moved_on_is_refused() -> None:
    with pytest.raises(ValueError, match="stands 0 times"):
        replace(ALWAYS, old="no such text").changed()


def test_the_page_says_what_noticed_each() -> None:
    results = [
        Noticed(bug="a", fuzz=("I1", "I2"), seeds=7, scenario="calm"),
        Noticed(bug="b", unit="tests/x.py::test_y"),
        Noticed(bug="c", seeds=300, met=12, tried=12),
        Noticed(bug="d", seeds=300, met=12, tried=4, unit="tests/x.py::test_y"),
    ]
    said = [by_what(result) for result in results]
    assert said == [
        "fuzz: I1, I2 within 7 seeds (calm)",
        "tests/x.py::test_y",
        "**nothing**; 12 of 300 runs met it",
        "tests/x.py::test_y; 12 of 300 runs met it, 4 of these were made",
    ]
    noticed = "3 of 4 noticed; by fuzz within 300 seeds 1 (25%, goal 85%), of 3 that a run met"
    assert summary(results, 300) == noticed
    assert page(results, 300, "abc1234").startswith("# Seeded bugs\n")


def test_the_seeds_that_found_bugs_are_remembered(tmp_path: Path) -> None:
    table = tmp_path / "bugs.toml"
    table.write_text(TABLE.read_text())
    for seed in (7, 9):
        remember({"one-death-counts-twice": seed}, table)
    before, after = bugs(), bugs(table)
    assert after["one-death-counts-twice"].seed == 9
    assert {**before, "one-death-counts-twice": after["one-death-counts-twice"]} == after


def test_a_run_continues_what_the_one_before_found(tmp_path: Path) -> None:
    path = tmp_path / "results"
    first = ResultsFile(path, "abc", 300)
    first.add_met({"a": (1, 2), "b": ()})
    first.add(Noticed(bug="a", seeds=9, unit="tests/x.py::test_y"))
    first.add(Noticed(bug="a", seeds=9, fuzz=("I1",)))
    for other in (("f00", 300), ("abc", 60)):
        with pytest.raises(OtherCommit, match="is of abc with 300 seeds: check that out"):
            ResultsFile(path, *other)
    again = ResultsFile(path, "abc", 300)
    assert again.met == {"a": (1, 2), "b": ()} and again.noticed == first.noticed
    again.add(Noticed(bug="none"))
    assert not list(try_all([NEVER], 1, 300, True, again)), "it has a result"
    assert ResultsFile(None).noticed == {}


def test_runs_that_were_not_made_are_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each once, in an order that does not change."""
    made: list[int] = []

    def swept(_: Tree, seeds: list[int], *__: str) -> tuple[list[Any], str]:
        made.extend(seeds)
        return [
            {"seed": s, "result": "passed", "noticed": (), "scenario": "calm"} for s in seeds
        ], ""

    monkeypatch.setattr(Tree, "__init__", lambda tree, _: setattr(tree, "folder", ROOT))
    monkeypatch.setattr(Tree, "_write", lambda *_: None)
    monkeypatch.setattr(Tree, "_swept", swept)
    results = ResultsFile(None)
    results.add_met({NEVER.name: range(10), ALWAYS.name: ()})
    for tries, total in ((4, 4), (4, 4), (7, 7), (300, 10), (300, 10)):
        list(try_all([NEVER], 1, 300, False, results, tries))
        assert results.noticed[NEVER.name].tried == len(made) == len(set(made)) == total
    assert drawn(replace(NEVER, seed=5), range(10))[0] == 5


SOURCE = '''"""A module."""
from __future__ import annotations

LIMIT = 3


def count(found: list[int], most: int) -> int:
    """Of a list."""
    if len(found) < most:
        return len(found)
    for one in found:
        found.remove(one)
    return most
'''
CHANGES = [
    ("LIMIT = 3", "LIMIT = 4"),
    ("len(found) < most", "len(found) <= most"),
    ("        return len(found)\n", "        return len(found) + 1\n"),
    ("        return len(found)\n", "        most = len(found)\n        return most\n"),
    ("        found.remove(one)\n", "        pass\n"),
    ("    return most\n", "    return max(most, LIMIT)\n"),
]
MET = {(1, 2): {"2", "3"}, (2, 2): {"1", "4", "5"}, (3, 2): {"4", "5"}, (5, 3): {"4"}}
"""Which of these bugs a call meets, by the length of the list and the maximum."""


def test_a_probe_tells_which_runs_meet_a_bug() -> None:
    """A run that reaches the place, and computes the same with the bug as without, does not."""
    every = [replace(ALWAYS, name=f"{n}", old=o, new=c) for n, (o, c) in enumerate(CHANGES)]
    source, everywhere = insert(SOURCE, every)
    assert everywhere == {"0"}
    names: dict[str, Any] = {}
    exec(compile(source, "module", "exec"), names)
    take_met()
    for (length, most), expected in MET.items():
        names["count"]([*range(length)], most)
        assert set(take_met()) == expected, (length, most)


def test_each_bug_of_the_table_has_a_probe() -> None:
    for file, here in by_file([*bugs().values()]):
        source, everywhere = insert((ROOT / file).read_text(), here)
        compile(source, file, "exec")
        assert source.count("_seeded_bugs.") == len(here) - len(everywhere)
