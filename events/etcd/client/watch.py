"""A watch over one key range that survives whatever happens to its connection.

It yields whole revisions: all events of one transaction together, in order, each once.
The server may cut an answer into fragments at any event; nothing is yielded before the last
fragment is here. After a break the watch restarts at the revision after the last one that was
yielded, so that nothing is lost or repeated.

A silent watch cannot distinguish an idle log from a hung server, a lost quorum or a dropped
connection. After `silence_ms` it therefore sends a linearizable read, which fails, or moves the
client to another endpoint, if etcd is not healthy. If the cluster has advanced for two silences
without the watch, the watch is restarted on another endpoint: a member whose watches are stuck
still answers reads.

At most two answers are queued here: what else the consumer has not read waits in the h2
flow-control window and then in etcd.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aetcd import rpc
from grpc import aio

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import BACKOFF_MIN_MS
from relume.events.etcd.errors import (
    PERMISSIONS_REMEDY,
    AccessRefused,
    CallFailed,
    LogWentBack,
)
from relume.events.log.errors import Compacted, LogUnavailable


class Watch:
    """Watches [key, end) for everything with revision > `after`."""

    def __init__(self, client: EtcdClient, key: bytes, end: bytes, after: int) -> None:
        self.after = after
        """The last revision yielded (or the one to begin after)."""
        self.healthy = False
        """Whether the server sent something, or answered a read, within the silence bound."""
        self._client = client
        self._key = key
        self._end = end
        self._silence_s = client.config.silence_ms / 1000

    async def revisions(self) -> AsyncGenerator[tuple[int, list[Any]], None]:
        """(revision, its mvccpb events) for ever, in order.

        Reconnects by itself. Raises Compacted, AccessRefused, LogWentBack.
        """
        config = self._client.config
        pause = BACKOFF_MIN_MS / 1000
        while True:
            try:
                async with aclosing(self._on_one_stream()) as groups:
                    async for group in groups:
                        pause = BACKOFF_MIN_MS / 1000
                        self.after = group[0]
                        yield group
            except LogUnavailable:
                self.healthy = False
            await asyncio.sleep(pause)
            pause = min(2 * pause, config.backoff_max_ms / 1000)

    async def _on_one_stream(self) -> AsyncGenerator[tuple[int, list[Any]], None]:
        """As `revisions`, until the stream breaks (CallFailed) or must be restarted."""
        endpoint = self._client.endpoint
        stream = _Stream(self._client, endpoint, await self._client.open_watch())
        try:
            await self._create(stream)
            pending: list[Any] = []
            while True:
                answer = await stream.next(self._silence_s, self._ask)
                if answer is None:
                    return
                self.healthy = True
                self._refuse_cancelled(answer, endpoint)
                pending.extend(answer.events)
                if answer.fragment:
                    continue
                for group in _by_revision(pending, self.after):
                    yield group
                pending = []
        finally:
            stream.cancel()

    async def _create(self, stream: _Stream) -> None:
        request = rpc.WatchCreateRequest(
            key=self._key, range_end=self._end, start_revision=self.after + 1, fragment=True
        )
        answer = await stream.first(rpc.WatchRequest(create_request=request))
        self._refuse_cancelled(answer, stream.endpoint)
        if not answer.created:
            raise CallFailed("Watch", stream.endpoint, "PROTOCOL", "no created answer")
        if answer.header.revision < self.after:
            # A lagging member is late too; only the quorum's revision is evidence.
            present = await self._present()
            if present < self.after:
                raise LogWentBack(self.after, present)
        self.healthy = True

    def _refuse_cancelled(self, answer: Any, endpoint: str) -> None:
        if answer.compact_revision:
            raise Compacted(self.after, answer.compact_revision)
        if answer.canceled:
            if "permission denied" in answer.cancel_reason:
                text = f"watch of {self._key!r}: {answer.cancel_reason}; {PERMISSIONS_REMEDY}"
                raise AccessRefused(text)
            raise CallFailed("Watch", endpoint, "CANCELLED", answer.cancel_reason)

    async def _ask(self) -> bool:
        """Whether the quorum has revisions this watch has not shown. Raises LogUnavailable.

        One attempt: when this endpoint does not answer, the watch moves to another.
        """
        request = rpc.RangeRequest(key=self._key, count_only=True)
        answer = await self._client.call("Range", request)
        return int(answer.header.revision) > self.after

    async def _present(self) -> int:
        answer = await self._client.range(self._key, count_only=True)
        return int(answer.header.revision)


class _Stream:
    """One Watch call: read with a bound on silence, without cancelling the read."""

    def __init__(self, client: EtcdClient, endpoint: str, call: Any) -> None:
        self.endpoint = endpoint
        self._client = client
        self._rotations = client.rotations
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Task[Any] | None = None
        self._answers: deque[Any] = deque()
        self._space: asyncio.Future[None] | None = None
        self._news: asyncio.Future[bool] | None = None
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def first(self, request: Any) -> Any:
        """Send `request` and return the first answer, within the call deadline."""
        try:
            async with asyncio.timeout(self._client.config.call_timeout_ms / 1000):
                await self._call.write(request)
                return self._checked(await self._call.read())
        except TimeoutError:
            self._client.rotate(self.endpoint)
            raise CallFailed("Watch", self.endpoint, "TIMEOUT", "not answered") from None
        except aio.AioRpcError as error:
            raise self._client.broken(error, "Watch", self.endpoint) from None
        except asyncio.InvalidStateError:
            raise await self._client.ended(self._call, "Watch", self.endpoint) from None

    async def next(self, silence_s: float, ask: Callable[[], Awaitable[bool]]) -> Any:
        """The next answer; None if the watch should restart.

        That is: the client left this endpoint, or `ask` said twice in a row, a silence apart, that
        the cluster has advanced. Raises CallFailed.
        """
        behind = 0
        # A cancelled read would end the whole call, so a separate task reads.
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read_for_ever())
            self._reading.add_done_callback(lambda _: self._tell(True))
        while True:
            if self._answers or await self._heard(silence_s):
                if not self._answers:
                    raise self._failed(self._reading) from None
                answer = self._answers.popleft()
                if self._space is not None and not self._space.done():
                    self._space.set_result(None)
                if answer is aio.EOF:
                    raise await self._client.ended(self._call, "Watch", self.endpoint)
                return answer
            behind = behind + 1 if await ask() else 0
            if behind == 2:
                self._client.rotate(self.endpoint)
            if self._client.rotations != self._rotations:
                return None

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            self._reading.add_done_callback(_look_at)
            self._reading.cancel()

    async def _read_for_ever(self) -> None:
        """One answer ahead of the consumer."""
        answer = None
        while answer is not aio.EOF:
            answer = await self._call.read()
            self._answers.append(answer)
            self._tell(True)
            if len(self._answers) > 1:
                self._space = self._loop.create_future()
                await self._space

    async def _heard(self, silence_s: float) -> bool:
        """Whether there was something within that time: an answer, or the end."""
        if self._reading is None or self._reading.done():
            return True
        self._due = self._loop.time() + silence_s
        if self._timer is None:  # one timer serves many waits: most end long before
            self._timer = self._loop.call_at(self._due, self._silent)
        self._news = self._loop.create_future()
        try:
            return await self._news
        finally:
            self._news = None

    def _silent(self) -> None:
        self._timer = None
        if self._news is None:
            return
        if self._loop.time() < self._due:
            self._timer = self._loop.call_at(self._due, self._silent)
        else:
            self._tell(False)

    def _tell(self, heard: bool) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(heard)

    def _failed(self, reading: asyncio.Task[Any]) -> Exception:
        """What the end of reading means."""
        try:
            reading.result()
        except aio.AioRpcError as error:
            return self._client.broken(error, "Watch", self.endpoint)
        except asyncio.CancelledError:
            pass
        return CallFailed("Watch", self.endpoint, "CANCELLED", "no longer read")

    def _checked(self, answer: Any) -> Any:
        if answer is aio.EOF:
            raise asyncio.InvalidStateError
        return answer


def _look_at(reading: asyncio.Task[Any]) -> None:
    """Retrieve the outcome of an abandoned read, so that asyncio does not warn."""
    if not reading.cancelled():
        reading.exception()


def _by_revision(events: list[Any], after: int) -> list[tuple[int, list[Any]]]:
    """Events in order, grouped by revision; those up to `after` were handed on already."""
    groups: list[tuple[int, list[Any]]] = []
    for event in events:
        revision = event.kv.mod_revision
        if revision <= after:
            continue
        if groups and groups[-1][0] == revision:
            groups[-1][1].append(event)
        else:
            groups.append((revision, [event]))
    return groups
