"""A whole control plane over MemoryLog (or etcd): real replicas, schedulers and leadership,
scripted workers, and clients that lose their streams.

Only the engines and the HTTP between are played. Times are short and real, what happens
is drawn from the seed.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import Any, Self

from aiohttp import web

from relume.controlplane.gateway.ports import Activity
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected
from relume.events.etcd.reader.log_reader import EtcdReader
from relume.events.log.errors import Fenced
from relume.events.log.memory import MemoryLog
from relume.policies.checkpoints.checkpoint_settings import CheckpointConfig
from relume.policies.migration.migration_settings import MigrationConfig
from relume.policies.routing.routing_settings import TIERS
from tests.replay.scripted_worker import MODEL, Attempt, StreamCut, Worker


class Clients:
    """Plays the gateway of one replica, and offers GatewayPort to its stall watch."""

    def __init__(
        self,
        replica: Replica,
        workers: dict[str, Worker],
        rng: random.Random,
        tokens: tuple[int, int],
    ) -> None:
        self.activity: dict[tuple[str, int], Activity] = {}
        self.broken: list[tuple[str, int]] = []
        self.moved = 0
        self.outcomes: dict[str, tuple[str, int]] = {}
        self._open: dict[tuple[str, int], dict[str, Attempt]] = {}
        self._scheduler = replica.scheduler
        self._workers = workers
        self._rng = rng
        self._tokens = tokens

    def break_streams(self, worker: str, incarnation: int, cause: str, detail: str = "") -> int:
        """As the gateway does: every stream there is dispatched anew before this returns."""
        self.broken.append((worker, incarnation))
        moving = self._open.pop((worker, incarnation), {})
        for name, attempt in moving.items():
            attempt.moved = True
            self._scheduler.observed(name, attempt.number, cause, attempt.delivered)
            attempt.given = self._scheduler.assign(name, cause, attempt.delivered)
        self.moved += len(moving)
        return len(moving)

    def running_covered(self, worker: str) -> bool:
        """Whether something runs there of which the log says that a holder has a part."""
        fleet = self._scheduler.view.fleet
        running = {n for (name, _), open_ in self._open.items() if name == worker for n in open_}
        return any(running & site.covered.keys() for site in fleet.holders.values())

    def let_go(self, request: str) -> None:
        """No stream here is resumable."""

    def is_absent(self, request: str) -> bool:
        return False

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        return {n: a.delivered for n, a in self._open.get((worker, incarnation), {}).items()}

    movable_on = delivered_on

    def away_on(self, worker: str, incarnation: int) -> dict[str, int]:
        return {}

    def movable_tokens(self, worker: str, incarnation: int, request: str) -> int | None:
        return self.movable_on(worker, incarnation).get(request)

    def given_up(self, request: str, attempt: int) -> None:
        """Nobody is away here."""

    def hand_over(self, name: str, number: int) -> bool:
        """As an engine does when it is asked to; False when it has no such attempt."""
        found = [o[name] for o in self._open.values() if name in o and o[name].number == number]
        for attempt in found:
            attempt.handed = True
        return bool(found)

    async def request(self, name: str) -> None:
        """One client's request, to its end, whatever happens to workers."""
        scheduler, rng = self._scheduler, self._rng
        total = rng.randint(*self._tokens)
        verdict = rng.choice(["exact"] * 8 + ["restart"])
        scheduler.arrived(
            Arrival(
                request=name,
                model=MODEL,
                route="completions",
                stream=True,
                prompt_tokens=rng.randint(5, 400),
                max_tokens=total,
                verdict=verdict,
                reason="drawn",
                tier=TIERS[sum(name.encode()) % len(TIERS)],
            )
        )
        delivered = 0
        given = scheduler.assign(name, "arrival", delivered)
        while True:
            if isinstance(given, Rejected):
                self._end(name, "failed", given.status, delivered)
                return
            if given is None:
                if not await scheduler.capacity(name, 5.0):
                    self._end(name, "rejected", 503, delivered)
                    return
                given = scheduler.assign(name, "wait_over", delivered)
                continue
            if rng.random() < 0.03:
                self._end(name, "cancelled", 499, delivered)
                return
            attempt = Attempt(given, delivered)
            cut = await self._attempt(name, attempt, total - delivered)
            delivered = attempt.delivered
            if attempt.moved:
                given = attempt.given
            elif cut is None:
                self._end(name, "completed", 200, delivered)
                return
            else:
                scheduler.observed(name, attempt.number, cut.kind, delivered)
                given = scheduler.assign(name, cut.kind, delivered)

    async def _attempt(self, name: str, attempt: Attempt, tokens: int) -> StreamCut | None:
        """Let the worker serve it; why it broke, if it did."""
        given = attempt.given
        assert isinstance(given, Assignment)
        place = given.worker, given.incarnation
        self._open.setdefault(place, {})[name] = attempt
        try:
            await self._workers[given.worker].serve(given, tokens, attempt)
        except StreamCut as cut:
            return cut
        finally:
            self._open.get(place, {}).pop(name, None)
        return None

    def _end(self, name: str, outcome: str, status: int, tokens: int) -> None:
        self.outcomes[name] = (outcome, tokens)
        self._scheduler.ended(name, outcome, status, tokens, "length")


class Scene:
    """Replicas and workers on one log. `async with Scene(seed) as scene: ...`

    `log`: a MemoryLog of its own, unless an EtcdLog is given; then nothing may be asked of
    it that only memory can do (`lapse`, `pause`).
    """

    def __init__(
        self,
        seed: int = 1,
        workers: int = 3,
        replicas: int = 2,
        log: Any = None,
        tick_s: float = 0.02,
        checkpoints: CheckpointConfig | None = None,
        migration: MigrationConfig | None = None,
        tokens: tuple[int, int] = (2, 12),
        policy: str = "least_load",
    ) -> None:
        self.rng = random.Random(seed)
        self._policy = policy
        self.log = log if log is not None else MemoryLog()
        self._tick_s = tick_s
        self._checkpoints = checkpoints or CheckpointConfig()
        self._migration = migration or MigrationConfig()
        self._tokens = tokens
        self.refuses_handover = 0
        self.handover_s = 0.0
        self.unbegun: list[bool] = []
        """Of each call to hand over: whether it says that nothing may have begun. Then it has."""
        self.workers = {f"w{n}": Worker(self.log, f"w{n}") for n in range(workers)}
        for worker in self.workers.values():
            worker.peers = self.workers
        self.replicas: dict[str, Replica] = {}
        self.clients: dict[str, Clients] = {}
        self._names = [f"r{n}" for n in range(replicas)]
        self._running: dict[str, asyncio.Task[None]] = {}
        self._writers: dict[str, Any] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if isinstance(self.log, MemoryLog):
            await self._listen()
        for worker in self.workers.values():
            await worker.register()
            worker.start()
        for name in self._names:
            await self.start_replica(name)
        await self.until(lambda: any(r.leadership.leading for r in self.replicas.values()))
        return self

    async def __aexit__(self, *_: object) -> None:
        if isinstance(self.log, MemoryLog):
            self.log.resume()
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._stack.aclose()
        if not isinstance(self.log, MemoryLog):
            for writer in [w._writer for w in self.workers.values()] + [*self._writers.values()]:
                await writer.__aexit__(None, None, None)

    async def _listen(self) -> None:
        """Engines answer one call: to hand a request over."""
        app = web.Application()
        app.router.add_post("/relume/handover", self._handover)
        runner = web.AppRunner(app)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        for worker in self.workers.values():
            worker.port = runner.addresses[0][1]

    async def _handover(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if self.refuses_handover:
            self.refuses_handover -= 1
            return web.json_response({}, status=500)
        await asyncio.sleep(self.handover_s)
        who = asked["request"], asked["attempt"]
        self.unbegun.append(asked["unbegun"])
        if asked["unbegun"]:
            return web.json_response({}, status=409)
        found = any(clients.hand_over(*who) for clients in self.clients.values())
        return web.json_response({}, status=200 if found else 404)

    async def start_replica(self, name: str) -> None:
        # A lease that an outage kept from being given back has to lapse first.
        waiting = {} if isinstance(self.log, MemoryLog) else {"wait_s": 10.0}
        writer = self.log.writer(f"r.{name}", **waiting)
        await writer.__aenter__()
        config = ReplicaConfig(
            name=name,
            policy=self._policy,
            tick_s=self._tick_s,
            checkpoints=self._checkpoints,
            migration=self._migration,
        )
        reader = self.log if isinstance(self.log, MemoryLog) else self.log.reader()
        replica = Replica(config, reader, writer, self.log.writer)
        if isinstance(reader, EtcdReader):
            reader.on_damage = replica.damaged.note
        await replica.catch_up()
        self._writers[name] = writer
        self.replicas[name] = replica
        self.clients[name] = Clients(replica, self.workers, self.rng, self._tokens)
        self._running[name] = asyncio.create_task(replica.run(self.clients[name]))

    async def kill_replica(self, name: str) -> None:
        """kill -9: its tasks end, its lease lapses, nothing more is written."""
        self.log.lapse(f"r.{name}")
        if self.replicas[name].leadership.leading:
            self.log.lapse("fleet")
        self._running[name].cancel()
        await asyncio.gather(self._running.pop(name), return_exceptions=True)
        del self.replicas[name], self.clients[name]

    async def stop_replica(self, name: str) -> None:
        """It ends in an outage: what did not land stays in its spool."""
        self._running[name].cancel()
        await asyncio.gather(self._running.pop(name), return_exceptions=True)
        await self._writers.pop(name).__aexit__(None, None, None)
        del self.replicas[name], self.clients[name]

    async def until(self, condition: Any, timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    def running_covered(self, worker: str) -> bool:
        """Whether a death there interrupts something that can be restored."""
        return any(clients.running_covered(worker) for clients in self.clients.values())

    async def traffic(self, count: int, prefix: str = "q", at_once: int = 24) -> None:
        """`count` requests, spread over the replicas that live when they begin."""
        names = iter([f"{prefix}{n}" for n in range(count)])

        async def client() -> None:
            for name in names:
                clients = self.clients[self.rng.choice(sorted(self.clients))]
                try:
                    await clients.request(name)
                except Fenced:
                    continue  # its replica was killed; so is the client's connection

        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(client())

    async def settled(self) -> None:
        """Wait until every replica has folded all there is, and two ticks more."""
        ticks = max(r.fleet.tick for r in self.replicas.values())
        await self.until(
            lambda: all(r.fleet.tick >= ticks + 3 for r in self.replicas.values()), 20.0
        )
