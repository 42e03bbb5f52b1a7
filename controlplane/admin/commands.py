"""Operators' changes: each goes into the log with its principal, once (I16).

A command's id is its principal and its idempotency key, so the fold itself recognises a resent one
on any replica. The answer waits up to a limit for the leader's decision. After that the command is
`accepted` and can be read by its id. While the log does not take events, no command is accepted: it
would be carried out when etcd is back, whenever that is.
"""

from __future__ import annotations

import asyncio
import re
import uuid

from relume.controlplane.admin.errors import BadRequest, Conflict, NotFound, TooFewWorkers
from relume.controlplane.admin.models import CommandDetail, CommandInfo, EffectInfo
from relume.controlplane.admin.principals import Principal
from relume.controlplane.admin.recent_events import Cursor, History
from relume.controlplane.history.errors import HistoryGap
from relume.controlplane.replica.loop import Replica
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.events.log.errors import Compacted, LogUnavailable
from relume.events.vocabulary.enums import AdminCommand, CommandState
from relume.policies.leader import drain_floor
from relume.policies.state.fleet import DrainOrder
from relume.policies.state.operator_commands import NO_ORDER

WORKER_COMMANDS = ("drain", "undrain", "restart", "hold", "release", "trust")
MAX_COMMANDS = 2048
_KEY = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Command:
    """What is known of one command; `answered` is set with the leader's answer."""

    __slots__ = ("answer", "answered", "commanded", "landed", "outcomes", "revision")

    def __init__(self, commanded: v.AdminCommanded) -> None:
        self.commanded = commanded
        self.answer: v.EffectsDecided | v.ConfigChanged | None = None
        self.answered = asyncio.Event()
        self.landed = False
        self.revision = 0
        self.outcomes: dict[int, str] = {}

    def take(self, revision: int, answer: v.EffectsDecided | v.ConfigChanged) -> None:
        """The leader answered; the first answer is the one that counts."""
        if self.answer is None:
            self.answer = answer
            self.revision = revision
            self.answered.set()

    def info(self) -> CommandInfo:
        """The command for HTTP. It depends on the leader's answer alone, so that a resent
        command is answered as it was the first time."""
        c, answer = self.commanded, self.answer
        refused = isinstance(answer, v.ConfigChanged) and not answer.key
        state = CommandState.REFUSED if refused else CommandState.DECIDED
        if answer is None:
            state = CommandState.ACCEPTED
        return CommandInfo(
            command_id=c.command_id,
            principal=c.principal,
            command=c.command,
            target=c.target,
            value=c.value,
            state=state,
            revision=self.revision,
            message=answer.value if isinstance(answer, v.ConfigChanged) and refused else "",
        )


class CommandBook:
    """Commands by id, oldest first; feeds on the history's entries.

    `wait_s`: how long an answer waits for the leader.
    """

    def __init__(self, replica: Replica, history: History, wait_s: float = 5.0) -> None:
        self._replica = replica
        self._history = history
        self._wait_s = wait_s
        self._commands: dict[str, Command] = {}

    def note(self, entry: Entry) -> None:
        """Take one event of the log."""
        event = entry.event
        kind = type(event)
        if kind is v.AdminCommanded:
            command = self._add(event)
            if not command.landed:  # two replicas may race: the first in the log is the one
                command.landed, command.commanded = True, event
        elif kind is v.EffectsDecided or kind is v.ConfigChanged:
            answered = self._commands.get(event.decision)
            if answered is not None and getattr(event, "again", -1) < 0:
                answered.take(entry.revision, event)
        elif kind is v.EffectApplied:
            carried = self._commands.get(event.decision)
            if carried is not None:
                carried.outcomes.setdefault(event.index, event.outcome)

    def _add(self, commanded: v.AdminCommanded) -> Command:
        command = self._commands.get(commanded.command_id)
        if command is None:
            command = self._commands[commanded.command_id] = Command(commanded)
            if len(self._commands) > MAX_COMMANDS:
                del self._commands[next(iter(self._commands))]
        return command

    async def submit(
        self,
        principal: Principal,
        key: str,
        command: str,
        target: str,
        value: str = "",
        order: DrainOrder = NO_ORDER,
    ) -> CommandInfo:
        """Have a command carried out; a known key gives the known answer.

        Raises BadRequest (key), Conflict (key used for another command, or the leader
        refused), TooFewWorkers (the leader refused a drain for that), LogUnavailable, Fenced, LogFull.
        """
        if key and not _KEY.fullmatch(key):
            raise BadRequest("Idempotency-Key: 1 to 128 of A-Z a-z 0-9 _ . : -", "Idempotency-Key")
        command_id = f"{principal.name}:{key or uuid.uuid4().hex}"
        issued = v.AdminCommanded(
            command_id=command_id,
            principal=principal.name,
            command=AdminCommand(command),
            target=target,
            value=value,
            reason=order.reason,
            deadline_ticks=order.deadline_ticks,
            force=order.force,
        )
        known = await self._known(command_id)
        if known is None:
            if not self._replica.scheduler.decisions.healthy:
                raise LogUnavailable(
                    "nothing was changed; send the command again when etcd answers"
                )
            self._replica.scheduler.emit(issued)
            known = self._add(issued)
        _same(known, issued)
        try:
            async with asyncio.timeout(self._wait_s):
                await known.answered.wait()
        except TimeoutError:
            pass  # accepted: the next leader carries it out, or refuses it if it comes too late
        _same(known, issued)
        info = known.info()
        if info.state == CommandState.REFUSED:
            is_floor = info.message.startswith(drain_floor.TOO_FEW)
            raise TooFewWorkers(info.message) if is_floor else Conflict(info.message)
        return info

    async def detail(self, command_id: str) -> CommandDetail:
        """A command and its effects. Raises NotFound, LogUnavailable."""
        command = await self._known(command_id)
        if command is None:
            raise NotFound(f"no command {command_id!r} in the log", "command_id")
        effects = command.answer.effects if type(command.answer) is v.EffectsDecided else ()
        return CommandDetail(
            command.info(),
            [
                EffectInfo(e.kind, e.worker, e.incarnation, command.outcomes.get(i, "pending"))
                for i, e in enumerate(effects)
            ],
        )

    async def _known(self, command_id: str) -> Command | None:
        """The command, from memory, else (it precedes this replica) from the log."""
        known = self._commands.get(command_id)
        if known is None and command_id in self._replica.fleet.commands:
            await self._read_log()
            known = self._commands.get(command_id)
            if known is None:
                raise Conflict("this Idempotency-Key was used before what the log still holds")
        return known

    async def _read_log(self) -> None:
        cursor: Cursor = (0, 1 << 62)
        end = self._history.end
        while cursor < end:
            try:
                entries, cursor = await self._history.after(cursor)
            except (Compacted, HistoryGap):
                return
            for entry in entries:
                self.note(entry)


def _same(known: Command, issued: v.AdminCommanded) -> None:
    """Raise Conflict when the key was used for something else."""
    before = known.commanded
    if before != issued:
        raise Conflict(
            f"this Idempotency-Key was used for {before.command} {before.target} {before.value}",
            "Idempotency-Key",
        )
