"""A byte of a worker's model file is damaged on its disk where no canary sees it: the worker is held.

Marked full: three engines with a copy of the model each, and waits for canaries of two more engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relume.chaos.live.faults.flipped_weights import flip
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.engine_shim.agent.canaries.weights_digest import HEAD_BYTES, weights_digest
from relume.engine_shim.canary_prompts import COUNT, prompt_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState, WeightsOutcome
from tests.live.conftest import HANG_S, MODEL, Scene, scene_of, whole
from tests.live.conftest import same as same_tokens

FILE = "model.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"
TOKEN = 100
"""No canary has it in its prompt. An embedding is read for tokens of prompts and answers only."""


@pytest.fixture
def copies(options: FleetOptions, tmp_path: Path) -> FleetOptions:
    """Three workers, each with the model in a directory of its own."""
    names = [tmp_path / f"m{number}" for number in range(3)]
    for name in names:
        shutil.copytree(MODEL, name)
    models = tuple(f"{name}=tiny" for name in names)
    return msgspec.structs.replace(options, workers=3, models=models)


@pytest.fixture(autouse=True)
def canaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary each second or two."""
    agent_env = LocalFleet.agent_env
    often = {"RELUME_CANARY_INTERVAL_S": "1", "RELUME_CANARY_BUDGET_PPM": "1000000"}
    monkeypatch.setattr(
        LocalFleet, "agent_env", lambda self, index: {**agent_env(self, index), **often}
    )


def place_of(path: Path, name: str, row: int) -> int:
    """Where in the file a row of a tensor in float32 begins."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensor = json.loads(file.read(length))[name]
    assert tensor["dtype"] == "F32"
    return 8 + length + tensor["data_offsets"][0] + 4 * row * tensor["shape"][1]


def damage(path: Path, at: int) -> None:
    """One bit of one byte, as a disk does it: size and time of the last write stay."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes((byte ^ 0x40,)))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


async def until(scene: Scene, enough: Callable[[list[Any]], Any]) -> Any:
    deadline = time.monotonic() + HANG_S
    while not (found := enough(await scene.events())):
        events = [e for e in await scene.events() if type(e) is v.HealthDecided]
        assert time.monotonic() < deadline, events
        await asyncio.sleep(0.2)
    return found


def of(events: list[Any], kind: type, worker: str, incarnation: int) -> list[Any]:
    found = (event for event in events if type(event) is kind)
    return [e for e in found if (e.worker, e.incarnation) == (worker, incarnation)]


async def test_a_worker_with_a_damaged_file_is_held_until_it_is_replaced(
    copies: FleetOptions, tmp_path: Path
) -> None:
    assert TOKEN not in {t for n in range(COUNT) for t in prompt_of(n, 3072, 2048)}
    path = tmp_path / "m1" / FILE
    at = place_of(path, EMBEDDINGS, TOKEN)
    assert at > HEAD_BYTES
    async with scene_of(copies) as scene:
        read = await until(scene, lambda events: three_digests(events))
        assert len({e.digest for e in read}) == 1, "the copies are equal"
        calm = await scene.streams(6, 24, "calm")
        short = weights_digest(str(path.parent))
        damage(path, at)
        assert weights_digest(str(path.parent)) == short == read[0].weights
        before = await scene.worker("w1")
        assert flip(before["engine_pid"], path.parent)
        held = await until(scene, lambda events: of(events, v.WeightsCompared, "w1", 2))
        assert held[0].outcome == WeightsOutcome.DIFFERENT and held[0].files == (FILE,)
        assert held[0].witnesses == ("w0", "w2") and held[0].expected == read[0].digest
        count = len(of(await scene.events(), v.CanaryReported, "w1", 2))
        await until(
            scene,
            lambda events: len(of(events, v.CanaryReported, "w1", 2)) >= count + 2 * COUNT,
        )
        worker = await scene.worker("w1")
        assert worker["health"] == HealthState.QUARANTINED and worker["incarnation"] == 2
        assert (
            "its model files differ from those of w0, w2 (model.safetensors)" in worker["evidence"]
        )
        incidents = (await scene.fleet.admin("incidents"))["incidents"]
        (incident,) = [one for one in incidents if one["failure"] == "corruption"]
        assert "relume restart w1" in incident["summary"] and incident["open"]
        answers = of(await scene.events(), v.CanaryReported, "w1", 2)
        right = of(await scene.events(), v.CanaryReported, "w0", 1)
        expected = {e.canary: (e.tokens, e.logprobs) for e in right if e.alone}
        assert all((e.tokens, e.logprobs) == expected[e.canary] for e in answers if e.alone), (
            "no canary sees the damage"
        )
        fresh = tmp_path / "fresh"
        shutil.copyfile(MODEL / FILE, fresh)
        fresh.replace(path)
        await scene.fleet.admin("workers/w1/restart", "POST")
        same = await until(scene, lambda events: of(events, v.WeightsCompared, "w1", 3))
        assert same[0].outcome == WeightsOutcome.SAME and same[0].digest == read[0].digest
        released = await until(
            scene,
            lambda events: [
                e for e in of(events, v.HealthDecided, "w1", 3) if e.state == HealthState.HEALTHY
            ],
        )
        assert released
        after = await scene.streams(6, 24, "after")
        assert not whole(after) and same_tokens(calm, after) == []
        await scene.sound()


def three_digests(events: list[Any]) -> list[v.WeightsDigested]:
    found = [e for e in events if type(e) is v.WeightsDigested and e.digest]
    return found if {e.worker for e in found} == {"w0", "w1", "w2"} else []
