"""State daemons in a whole fleet: real engines write to the daemon of another worker's host,
the log says what is held there, and the fleet leaves no process behind."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from relume.chaos.validators import ClientRecord, check_all
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.controlplane.local.orphans import daemons
from relume.controlplane.replay.verify import verify
from relume.engine_shim.agent.engine_process.process_identity import marked_processes
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.wire import frames
from relume.policies.state.coverage import covered_tokens, endpoint
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.fold import apply_group
from tests.engine import client
from tests.live.conftest import HANG_S, MODEL, read_log
from tests.signals import slowed
from tests.suite.outcomes import inconclusive

PATH = "/v1/completions"
PROMPT = " ".join(f"Block {i} of the lease is held by worker {i * 7 % 13}." for i in range(14))
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1600, "temperature": 0, "stream": True}


class Scene:
    """The fleet, its log, and the fold of it."""

    def __init__(self, fleet: LocalFleet, etcd: EtcdLog) -> None:
        self.fleet = fleet
        self.etcd = etcd

    @property
    def run(self) -> Path:
        return self.fleet.dir / "run"

    async def groups(self) -> list[Any]:
        return await read_log(self.etcd)

    async def fold(self) -> Fleet:
        fleet = Fleet()
        for group in await self.groups():
            apply_group(fleet, group)
        return fleet

    async def until(self, found: Callable[[Fleet], Any]) -> Any:
        deadline = time.monotonic() + HANG_S
        while not (result := found(fold := await self.fold())):
            assert time.monotonic() < deadline, (fold.holders, fold.restores)
            await asyncio.sleep(0.1)
        return result


@pytest.fixture
async def scene(tmp_path: Path, zygote: str) -> AsyncIterator[Scene]:
    options = FleetOptions(
        workers=2, state_dir=str(tmp_path), model=str(MODEL), port=0, admin_port=0,
        zygote=zygote, checkpoint_mb=64, lease_ttl_s=4,
    )  # fmt: skip
    async with LocalFleet(options, print) as fleet:
        async with EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))) as etcd:
            yield Scene(fleet, etcd)
    assert daemons(tmp_path / "run") == []
    for name in ("w0", "w1"):
        assert not [*marked_processes(f"RELUME_STATE_SOCKET={tmp_path}/run/{name}/state.sock")]


def stream_until(port: int, name: str, to: str, tokens: int) -> tuple[Any, list[int]]:
    """Opens a stream that is checkpointed at `to`, and reads so many tokens of it."""
    headers = client.headers_for(request=name, checkpoint=to)
    connection, response = client.open_stream(port, PATH, BODY, headers)
    reader, ids = frames.FrameReader(), []
    while len(ids) < tokens:
        data = response.read1(65536)
        assert data, "the stream ended early"
        for part in reader.feed(data):
            assert isinstance(part, frames.Tokens), part
            ids += part.ids
    return connection, ids


def cut_after(port: int, name: str, to: str, tokens: int) -> None:
    """The same, aborted there: it may be taken up elsewhere, so its blocks stay."""
    connection, _ = stream_until(port, name, to, tokens)
    connection.close()


def flip(pid: int, image: int, size: int) -> None:
    """A bit of the `image`-th block in a daemon's memory."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{fd}"
        if "relume-checkpoints" in os.readlink(link):
            with open(link, "r+b", buffering=0) as file:
                at = image * -(-size // mmap.PAGESIZE) * mmap.PAGESIZE + size // 3
                old = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([old[0] ^ 64]), at)
            return
    raise AssertionError("no arena")


@pytest.mark.parametrize("damaged", (False, True))
async def test_what_one_worker_wrote_another_takes_up(scene: Scene, damaged: bool) -> None:
    """And what was damaged meanwhile it computes, with the same answer."""
    fleet = await scene.until(lambda f: f if all(h.alive for h in f.holders.values()) else None)
    w0, w1 = fleet.workers["w0"], fleet.workers["w1"]
    assert w0.family == w1.family == fleet.holders["w1"].family != ""
    assert w0.block_bytes > 0 and fleet.holders["w1"].budget_bytes == 64 << 20
    to = endpoint(fleet, "w1", "w0")
    assert to == f"unix:{scene.run}/w1/state.sock"
    plain = await asyncio.to_thread(client.ask, w0.port, PATH, BODY, request="plain")
    ids, held = await _killed_when_held(scene, w0, to)
    blocks, rest_tokens = divmod(covered_tokens(held, "w1", "moved"), w0.block_size)
    assert rest_tokens == 0
    assert sum(held.holders["w1"].covered["moved"].bytes.values()) == blocks * w0.block_bytes
    if damaged:
        flip(daemons(scene.run)[1], 3, w0.block_bytes)
    rest = await asyncio.to_thread(
        lambda: client.ask(
            w1.port, PATH, BODY, attempt=2, request="moved", resume=("continue", ids),
            created=client.created_of(plain.payload), response_id="moved", restore=to,
            checkpoint=endpoint(fleet, "w0", "w1"),
        )
    )  # fmt: skip
    assert ids + rest.ids == plain.ids
    await scene.until(lambda f: f.restores.get("failed" if damaged else "done"))
    assert ("w1" in (await scene.fold()).holders["w1"].rates) == (not damaged)
    # The holder of the first attempt is told of the end by nobody but the leader.
    async with scene.etcd.writer("r.story") as gateway:
        basis = v.Basis((await scene.fold()).revision, 0)
        gateway.append(
            v.RequestArrived(
                request="moved",
                model="tiny",
                route="/v1/completions",
                stream=True,
                prompt_tokens=9,
                max_tokens=400,
                verdict="exact",
            ),
            v.HolderChosen(
                decision="d",
                basis=basis,
                request="moved",
                attempt=1,
                cause="arrival",
                primary="w0",
                holders=("w1",),
                policy="load_aware",
                wanted=1,
                expected_blocks=1,
                expected_bytes=1,
            ),
            v.RequestEnded(
                request="moved",
                outcome="completed",
                status=200,
                tokens=400,
                finish="length",
                attempts=2,
                verdict="exact",
            ),
        )
        await gateway.flush(5)
        await scene.until(lambda f: "moved" not in f.holders["w1"].covered and not f.ending)
    released = [e for e in await events(scene) if isinstance(e, v.CheckpointsReleased)]
    assert [e.requests for e in released] == [("moved",)]
    groups = await scene.groups()
    calm = ClientRecord(
        request="plain", status=200, text="", tokens=plain.ids, content_id="a", undisturbed=True
    )
    moved = ClientRecord(
        request="moved", status=200, text="", tokens=ids + rest.ids, content_id="a"
    )
    assert check_all(groups, [calm, moved], ("I5", "I6", "I8", "I14", "I15")) == []
    moved.tokens[-1] += 1
    assert check_all(groups, [calm, moved], ("I14",)), "its answer is compared"
    # What the story tells as a replica was decided by nobody.
    assert {d.stream for d in verify(groups).divergences} == {"r.story"}


async def _killed_when_held(scene: Scene, worker: Worker, to: str) -> tuple[list[int], Fleet]:
    """Kill the engine of `worker` once 80 tokens of a stream are read and `to` holds some of it:
    these tokens, and what the log said then. The engine runs a moment at a time, so that the
    stream does not end before, which would release what is held."""
    with slowed(worker.engine_pid, stands_s=0.1):
        connection, ids = await asyncio.to_thread(stream_until, worker.port, "moved", to, 80)
        while not covered_tokens(fleet := await scene.fold(), "w1", "moved"):
            if _has_ended(told := await events(scene), "moved"):
                assert _was_held(told, "moved"), "nothing was held while the stream ran"
                inconclusive("the stream ended before the test read that its blocks are held")
            await asyncio.sleep(0.1)
        os.kill(worker.engine_pid, signal.SIGKILL)
    connection.close()
    return ids[:80], fleet


def _has_ended(told: list[Any], request: str) -> bool:
    changes = [c for e in told if isinstance(e, v.EngineStep) for c in e.changes]
    return any(isinstance(c, v.EngineFinished) and c.request == request for c in changes)


def _was_held(told: list[Any], request: str) -> bool:
    """Whether a holder has ever had blocks of it."""
    held = [h for e in told if isinstance(e, v.CheckpointsAcknowledged) for h in e.held]
    held += [e for e in told if isinstance(e, v.CheckpointAcknowledged)]
    return any(h.request == request and h.tokens for h in held)


async def events(scene: Scene) -> list[Any]:
    found: list[Any] = []
    fleet = Fleet()
    for group in await scene.groups():
        apply_group(fleet, group, lambda stream, position, event: found.append(event))
    return found


async def test_a_daemon_outlives_its_killed_agent_and_a_stopped_fleet_leaves_none(
    scene: Scene,
) -> None:
    fleet = await scene.until(lambda f: f if all(h.alive for h in f.holders.values()) else None)
    boot, pids = fleet.holders["w1"].boot, daemons(scene.run)
    assert len(pids) == 2
    w0 = fleet.workers["w0"]
    with slowed(w0.engine_pid):  # a stream that ends before its client leaves is no longer held
        await asyncio.to_thread(cut_after, w0.port, "kept", endpoint(fleet, "w1", "w0"), 40)
        await scene.until(lambda f: covered_tokens(f, "w1", "kept"))
    agent = scene.fleet.children["w1"]
    agent.kill()
    agent.process.wait()
    assert daemons(scene.run) == pids
    scene.fleet.restart("w1")
    await scene.until(
        lambda f: f.workers["w1"].incarnation == 2 and f.workers["w1"].engine == "ready"
    )
    fleet = await scene.fold()
    assert (fleet.holders["w1"].boot, daemons(scene.run)) == (boot, pids)
    told = await events(scene)
    again = max(i for i, e in enumerate(told) if isinstance(e, v.StateDaemonStarted))
    # The leader releases what no request of the log is about, after some seconds.
    if any(isinstance(e, v.CheckpointsReleased) for e in told[:again]):
        inconclusive("what is held was released before the agent was back")
    assert _was_held(told[again:], "kept"), "the new agent tells what its daemon has"
    # Left without agent, they are ended with the fleet all the same.
    for name in ("w0", "w1"):
        scene.fleet.children[name].kill()
        scene.fleet.children[name].process.wait()
    assert daemons(scene.run) == pids


@pytest.mark.timeout(300)
async def test_stock_vllm_serve_takes_part(tmp_path: Path) -> None:
    """Three processes an engine: the scheduler's tells the layout, the rank's writes."""
    options = FleetOptions(
        workers=1, state_dir=str(tmp_path), model=str(MODEL), port=0, admin_port=0,
        host_kind="serve", checkpoint_mb=64, ready_timeout_s=200.0,
    )  # fmt: skip
    async with LocalFleet(options, print) as fleet:
        async with EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))) as etcd:
            scene = Scene(fleet, etcd)
            found = await scene.until(lambda f: f if f.holders["w0"].alive else None)
            worker = found.workers["w0"]
            assert worker.family and worker.block_bytes > 0
            to = found.holders["w0"].local
            connection, _ = await asyncio.to_thread(stream_until, worker.port, "q", to, 80)
            await written(scene, "q")
            connection.close()
    assert daemons(tmp_path / "run") == []


async def written(scene: Scene, request: str) -> None:
    """Waits until the log tells that blocks of it were held, be it finished meanwhile or not:
    on a busy machine an engine may be done before its client has read much."""
    deadline = time.monotonic() + HANG_S
    while True:
        if _was_held(told := await events(scene), request):
            return
        assert time.monotonic() < deadline, told[-20:]
        await asyncio.sleep(0.1)
