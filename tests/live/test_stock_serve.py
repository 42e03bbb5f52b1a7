"""The production host: stock `vllm serve` with our plugin, each of its processes killed, and
some stopped."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from relume.controlplane.local.local_fleet import ENGINE_NICE
from relume.engine_shim.agent.engine_process import ipc_directory
from relume.engine_shim.engine.progress import Progress
from relume.events import vocabulary as v
from tests.agent.stage import weight_of_session
from tests.live.conftest import EVENLY, Scene, same, scene_of, small_fleet, whole
from tests.processes import cpu_time, family, starved
from tests.signals import stop
from tests.suite.outcomes import inconclusive

pytestmark = pytest.mark.timeout(420)
TOKENS = 600


def shared_memory(pids: dict[str, int]) -> set[Path]:
    """Files of shared memory that those processes have mapped."""
    lines = [line for pid in pids.values() for line in Path(f"/proc/{pid}/maps").open()]
    return {Path(line.split()[-1]) for line in lines if " /dev/shm/psm_" in line}


def sockets_in(scene: Scene) -> set[str]:
    """What lies in the directory of w0's engine."""
    directory = ipc_directory.ipc_path(scene.fleet.dir / "run" / "w0")
    return {path.name for path in directory.iterdir() if path.is_socket()}


async def test_each_process_of_vllm_serve_dies_or_hangs(tmp_path: Path) -> None:
    options = small_fleet(tmp_path, host_kind="serve", ready_timeout_s=200.0, replica_args=EVENLY)
    async with scene_of(options) as scene:
        calm = await scene.streams(6, TOKENS, "calm")
        assert not whole(calm)
        await _gives_way_and_measures(scene)
        for role in ("core", "worker"):
            await _hangs(scene, calm, role)
        for role in ("worker", "core", "api"):
            # A busy API process may pass on nothing before its engine is done: then try again.
            moved = [await _killed(scene, calm, role, 1)]
            while not moved[-1] and len(moved) < 3:
                moved.append(await _killed(scene, calm, role, len(moved) + 1))
            if not moved[-1]:
                inconclusive(f"{role} killed {len(moved)} times: all streams had ended before")
        verdict = await scene.sound()
        assert verdict.stalls == sum(type(e) is v.StallJudged for e in await scene.events())
    assert not ipc_directory.ipc_path(scene.fleet.dir / "run" / "w0").exists()


async def _gives_way_and_measures(scene: Scene) -> None:
    """Its processes give way to the rest of the fleet, those that compute also to its HTTP server, and
    its worker says what steps take there."""
    pids = family((await scene.until_idle("w0"))["engine_pid"])
    nice = {role: os.getpriority(os.PRIO_PROCESS, pid) for role, pid in pids.items()}
    assert nice["api"] >= ENGINE_NICE
    assert nice["core"] == nice["worker"] == min(19, 2 * nice["api"])
    assert {weight_of_session(pid) for pid in pids.values()} <= {None, nice["api"]}
    took_us, waited_us, late_us = Progress(
        str(scene.fleet.dir / "run" / "w0" / "progress")
    ).computed()
    steps = [e for e in await scene.events("w.w0") if type(e) is v.EngineStep]
    assert (
        late_us >= 0 and 0 <= waited_us < took_us < sum(e.duration_us for e in steps) + 60_000_000
    )


async def _killed(scene: Scene, calm: dict, role: str, turn: int) -> bool:
    """One process of `vllm serve` is killed: streams go on, the others follow it, and the
    worker comes back. Whether a stream had to move."""
    victim = await scene.until_idle("w0")
    pids = family(victim["engine_pid"])
    shared, sockets = shared_memory(pids), sockets_in(scene)
    assert shared and sockets
    began = time.monotonic()

    async def kill(streams: dict) -> None:
        await scene.paced(streams, 16, "w0", pids["core"])
        os.kill(pids[role], signal.SIGKILL)
        if role != "core":
            os.kill(pids["core"], signal.SIGCONT)

    hit = await scene.streams(6, TOKENS, f"{role}-killed{turn}", kill)
    assert not whole(hit), role
    assert same(calm, hit) == [], role
    paths = {r: [d.worker for d in made] for r, made in (await scene.routes(hit)).items()}
    gap_s = max(s.longest_gap_s for s in hit.values())
    await scene.until_ready("w0", victim["incarnation"] + 1)
    died = [e for e in await scene.events("w.w0") if type(e) is v.EngineDied][-1]
    assert died.reason == "killed" and (role == "api" or died.detail.startswith(role)), died
    print(f"{role} killed: longest gap {gap_s:.2f} s, back after {time.monotonic() - began:.1f} s")
    left = {r: pid for r, pid in pids.items() if Path(f"/proc/{pid}").exists()}
    assert not left, f"{role} killed, left behind: {left}"
    assert not [path for path in shared if path.exists()], "shared memory was left behind"
    assert sockets_in(scene) and not sockets_in(scene) & sockets, "each engine has its own"
    return any(len(path) > 1 for path in paths.values())


async def _hangs(scene: Scene, calm: dict, role: str) -> None:
    """One process is stopped while the API server still answers for it. The streams are
    rescued, and when it goes on, the worker is taken back as it is."""
    victim = await scene.until_idle("w0")
    pids = family(victim["engine_pid"])

    async def hang(streams: dict) -> None:
        await scene.paced(streams, 16, "w0", pids["core"])
        if role != "core":
            stop(pids[role])
            os.kill(pids["core"], signal.SIGCONT)

    other = family((await scene.worker("w1"))["engine_pid"]).values()
    since = cpu_time(other)
    known = len(await scene.hung())
    try:
        hit = await scene.streams(6, TOKENS, f"{role}-hung", hang)
    finally:
        os.kill(pids[role], signal.SIGCONT)
    assert not whole(hit)
    assert same(calm, hit) == []
    judged = (await scene.hung())[known:]
    gap_s = max(s.longest_gap_s for s in hit.values())
    print(f"{role} hung: longest gap {gap_s:.2f} s; found by {judged}")
    if "w1" in {e.worker for e in judged} and starved(since, cpu_time(other)):
        inconclusive(f"w1 got no processor and was judged hung too: {judged}")
    assert {e.worker for e in judged} == {"w0"}
    await scene.until_serving("w0")
    assert (await scene.worker("w0"))["incarnation"] == victim["incarnation"]
