"""`relume replay` and `relume why` on stored logs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from relume.controlplane.cli.relume_command import main
from relume.controlplane.replay.store import save
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from tests.replay.scene import Scene
from tests.replay.tamper import places, replaced


async def scene_groups(workers: int = 3):
    async with Scene(41, workers=workers) as scene:
        await scene.traffic(25)
        await scene.settled()
    return scene.log.groups


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "run.rlog"
    save(path, asyncio.run(scene_groups()), origin="a scene")
    return path


def test_sound_log_verifies(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--verify", "--log", str(stored)]) == 0
    out = capsys.readouterr().out
    assert "every decision came out the same" in out
    assert "decisions repeated" in out


def test_verdict_as_json(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--verify", "--json", "--log", str(stored)]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["ok"] is True
    assert verdict["contested"] > 0
    assert verdict["divergences"] == []


def test_tampered_log_fails_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = asyncio.run(scene_groups())
    place = next(places(groups, "w.w1"))[0]
    path = tmp_path / "bad.rlog"
    save(
        path,
        replaced(
            groups, place, encode(v.WorkerRegistered(worker="w1", domain="elsewhere", agent_pid=1))
        ),
    )
    assert main(["replay", "--verify", "--log", str(path)]) == 1
    out = capsys.readouterr().out
    assert "recorded:" in out
    assert "replayed:" in out


def test_log_that_proves_nothing_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.rlog"
    save(path, asyncio.run(scene_groups(workers=1)))
    assert main(["replay", "--verify", "--log", str(path)]) == 1
    assert "proves nothing" in capsys.readouterr().out


def test_state_at_a_revision(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--log", str(stored)]) == 0
    assert "route_decided" in capsys.readouterr().out
    assert main(["replay", "--at", "9", "--json", "--log", str(stored)]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["revision"] == 9
    assert state["arrived"] == 0
    assert [w["name"] for w in state["workers"]] == ["w0", "w1", "w2"]


def test_export_of_an_export_is_the_same(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again.rlog"
    assert main(["replay", "--log", str(stored), "--export", str(again), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exported"]["state"] == report["hash"]
    assert main(["replay", "--verify", "--log", str(again)]) == 0


def test_why_tells_a_request(stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "q7", "--log", str(stored)]) == 0
    assert "attempt 1 sent to w" in capsys.readouterr().out
    assert main(["why", "q7", "--json", "--log", str(stored)]) == 0
    assert json.loads(capsys.readouterr().out)["request"] == "q7"


def test_errors_are_one_line(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["why", "nobody", "--log", str(stored)]) == 1
    assert main(["replay", "--log", str(tmp_path / "none.rlog")]) == 1
    closed = ["--etcd", "127.0.0.1:1", "--state-dir", str(tmp_path)]
    assert main(["replay", *closed]) == 3
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 3
    assert all(line.startswith("relume ") for line in errors)
