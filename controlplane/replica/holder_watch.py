"""Running requests get another holder when theirs is lost or drains.

It follows the fold: what changed among the state daemons is noted with the events, decided
when their group is folded (`Checkpoints.replace`), and the engine that runs the request is informed
(`POST /relume/checkpoint`), again for a while if it does not answer. An engine that cannot be
reached loses only coverage.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import structlog

from relume.controlplane.replica import engine_calls
from relume.controlplane.replica.checkpoint_scheduling import HolderChange
from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.wire.worker_calls import CHECKPOINT_PATH, Retarget

TELLERS = 16
"""Number of engines informed concurrently; a slow one must not hold up the others."""
WAITING = 10_000
TRIES = 5
PAUSE_S = 0.5
"""Delay before an engine that did not answer is called again; doubled each time."""

log = structlog.get_logger("relume.holders")

_CHANGES = (v.StateDaemonStarted, v.StateDaemonLost, v.WorkerLost, v.EffectsDecided)
"""What may displace a checkpoint, or make a place for one."""


class HolderWatch:
    """One for a replica, for the requests it serves."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changed = False
        self._started: list[str] = []
        self._to_tell: asyncio.Queue[tuple[HolderChange, int]] = asyncio.Queue(WAITING)
        self._newest: dict[str, HolderChange] = {}

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with each event folded."""
        kind = type(event)
        if kind in _CHANGES:
            self._changed = True
            if kind is v.StateDaemonStarted:
                self._started.append(event.worker)

    def folded(self, group: RevisionGroup) -> None:
        """Called when a whole group was folded: a decision's basis is no less."""
        if not self._changed:
            return
        self._changed, started, self._started = False, self._started, []
        checkpoints = self._scheduler.checkpoints
        # A daemon that is back may be reached elsewhere, and has all to be offered again.
        found = [change for holder in started for change in checkpoints.held_by(holder)]
        try:
            found += checkpoints.replace()
        except LogError as error:
            log.warning("holders_not_written", reason=str(error))
        for change in found:
            self._newest[change.request] = change
            self._put(change, 1)

    def _put(self, change: HolderChange, turn: int) -> None:
        if self._newest.get(change.request) is not change:
            return  # other holders were chosen meanwhile
        try:
            self._to_tell.put_nowait((change, turn))
        except asyncio.QueueFull:
            self._done(change, "too many wait")

    def _done(self, change: HolderChange, refusal: str) -> None:
        if self._newest.get(change.request) is change:
            del self._newest[change.request]
        if refusal:
            log.info("holders_not_told", request=change.request, reason=refusal)

    async def run(self) -> None:
        """Inform engines, without end; the caller owns the task."""
        async with engine_calls.session() as session, asyncio.TaskGroup() as tasks:
            for _ in range(TELLERS):
                tasks.create_task(self._tell_all(session))

    async def _tell_all(self, session: aiohttp.ClientSession) -> None:
        loop = asyncio.get_running_loop()
        while True:
            change, turn = await self._to_tell.get()
            if self._newest.get(change.request) is not change:
                continue
            try:
                fleet, holders = self._scheduler.view.fleet, change.endpoints
                call = Retarget(change.request, change.attempt, change.incarnation, holders)
                refusal = await engine_calls.ask(
                    session, fleet, change.worker, CHECKPOINT_PATH, call
                )
                self._done(change, refusal)
            except engine_calls.LOST as error:
                if turn == TRIES:
                    self._done(change, repr(error))
                else:
                    loop.call_later(PAUSE_S * 2 ** (turn - 1), self._put, change, turn + 1)
