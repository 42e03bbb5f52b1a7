"""The bench runner, and the parts of benches that compute."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

from relume.chaos.bench import __main__ as runner
from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.eventlog import replay_open
from relume.chaos.bench.eventlog import validator_cost as validators
from relume.chaos.bench.failover import recovery_ablation
from relume.chaos.bench.failover.failover_checkpoints import Arm, _figures
from relume.chaos.bench.failover.failover_parts import TimedStream
from relume.chaos.bench.failover.recovery_ablation import (
    MOST_CONTEXT,
    Way,
    bars,
    figures_of,
    lengths,
)
from relume.chaos.traffic import Stream


def test_every_bench_is_listed_with_a_description(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(runner.BENCHES)
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)
    assert all(callable(runner.load(name).run) for name in runner.BENCHES)


@pytest.mark.full
def test_relume_chaos_runs_benches() -> None:
    command = [sys.executable, "-m", "relume.chaos.cli", "bench", "validators", "--quick"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    result = json.loads(ran.stdout.splitlines()[-1])
    assert result["bench"] == "validators" and set(result) == {"bench", "met", "figures"}
    assert ran.returncode == (0 if result["met"] else 1), ran.stderr


def test_an_unknown_bench_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.main(["fastest"]) == 2
    assert "recovery-ablation" in capsys.readouterr().err


@pytest.mark.full
def test_the_last_line_is_the_result(capfd: pytest.CaptureFixture[str]) -> None:
    code = runner.main(["restore", "--pairs", "1", "--blocks", "8", "--requests", "0"])
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["bench"] == "restore" and code == (0 if result["met"] else 1)
    for link in ("memory", "plain", "curve"):
        found = result["figures"][f"{link}_to_bare"]
        assert found["unit"] == "ratio" and found["goal"] == 0.8 and found["value"] > 0


def test_lengths_of_the_trace_fit_the_model() -> None:
    whole, half = lengths(1.0), lengths(0.5)
    assert len(whole) == 512
    assert all(p >= 16 and o >= 1 and p + o < MOST_CONTEXT for p, o in whole)
    assert statistics.median(p for p, _ in half) == pytest.approx(498.0, abs=1)
    assert [o for _, o in whole] == [o for _, o in half]


def test_a_gap_is_counted_from_the_kill_on() -> None:
    one = TimedStream(
        stream=Stream(request="a", prompt=""), prompt=[], output=5, at=[1.0, 3.0, 3.1, 3.4, 3.5]
    )
    assert one.gap_s(3.15) == pytest.approx(0.3)
    assert one.gap_s(2.0) == pytest.approx(2.0)
    assert one.gap_s(9.0) == 0.0


def test_figures_of_an_ablation() -> None:
    ways = {
        f"{place}_{rule}": Way()
        for place in recovery_ablation.PLACEMENTS
        for rule in ("eq6", "least_total")
    }
    good = ways["load_aware_least_total"]
    good.gaps, good.balance = [0.1, 0.3, 0.2], [1.2]
    good.requests, good.tokens = [(9, 10), (28, 30)], [(90, 100), (250, 300)]
    good.loads = {"w0": 10, "w1": 12}
    ways["none_eq6"].gaps = [0.4]
    figures = figures_of(ways)
    assert figures["load_aware_least_total_gap_p50"]["value"] == 200
    assert figures["load_aware_least_total_coverage"] == {
        "value": 0.925,
        "goal": recovery_ablation.COVERAGE_GOAL,
        "unit": "ratio",
    }
    assert figures["load_aware_least_total_token_coverage"]["value"] == 0.85
    assert figures["load_aware_least_total_balance_over_time"]["value"] == 1.2
    assert "none_eq6_coverage" not in figures
    chart = bars(ways).splitlines()
    assert chart[1].count("#") == 40 and chart[2].count("#") == 20 and chart[2].count("-") >= 10


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


def test_the_log_of_the_validators_bench_is_sound_and_has_checkpoints() -> None:
    events, took = validators.judge(2_000)
    assert events >= 2_000 and {"decoding", "I1", "I8"} <= set(took)


def test_with_snapshots_the_end_of_a_log_is_near() -> None:
    found = replay_open.run(["--records", "3000", "--every", "200"])["figures"]
    assert found["file_folded"]["value"] == found["log"]["value"] > 400
    assert 0 < found["archive_folded"]["value"] < 200
