"""An operator in virtual time: drains and undrains workers, one after the other.

It serves faults that wait for effects: nothing else causes effects. A replica that serves writes
the commands to the log, like those of the admin API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import AdminCommand

if TYPE_CHECKING:
    from relume.chaos.sim.replica_process import Plane
    from relume.controlplane.replica.loop import Replica

EVERY_S = 0.4
PRINCIPAL = "operator"


class Operator:
    """Run it in no process."""

    def __init__(self, planes: Sequence[Plane], workers: Sequence[str]) -> None:
        self._given: list[tuple[str, Replica, int]] = []
        self._planes = planes
        self._workers = workers
        self._count = 0

    async def run(self) -> None:
        """Give commands until cancelled."""
        while True:
            target = self._workers[self._count // 2 % len(self._workers)]
            if self.give("undrain" if self._count % 2 else "drain", target):
                self._count += 1
            await asyncio.sleep(EVERY_S)

    @property
    def acknowledged(self) -> tuple[tuple[str, str], ...]:
        """(id, principal) of the commands that are durable by their replica's knowledge."""
        durable = (name for name, by, position in self._given if by.writer.durable >= position)
        return tuple((name, PRINCIPAL) for name in durable)

    def give(self, command: str, target: str) -> bool:
        """Give one command; whether a replica accepted it."""
        for plane in self._planes:
            replica, process = plane.replica, plane.process
            if replica is None or process is None or process.stopped:
                continue
            name = f"{PRINCIPAL}:c{len(self._given)}"
            asked = v.AdminCommanded(
                command_id=name, principal=PRINCIPAL, command=AdminCommand(command), target=target
            )
            try:
                position = process.context.run(replica.scheduler.emit, asked)
            except LogError:
                continue
            self._given.append((name, replica, position))
            return True
        return False
