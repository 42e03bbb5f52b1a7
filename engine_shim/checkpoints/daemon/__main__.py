"""`python -m relume.engine_shim.checkpoints.daemon --config FILE`: serves until SIGTERM or
SIGINT; SIGHUP has it read `budget_share` again.

Prints one line of JSON when it listens: `{"ready": true, "boot": ..., "notes": [...]}`.
It is independent of the process that started it, and holds nothing when it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import zmq

from relume.engine_shim.checkpoints.daemon import config as configuration
from relume.engine_shim.checkpoints.daemon.config import DaemonConfig
from relume.engine_shim.checkpoints.daemon.errors import StateDaemonError
from relume.engine_shim.checkpoints.daemon.local_server import LocalServer
from relume.engine_shim.checkpoints.daemon.remote_server import RemoteServer
from relume.engine_shim.checkpoints.daemon.service import Service
from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.daemon.store.block_store import BlockStore
from relume.engine_shim.checkpoints.daemon.store.file_tier import FileTier
from relume.engine_shim.pools.pool_server import PoolServer
from relume.engine_shim.pools.pools import Pools
from relume.events.failpoints import failpoint_client
from relume.events.log.disk import SteadyOutput
from relume.events.settings.config_error import ConfigError

HOUSEKEEPING_S = 1.0
BAD_CONFIG_EXIT = 2

logger = logging.getLogger("relume.state")


def build(config: DaemonConfig) -> Service:
    """Raises ConfigError, CannotHold, OSError."""
    arena = Arena(config.budget_bytes, config.reserve_bytes, config.allow_unlocked)
    cold = None
    if config.file_directory:
        cold = FileTier(config.file_directory, config.file_budget_bytes)
    store = BlockStore(arena, cold, config.ttl_s, config.cold_after_s)
    secret = configuration.secret(config)
    store.keep_to(config.budget_share)
    service = Service(store, config.host, config.epoch, secret, time.monotonic)
    notes = ["nothing is held of an earlier life"]
    if arena.unlocked:
        notes.append(f"memory is not locked ({arena.unlocked})")
    if cold is not None:
        notes.append("the file tier ends with this process")
    service.notes = tuple(notes)
    return service


def keep_to(service: Service, reload: Callable[[], DaemonConfig]) -> None:
    """Keep to what the settings say now; if they cannot be read, nothing changes."""
    try:
        share = reload().budget_share
    except ConfigError as error:
        logger.error("settings are not read again: %s", error)
        return
    service.store.keep_to(share)
    logger.info("keeps to %g of its budget", share)


async def serve(config: DaemonConfig, service: Service, reload: Callable[[], DaemonConfig]) -> None:
    """Until a signal. `reload` reads the settings again. Raises BadConfig, and OSError or
    zmq.ZMQError when an address cannot be bound."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, keep_to, service, reload)
    servers: list[LocalServer | RemoteServer | PoolServer] = [LocalServer(service, config.socket)]
    if config.remote is not None:
        servers.append(RemoteServer(service, config.remote))
    pools = Pools(config.pools_bytes, config.reserve_bytes, time.monotonic)
    if config.pools_bytes:
        servers.append(PoolServer(pools, config.pools_socket))
    try:
        for server in servers:
            server.bind()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(server.serve()) for server in servers]
            tasks.append(group.create_task(_keep_house(service, config.abandoned_s, stop)))
            ready = {"ready": True, "boot": service.boot, "notes": service.notes}
            SteadyOutput(sys.stdout).write(json.dumps(ready) + "\n")
            await stop.wait()
            for task in tasks:
                task.cancel()
    finally:
        service.store.close()
        pools.close()


async def _keep_house(service: Service, abandoned_s: float, stop: asyncio.Event) -> None:
    """Orphans expire; pages of freed blocks go back to the host; what no agent comes back
    for does not stay for ever."""
    while True:
        await asyncio.sleep(HOUSEKEEPING_S)
        for request in service.store.expire(service.now()):
            logger.info("expired %s", request)
        service.store.arena.trim()
        silent_s = service.now() - service.polled_s
        if abandoned_s and silent_s > abandoned_s and not service.store.stats()["blocks"]:
            logger.warning("no agent for %.0f s, and nothing is held: ends", silent_s)
            stop.set()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m relume.engine_shim.checkpoints.daemon", description=__doc__
    )
    parser.add_argument("--config", metavar="FILE", required=True, help="settings, as JSON")
    reload = partial(configuration.load, parser.parse_args().config)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        config = reload()
        failpoint_client.start(f"daemon {config.host}")
        asyncio.run(serve(config, build(config), reload))
    except (ConfigError, StateDaemonError, OSError, zmq.ZMQError) as error:
        print(f"state daemon: {error}", file=sys.stderr)
        return BAD_CONFIG_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
