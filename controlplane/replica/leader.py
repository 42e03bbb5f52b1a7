"""Leadership: owning stream `fleet`. The owner ticks, judges losses, carries out commands.

Owning the stream *is* leading: its fencing is the log's own. A replica that does not lead
tries to open the stream whenever its owner key is gone; all writes of a leader are in
that stream, so a deposed leader's writes are refused by etcd, not by good manners.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog

from relume.events import vocabulary as v
from relume.events.log.errors import Fenced, LogError, LogFull, LogUnavailable, StreamOwned
from relume.events.log.feature_levels import require
from relume.events.log.interface import StreamWriter
from relume.policies.decision_versions import shape_name
from relume.policies.leader.duties import MOST_SILENT_MS, step
from relume.policies.leader.feature_level import in_force
from relume.policies.state.fleet import Fleet, state_hash

STREAM = "fleet"
ABSTAIN_TICKS = 10
"""Time that a leader that resigned leaves others to take the stream."""
log = structlog.get_logger("relume.leader")


class Leadership:
    """Campaigns for stream `fleet` and, while owning it, answers events with `step`.

    `open_writer` returns a new writer for the stream; `fleet` is the replica's fold. It acts
    from the fold of its own `LeaderElected` on: by then it has all that its predecessor
    wrote, and what it owes follows from the log alone. It ticks once the tick before is folded,
    so that ticks prove a working log: stored ticks that land together after an outage would say
    that owners were missing while all was well. Every `hash_every` ticks it writes the state hash,
    without which replay could not find what no decision depended on.
    """

    def __init__(
        self,
        open_writer: Callable[[str], Any],
        fleet: Fleet,
        replica: str,
        boot: str,
        tick_s: float = 1.0,
        hash_every: int = 1,
    ) -> None:
        self._open_writer = open_writer
        self._fleet = fleet
        self._replica = replica
        self._boot = boot
        self._tick_s = tick_s
        self._hash_every = hash_every
        self._writer: StreamWriter | None = None
        self._acting = False
        self._deposed = asyncio.Event()
        self._abstain_until = 0.0

    @property
    def leading(self) -> bool:
        """Whether this replica owns stream `fleet`."""
        return self._writer is not None

    @property
    def acting(self) -> bool:
        """Whether it leads, and has folded what its predecessor wrote."""
        return self._acting

    @property
    def epoch(self) -> int:
        """Epoch of our leadership, 0 when not leading."""
        return self._writer.epoch if self._writer is not None else 0

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with each event just folded; writes what the leader owes."""
        if self._writer is None:
            return
        if type(event) is v.LeaderElected:
            self._acting = (event.replica, event.boot) == (self._replica, self._boot)
        if not self._acting:
            return
        owed = step(self._fleet, event, self._log_was_away(event))
        if owed:
            self.append(*owed)
            if type(owed[-1]) is v.LeaderResigned:
                self._abstain_until = time.monotonic() + ABSTAIN_TICKS * self._tick_s
                self.resign(owed[-1].reason)

    def _log_was_away(self, event: Any) -> bool:
        """Whether a command that is open now may have waited for the log for long. Ticks follow one
        another while the log works, so the last one would be younger."""
        if type(event) not in (v.AdminCommanded, v.LeaderElected) or not self._fleet.tick_unix_ms:
            return False
        return time.time_ns() // 1_000_000 - self._fleet.tick_unix_ms > MOST_SILENT_MS

    def append(self, *events: Any) -> None:
        """Write as the leader; does nothing if not (or no longer) leading. A leader cannot repeat a
        write that found no room, so a full spool ends the leadership: the next leader writes again
        all that is open. Raises AboveFeatureLevel.
        """
        if self._writer is None:
            return
        for event in events:
            require(event, in_force(self._fleet))
        try:
            self._writer.append(*events)
        except Fenced:
            self._depose("fenced")
        except LogFull:
            log.warning("leader_spool_full", events=len(events))
            self.resign("its spool is full")

    def resign(self, reason: str) -> None:
        """Give the leadership up; nothing when not leading."""
        self._depose(reason)

    async def run(self) -> None:
        """Campaign and lead, for ever."""
        while True:
            if STREAM in self._fleet.owners or time.monotonic() < self._abstain_until:
                await asyncio.sleep(self._tick_s / 2)
                continue
            try:
                async with self._open_writer(STREAM) as writer:
                    await self._lead(writer)
            except StreamOwned:
                await asyncio.sleep(self._tick_s / 2)
            except (Fenced, LogUnavailable) as error:
                log.warning("leadership_lost", reason=str(error))
                await asyncio.sleep(self._tick_s)
            except LogError as error:
                log.error("leadership_failed", reason=str(error), remedy="relume doctor")
                await asyncio.sleep(self._tick_s)
            finally:
                self._depose("left")

    async def _lead(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._acting = False
        self._deposed.clear()
        log.info("leader_elected", replica=self._replica, epoch=writer.epoch)
        writer.append(v.LeaderElected(self._replica, self._boot))
        number = -1
        fenced = asyncio.ensure_future(writer.fenced())
        deposed = asyncio.ensure_future(self._deposed.wait())
        try:
            while self._writer is writer:
                if self._acting and writer.healthy and self._fleet.tick >= number:
                    number = max(number, self._fleet.tick) + 1
                    self.append(v.Tick(number, time.time_ns() // 1_000_000))
                    if number % self._hash_every == 0:
                        self.append(self._state())
                await asyncio.wait(
                    {fenced, deposed},
                    timeout=self._tick_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if fenced.done():
                    await fenced
                    self._depose("fenced")
        finally:
            fenced.cancel()
            deposed.cancel()
            if self._writer is writer:
                with suppress(Fenced, LogFull):
                    writer.append(self._state(), v.LeaderResigned(self._replica, "stopping"))

    def _state(self) -> v.StateHashed:
        fleet = self._fleet
        return v.StateHashed(fleet.revision, state_hash(fleet), fleet.order, shape_name())

    def _depose(self, reason: str) -> None:
        if self._writer is not None:
            log.info("leader_deposed", replica=self._replica, reason=reason)
        self._writer = None
        self._acting = False
        self._deposed.set()
