"""The owner of one stream on etcd.

`append` takes events and returns; one task lands them, one segment and one transaction
at a time. An idle stream sends at once; a busy one waits `linger_ms` since its last
segment, or for `linger_bytes`.

When etcd does not answer, the same append is sent again until its outcome is known:
landed, or refused because another writer owns the stream (Fenced), or refused because it has no
owner. In the last case, or if the lease is lost, the writer takes ownership again as
`ownership.regain` describes. Everything accepted meanwhile, and the segment under way unless it
landed, is then written under the new epoch at the positions `append` gave it, and followed by
`StreamResumed(old epoch, new epoch, how many)`.

Positions, once returned, never change; that is why StreamResumed comes after the events it is about
and not before them. The first segment with the new epoch is where the resumption begins.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any, Self

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.client.lease import Lease
from relume.events.etcd.config import BACKOFF_MIN_MS
from relume.events.etcd.errors import AccessRefused, LeaseGone, NoSpace, RecordTooLarge
from relume.events.etcd.keys import Keys
from relume.events.etcd.writer.appends import Append, Outcome, Shape
from relume.events.etcd.writer.backlog import Backlog
from relume.events.etcd.writer.ownership import Ownership, Tail, is_lost
from relume.events.etcd.writer.spool import SPOOL_VERSION, Spool, SpoolHead, path_for
from relume.events.etcd.writer.spool_recovery import Loss, recover
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.log.codec import encode
from relume.events.log.errors import (
    BrokenChain,
    Fenced,
    LogError,
    LogFull,
    LogReplaced,
    LogUnavailable,
)
from relume.events.log.interface import LandedSegment
from relume.events.log.segment import MAX_SEGMENT_BYTES
from relume.events.vocabulary import StreamResumed

_CUT_BYTES = MAX_SEGMENT_BYTES - 1024  # leaves room for the header
_SETTLED_BYTES = 64 * 1024
_NEVER = 1 << 62


class WriterClosed(LogError):
    """The writer's context was left; it accepts no more events."""


class EtcdWriter:
    """A StreamWriter on etcd. Use as an async context manager.

    Entering raises StreamOwned if another owner lives longer than `wait_s`, LogUnavailable if etcd
    does not answer. `name` shows people the owner of the stream. An event accepted while nothing
    waits is sent at most `gather_s` later, with what arrived since; `hurry` and `flush` send
    immediately.
    """

    def __init__(
        self,
        client: EtcdClient,
        stream: str,
        *,
        name: str = "",
        wait_s: float = 0.0,
        gather_s: float = 0.0,
    ) -> None:
        self.stream = stream
        self._client = client
        self._config = client.config
        self._keys = Keys(client.config.prefix)
        self._own = Ownership(client, stream, name)
        self._wait_s = wait_s
        self._backlog = Backlog(
            self._config.memory_limit_bytes,
            self._config.spool_limit_bytes,
            self._config.spool_sync_ms / 1000,
            self._create_spool if self._config.spool_dir else None,
        )
        self.spool_losses: list[Loss] = []
        """What earlier writers of the stream spooled and this one could not write, set aside."""
        self._tail = Tail()
        self._position = 0
        self._under_way: Append | None = None
        self._shape: Shape | None = None
        self._callbacks: list[Callable[[LandedSegment], None]] = []
        self._trouble: LogError | None = None
        self._lapsed = False
        self._fence: Fenced | None = None
        self._fenced = asyncio.Event()
        self._closing = False
        self._hurry_at = math.inf
        self._wake = asyncio.Event()
        self._wake_at = _NEVER
        self._sent_at = self._since = float("-inf")
        self._gather_s = gather_s
        self._linger_s = client.config.linger_ms / 1000
        self._now = time.monotonic
        self._progress: asyncio.Event | None = None
        self._tasks = asyncio.TaskGroup()
        self._keeper: asyncio.Task[None] | None = None
        self._workers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tail = await self._own.take(self._wait_s)
        self._position = self._tail.position - 1
        try:
            if self._config.spool_dir:
                await self._take_over_spool()
        except BaseException:
            await self._own.give_back()
            raise
        await self._tasks.__aenter__()
        self._keep()
        for work in (self._land_for_ever(), self._backlog.write_for_ever()):
            self._workers.append(self._tasks.create_task(work, name=f"log {self.stream}"))
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if self._fence is None:
                await self.flush(self._config.close_timeout_ms / 1000)
        except (TimeoutError, Fenced):
            pass
        finally:
            self._closing = True
            for task in (*self._workers, self._keeper):
                if task is not None:
                    task.cancel()
            try:  # a task group raises the cancellation it is left with
                await self._tasks.__aexit__(kind, error, trace)
            finally:
                await self._leave_spool()
                await self._own.give_back()

    # --- state -----------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """create_revision of the owner key; changes when the stream is resumed."""
        return self._own.epoch

    @property
    def position(self) -> int:
        """Position of the last event accepted."""
        return self._position

    @property
    def durable(self) -> int:
        """Position of the last event known to be in etcd."""
        return self._tail.position - 1

    @property
    def healthy(self) -> bool:
        """Whether appends land now."""
        return self.state == "landing"

    @property
    def state(self) -> str:
        """landing, outage, nospace, refused (credentials), fenced or closed."""
        if self._fence is not None:
            return "fenced"
        if self._closing:
            return "closed"
        if isinstance(self._trouble, NoSpace):
            return "nospace"
        if isinstance(self._trouble, AccessRefused):
            return "refused"
        lease = self._own.lease
        well = self._trouble is None and lease is not None and lease.answering and lease.alive
        return "landing" if well else "outage"

    @property
    def spool_trouble(self) -> str:
        """Why the spool does not take what waits, which is then in memory alone until all of
        it has landed; empty when it does, or is not needed."""
        return str(self._backlog.disk_error or "")

    @property
    def waiting_bytes(self) -> int:
        """Size of what was accepted and has not landed."""
        return self._backlog.bytes + (self._under_way.size if self._under_way else 0)

    # --- what it does ------------------------------------------------------------------

    def append(self, *events: Any, beyond_limit: bool = False) -> int:
        """Take events (structs, or encoded records); returns the position of the last.

        Never waits. Raises Fenced, LogFull (not `beyond_limit`), RecordTooLarge, WriterClosed; then
        none of the events was accepted.
        """
        if self._fence is not None:
            raise self._fence
        if self._closing:
            raise WriterClosed(f"writer of stream {self.stream} is closed")
        records = [e if isinstance(e, bytes) else encode(e) for e in events]
        size = 0
        for record in records:
            if len(record) > _CUT_BYTES - 4:
                raise RecordTooLarge(len(record), _CUT_BYTES - 4)
            size += len(record)
        backlog = self._backlog
        if not beyond_limit and not backlog.has_space(size):
            raise LogFull(self.stream, backlog.limit_bytes)
        if backlog.passes_memory(size):
            self._journal()
        if not backlog.count:
            self._since = self._now()
        backlog.add(records, size)
        self._position += len(records)
        if backlog.bytes >= self._wake_at:
            self._wake.set()
        return self._position

    def hurry(self, within_s: float = 0.0) -> None:
        """Send what was accepted within that time, instead of gathering longer."""
        at = self._now() + within_s
        if at < self._hurry_at:
            self._hurry_at = at
            self._wake.set()

    async def flush(self, timeout_s: float) -> None:
        """Wait until all accepted events are durable. Raises TimeoutError, Fenced."""
        target = self._position
        async with asyncio.timeout(timeout_s):
            while self.durable < target:
                if self._fence is not None:
                    raise self._fence
                self.hurry()
                if self._progress is None:
                    self._progress = asyncio.Event()
                await self._progress.wait()

    def on_landed(self, callback: Callable[[LandedSegment], None]) -> None:
        """Call `callback` on the event loop for every segment that became durable."""
        self._callbacks.append(callback)

    @property
    def fence(self) -> Fenced | None:
        """Why the stream is no longer ours: another owner took it, or LogReplaced."""
        return self._fence

    async def fenced(self) -> None:
        """Return when (if ever) there is a `fence`; this writer takes no more events."""
        await self._fenced.wait()

    # --- landing -----------------------------------------------------------------------

    async def _land_for_ever(self) -> None:
        longest = self._config.backoff_max_ms / 1000
        pause = BACKOFF_MIN_MS / 1000
        try:
            while True:
                await self._something_to_do()
                try:
                    if self._must_regain:
                        await self._regain()
                    else:
                        await self._append()
                except (LogUnavailable, AccessRefused, LeaseGone) as error:
                    self._trouble = error
                    self._journal()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, longest)
                else:
                    self._trouble = None
                    pause = BACKOFF_MIN_MS / 1000
                    if not self._backlog.settled:
                        await self._settle()
        except (Fenced, BrokenChain) as error:
            self._fence = await self._fence_of(error)
            self._fenced.set()
            self._moved()

    async def _fence_of(self, error: Fenced | BrokenChain) -> Fenced:
        """What ended the ownership: another owner, or an etcd that is not the same any more."""
        replaced = LogReplaced(self.stream, self.epoch, self._tail.seq)
        if isinstance(error, BrokenChain):
            return replaced
        until = self._now() + self._config.open_timeout_ms / 1000
        while True:
            try:
                lost = await is_lost(self._client, self._keys, self.stream, self._tail, self.epoch)
                return replaced if lost else error
            except LogUnavailable:
                if self._now() > until:
                    return error
                await asyncio.sleep(BACKOFF_MIN_MS / 1000)
            except LogError:
                return error

    @property
    def _must_regain(self) -> bool:
        # The keeper watches our clock; a fenced transaction does no harm before it looks.
        return self._lapsed or self._own.lease is None or self._own.lease.lost.is_set()

    async def _something_to_do(self) -> None:
        """Return when there is a segment to send now, or the stream to regain."""
        while True:
            self._wake.clear()
            if self._must_regain or self._under_way is not None:
                return
            if not self._backlog.count:
                self._wake_at = 1
                await self._wake.wait()
                continue
            full = self._backlog.bytes >= self._config.linger_bytes
            due = max(self._sent_at + self._linger_s, self._since + self._gather_s)
            left = 0.0 if full else min(due, self._hurry_at) - self._now()
            if left <= 0:
                self._hurry_at = math.inf
                self._wake_at = _NEVER
                return
            self._wake_at = self._config.linger_bytes
            try:
                async with asyncio.timeout(left):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _append(self) -> None:
        append = self._under_way
        if append is None:
            if not self._backlog.in_memory:
                await self._backlog.refill()
            records = self._backlog.cut(_CUT_BYTES)
            if self._shape is None or self._shape.epoch != self.epoch:
                self._shape = Shape(self._keys, self.stream, self.epoch)
            append = Append(self._shape, self._tail, records, time.time_ns() // 1_000_000)
            self._under_way = append
        self._sent_at = self._now()
        if failpoint_client.active:
            await self._reach(Failpoint.LOG_APPEND, append)
        outcome, revision = append.judge(await self._client.append(append))
        if outcome is Outcome.LANDED:
            if failpoint_client.active:
                await self._reach(Failpoint.LOG_LANDED, append)
            self._landed(append, revision)
        else:
            self._lapsed = True

    async def _reach(self, point: Failpoint, append: Append) -> None:
        """Raises LogUnavailable where a failpoint says so."""
        stream, seq = self.stream, append.seq
        await failpoint_client.reach_async(point, LogUnavailable, stream=stream, seq=seq)

    def _landed(self, append: Append, revision: int) -> None:
        self._under_way = None
        self._tail = append.landed_as(revision)
        self._moved()
        landed = LandedSegment(
            stream=self.stream,
            revision=revision,
            seq=append.seq,
            first=append.first,
            last=self.durable,
        )
        for callback in self._callbacks:
            callback(landed)

    def _moved(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.set()

    # --- the spool ---------------------------------------------------------------------

    def _create_spool(self, head: SpoolHead) -> Spool:
        path = path_for(self._config.spool_dir, self.stream, self._own.nonce)
        return Spool.create(path, head)

    def _journal(self) -> None:
        """From here on, what has not landed is on disk too."""
        tail, own = self._tail, self._own
        head = SpoolHead(
            version=SPOOL_VERSION,
            cluster=own.cluster,
            prefix=self._config.prefix,
            stream=self.stream,
            epoch=own.epoch,
            seq=tail.seq,
            hash=tail.hash,
            position=tail.position,
        )
        self._backlog.journal(self._under_way.records if self._under_way else (), head)

    async def _settle(self) -> None:
        """Give the spool up once landing keeps up from memory again."""
        backlog = self._backlog
        if backlog.in_memory and backlog.bytes <= _SETTLED_BYTES:
            # Removing the file continues if this task is cancelled; leaving waits for it.
            await asyncio.shield(backlog.settle())

    async def _take_over_spool(self) -> None:
        """Queue what an earlier writer of this stream took and did not land."""
        own = self._own
        directory = self._config.spool_dir
        on_loss = self.spool_losses.append
        left = await recover(self._client, directory, own.cluster, self.stream, self._tail, on_loss)
        if left is not None:
            self._backlog.adopt(left.spool, left.offset, left.count, left.size)
            self._position += left.count
            self._say_resumed(left.spool.head.epoch)

    async def _leave_spool(self) -> None:
        """What did not land stays on disk for the next writer; nothing else does."""
        if self._fence is None and self.durable == self._position:
            await self._backlog.settle()
        elif self._fence is None:
            self._journal()
        await self._backlog.close(refused=self._fence is not None)

    # --- the lease ---------------------------------------------------------------------

    async def _regain(self) -> None:
        old_epoch = self._own.epoch
        found = await self._own.regain(self._tail, self._lapsed)
        if found is not None:
            append = self._under_way
            if append is None or found.hash != append.hash:
                raise Fenced(self.stream, old_epoch, "another owner wrote to it")
            self._landed(append, found.revision)
            return
        self._lapsed = False
        self._keep()
        if self._own.epoch != old_epoch:
            self._restamp(old_epoch)

    def _restamp(self, old_epoch: int) -> None:
        """Everything not landed goes under the new epoch, then the fact that it did."""
        if self._under_way is not None:
            self._backlog.put_back(self._under_way.records)
            self._under_way = None
        self._say_resumed(old_epoch)

    def _say_resumed(self, old_epoch: int) -> None:
        record = encode(StreamResumed(old_epoch, self.epoch, self._backlog.count))
        self._backlog.add([record], len(record))
        self._position += 1

    def _keep(self) -> None:
        """Keep the current lease alive in a separate task."""
        if self._keeper is not None:
            self._keeper.cancel()
        if self._own.lease is not None:
            self._keeper = self._tasks.create_task(self._keep_one(self._own.lease))

    async def _keep_one(self, lease: Lease) -> None:
        await lease.keep()
        self._wake.set()
