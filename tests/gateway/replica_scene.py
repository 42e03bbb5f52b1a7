"""Real replicas, gateways and agents' boards over a log in memory; scripted engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.replay.verify import verify
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.notice_server import NoticeBoard
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.memory import MemoryLog, MemoryWriter
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from relume.policies.liveness import stall
from relume.policies.liveness.overdue import OverdueConfig
from tests.gateway.peers import Behaviour, Engine, expected_stream
from tests.gateway.raw_client import Answer, RawClient

TEXT = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": "hi", "temperature": 0, "stream": True}).encode()
WANT = expected_stream(BODY, "cmpl-q", "1700000000", 12, False)
NEVER = stall.StallConfig(floor_us=600_000_000, cap_us=600_000_000, factor=8)
NEVER_OVERDUE = OverdueConfig(floor_us=600_000_000)
NO_CHECKS = CrossCheckConfig(share_ppm=0)
GATEWAY = GatewayConfig(port=0, sweep_interval_s=0.05)
INCARNATION = 3


async def until(found: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not found():
            await asyncio.sleep(0.005)


class Worker:
    """A worker of the scene: its stream, its agent's board, its engine."""

    def __init__(
        self, writer: MemoryWriter, board: NoticeBoard, engine: Engine, exact: tuple[str, ...]
    ) -> None:
        self.exact = exact
        self.writer = writer
        self.board = board
        self.engine = engine

    def register(self, notices: str, incarnation: int = INCARNATION) -> None:
        self.writer.append(
            v.WorkerRegistered(
                worker=self.engine.name, domain="host", agent_pid=1, agent_url="", notices=notices
            )
        )
        self.start(incarnation)

    def start(self, incarnation: int) -> None:
        name, port = self.engine.name, self.engine.port
        self.engine.incarnation = incarnation
        self.writer.append(
            v.EngineStarted(name, incarnation, 2, 3),
            v.EngineReady(
                worker=name,
                incarnation=incarnation,
                host="127.0.0.1",
                port=port,
                model="m",
                max_model_len=4096,
                block_size=16,
                kv_blocks=512,
                exact=self.exact,
            ),
        )


class Scene:
    """Two workers on one log; replicas started by `replica`."""

    def __init__(self, log: MemoryLog, stack: AsyncExitStack, workers: list[Worker]) -> None:
        self.log = log
        self.stack = stack
        self.workers = workers
        self.gateways: list[Gateway] = []
        self.replicas: list[Replica] = []

    async def replica(
        self,
        name: str = "r0",
        overdue: OverdueConfig = NEVER_OVERDUE,
        cross_checks: CrossCheckConfig = NO_CHECKS,
        gateway: GatewayConfig = GATEWAY,
        stalls: stall.StallConfig = NEVER,
    ) -> None:
        """Start a control plane replica; its stall watch never judges by default, nor does its
        stream watch, and it has no request answered again."""
        log, stack = self.log, self.stack
        writer = await stack.enter_async_context(log.writer(f"r.{name}"))
        config = ReplicaConfig(
            name=name, tick_s=0.05, stall=stalls, overdue=overdue, cross_checks=cross_checks
        )
        replica = Replica(config, log, writer, log.writer)
        await replica.catch_up()
        serving = await stack.enter_async_context(Gateway(replica.scheduler, gateway))
        running = asyncio.create_task(replica.run(serving))

        async def stop() -> None:
            assert not running.done(), running
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        stack.push_async_callback(stop)
        self.gateways.append(serving)
        self.replicas.append(replica)

    def script(self, how: Behaviour) -> None:
        for worker in self.workers:
            worker.engine.default = how

    async def ask(self) -> bytes:
        answer = await self.answer()
        assert answer.complete and answer.status == 200
        return answer.body

    async def answer(self, gateway: int = 0) -> Answer:
        """Whatever a request of its own connection is answered."""
        async with RawClient(self.gateways[gateway].port) as client:
            return await client.ask(TEXT, BODY, headers="x-request-id: q\r\n")

    def on(self, worker: Worker) -> list[int]:
        """Tokens delivered of each stream this worker's engine holds."""
        held = self.gateways[0]._attempts.get((worker.engine.name, INCARNATION), ())
        return [attempt.delivered for attempt in held]

    def told(self, stream: str = "r.r0") -> list:
        """The events of a stream."""
        return [
            codec.decode(record)
            for group in self.log.groups
            for segment in group.segments
            if segment.stream == stream
            for record in segment.records
        ]

    def suspected(self, stream: str = "r.r0") -> list[v.WorkerSuspected]:
        return [e for e in self.told(stream) if type(e) is v.WorkerSuspected]

    async def listening(self, *workers: Worker, gateways: int = 1) -> None:
        await until(lambda: all(w.board.listeners == gateways for w in workers or self.workers))

    async def folded(self) -> None:
        """Every replica knows all that the log holds by now."""
        revision = self.log.revision
        await until(lambda: all(r.fleet.revision >= revision for r in self.replicas))

    async def proven(self) -> None:
        """The log replays, up to a state hash behind all that happened."""
        hashes = len([e for e in self.told("fleet") if type(e) is v.StateHashed])
        await until(
            lambda: len([e for e in self.told("fleet") if type(e) is v.StateHashed]) > hashes + 1
        )
        verdict = verify(self.log.groups)
        assert verdict.divergences == [] and verdict.contested > 0


@asynccontextmanager
async def scene(
    w0_registers: bool = True, workers: int = 2, exact: tuple[str, ...] = ()
) -> AsyncIterator[Scene]:
    log = MemoryLog()
    async with AsyncExitStack() as stack:
        found = []
        for name in (f"w{number}" for number in range(workers)):
            engine = await stack.enter_async_context(Engine(name, INCARNATION))
            writer = await stack.enter_async_context(log.writer(f"w.{name}"))
            board = NoticeBoard(
                name, "127.0.0.1", 0, "", lambda writer=writer: writer.epoch, make_logger()
            )
            await stack.enter_async_context(board)
            found.append(Worker(writer, board, engine, exact))
            if w0_registers or name != "w0":
                found[-1].register(board.address)
        yield Scene(log, stack, found)
