"""Where engines come from: a zygote that forks them, or stock `vllm serve` as our child.

Both take the same environment and vLLM arguments and give an `EngineProcesses`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_errors import HostRefused
from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.engine_process import ipc_directory
from relume.engine_shim.agent.engine_process.child import EngineProcesses
from relume.engine_shim.agent.engine_process.process_identity import ProcessId, free_port, stat_of
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.engine_shim.engine import progress
from relume.events.decode_errors import UNREADABLE
from relume.events.failpoints import failpoint_client
from relume.events.vocabulary.enums import HostKind
from relume.events.wire import engine_environment

FORK_TIMEOUT_S = 30.0
ZYGOTE_POLL_S = 0.2
ENGINE_LOG_LIMIT_BYTES = 32 << 20


class EngineOrder(Struct, frozen=True):
    """One start of an engine: its identity (environment) and vLLM's arguments."""

    incarnation: int
    port: int
    environment: dict[str, str]
    arguments: tuple[str, ...]


def make_order(
    config: AgentConfig,
    run: RunDirectory,
    incarnation: int,
    more: tuple[str, ...] = (),
    pools: Mapping[str, str] = {},
) -> EngineOrder:
    """The order for the next engine; `more` are arguments for vLLM before the user's own, and `pools`
    variables that say where it finds its weights.

    Raises HostRefused when no port is free.
    """
    try:
        port = config.engine_port or free_port(config.engine_host)
    except OSError as error:
        raise HostRefused(str(error)) from None
    named = ("--served-model-name", config.served_model_name) if config.served_model_name else ()
    return EngineOrder(
        incarnation=incarnation,
        port=port,
        environment={
            engine_environment.WORKER: config.worker,
            engine_environment.INCARNATION: str(incarnation),
            engine_environment.AGENT_SOCKET: str(run.socket_path),
            **pools,
            ipc_directory.VARIABLE: str(ipc_directory.ipc_path(run.path)),
            **failpoint_client.environment(),
        },
        arguments=(
            *("--model", config.model),
            *named,
            *("--host", config.engine_host, "--port", str(port)),
            *_backend(config),
            *more,
            *config.engine_args,
        ),
    )


def _backend(config: AgentConfig) -> tuple[str, ...]:
    """Where the plain server is, for `relume.engine_shim.plain.server_process`."""
    if config.host_kind != HostKind.PLAIN:
        return ()
    key = ("--api-key-file", config.backend_key_file) if config.backend_key_file else ()
    return ("--backend", config.backend, *key)


def prepare_engine_log(run: RunDirectory) -> Path:
    """The file the engine's output is appended to; past its limit it is put aside."""
    path = run.engine_log
    if path.exists() and path.stat().st_size > ENGINE_LOG_LIMIT_BYTES:
        path.rename(path.with_suffix(".log.1"))
    return path


def _new_page(run: RunDirectory) -> str:
    """Where the next engine counts its steps and load; what the one before wrote is gone.
    There is room for it: a page without would kill the engine when it is written to.

    Raises HostRefused.
    """
    page = run.progress
    try:
        page.unlink(missing_ok=True)
        progress.Progress(str(page))
    except OSError as error:
        raise HostRefused(f"{page}: {error}") from None
    return str(page)


class EngineHost(Protocol):
    """Starts engines."""

    async def available(self) -> None:
        """Return when an engine can be started; may wait for ever, is safe to cancel."""
        ...

    async def start(self, order: EngineOrder) -> EngineProcesses:
        """Start one. Raises HostRefused if that is not possible now."""
        ...


class _Forked(Struct):
    """A zygote's answer: the child, or why there is none."""

    pid: int = 0
    start_time: int = 0
    error: str = ""


class ZygoteHost:
    """Requests a fork from the zygote at `socket_path`. One connection per request.

    A zygote needs seconds to import vLLM before it listens, so a missing one is waited
    for instead of counting as an engine that failed.
    """

    def __init__(self, socket_path: str, run: RunDirectory, logger: Logger) -> None:
        self._socket_path = socket_path
        self._run = run
        self._logger = logger

    async def available(self) -> None:
        """See EngineHost.available: the zygote listens."""
        warned = False
        while True:
            try:
                _, writer = await asyncio.open_unix_connection(self._socket_path)
            except OSError as error:
                if not warned:
                    self._logger.warning(
                        "waiting for the zygote", why=f"{self._socket_path}: {error}"
                    )
                    warned = True
                await asyncio.sleep(ZYGOTE_POLL_S)
            else:
                writer.close()
                return

    async def start(self, order: EngineOrder) -> EngineProcesses:
        """See EngineHost.start."""
        request = {
            "cmd": "fork",
            "env": {**order.environment, engine_environment.PROGRESS: _new_page(self._run)},
            "argv": order.arguments,
            "log": str(prepare_engine_log(self._run)),
        }
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                line = await self._ask(msgspec.json.encode(request) + b"\n")
        except TimeoutError:
            raise HostRefused(f"the zygote did not answer within {FORK_TIMEOUT_S:g} s") from None
        except OSError as error:
            raise HostRefused(f"zygote {self._socket_path}: {error}") from None
        try:
            forked = msgspec.json.decode(line, type=_Forked)
        except UNREADABLE as error:
            raise HostRefused(f"the zygote's answer does not decode: {error}") from None
        if not forked.pid:
            raise HostRefused(f"the zygote refused: {forked.error or 'without a reason'}")
        leader = ProcessId(forked.pid, forked.start_time)
        return EngineProcesses(leader, self._logger, self._run.marker)

    async def _ask(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket_path)
        try:
            writer.write(request)
            await writer.drain()
            line = await reader.readline()
        finally:
            writer.close()
        if not line:
            raise ConnectionResetError("closed without an answer")
        return line


class ServeHost:
    """Runs `python -m relume.engine_shim.engine.hosts.vllm_serve` as a child in its own session."""

    def __init__(
        self,
        run: RunDirectory,
        logger: Logger,
        command: Sequence[str] = (
            sys.executable,
            "-m",
            "relume.engine_shim.engine.hosts.vllm_serve",
        ),
        environment: Mapping[str, str] = os.environ,
        niceness: int = 0,
    ) -> None:
        self._run = run
        self._logger = logger
        nice = ("nice", "-n", str(niceness)) if niceness else ()
        self._command = (*nice, *command)
        # Secrets of the log are the agent's alone.
        self._environment = {k: v for k, v in environment.items() if k != "RELUME_ETCD_ENDPOINTS"}

    async def available(self) -> None:
        """See EngineHost.available: always."""

    async def start(self, order: EngineOrder) -> EngineProcesses:
        """See EngineHost.start."""
        environment = {
            **self._environment,
            **order.environment,
            engine_environment.PROGRESS: _new_page(self._run),
        }
        try:
            child = self._spawn(order, environment)
        except OSError as error:
            raise HostRefused(f"{self._command[0]}: {error}") from None
        stat = stat_of(child.pid)
        if stat is None:
            raise HostRefused(f"pid {child.pid} vanished")
        return EngineProcesses(stat.id, self._logger, self._run.marker, child)

    def _spawn(self, order: EngineOrder, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Blocks for the milliseconds of fork and exec; no engine runs meanwhile."""
        with open(prepare_engine_log(self._run), "ab") as output:
            return subprocess.Popen(
                [*self._command, *order.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def make_host(config: AgentConfig, run: RunDirectory, logger: Logger) -> EngineHost:
    """The host that the configuration selects."""
    if config.host_kind == HostKind.ZYGOTE:
        return ZygoteHost(config.zygote, run, logger)
    niceness = config.engine_nice
    if config.host_kind == HostKind.PLAIN:
        plain = (sys.executable, "-m", "relume.engine_shim.plain.server_process")
        return ServeHost(run, logger, plain, niceness=niceness)
    return ServeHost(run, logger, niceness=niceness)
