"""`python -m engine_shim.agent`: the process of one worker's agent.

The edge only: command line, event loop, signals, exit status; `agent_life` tells what the
agent does. It imports neither vLLM nor torch, so that it starts in a moment, stays small
and cannot die of what kills engines.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relume.engine_shim.agent_checkpoints import checkpoints_of
from relume.engine_shim.agent_config import AgentConfig, parse
from relume.engine_shim.agent_errors import (
    EXIT_FAILED,
    AgentError,
    ConfigInvalid,
    RunDirectoryUnusable,
)
from relume.engine_shim.agent_fleet import FleetReader
from relume.engine_shim.agent_hosts import make_host
from relume.engine_shim.agent_life import Agent
from relume.engine_shim.agent_logging import Logger, make_logger
from relume.engine_shim.agent_state import RunDirectory
from relume.engine_shim.agent_takeover import free_stream
from relume.events.disk import is_full
from relume.events.errors import RelumeError, first_cause
from relume.events.etcd.factory import EtcdLog

try:
    import uvloop
except ImportError:  # not a dependency of a worker host, only faster
    uvloop = None


async def run_agent(config: AgentConfig, directory: RunDirectory, logger: Logger) -> None:
    """One agent on etcd, until a signal or an error ends it."""
    async with EtcdLog(config.log_config()) as log:
        reader = FleetReader(log.client, ("fleet", f"w.{config.worker}"))
        host = make_host(config, directory, logger)
        free = partial(free_stream, log.client)
        agent = Agent(config, directory, log.writer, free, reader, host, logger)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, agent.stop, number.name)
        await agent.run()


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status; see `--help` for what each means."""
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        checkpoints_of(config)  # refused here, if at all
    except ConfigInvalid as error:
        print(f"relume agent: {error}", file=sys.stderr)
        return error.status
    logger = make_logger(config.log_level, worker=config.worker)
    try:
        with RunDirectory(Path(config.run_dir)) as directory:
            _run(run_agent(config, directory, logger))
    except (RelumeError, OSError, BaseExceptionGroup) as error:
        cause = first_cause(error)
        if is_full(cause):
            cause = RunDirectoryUnusable(config.run_dir, str(cause))
        logger.error("agent stops", why=str(cause), kind=type(cause).__name__)
        if not isinstance(cause, RelumeError):
            raise  # a bug: its traceback belongs on stderr
        return cause.status if isinstance(cause, AgentError) else EXIT_FAILED
    logger.info("agent left; nothing of it remains")
    return 0


def _run(work: Coroutine[Any, Any, None]) -> None:
    if uvloop is None:
        asyncio.run(work)
    else:
        uvloop.run(work)


if __name__ == "__main__":
    sys.exit(main())
