"""Guards of the product are counted where a run reaches them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from relume.chaos.runner.guards import ROOT, Guard, guards

GUARDS = guards()


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_each_entry_fits_the_code(guard: Guard) -> None:
    source = (ROOT / guard.file).read_text()
    line = guard.line(source)
    assert any(isinstance(n, ast.If) and n.lineno == line for n in ast.walk(ast.parse(source)))
    assert [g.name for g in GUARDS].count(guard.name) == 1


def test_an_entry_whose_text_has_moved_on_is_refused() -> None:
    with pytest.raises(ValueError, match="stands 0 times"):
        replace(GUARDS[0], at="if no_such_text").line("")


def test_fuzz_counts_them_and_says_which_no_run_reached() -> None:
    """In a process of its own, since the code of the product changes there."""
    command = (
        "fuzz",
        "--guards",
        "--json",
        "--scenarios",
        "engine-killed-in-decode",
        "--seeds",
        "2",
    )
    done = subprocess.run(
        (sys.executable, "-m", "relume.chaos.runner", *command),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["passed"] == 2 and found["guards"].keys() == {guard.name for guard in GUARDS}
    assert any(found["guards"].values())
    assert found["guards"]["effect-refused-as-held"] == 0
    assert done.returncode == 1 and "effect-refused-as-held" in done.stderr
