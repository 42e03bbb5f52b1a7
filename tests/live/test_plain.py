"""A server without our plugin in the fleet: here the stock API of another worker's engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from relume.controlplane.local.local_fleet import ENGINE_ENV, FleetOptions
from relume.events import vocabulary as v
from tests.live.conftest import HANG_S, Scene, same, scene_of, whole
from tests.suite.outcomes import inconclusive

pytestmark = pytest.mark.usefixtures("patient")


@contextmanager
def plain_agent(scene: Scene, path: Path, backend: str) -> Iterator[subprocess.Popen[bytes]]:
    """Worker p0 in front of `backend`, as `relume attach` makes it."""
    flags = {
        "worker": "p0", "run-dir": str(path / "p0"), "etcd": scene.fleet.etcd_endpoint,
        "lease-ttl-s": "4",
    }  # fmt: skip
    argv = [x for name, value in flags.items() for x in (f"--{name}", value)]
    with open(path / "p0.log", "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "relume.controlplane.cli", "attach", backend, *argv],
            env={**os.environ, **ENGINE_ENV}, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def test_a_plain_server_serves_beside_workers_and_never_gets_a_resumption(
    options: FleetOptions, tmp_path: Path
) -> None:
    async with scene_of(options) as scene:
        calm = await scene.streams(6, 60, "calm")
        assert not whole(calm)
        stock = await scene.worker("w1")
        with plain_agent(scene, tmp_path, f"http://{stock['host']}:{stock['port']}"):
            await scene.until_ready("p0")
            ready = [e for e in await scene.events("w.p0") if type(e) is v.EngineReady]
            assert [e.kind for e in ready] == ["plain"] and ready[0].exact == ()
            await scene.drain("w1")
            await scene.drain("w0")
            through = await scene.streams(6, 60, "through")
            assert not whole(through) and same(calm, through) == []
            places = {d.worker for made in (await scene.routes(through)).values() for d in made}
            assert places == {"p0"}
            await _other_answers(scene)
            await _counted(scene, set(through))
            await scene.drain("w0", "undrain")
            await scene.drain("w1", "undrain")
            await _not_taken_up(scene, calm)
            await _broken(scene, stock["engine_pid"])
            await scene.sound()
        await _gone(scene)


async def _other_answers(scene: Scene) -> None:
    """Whole answers and clients' errors come as the server gives them."""
    body = {"model": "tiny", "prompt": "once upon", "max_tokens": 8, "temperature": 0}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{scene.url}/v1/completions", json=body) as answer:
            assert answer.status == 200
            assert (await answer.json())["usage"]["completion_tokens"] == 8
        bad = {**body, "temperature": -3}
        async with session.post(f"{scene.url}/v1/completions", json=bad) as answer:
            assert answer.status == 400 and "temperature" in await answer.text()
    assert await scene.unharmed() == []


async def _counted(scene: Scene, streams: set[str]) -> None:
    """The log has each request's course at the plain server, and nothing is left."""
    deadline = time.monotonic() + HANG_S
    while (found := await scene.worker("p0"))["requests"]:
        assert time.monotonic() < deadline, found
    steps = [e for e in await scene.events("w.p0") if type(e) is v.EngineStep]
    changes = [c for s in steps for c in s.changes]
    for kind in (v.RequestQueued, v.FirstToken, v.EngineFinished):
        assert sum(type(c) is kind for c in changes) >= len(streams), kind
    ends = [c for c in changes if type(c) is v.EngineFinished and c.output_tokens == 60]
    assert len(ends) == len(streams)


async def _not_taken_up(scene: Scene, calm: dict) -> None:
    """Streams begun on w0 go on at an engine that can take them up, not at p0."""
    victim = await scene.until_idle("w0")
    await scene.until_idle("w1")

    async def kill(streams: dict) -> None:
        await scene.paced(streams, 8, "w0", victim["engine_pid"])
        os.kill(victim["engine_pid"], signal.SIGKILL)

    begun = await scene.streams(6, 60, "begun", kill)
    routes = (await scene.routes(begun)).values()
    moved = [made for made in routes if len(made) > 1]
    if not moved:
        inconclusive("all streams on w0 had ended before the kill")
    assert {d.worker for made in moved for d in made[1:] if d.delivered} == {"w1"}
    turned = [c for made in moved for d in made[1:] for c in d.candidates if c.worker == "p0"]
    assert any(c.excluded == "tells no token ids" for c in turned)
    assert not whole(begun) and same(calm, begun) == []


async def _broken(scene: Scene, server: int) -> None:
    """What is lost with the connection to the server is told to its client, and the worker
    is back by itself."""
    await scene.until_ready("w0", 2)
    for name in ("w0", "w1"):
        await scene.drain(name)
    known = await scene.until_idle("p0")

    async def kill(streams: dict) -> None:
        await scene.paced(streams, 8, "p0", server)
        os.kill(known["engine_pid"], signal.SIGKILL)
        os.kill(server, signal.SIGCONT)

    broken = await scene.streams(2, 400, "broken", kill)
    assert all("the worker sent no token ids" in s.error for s in broken.values()), whole(broken)
    assert not whole(await scene.streams(2, 60, "again")), "it is taken back when it is ready"
    await scene.until_ready("p0", known["incarnation"] + 1)


async def _gone(scene: Scene) -> None:
    """Its agent left in order: the worker is no candidate any more."""
    deadline = time.monotonic() + HANG_S
    while any(w["name"] == "p0" and w["state"] == "serving" for w in await scene.fleet.workers()):
        assert time.monotonic() < deadline
