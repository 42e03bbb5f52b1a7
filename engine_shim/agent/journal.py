"""The agent's pen: what it writes into its worker's stream, and what may be dropped.

The writer of the log never waits and may say `LogFull` (an outage longer than the spool
holds) or `Fenced`. Facts about the engine's life are few and must not be lost, so they
queue here until the writer takes them again; step records are many and are refused, so
that the report socket fills up and the engine itself counts what is lost. While etcd is
short of room the leader has steps written with less detail (`step_detail`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.step_detail import PER_S, Merger
from relume.events.log.codec import encode
from relume.events.log.errors import Fenced, LogFull, LogReplaced
from relume.events.log.feature_levels import FIRST_LEVEL, level_of, require
from relume.events.log.interface import LandedSegment, StreamWriter
from relume.events.log.segment import MAX_SEGMENT_BYTES

# Restarts continue while etcd is unavailable; at four events per restart and 30 s between them
# this is a day and a half beyond a full spool.
MAX_WAITING_FACTS = 16384
RETRY_S = 0.25
FLUSH_TIMEOUT_S = 5.0
"""Maximum time a stopping agent waits for etcd to take its events."""
MAX_RECORD_BYTES = MAX_SEGMENT_BYTES - 2048
"""One record must fit a segment beside its head."""


class Journal:
    """One worker's stream. `record` never fails; `step` says whether it was accepted."""

    def __init__(self, writer: StreamWriter, logger: Logger) -> None:
        self._writer = writer
        self._logger = logger
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING_FACTS)
        self._retry: asyncio.TimerHandle | None = None
        self._fenced = asyncio.Event()
        self._inherited = writer.position
        for loss in getattr(writer, "spool_losses", ()):
            logger.error(
                "part of the spool set aside",
                path=str(loss.path),
                why=loss.why,
                remedy=loss.remedy,
            )
        self._on_epoch: list[Callable[[int], None]] = []
        self._merger: Merger | None = None
        self._due: asyncio.TimerHandle | None = None
        self.steps = 0
        self.feature_level = FIRST_LEVEL
        """Level of which events may be written, as far as the agent knows."""
        self._unreadable: dict[type, Any] = {}
        """The last event of each type that not every replica reads yet."""

    @property
    def stream(self) -> str:
        return self._writer.stream

    @property
    def epoch(self) -> int:
        return self._writer.epoch

    @property
    def is_fenced(self) -> bool:
        return self._fenced.is_set()

    @property
    def is_replaced(self) -> bool:
        """Whether etcd holds another log, or an older state of this one."""
        return isinstance(self._writer.fence, LogReplaced)

    @property
    def has_landed_spool(self) -> bool:
        """Whether the log has all that earlier writers of the stream spooled."""
        return self._writer.durable >= self._inherited

    async def landed_spool(self) -> None:
        """Return when `has_landed_spool`."""
        landed = asyncio.Event()
        self._writer.on_landed(lambda _: landed.set())
        while not self.has_landed_spool:
            landed.clear()
            await landed.wait()

    def on_epoch(self, callback: Callable[[int], None]) -> None:
        """Call `callback(epoch)` when the stream was resumed under another epoch, or begun in another
        log."""
        self._on_epoch.append(callback)
        self._watch_epoch(self._writer, callback)

    @staticmethod
    def _watch_epoch(writer: StreamWriter, callback: Callable[[int], None]) -> None:
        known = writer.epoch

        def landed(_: LandedSegment) -> None:
            nonlocal known
            if writer.epoch != known:
                known = writer.epoch
                callback(known)

        writer.on_landed(landed)

    def suspend(self) -> None:
        """Drop what is recorded from here on, until `continue_in`."""
        self._fenced.set()
        self._waiting.clear()

    def continue_in(self, writer: StreamWriter) -> None:
        """Write to the stream of a new log. What waits for the former one is dropped: the caller
        states again what is true now."""
        self._held_back()
        self._merger = None
        self._waiting.clear()
        self._writer, self._inherited = writer, writer.position
        self._fenced.clear()
        self.feature_level = FIRST_LEVEL
        self._unreadable.clear()
        for callback in self._on_epoch:
            self._watch_epoch(writer, callback)
            callback(writer.epoch)

    def record(self, *events: Any) -> None:
        """Write facts, in order; keeps them while the log is full. Raises AboveFeatureLevel."""
        for event in events:
            require(event, self.feature_level)
        self._waiting.extend(self._held_back())
        self._waiting.extend(encode(event) for event in events)
        self._write_waiting()

    def record_when_readable(self, event: Any) -> None:
        """Write a fact now, or when every replica reads such events, unless another one of its type
        came meanwhile."""
        if level_of(event) <= self.feature_level:
            self.record(event)
        else:
            self._unreadable.pop(type(event), None)
            self._unreadable[type(event)] = event

    def raise_level(self, level: int) -> None:
        """Events up to this level may be written from here on."""
        if level <= self.feature_level:
            return
        self.feature_level = level
        waiting, self._unreadable = self._unreadable, {}
        for event in waiting.values():
            self.record_when_readable(event)

    @property
    def shedding(self) -> bool:
        """Whether step records are merged."""
        return self._merger is not None

    def shed(self, shed: bool) -> None:
        """Merge step records from here on, or write each of them again."""
        if shed is self.shedding:
            return
        self._logger.info("detail of steps", shed=shed)
        self._write_held()
        self._merger = Merger(MAX_RECORD_BYTES) if shed else None

    def step(self, record: bytes) -> bool:
        """Write one encoded step; False if it was not accepted and must be sent again."""
        if self._waiting:
            return False
        if self._merger is None:
            return self._append(record)
        due = self._merger.offer(record)
        self.steps += 1
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(1 / PER_S, self._write_held)
        self._write_merged(due)
        return True

    def _append(self, record: bytes) -> bool:
        if self.is_fenced:
            return True
        try:
            self._writer.append(record)
        except LogFull:
            return False
        except Fenced:
            self._fenced.set()
            return True  # nowhere to go: this process is about to stop
        self.steps += 1
        return True

    def _write_merged(self, records: list[bytes]) -> None:
        """What was merged is few: it waits for room like a fact."""
        if records:
            self._waiting.extend(records)
            self._write_waiting()

    def _held_back(self) -> list[bytes]:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        return self._merger.rest() if self._merger is not None else []

    def _write_held(self) -> None:
        self._write_merged(self._held_back())

    def _write_waiting(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self.is_fenced:
            self._waiting.clear()
        while self._waiting:
            try:
                self._writer.append(self._waiting[0])
            except LogFull as full:
                waiting = len(self._waiting)
                self._logger.warning("log is full; facts wait", waiting=waiting, why=str(full))
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._write_waiting)
                return
            except Fenced:
                self._fenced.set()
                self._waiting.clear()
                return
            self._waiting.popleft()

    async def fenced(self) -> None:
        """Return when another owner has the stream."""
        fence = asyncio.create_task(self._fenced.wait())
        seen = asyncio.create_task(self._writer.fenced())
        try:
            await asyncio.wait({fence, seen}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            fence.cancel()
            seen.cancel()
        self._fenced.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all is durable; False when the time ran out or the stream is lost."""
        self._write_held()
        try:
            async with asyncio.timeout(timeout_s):
                while self._waiting:
                    await asyncio.sleep(RETRY_S / 5)
                    self._write_waiting()
                await self._writer.flush(timeout_s)
        except (TimeoutError, Fenced):
            return False
        return True

    def describe(self) -> dict[str, Any]:
        """For the status endpoint."""
        return {
            "stream": self._writer.stream,
            "epoch": self._writer.epoch,
            "healthy": self._writer.healthy,
            "replaced": self.is_replaced,
            "position": self._writer.position,
            "durable": self._writer.durable,
            "spooled_bytes": getattr(self._writer, "waiting_bytes", 0),
            "spool_trouble": getattr(self._writer, "spool_trouble", ""),
            "spool_losses": [str(one) for one in getattr(self._writer, "spool_losses", ())],
            "facts_waiting": len(self._waiting),
            "steps": self.steps,
            "shedding": self.shedding,
        }
