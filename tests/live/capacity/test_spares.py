"""An engine of a busy fleet is killed: a spare is promoted at once, and first tokens come as before."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from relume.chaos.traffic import Stream
from relume.chaos.validators.records import events_of
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Tier
from tests.live.capacity.test_short_of_capacity import Load, few_at_once, pausing_fleet
from tests.live.conftest import HANG_S, Scene
from tests.suite.outcomes import inconclusive

PAUSE_S, TOKENS = 0.06, 24
PER_S = 6.5
"""Three workers serve 8.3 requests a second, two 5.5."""
LOOK_S = 10.0
"""For so long after the kill clients' first tokens are looked at."""
LATE_S = 2.5
"""A fleet that serves its load gives 90 % of the first tokens sooner (seen: 0.9 s and 1.5 s)."""
PROMOTED_MS = 1000
QUEUED = ("--waiting-limits", "queued=2")
"""Other requests queue at the replica."""
SPARE = (*QUEUED, "--spares", "share_percent=10")
"""At least one of four."""


async def until_spare(scene: Scene) -> str:
    deadline = time.monotonic() + HANG_S
    while not (found := [w for w in await scene.fleet.workers() if w["state"] == "spare"]):
        assert time.monotonic() < deadline, "no worker became a spare"
        await asyncio.sleep(0.1)
    return str(found[0]["name"])


async def ttft_after_kill(scene: Scene, victim: str) -> list[float]:
    """`ttft` of what came after an engine was killed for good."""
    # batch may use spares before they are promoted
    load = Load(scene, PER_S, {Tier.STANDARD: 1.0}, tokens=TOKENS)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run())
        await asyncio.sleep(6.0)
        await scene.fleet.admin(f"workers/{victim}/hold", "POST")
        killed = time.monotonic()
        os.kill((await scene.worker(victim))["engine_pid"], signal.SIGKILL)
        await asyncio.sleep(LOOK_S)
        load.stop()
    before = ttft(s for _, s in load.streams if s.first and s.first < killed)
    if not before:
        inconclusive("no stream had its first token before the kill")
    if p90(before) > LATE_S:
        inconclusive(
            f"the load was more than the fleet served before: TTFT p90 {p90(before):.2f} s"
        )
    for _, stream in load.streams:
        scene.note(stream, stream.prompt, undisturbed=stream.whole and stream.ended < killed)
    assert [stream.error for _, stream in load.streams if not stream.whole] == []
    await scene.sound()
    return ttft(s for _, s in load.streams if s.started >= killed)


def ttft(streams: Iterable[Stream]) -> list[float]:
    """Times to first token, in seconds and ascending."""
    return sorted(stream.first - stream.started for stream in streams)


def p90(found: list[float]) -> float:
    return found[len(found) * 9 // 10]


async def test_first_tokens_come_as_before_when_a_spare_takes_over(
    options: FleetOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_spare = tmp_path / "with"
    with_spare.mkdir()
    fleet = few_at_once(options, 4, *SPARE)
    async with pausing_fleet(fleet, with_spare, monkeypatch, PAUSE_S) as scene:
        spare = await until_spare(scene)
        victim = next(w["name"] for w in await scene.fleet.workers() if w["name"] != spare)
        kept = await ttft_after_kill(scene, victim)
        at = list(events_of(await scene.log()))
    died = next(a for a in at if type(a.event) is v.EngineDied and a.event.worker == victim)
    promoted = next(
        a for a in at if type(a.event) is v.SparesDecided and spare not in a.event.spares
        and a.revision > died.revision
    )  # fmt: skip
    took_ms = promoted.at_ms - died.at_ms
    without = tmp_path / "without"
    without.mkdir()
    fleet = few_at_once(options, 3, *QUEUED)
    async with pausing_fleet(fleet, without, monkeypatch, PAUSE_S) as scene:
        short = await ttft_after_kill(scene, "w0")
    for name, found in (("with", kept), ("without", short)):
        median = found[len(found) // 2]
        print(
            f"{name} spare: {len(found)} requests, TTFT median {median:.2f} s, p90 {p90(found):.2f} s"
        )
    print(f"promoted {took_ms} ms after the death stood in the log")
    assert took_ms <= PROMOTED_MS
    assert 2 * p90(kept) < p90(short)
