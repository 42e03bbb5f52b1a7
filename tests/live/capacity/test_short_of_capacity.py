"""Real engines die and return one after the other: levels follow, and tier interactive is served.

Each engine pauses before its steps, so four of them do four times as much as one, whatever the machine.
Step times do not show these pauses: the test sets the share of the capacity that counts so that four
workers serve half more than clients send.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.traffic import Stream, complete, prompts
from relume.controlplane.local.local_fleet import FleetOptions
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.failpoints.failpoint_client import ENVIRONMENT
from relume.events.failpoints.points import Action, Failpoint
from relume.events.vocabulary.enums import ShedReason, Tier
from tests.live.conftest import EVENLY, HANG_S, Scene, scene_of

PAUSE_S = 0.06
WORKERS, AT_ONCE, TOKENS = 4, 4, 24
PER_S = 5.0
"""One worker ends at most AT_ONCE / (TOKENS * PAUSE_S) = 2.8 requests a second; all four 11."""
SHARES = {Tier.INTERACTIVE: 0.15, Tier.STANDARD: 0.15, Tier.BATCH: 0.7}
SERVED_PERMILLE = 1500
"""With all workers."""
TTFT_S = 3.0
"""The TTFT goal of tier interactive, which nine in ten of its requests have to meet: a step takes 0.06 s,
one request 1.5 s."""
LIMITS = "window_ticks=6,rise_ticks=2,fall_ticks=3,usable_percent=100"


class Load:
    """Clients of three tiers that send `per_s` requests at random times until `stop`."""

    def __init__(
        self, scene: Scene, per_s: float = PER_S, shares: Mapping[Tier, float] = SHARES
    ) -> None:
        self.streams: list[tuple[Tier, Stream]] = []
        self._scene = scene
        self._per_s = per_s
        self._shares = shares
        self._over = asyncio.Event()

    def stop(self) -> None:
        self._over.set()

    async def run(self) -> None:
        rng, texts = random.Random(1), prompts(8)
        tiers, weights = list(self._shares), list(self._shares.values())
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            while not self._over.is_set():
                number = len(self.streams)
                stream = Stream(request=f"q{number}", prompt=texts[number % len(texts)])
                (tier,) = rng.choices(tiers, weights)
                self.streams.append((tier, stream))
                tasks.create_task(
                    complete(
                        session, self._scene.url, stream, TOKENS, ignore_eos=True,
                        headers={"x-relume-tier": tier},
                    )
                )  # fmt: skip
                await asyncio.sleep(rng.expovariate(self._per_s))

    def of(self, tier: Tier) -> list[Stream]:
        return [stream for found, stream in self.streams if found == tier]


def few_at_once(options: FleetOptions, workers: int, *replica_args: str) -> FleetOptions:
    """So many workers whose engines run `AT_ONCE` requests."""
    arguments = list(options.engine_args)
    arguments[arguments.index("--max-num-seqs") + 1] = str(AT_ONCE)
    return msgspec.structs.replace(
        options,
        workers=workers,
        engine_args=tuple(arguments),
        replica_args=(*EVENLY, *replica_args),
    )


@asynccontextmanager
async def pausing_fleet(
    options: FleetOptions, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    """A fleet whose engines pause before each step."""
    async with FailpointServer(folder / "failpoints.sock") as failpoints:
        monkeypatch.setenv(ENVIRONMENT, str(failpoints.path))
        async with scene_of(msgspec.structs.replace(options, state_dir=str(folder))) as scene:
            pausing = failpoints.armed(
                Failpoint.ENGINE_STEP, Action.DELAY, process="engine *", times=0, seconds=PAUSE_S
            )
            async with pausing:
                yield scene


async def set_config(scene: Scene, key: str, value: object) -> None:
    answer = await scene.fleet.admin("config", "PUT", body={"key": key, "value": str(value)})
    assert answer.get("state") == "decided", answer


async def figures(scene: Scene) -> dict[str, Any]:
    """What the leader knows of demand and capacity."""
    return (await scene.fleet.admin("degradation"))["models"][0]


async def until(scene: Scene, found: Any, what: str) -> dict[str, Any]:
    deadline = time.monotonic() + HANG_S
    while not found(seen := await figures(scene)):
        assert time.monotonic() < deadline, (what, seen)
        await asyncio.sleep(0.2)
    return seen


async def test_levels_follow_capacity_and_interactive_requests_are_served(
    options: FleetOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--degradation", "observe", "--degradation-limits", LIMITS)
    arguments += ("--routing-limits", f"slo_interactive_ms={TTFT_S * 1000:.0f}")
    options = few_at_once(options, WORKERS, *arguments)
    async with pausing_fleet(options, tmp_path, monkeypatch) as scene:
        load = Load(scene)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            killed = await _staircase(scene)
            load.stop()
        await _judged(scene, load, killed)


async def _staircase(scene: Scene) -> float:
    """Returns when the first engine was killed."""
    known = await until(scene, lambda f: f["known"], "step times are not known")
    await asyncio.sleep(8.0)  # a whole window of demand
    known = await figures(scene)
    percent = PER_S * SERVED_PERMILLE / 10 / known["requests_s"]
    assert 1 <= percent <= 100, known
    await set_config(scene, "degradation.usable_percent", round(percent))
    await until(scene, lambda f: f["served_permille"] > 1100, "four workers do not serve it")
    await set_config(scene, "degradation.mode", "on")
    killed = time.monotonic()
    for name in ("w1", "w2", "w3"):
        await scene.fleet.admin(f"workers/{name}/hold", "POST")
        os.kill((await scene.worker(name))["engine_pid"], signal.SIGKILL)
        await asyncio.sleep(2.0)
    await until(scene, lambda f: f["level"] >= 2, "the level did not rise")
    await until(scene, lambda f: f["workers"] == 1, "workers without an engine count")
    await asyncio.sleep(10.0)
    shown = await relume_degradation(scene)
    (model,) = shown["models"]
    assert (model["workers"], model["level"]) == (1, shown["decisions"][-1]["level"])
    for name in ("w1", "w2", "w3"):
        await scene.fleet.admin(f"workers/{name}/release", "POST")
    await until(scene, lambda f: f["workers"] == WORKERS, "the workers did not return")
    await until(scene, lambda f: f["level"] == 0, "the level did not fall")
    return killed


async def relume_degradation(scene: Scene) -> dict[str, Any]:
    """What the command shows of the running fleet."""
    command = [sys.executable, "-m", "relume.controlplane.cli.relume_command", "degradation"]
    command += ["--state-dir", scene.fleet.options.state_dir]

    def call(*more: str) -> str:
        return subprocess.run([*command, *more], capture_output=True, check=True, text=True).stdout

    shown = json.loads(await asyncio.to_thread(call, "--json"))
    text = await asyncio.to_thread(call)
    for decision in shown["decisions"]:
        assert f"degradation level {decision['level']} " in text, text
    return shown


async def _judged(scene: Scene, load: Load, killed: float) -> None:
    for _, stream in load.streams:
        scene.note(stream, stream.prompt, undisturbed=stream.whole and stream.ended < killed)
    await scene.sound()
    events = await scene.events()
    decided = [e for e in events if type(e) is v.DegradationDecided]
    levels = [e.level for e in decided]
    print(f"levels {levels}, {len(load.streams)} requests")
    top = levels.index(max(levels))
    assert levels[: top + 1] == sorted(levels[: top + 1]), "it does not flap on the way up"
    assert levels[top:] == [*range(levels[top], -1, -1)], "it falls one by one"
    assert decided[top].workers < WORKERS and decided[-1].workers == WORKERS
    refused = [e for e in events if type(e) is v.RequestShed and e.reason == ShedReason.DEGRADED]
    assert refused and {e.tier for e in refused} == {Tier.BATCH}
    for tier in (Tier.INTERACTIVE, Tier.STANDARD):
        assert [s.error for s in load.of(tier) if not s.whole] == [], "none failed"
    lost = [s for s in load.of(Tier.BATCH) if not s.whole and s.status != 503]
    assert [s.error for s in lost] == []
    waits = sorted(s.first - s.started for s in load.of(Tier.INTERACTIVE))
    print(f"TTFT of interactive: median {waits[len(waits) // 2]:.2f} s, largest {waits[-1]:.2f} s")
    assert waits[len(waits) * 9 // 10] < TTFT_S
    chain = why(await scene.log(), refused[0].request)
    assert chain is not None and "refused on arrival: degraded" in "\n".join(lines_of(chain))
