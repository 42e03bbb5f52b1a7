"""An operator: drains and undrains workers, one after the other.

It serves faults that wait for effects: nothing else causes effects. It sends commands to the admin
API of the first replica that answers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import aiohttp

from relume.chaos.live.processes.fleet_host import Host

EVERY_S = 0.8


class Operator:
    """The next command undrains a drained worker, at the latest in `settle`.
    `acknowledged`: (id, principal) of commands that a replica answered as decided."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._workers = list(host.schedule.workers)
        self._begun = False
        self.acknowledged: list[tuple[str, str]] = []

    async def run(self) -> None:
        """Give commands until cancelled; call `settle` afterwards."""
        self._begun = True
        while True:
            for worker in self._workers:
                for command in ("drain", "undrain"):
                    await self._give(command, worker)
                    await asyncio.sleep(EVERY_S)

    async def settle(self, timeout_s: float = 30.0) -> None:
        """Undrain all workers: the effect of a command that was cut short is unknown. Raises
        TimeoutError."""
        if self._begun:
            async with asyncio.timeout(timeout_s):
                for worker in self._workers:
                    await self._give("undrain", worker)

    async def _give(self, command: str, worker: str) -> None:
        """Repeat a command until some replica has decided it."""
        while True:
            for replica in range(len(self._host.admins)):
                with suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
                    path = f"workers/{worker}/{command}"
                    order = {"force": True} if command == "drain" else None
                    answer = await self._host.admin(path, "POST", replica, order)
                    if answer.get("state") == "decided":
                        self.acknowledged.append((answer["command_id"], answer["principal"]))
                        return
            await asyncio.sleep(0.1)
