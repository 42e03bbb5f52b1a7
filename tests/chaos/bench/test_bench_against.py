"""A bench compared with the same bench in another checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relume.chaos.bench import __main__ as runner
from relume.chaos.bench import against

CHECKOUT = Path(__file__).resolve().parents[3]


def figures(**values: tuple[float, str]) -> against.Figures:
    return {name: {"value": value, "unit": unit} for name, (value, unit) in values.items()}


@pytest.mark.parametrize(
    "unit, here, there, expected",
    [
        ("records/s", 190.0, 200.0, 0.95),
        ("us", 100.0, 95.0, 0.95),
        ("us a decision", 50.0, 100.0, 2.0),
        ("s/1k requests", 0.5, 0.4, 0.8),
        ("records", 1.0, 2.0, None),
        ("x", 1.0, 2.0, None),
        ("samples", 1.0, 2.0, None),
        ("us", 0.0, 2.0, None),
    ],
)
def test_above_one_is_faster_whatever_the_unit(
    unit: str, here: float, there: float, expected: float | None
) -> None:
    found = against.speed(unit, here, there)
    assert found == (None if expected is None else pytest.approx(expected))


def test_ratios_are_of_neighbours_and_judged_by_their_median() -> None:
    # The machine is twice as slow in the second pair, and one run of the third was disturbed.
    took = [(10.0, 10.0), (20.0, 20.0), (30.0, 10.0), (11.0, 10.0), (10.0, 10.0)]
    pairs = [(figures(a=(here, "us")), figures(a=(there, "us"))) for here, there in took]
    found = against.compare(pairs, "", 0.95)
    assert found["a_speed"] == {"value": 1.0, "goal": 0.95, "unit": "x"}
    assert found["a_speed_low"]["value"] < 0.95 and found["a_speed_high"]["value"] == 1.0
    assert found["a_speed_best"]["value"] == 1.0
    assert (found["a_here"]["value"], found["a_there"]["value"]) == (11.0, 10.0)


def test_only_what_both_have_and_what_is_asked_for_is_compared() -> None:
    ours = figures(cpu=(1.0, "s"), wait=(1.0, "s"), new=(1.0, "s"))
    theirs = figures(cpu=(1.0, "s"), wait=(1.0, "s"), old=(1.0, "s"))
    found = against.compare([(ours, theirs)], "^(cpu|new)", 0.95)
    assert {name for name in found if name.endswith("_speed")} == {"cpu_speed"}


def test_a_checkout_without_the_common_import_name_is_run_under_its_own(tmp_path: Path) -> None:
    assert against.command(tmp_path, "replay", ["--quick"])[1:] == [
        "-m", "chaos.bench", "replay", "--quick",
    ]  # fmt: skip
    (tmp_path / "relume").mkdir()
    assert "relume.chaos.bench" in against.command(tmp_path, "replay", [])


@pytest.mark.full
def test_a_bench_is_compared_with_another_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["replay", "--against", str(CHECKOUT), "--rounds", "2", "--figures", "^records_per"]
    code = runner.main([*argv, "--at-least", "0.01", "--records", "1000", "--repeat", "1"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0 and result["met"] and result["bench"] == "replay-against"
    found = result["figures"]
    assert found["records_per_s_speed"]["goal"] == 0.01
    assert 0.1 < found["records_per_s_speed"]["value"] < 10
    assert found["records_per_s_here"]["value"] > 1000


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(against.BenchFailed, match="no checkout"):
        against.run("replay", ["--against", str(tmp_path)])


def test_a_run_without_a_result_is_said() -> None:
    with pytest.raises(against.BenchFailed, match="made no result"):
        against.run("replay", ["--against", str(CHECKOUT), "--no-such-option"])
