"""The bench runner, and the parts of benches that compute."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from relume.chaos.bench import __main__ as runner
from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.failover.failover_checkpoints import Arm, _figures
from relume.chaos.bench.failover.failover_parts import TimedStream
from relume.chaos.traffic import Stream


def test_every_bench_is_listed_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(runner.BENCHES)
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)
    assert all(callable(runner.load(name).run) for name in runner.BENCHES)


@pytest.mark.full
def test_the_last_line_of_a_bench_is_its_result() -> None:
    command = [sys.executable, "-m", "relume.chaos.cli", "bench", "restore"]
    options = ["--pairs", "1", "--blocks", "8", "--requests", "0"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["bench"] == "restore" and set(result) == {"bench", "met", "figures"}
    assert ran.returncode == (0 if result["met"] else 1), ran.stderr
    for link in ("memory", "plain", "curve"):
        found = result["figures"][f"{link}_to_bare"]
        assert found["unit"] == "ratio" and found["goal"] == 0.8 and found["value"] > 0


def test_an_unknown_bench_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["fastest"]) == 2
    assert "failover-gap" in capsys.readouterr().err


def test_a_gap_is_counted_from_the_kill_on() -> None:
    one = TimedStream(
        stream=Stream(request="a", prompt=""), prompt=[], output=5, at=[1.0, 3.0, 3.1, 3.4, 3.5]
    )
    assert one.gap_s(3.15) == pytest.approx(0.3)
    assert one.gap_s(2.0) == pytest.approx(2.0)
    assert one.gap_s(9.0) == 0.0


def test_gaps_are_compared_pair_by_pair() -> None:
    on, off = (
        Arm(longest=[0.1, 0.2, 0.3], moved=[0.1]),
        Arm(longest=[1.0, 1.0, 1.0], moved=[1.0], broken=1),
    )
    figures = _figures(on, off)
    assert figures["checkpoint_gap_ratio"]["value"] == 0.2
    assert figures["checkpoint_broken"]["value"] == 1
    assert figures["longest_gap_with_worst"]["value"] == 300


def test_figures_are_rounded_and_percentiles_are_values_that_were_measured() -> None:
    assert figure(1.23456, "ms", 2.0, 2) == {"value": 1.23, "goal": 2.0, "unit": "ms"}
    assert repr(figure(7.6, "bytes", digits=0)["value"]) == "8"
    values = [float(n) for n in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 51, 100, 100]
