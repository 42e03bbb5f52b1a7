"""`python -m relume.engine_shim.agent`: the process of one worker's agent.

The process edge only: command line, event loop, signals, exit status; `life` has what the
agent does. It imports neither vLLM nor torch, so it starts fast, stays small and survives
what kills engines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relume.engine_shim.agent.agent_config import AgentConfig, parse
from relume.engine_shim.agent.agent_errors import (
    EXIT_CONFIG,
    RunDirectoryUnusable,
    exit_status,
)
from relume.engine_shim.agent.agent_logging import Logger, make_logger
from relume.engine_shim.agent.engine_process.engine_hosts import make_host
from relume.engine_shim.agent.host_daemon.checkpoint_options import checkpoints_of
from relume.engine_shim.agent.life import Agent
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.engine_shim.agent.stream_ownership.takeover import free_stream
from relume.engine_shim.agent.stream_reader import FleetReader
from relume.events.etcd.factory import EtcdLog
from relume.events.failpoints import failpoint_client
from relume.events.log.disk import is_full
from relume.events.log.errors import RelumeError, first_cause
from relume.events.settings import variables
from relume.events.settings.config_error import ConfigError

try:
    import uvloop
except ImportError:  # not a dependency of a worker host, only faster
    uvloop = None  # type: ignore[assignment]  # see above


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
        checkpoints_of(config)  # an error here ends the start
    except ConfigError as error:
        print(f"relume agent: {error}", file=sys.stderr)
        return EXIT_CONFIG
    logger = make_logger(config.log_level, worker=config.worker)
    for name, close in variables.unknown(os.environ).items():
        logger.warning("unknown variable", name=name, remedy=variables.remedy(close))
    failpoint_client.start(f"agent {config.worker}")
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
        return exit_status(cause)
    logger.info("agent left; nothing of it remains")
    return 0


def _run(work: Coroutine[Any, Any, None]) -> None:
    if uvloop is None:
        asyncio.run(work)
    else:
        uvloop.run(work)


if __name__ == "__main__":
    sys.exit(main())
