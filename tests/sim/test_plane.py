"""The real control plane in virtual time, with toy workers and what strikes them."""

import asyncio
import hashlib
import os
import subprocess
import sys

import pytest

from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.message_ports import Ask
from relume.chaos.sim.replica_process import Plane
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.codec import decode_all
from tests.sim.toy import Client, Worker


class World:
    """A fleet of toy workers."""

    def __init__(self, workers=2, planes=1, members=1, seed=5):
        self.loop = VirtualLoop(seed)
        self.wires = Wires(self.loop)
        self.etcd = SimEtcd(self.loop, self.wires, [f"e{n}" for n in range(members)])
        names = [f"r{n}" for n in range(planes)]
        self.planes = [Plane(self.loop, self.wires, self.etcd, name) for name in names]
        self.workers = [Worker(self.loop, self.wires, self.etcd, f"w{n}") for n in range(workers)]
        self.clients = self.loop.process("clients")
        self.doors = [self.wires.door(plane.address) for plane in self.planes]

    def run(self, work, until_s=900.0):
        """Run `work()` among the clients once all is up."""

        async def main():
            for plane in self.planes:
                plane.start()
            await self.until(lambda: all(p.running for p in self.planes))
            await self.until(lambda: all(self.ready(p) for p in self.planes))
            await self.clients.spawn(work())

        self.loop.run(main(), until_s)

    def ready(self, plane):
        workers = plane.fleet.workers.values()
        return sum(w.engine == "ready" for w in workers) == len(self.workers)

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0.05)

    def ask(self, count, tokens=50, door=0, name="c"):
        asked = [Client() for _ in range(count)]
        for number, client in enumerate(asked):
            self.doors[door].ask(
                Ask(
                    client_id=f"{name}{door}-{number}",
                    asked="q",
                    prompt_tokens=32,
                    output_tokens=tokens,
                ),
                client,
            )
        return asked

    async def answered(self, clients):
        await self.until(lambda: all(c.outcome for c in clients))

    def worker_of(self, plane=0):
        """The worker that runs most."""
        return max(self.workers, key=lambda w: len(w.engine.running))

    def events(self, *kinds):
        return [
            event
            for group in self.etcd.groups()
            for segment in group.segments
            for event in decode_all(segment.records)
            if not kinds or type(event) in kinds
        ]

    def digest(self):
        return hashlib.sha256(repr(self.etcd.groups()).encode()).hexdigest()


@pytest.fixture
def world():
    made = []

    def make(**how):
        made.append(World(**how))
        return made[-1]

    yield make
    for each in made:
        each.etcd.close()
        each.loop.close()


def complete(clients, tokens=50):
    return all(c.outcome == "length" and c.indices == list(range(tokens)) for c in clients)


def replayed(world):
    """Replay finds the same decisions and state (I7)."""
    found = verify(world.etcd.groups())
    assert not found.divergences, found.divergences[:3]
    return found


def test_requests_are_answered_and_replay_finds_the_same_decisions(world):
    w = world()

    async def work():
        clients = w.ask(20)
        await w.answered(clients)
        assert complete(clients)
        await asyncio.sleep(3)

    w.run(work)
    ends = w.events(v.RequestEnded)
    assert [e.outcome for e in ends] == ["completed"] * 20
    assert {e.tokens for e in ends} == {50}
    assert w.events(v.Tick) and w.events(v.StateHashed)
    replayed(w)


@pytest.mark.parametrize("notice", [True, False])
def test_streams_of_a_killed_engine_continue_elsewhere(world, notice):
    w = world()

    async def work():
        clients = w.ask(10)
        await asyncio.sleep(0.5)
        w.worker_of().kill_engine(notice)
        await w.answered(clients)
        assert complete(clients)
        await asyncio.sleep(3)

    w.run(work)
    moved = [e for e in w.events(v.RouteDecided) if e.attempt > 1]
    assert moved and all(e.mode == "continue" and 15 < e.delivered < 40 for e in moved)
    assert bool([e for e in w.events(v.WorkerSuspected) if "agent" in e.reason]) is notice
    replayed(w)


def test_streams_of_a_hung_engine_are_moved_by_the_stall_watch(world):
    w = world()

    async def work():
        clients = w.ask(10)
        await asyncio.sleep(0.3)
        hung = w.worker_of()
        hung.engine.flush_all()
        hung.engine.hung = True
        hung.engine.process.stop()
        await w.answered(clients)
        assert complete(clients)

    w.run(work)
    assert any(e.hung for e in w.events(v.StallJudged))
    replayed(w)


def test_a_client_that_leaves_ends_its_request_with_what_it_had(world):
    w = world()

    async def work():
        w.ask(1)
        await asyncio.sleep(0.51)
        w.doors[0].hang_up("c0-0")
        await asyncio.sleep(3)
        assert not any(worker.engine.running for worker in w.workers)

    w.run(work)
    (ended,) = w.events(v.RequestEnded)
    assert ended.outcome == "cancelled" and ended.tokens == 25


def test_a_killed_replica_cuts_its_clients_and_comes_back_under_its_name(world):
    w = world(planes=2)

    async def work():
        cut, others = w.ask(5, door=0), w.ask(5, door=1)
        await asyncio.sleep(0.5)
        w.planes[0].kill()
        await w.answered(cut + others)
        assert {c.outcome for c in cut} == {"cut"} and complete(others)
        await w.until(lambda: w.planes[0].running)
        again = w.ask(5, door=0)
        await w.answered(again)
        assert complete(again)
        await asyncio.sleep(5)

    w.run(work)
    ends = w.events(v.RequestEnded)
    assert len(ends) == len(w.events(v.RequestArrived)) == 15
    replayed(w)


def test_what_a_killed_replica_did_not_write_of_the_leader_ends(world):
    """It is killed before its arrivals and decisions are sent; engines told of its requests."""
    w = world(planes=2)

    async def work():
        before = w.ask(3, door=0, name="before")
        await asyncio.sleep(0.2)
        cut = w.ask(5, door=0)
        await asyncio.sleep(0.02)
        w.planes[0].kill()
        await w.answered(cut + before)
        await w.until(lambda: w.planes[0].running)
        await asyncio.sleep(8)

    w.run(work)
    steps = [c for e in w.events(v.EngineStep) for c in e.changes]
    queued = {c.request for c in steps if type(c) is v.RequestQueued}
    arrived = {e.request for e in w.events(v.RequestArrived)}
    assert len(queued) == 8 and len(arrived) == 3, "the rest is known from engines alone"
    ends = [e.request for e in w.events(v.RequestEnded)]
    assert sorted(ends) == sorted(queued)
    replayed(w)


def test_another_replica_leads_when_the_leader_is_stopped_beyond_its_lease(world):
    w = world(planes=2)

    async def work():
        await w.until(lambda: any(p.leading for p in w.planes))
        leader, other = sorted(w.planes, key=lambda p: not p.leading)
        leader.stop()
        await w.until(lambda: other.leading)
        leader.go_on()
        await w.until(lambda: leader.running and not leader.leading)
        clients = w.ask(5, door=0) + w.ask(5, door=1)
        await w.answered(clients)
        assert complete(clients)

    w.run(work)
    assert len(w.events(v.LeaderElected)) >= 2
    replayed(w)


def test_serving_and_failover_continue_while_etcd_is_unavailable(world):
    w = world()

    async def work():
        w.etcd.stop("e0")
        clients = w.ask(10)
        await asyncio.sleep(0.5)
        w.worker_of().kill_engine()
        await w.answered(clients)
        assert complete(clients)
        await asyncio.sleep(12)
        w.etcd.go_on("e0")
        await asyncio.sleep(20)

    w.run(work)
    assert len(w.events(v.RequestEnded)) == 10
    assert w.events(v.StreamResumed)
    replayed(w)


def test_a_stream_that_does_not_join_is_cut_and_wrong_tokens_are_reported(world):
    w = world()

    async def work():
        clients = w.ask(2)
        await asyncio.sleep(0.5)
        for worker in w.workers:
            for run in worker.engine.running.values():
                run.told = 0  # says again what it has said
        w.workers[0].engine.wrong = True
        await w.answered(clients)
        assert all(c.indices == list(range(50)) for c in clients)
        assert any(s.wrong for c in clients for s in c.stretches)

    w.run(work)
    kinds = {e.kind for e in w.events(v.TransportObserved)}
    assert kinds == set() or "engine_error" in kinds


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 3])
def test_a_gateway_cut_from_every_worker_loses_no_stream(world, seed):
    w = world(workers=36, seed=seed)

    async def work():
        clients = w.ask(72, tokens=400)
        for _ in range(5):
            await asyncio.sleep(0.2)
            clients += w.ask(8, tokens=400, name=f"more{len(clients)}")
        for worker in w.workers:
            worker.engine.flush_all()
        cut = w.wires.cut("r0", kind="gateway")
        await asyncio.sleep(9)
        w.wires.heal(cut)
        await w.answered(clients)
        assert complete(clients, 400)

    w.run(work)
    assert max(e.attempt for e in w.events(v.RouteDecided)) > 8
    replayed(w)


DIGEST = """
import asyncio
from tests.sim.test_plane import World
w = World(workers=3, planes=2, members=3, seed=11)
async def work():
    clients = w.ask(20) + w.ask(20, door=1)
    await asyncio.sleep(0.4)
    w.worker_of().kill_engine()
    await asyncio.sleep(0.2)
    w.etcd.kill(w.etcd.leader.name)
    w.planes[0].kill()
    await asyncio.sleep(0.2)
    w.worker_of().kill_engine(False)
    await w.answered(clients)
    await asyncio.sleep(20)
w.run(work)
print(w.digest())
w.etcd.close()
"""


@pytest.mark.full
def test_the_same_seed_gives_the_same_log_in_another_process():
    told = set()
    for salt in ("0", "1", "12345"):
        env = os.environ | {"PYTHONHASHSEED": salt}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, check=True
        )
        told.add(done.stdout)
    assert len(told) == 1
