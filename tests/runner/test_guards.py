"""Guards of the product are counted where a run reaches them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest
from msgspec.structs import replace

from relume.chaos.runner.composed.compose_disorder import late_records, small_limits
from relume.chaos.runner.guards import ROOT, Guard, guards
from relume.chaos.scenario.language import Closed, Fixed, Fleet, Traffic

GUARDS = guards()


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_each_entry_fits_the_code(guard: Guard) -> None:
    source = (ROOT / guard.file).read_text()
    line = guard.line(source)
    assert any(isinstance(n, ast.If) and n.lineno == line for n in ast.walk(ast.parse(source)))
    assert [g.name for g in GUARDS].count(guard.name) == 1
    # What `when` names stands in that file too: a run would end with an error where it does not.
    used = {n.attr for n in ast.walk(ast.parse(guard.when)) if isinstance(n, ast.Attribute)}
    used |= {n.id for n in ast.walk(ast.parse(guard.when)) if isinstance(n, ast.Name)}
    known = {n.attr for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute)}
    known |= {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)}
    assert used <= known


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


REACHED_BY = {
    "prefixes-of-a-dead-engine": 401,
    "prefixes-of-another-engine": 401,
    "step-of-a-dead-engine": 401,
    "end-of-a-request-of-another": 613,
    "last-bytes-lost": 308,
    "arrival-after-its-end": 475,
    "effect-of-an-older-engine": 524,
    "effect-refused-as-held": 362,
    "blocks-of-an-older-daemon": 346,
    "fenced-by-another-owner": 115,
    "return-to-a-replica-that-lags": 115,
}
"""A composed seed for each guard that chance alone seldom reaches."""


@pytest.mark.full
@pytest.mark.parametrize("seed", sorted({*REACHED_BY.values()}))
def test_a_drawn_scenario_reaches_the_guards_that_it_is_drawn_for(seed: int) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "relume.chaos.runner", "fuzz", "--guards", "--json",
         "--scenarios", "composed", "--seeds", "1", "--first", str(seed)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["passed"] == 1
    assert all(found["guards"][name] for name, by in REACHED_BY.items() if by == seed)


def test_each_kind_of_late_record_and_each_limit_is_drawn() -> None:
    calm, traffic = _calm()
    drawn, limits = set(), set()
    for seed in range(300):
        fleet, changed, faults = late_records(seed, calm, traffic, (), is_stuck=False)
        drawn.add((fleet.disorder != calm.disorder, fleet.operator != calm.operator,
                   changed.resumable > 0, changed.prefixes is not None,
                   *sorted({fault.what for fault in faults})))  # fmt: skip
        small = small_limits(seed, calm, traffic, (), needs_blocks=False).limits
        limits |= {name for name in small.__struct_fields__ if getattr(small, name)}
        assert not small_limits(seed, calm, traffic, (), needs_blocks=True).limits.checkpoint_kb
        without = late_records(seed, calm, traffic, ("leader-stop",), is_stuck=False)
        assert all(fault.what != "leader-stop" for fault in without[2])
    faults_drawn = {what for one in drawn for what in one[4:]}
    assert faults_drawn == {"engine-kill", "agent-kill", "gateway-kill", "leader-stop", "cut"}
    assert {one[:4] for one in drawn} >= {
        (False, False, False, False), (True, False, False, True), (True, False, True, False),
        (False, True, False, False), (True, True, False, False),
    }  # fmt: skip
    assert limits == {"checkpoint_kb", "unwritten_kb", "segment_bytes", "running", "kv_blocks"}


def _calm() -> tuple[Fleet, Traffic]:
    fleet = Fleet(workers=4, domains=2, checkpoint_mb=64)
    return fleet, Traffic(arrivals=Closed(8), lengths=Fixed(64, 64), requests=48)
