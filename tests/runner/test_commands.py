"""Reports of runs, and the commands, over a world made of a stored run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relume.chaos.runner import __main__ as command
from relume.chaos.runner import artifacts
from relume.chaos.runner.composed.compose import compose
from relume.chaos.runner.judge import judge
from relume.chaos.runner.report.run_report import run_report
from relume.chaos.runner.report.timeline import timeline
from relume.chaos.scenario import scenario_reader
from relume.controlplane.replay.recorded_log import History
from relume.controlplane.ui.recorded_fleet import RecordedFleet
from relume.controlplane.ui.recording_server import RecordingServer
from tests.runner.conftest import GOOD

# --- reports ---------------------------------------------------------------------------


async def test_the_page_gets_the_run_beside_its_log(tmp_path: Path) -> None:
    artifacts.keep(tmp_path, GOOD, judge(GOOD), "relume-chaos run recorded --seed 7")
    outcome_, run = artifacts.outcome_in(tmp_path)
    report = run_report(timeline(outcome_), judge(outcome_), run)
    recorded = RecordedFleet(History(groups=list(outcome_.groups), origin="here"))
    async with (
        RecordingServer(recorded, report=report) as server,
        aiohttp.ClientSession() as session,
    ):
        api = server.url.removesuffix("ui/") + "admin/v1"

        async def get(path: str) -> Any:
            async with session.get(f"{api}/{path}") as answer:
                assert answer.status == 200
                return await answer.json()

        assert (await get("recording"))["has_report"] is True
        shown = await get("report")
        assert shown["command"] == "relume-chaos run recorded --seed 7"
        assert shown["result"] == "passed" and len(shown["requests"]) == 56
        assert [one["what"] for one in shown["struck"]] == ["engine-kill"]
        assert {lane["name"] for lane in shown["lanes"]} >= {"w0", "w3", "r0"}
        judged = {one["name"]: one["result"] for one in shown["promises"]}
        assert judged["I1"] == "passed" and "failed" not in judged.values()
        struck_ms = shown["began_ms"] + shown["struck"][0]["from_ms"]
        before = await get(f"moment?at_ms={int(struck_ms) - 5}")
        after = await get(f"moment?at_ms={int(struck_ms) + 2_000}")
        assert not before["incidents"] and len(after["incidents"]) == 1
        assert before["head"]["at_ms"] <= struck_ms < after["head"]["at_ms"]


def test_the_timeline_holds_lives_attempts_and_decisions() -> None:
    told = timeline(GOOD)
    lanes = {lane.name: lane for lane in told.workers}
    first, second = lanes["w0"].lives
    assert first.to_ms is not None and second.from_ms >= first.to_ms
    lost = [a for lane in told.workers for a in lane.attempts if a.end == "engine died"]
    again = [a for lane in told.workers for a in lane.attempts if a.attempt == 2]
    assert len(lost) == len(again) == 14
    assert all(a.restored for a in again)
    assert sum(len(lane.attempts) for lane in told.workers) == 70
    assert sum(request.interrupted for request in told.requests) == 14
    kinds = {decision.kind for decision in told.decisions}
    assert {"RouteDecided", "HolderChosen", "RecoveryPlanned"} <= kinds
    for lane in told.workers:
        for row in range(lane.rows):
            spans = sorted((a.from_ms, a.to_ms or 1e12) for a in lane.attempts if a.row == row)
            assert all(a[1] <= b[0] for a, b in pairwise(spans))


# --- commands --------------------------------------------------------------------------


def test_run_says_how_it_went(
    played: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", "calm", "--seed", "2"]) == 0
    assert "PASSED" in capsys.readouterr().out
    out = tmp_path / "kept"
    assert command.main(["run", "cascade", "--seed", "3", "--out", str(out)]) == 1
    text = capsys.readouterr().out
    assert "BROKEN    I10" in text and "repeat: relume-chaos run cascade --seed 3" in text
    assert command.main(["run", "cascade", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["broken"] == {"I10": 1}
    assert command.main(["report", str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"]["result"] == "failed"
    assert command.main(["run", str(out)]) == 1, "a kept run is a case"
    capsys.readouterr()
    assert command.main(["run", "composed", "--seed", "4", "--print"]) == 0
    assert scenario_reader.parse(capsys.readouterr().out) == compose(4)


def test_what_cannot_be_run_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main(["run", "calmm"]) == 2
    assert "did you mean calm?" in capsys.readouterr().err
    assert command.main(["report", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_report_of_which_only_the_head_is_read_is_no_error(tmp_path: Path) -> None:
    artifacts.keep(tmp_path, GOOD, judge(GOOD), "relume-chaos run it")
    report = [sys.executable, "-m", "relume.chaos.runner", "report", str(tmp_path)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(report, stdout=writer, stderr=subprocess.PIPE, timeout=120)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.full
def test_fuzz_and_shrink_from_the_command_line(
    played: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenarios = "calm,cascade"
    given = ["fuzz", "--seeds", "4", "--jobs", "1", "--scenarios", scenarios]
    assert command.main([*given, "--out", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "relume-chaos run cascade --seed 1" in captured.out
    assert "4 runs in" in captured.out and "2 passed, 2 failed" in captured.out
    assert "FAILED cascade seed 1" in captured.err
    assert command.main([*given[:-1], "calm", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenarios"]["calm"]["passed"] == 4
    path = tmp_path / "small.yaml"
    assert command.main(["shrink", "cascade", "--seed", "1", "--out", str(path)]) == 0
    text = capsys.readouterr().out
    assert "2 workers" in text and f"repeat: relume-chaos run {path}" in text
    assert command.main(["run", str(path)]) == 1


@pytest.mark.parametrize(("given", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1h", 3600)])
def test_times_on_the_command_line(given: str, seconds: float) -> None:
    assert command.duration(given) == seconds
    for wrong in ("0", "-3", "x", "3d"):
        with pytest.raises(Exception, match="is no time"):
            command.duration(wrong)
