"""Makes an agent write a record that nobody can read.

A report that cannot be read comes to the agent's report socket, as from a process of its engine. A
failpoint lets it pass the agent's check, as an agent with a bug or of a newer build would.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from relume.chaos.live.failpoint_server import FailpointError, FailpointServer
from relume.events.failpoints.points import Action, Failpoint
from relume.events.wire.reports import Hello, frame, hello_frame

REACH_S = 10.0


async def write(
    failpoints: FailpointServer, worker: str, socket: Path, incarnation: int, record: bytes
) -> None:
    """Returns when the agent has the record. Raises FailpointError, OSError if no agent takes it."""
    process = f"agent {worker}"
    if process not in failpoints.processes:
        raise FailpointError(f"no failpoints in {process}")
    point = Failpoint.AGENT_CHECK
    async with failpoints.armed(point, Action.FAIL, process=process, pid=os.getpid()) as armed:
        _, writer = await asyncio.open_unix_connection(socket)
        try:
            writer.write(hello_frame(Hello(os.getpid(), "chaos", incarnation)))
            writer.write(frame(record))
            await armed.reached(REACH_S)
        finally:
            writer.close()
