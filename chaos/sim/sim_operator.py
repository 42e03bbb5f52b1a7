"""An operator in virtual time: commands to workers, one worker after the other.

A fault may wait for the effects of commands. Without commands of the scenario the operator then drains
and undrains workers. A replica that serves writes the commands to the log, like those of the admin API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from relume.chaos.scenario.language import Commands
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import AdminCommand

if TYPE_CHECKING:
    from relume.chaos.sim.replica_process import Plane
    from relume.controlplane.replica.loop import Replica

DRAINS = Commands(each=(("drain",), ("undrain",)))
PRINCIPAL = "operator"
UNFORCED = "drain-unforced"
UNDO = {"hold": "release", "drain": "undrain", UNFORCED: "undrain"}
"""What ends the state that a command leads to."""
AGAIN_S = 0.1
LOOK_S = 1.0
"""Period in which the fleet is looked at until it is at rest: a command has its effect within that time."""


class Operator:
    """Run it in no process."""

    def __init__(
        self,
        planes: Sequence[Plane],
        models: Mapping[str, str],
        commands: Commands = DRAINS,
        is_right: Callable[[str], bool] = lambda worker: True,
    ) -> None:
        """`models`: by worker; `is_right`: whether a worker may be trusted."""
        self._is_right = is_right
        self._given: list[tuple[str, Replica, int]] = []
        self._planes = planes
        self._models = models
        self._workers = list(models)
        self._commands = commands
        self._count = 0
        self._states: dict[tuple[str, str], None] = {}
        """States that commands have led to: worker, and the command that ends it."""

    async def run(self) -> None:
        """Give commands until cancelled, or until there were enough of them."""
        commands, count = self._commands, 0
        while not commands.most or count < commands.most:
            worker, group = divmod(count, len(commands.each))
            one = self._workers[worker % len(self._workers)]
            targets = self._workers if commands.at_once else [one]
            given = [
                self._give(command, target)
                for target in targets
                for command in commands.each[group]
                if command != AdminCommand.TRUST or self._is_right(target)
            ]
            count += all(given)
            await asyncio.sleep(commands.every_s)
        await self.undo()

    async def end(self) -> None:
        """Undo, and cancel a rolling restart."""
        await self.undo()
        if any(AdminCommand.ROLLOUT in group for group in self._commands.each):
            while not self._give(AdminCommand.CANCEL_ROLLOUT, ""):
                await asyncio.sleep(AGAIN_S)

    async def undo(self) -> None:
        """Release what is held, and undrain what is drained, as soon as a replica serves."""
        while self._states:
            target, command = next(iter(self._states))
            if not self._give(command, target):
                await asyncio.sleep(AGAIN_S)

    def forget(self) -> None:
        """The log that has the commands is gone, with the states that they led to."""
        self._given.clear()
        self._states.clear()

    async def settle(self) -> None:
        """End what the log says is held or drained, until cancelled. Commands of an outage land when
        their replica writes again: one that died writes a command after those that others got later."""
        while True:
            await asyncio.sleep(LOOK_S)
            plane = next((plane for plane in self._planes if plane.running), None)
            for worker in list(plane.fleet.workers.values()) if plane is not None else ():
                for command, is_on in (("hold", worker.held), ("drain", worker.draining)):
                    if is_on:
                        self._give(UNDO[command], worker.name)

    def _give(self, command: str, target: str) -> bool:
        if not self.give(command, target):
            return False
        self._states.pop((target, command), None)
        if command in UNDO:
            self._states[target, UNDO[command]] = None
        return True

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
            name = f"{PRINCIPAL}:c{self._count}"
            event = v.AdminCommanded(
                command_id=name,
                principal=PRINCIPAL,
                command=AdminCommand("drain" if command == UNFORCED else command),
                target=self._models[target] if command == AdminCommand.ROLLOUT else target,
                force=command == "drain",
            )
            try:
                position = process.context.run(replica.scheduler.emit, event)
            except LogError:
                continue
            self._count += 1
            self._given.append((name, replica, position))
            return True
        return False
