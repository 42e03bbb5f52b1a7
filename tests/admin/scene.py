"""A real replica over a MemoryLog, with an admin server, for tests of admin and CLI."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Self

import aiohttp
import msgspec

from relume.controlplane.admin.admin_server import AdminServer
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.controlplane.serve_settings import ServeConfig
from relume.controlplane.stream.arrival import Arrival
from relume.events import vocabulary as v
from relume.events.log.memory import MemoryLog
from tests.etcd_server import free_port

VIEWER, OPERATOR, ADMIN = (
    "viewer-token-0123456789",
    "operator-token-012345",
    "admin-token-0123456789",
)
TOKENS = {VIEWER: "viewer", OPERATOR: "operator:olga", ADMIN: "admin:ada"}


class NoStreams:
    """A gateway without connections."""

    def __init__(self) -> None:
        self.activity: dict[Any, Any] = {}

    def break_streams(self, worker: str, incarnation: int, cause: str, detail: str = "") -> int:
        return 0

    def let_go(self, request: str) -> None:
        """No stream here is resumable."""

    def is_absent(self, request: str) -> bool:
        return False

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        return {}

    movable_on = delivered_on

    def away_on(self, worker: str, incarnation: int) -> dict[str, int]:
        return {}

    def movable_tokens(self, worker: str, incarnation: int, request: str) -> int | None:
        return None

    def given_up(self, request: str, attempt: int) -> None:
        """Nobody is away here."""


class Scene:
    """One replica with its admin server on a log; `call` asks it."""

    def __init__(self, log: Any = None, name: str = "r0", lead: bool = True, **config: Any) -> None:
        self.log = log or MemoryLog()
        self.config = ServeConfig(
            **{
                "name": name,
                "admin_port": free_port(),
                "admin_tokens": TOKENS,
                "archive_dir": "/nowhere",  # the default may hold what ran here before
                **config,
            }
        )
        self.lead = lead
        self.worker_writers: dict[str, Any] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        enter = self._stack.enter_async_context
        self.writer = await enter(self.log.writer(f"r.{self.config.name}"))
        reader = self.log.reader() if hasattr(self.log, "reader") else self.log
        self.replica = Replica(
            ReplicaConfig(name=self.config.name, tick_s=0.2), reader, self.writer, self.log.writer
        )
        if not self.lead:
            self.replica.leadership.run = _never  # type: ignore[method-assign]
        await self.replica.catch_up()
        self.admin = await enter(AdminServer(self.replica, self.config, reader))
        self.session = await enter(aiohttp.ClientSession())
        running = asyncio.create_task(self.replica.run(NoStreams()))
        self._stack.push_async_callback(_cancelled, running)
        if self.lead:
            await self.until(lambda: self.replica.fleet.leader)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def until(self, condition: Any, timeout_s: float = 5.0) -> None:
        """Wait until `condition()` holds."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.005)

    async def call(
        self, path: str, method: str = "GET", token: str = ADMIN, **options: Any
    ) -> tuple[int, Any]:
        """(status, decoded JSON) of a call; `path` beginning with / is taken as it is."""
        url = self.admin.url + (path if path.startswith("/") else f"/admin/v1/{path}")
        headers = {**({"Authorization": f"Bearer {token}"} if token else {})}
        headers |= options.pop("headers", {})
        async with self.session.request(method, url, headers=headers, **options) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def status(self, path: str, method: str = "GET", token: str = ADMIN) -> int:
        """The status alone, whatever the body is; a redirect is not followed."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = self.admin.url + path
        async with self.session.request(method, url, headers=headers, allow_redirects=False) as got:
            return got.status

    async def worker(self, name: str = "w0", model: str = "tiny", incarnation: int = 1) -> Any:
        """Let a worker appear in the log, ready; returns its writer."""
        writer = await self._stack.enter_async_context(self.log.writer(f"w.{name}"))
        writer.append(
            v.WorkerRegistered(worker=name, domain=f"host-{name}", agent_pid=4000, agent_url=""),
            v.EngineStarted(name, incarnation, 5000, 1),
            v.EngineReady(
                worker=name,
                incarnation=incarnation,
                host="127.0.0.1",
                port=9000,
                model=model,
                max_model_len=2048,
                block_size=32,
                kv_blocks=100,
            ),
        )
        self.worker_writers[name] = writer
        await self.until(lambda: self._ready(name))
        return writer

    def _ready(self, name: str) -> bool:
        worker = self.replica.fleet.workers.get(name)
        return worker is not None and worker.engine == "ready"

    async def serve_request(self, request: str = "req-1", tokens: int = 7) -> None:
        """One request from arrival to its end, as the gateway would have it."""
        scheduler = self.replica.scheduler
        scheduler.arrived(
            Arrival(
                request=request,
                model="tiny",
                route="completions",
                stream=True,
                prompt_tokens=5,
                max_tokens=16,
                verdict="exact",
                client_id=f"mine-{request}",
            )
        )
        assert scheduler.assign(request, "arrival", 0) is not None
        scheduler.ended(request, "completed", 200, tokens, "length", 12_000, 3_000)
        await self.until(lambda: request not in self.replica.fleet.requests)
        await self.until(lambda: self.replica.fleet.ended > 0)


async def _never() -> None:
    await asyncio.Event().wait()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
