"""What a replica does when etcd does not hold its log any more, and how it knows which log it reads.

Its fold belongs to the log that is gone, so it only lets its open streams end, and exits. Its successor reads the
log that begins in that one's place.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress

import structlog

from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.history.errors import EtcdLostSegments
from relume.controlplane.replica.decision_writer import DecisionWriter
from relume.events.etcd.errors import LogWentBack
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import (
    BrokenChain,
    Compacted,
    LogReplaced,
    LogUnavailable,
    first_cause,
)

LOG_ID_S = 0.5
"""Period in which a replica asks for the id of a log that has none yet."""
LOG_LOST = LogReplaced, LogWentBack, EtcdLostSegments, BrokenChain, Compacted
"""What says that etcd does not hold the log any more that this replica read. If other programs raised
etcd's revision since a backup was restored, its next segment does not follow, or is compacted."""
log = structlog.get_logger("relume.serve")


def is_log_lost(error: BaseException | None) -> bool:
    """Whether a replica ended with this error because its log is gone."""
    return isinstance(error and first_cause(error), LOG_LOST)


async def outlive_log(gateway: Gateway, drain_s: float, stop: asyncio.Event) -> None:
    """Let open streams end, for at most `drain_s` or until `stop`: they need engines, not the log.
    New requests are refused; they belong to a replica that reads the new log."""
    requests = gateway.counters.in_flight
    log.error("log_replaced_streams_continue", requests=requests, drain_s=drain_s)
    draining = asyncio.create_task(gateway.drain(drain_s, 0.0))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({draining, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for task in (draining, stopping):
        task.cancel()
    await asyncio.gather(draining, stopping, return_exceptions=True)
    log.info("stopped", reason="log replaced", cut=gateway.counters.in_flight)


async def name_log(maintenance: Maintenance) -> None:
    """Name the log if it has no id. Where there is an archive, the leader names it, with its archive."""
    with suppress(LogUnavailable):
        await maintenance.name_unnamed(secrets.token_hex(8))


async def learn_log_id(decisions: DecisionWriter, maintenance: Maintenance) -> None:
    """The first leader of a log names it: until then its streams cannot outlive it."""
    while not decisions.log_id:
        await asyncio.sleep(LOG_ID_S)
        with suppress(LogUnavailable):
            decisions.log_id = await maintenance.identity()
