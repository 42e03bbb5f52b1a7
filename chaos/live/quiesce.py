"""Waits until a fleet has nothing left to do, after all faults are over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from relume.chaos import validators
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes.fleet_host import Host
from relume.chaos.outcome import History
from relume.chaos.validators.promises.workers.i12_drained import left_over
from relume.chaos.validators.records import ClientRecord
from relume.events.vocabulary.enums import EnginePhase

AGAIN_S = 0.25


async def at_rest(
    host: Host,
    watch: Watch,
    histories: Sequence[History],
    timeout_s: float,
    say: Callable[[str], None],
) -> str:
    """Wait until every process runs, every worker serves, every request of a client has ended in
    the log and nothing is held. Empty: this is so; else the condition that failed last.

    It also waits for a state hash, so that replay has one of the whole log.
    """
    deadline = time.monotonic() + timeout_s
    last_why = ""
    clients = [history.record for history in histories]
    while why := _restless(host, watch) or _unsaid(watch, clients):
        if watch.error:
            return watch.error
        if time.monotonic() > deadline:
            # The validators report everything else that is broken.
            return _restless(host, watch)
        if why != last_why:
            last_why = why
            say(f"waiting: {why}")
        await asyncio.sleep(AGAIN_S)
    return ""


def _restless(host: Host, watch: Watch) -> str:
    for child in host.children.values():
        if not child.alive and child.name not in host.out_of_log:
            return f"{child.name} does not run"
    fleet = watch.fleet
    for name in host.schedule.workers:
        if name in host.out_of_log:
            continue
        worker = fleet.workers.get(name)
        if worker is None or not worker.present or worker.engine != EnginePhase.READY:
            return f"{name} does not serve"
        if host.checkpoints is not None:
            holder = fleet.holders.get(name)
            if holder is None or not holder.alive:
                return f"the state daemon of {name} is not there"
    return ""


def _unsaid(watch: Watch, clients: Sequence[ClientRecord]) -> str:
    """What is left over in the log's fold, or missing in the log. I1 decides which answered
    requests the log must have."""
    for about, text in left_over(watch.fleet):
        return f"{about} {text}"
    known = set(watch.clients.values())
    if any(client.status and client.request not in known for client in clients):
        for violation in validators.check_all(watch.groups, clients, ["I1"]):
            return str(violation)
    return "" if watch.count("StateHashed") else "no state was hashed"
