"""Logs of real runs replay to the same decisions, on any CPU, under any hash seed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from relume.chaos.validators import check_all
from relume.controlplane.replay.history import from_file
from relume.controlplane.replay.telling import told
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.policies import routing
from tests.replay.tamper import dropped, places, swapped

ROOT = Path(__file__).parents[2]
LOGS = sorted((ROOT / "tests/replay/logs").glob("*.rlog"))

NO_FEATURES = {
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-AVX,-FMA,-BMI2,-ERMS,-SSE4_2,-SSSE3",
    "OPENSSL_ia32cap": "~0x200000200000000:~0x20000000",
    "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F",
}
SETTINGS = {
    "seed 0": {"PYTHONHASHSEED": "0"},
    "seed 4242": {"PYTHONHASHSEED": "4242"},
    "CPU features off": {"PYTHONHASHSEED": "1", **NO_FEATURES},
}


def test_there_is_a_log() -> None:
    assert LOGS


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_verdict_is_the_same_in_every_environment(path: Path) -> None:
    command = [sys.executable, "-m", "relume.controlplane.cli", "replay", "--verify", "--json"]
    answers = {}
    for name, settings in SETTINGS.items():
        done = subprocess.run(
            [*command, "--log", str(path.relative_to(ROOT))],
            cwd=ROOT,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        answers[name] = done.stdout
    assert len(set(answers.values())) == 1
    verdict = json.loads(answers["seed 0"])
    assert verdict["contested"] > 50
    assert verdict["unanchored"] == 0


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_promises_held_in_it(path: Path) -> None:
    assert check_all(from_file(path).groups, []) == []


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_other_weights_decide_otherwise(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = from_file(path)
    monkeypatch.setattr(routing, "REQUEST_TOKENS", 31)
    assert verify(history.groups, history.base).divergences


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_dropped_and_swapped_events_are_found(path: Path) -> None:
    history = from_file(path)
    assert history.footer is not None
    rng = random.Random(path.stem)
    everything = [place for place, _ in places(history.groups)]
    for place in rng.sample(everything, 40):
        found = verify(dropped(history.groups, place), limit=1, end=history.footer.end)
        assert found.divergences, f"dropped at {place}"
        records = history.groups[place[0]].segments[place[1]].records
        if place[2] + 1 < len(records) and records[place[2]] != records[place[2] + 1]:
            found = verify(swapped(history.groups, place), limit=1, end=history.footer.end)
            assert found.divergences, f"swapped at {place}"


def test_moved_request_of_the_kill_run_is_explained() -> None:
    history = from_file(ROOT / "tests/replay/logs/engine-killed.rlog")
    restored = moved = 0
    for number in range(56):
        found = why(history.groups, f"hit-{number}")
        assert found is not None
        if len(found.decisions) > 1:
            text = "\n".join(told(found))
            assert "died (killed)" in text
            assert "mode continue" in text
            assert "planned with all that w0:1 was running" in text
            moved += 1
            restored += "tokens were restored from" in text
    assert moved >= restored > 5
