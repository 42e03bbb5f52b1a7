"""`relume doctor --repair`: lift etcd's NOSPACE alarm without losing an acknowledged event."""

from __future__ import annotations

import asyncio

from relume.controlplane.history.errors import HistoryError
from relume.controlplane.history.repair import repair
from relume.controlplane.serve_settings import ServeConfig, etcd_config
from relume.events.etcd.factory import EtcdLog
from relume.events.log.errors import Fenced, LogUnavailable


def repaired(config: ServeConfig) -> tuple[bool, str]:
    """Archive, trim, compact, defragment, disarm: (whether it was done, what to say)."""
    if not config.archive_dir:
        return False, "no archive to move the log to: give --archive-dir"
    try:
        done = asyncio.run(_repair(config))
    except Fenced:
        return False, "leadership changed meanwhile: run it again"
    except (HistoryError, LogUnavailable, OSError) as error:
        return False, str(error)
    return True, f"archived up to revision {done.archived}; before {done.before}, now {done.after}"


async def _repair(config: ServeConfig):
    async with EtcdLog(etcd_config(config)) as etcd:
        return await repair(etcd, config.archive_dir)
