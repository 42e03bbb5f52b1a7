"""The engine that a dead agent left: found by its record, killed before a new one starts.

An orphan usually ends by itself within a second of its agent's death (EOF on the report
socket). One that is stopped (SIGSTOP) sees nothing, would wake up later, and serve clients that no
agent accounts for: so it is killed here, by pid *and* start time.
"""

from __future__ import annotations

import asyncio
import signal
import time

from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.engine_process.process_identity import (
    ProcessId,
    is_alive,
    marked_processes,
    session_members,
    signal_process,
)
from relume.engine_shim.agent.run_directory import EngineRecord, RunDirectory
from relume.events.vocabulary import EngineDied
from relume.events.vocabulary.enums import DeathReason

GONE_TIMEOUT_S = 10.0


async def kill_orphan(run: RunDirectory, worker: str, logger: Logger) -> EngineDied | None:
    """Kill the recorded engine and all it spawned; what the log is to say of it.

    None when nothing is recorded and nothing is left: one that a full disk kept from being
    recorded is found by its environment. The record is erased by the caller, once the
    returned event is written.
    """
    state, record = run.state, run.state.engine
    if record is None and not (state.incarnation and _remaining(None, run)):
        return None
    was_alive = record is None or is_alive(record.process)
    deadline = time.monotonic() + GONE_TIMEOUT_S
    killed: set[ProcessId] = set()
    while remaining := _remaining(record, run):
        for process in remaining:
            if signal_process(process, signal.SIGKILL):
                killed.add(process)
        if time.monotonic() > deadline:
            logger.error("orphans survive SIGKILL", pids=[p.pid for p in remaining])
            break
        await asyncio.sleep(0.01)
    pids = sorted(p.pid for p in killed)
    incarnation = state.incarnation if record is None else record.incarnation
    logger.warning("engine of the previous agent", incarnation=incarnation, killed=pids)
    return EngineDied(
        worker=worker,
        incarnation=incarnation,
        reason=DeathReason.KILLED if was_alive else DeathReason.UNKNOWN_REASON,
        detail=f"orphan of a dead agent; killed pids {pids}" if pids else "gone with its agent",
    )


def _remaining(record: EngineRecord | None, run: RunDirectory) -> set[ProcessId]:
    known = (record.process, *record.members) if record is not None else ()
    found = {p for p in known if is_alive(p)}
    if record is not None and found:
        # While one of them lives, no other process can get the session number.
        found.update(stat.id for stat in session_members(record.process.pid))
    found.update(marked_processes(run.marker))
    return found
