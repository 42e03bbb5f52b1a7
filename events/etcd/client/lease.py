"""A lease kept alive on one stream.

The lease counts as lost when etcd answers with TTL 0, or when our own monotonic clock
passes the deadline: the moment the last answered keepalive was *sent*, plus the TTL.
The second rule needs no answer, so a hung etcd and a process that was stopped itself
are both noticed. Losing a lease is not losing the stream; see `ownership`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from aetcd import rpc
from grpc import aio

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import BACKOFF_MIN_MS
from relume.events.etcd.errors import AccessRefused, CallFailed, LeaseGone
from relume.events.log.errors import LogUnavailable


class Lease:
    """One granted lease. `lost` is set once, for good."""

    def __init__(self, client: EtcdClient, lease_id: int, ttl_s: int, sent_at: float) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        """As granted; etcd may grant more than requested."""
        self.deadline = sent_at + ttl_s
        """Event loop time after which the lease counts as lost."""
        self.answering = True
        """Whether the last keepalive was answered in time."""
        self.lost = asyncio.Event()
        self._client = client

    @classmethod
    async def grant(cls, client: EtcdClient, ttl_s: int, timeout_s: float = 0.0) -> Self:
        """A new lease. Raises CallFailed, NoSpace."""
        sent_at = asyncio.get_running_loop().time()
        answer = await client.lease_grant(ttl_s, timeout_s)
        return cls(client, answer.ID, answer.TTL, sent_at)

    @property
    def alive(self) -> bool:
        """Whether we may still believe in it."""
        return not self.lost.is_set() and asyncio.get_running_loop().time() < self.deadline

    async def keep(self) -> None:
        """Keep it alive until it is lost; returns then, with `lost` set."""
        pause = BACKOFF_MIN_MS / 1000
        try:
            async with asyncio.timeout_at(self.deadline) as until_deadline:
                while True:
                    answered = self.deadline
                    try:
                        await self._keep_on_one_stream(until_deadline)
                    except LeaseGone:
                        return
                    except (LogUnavailable, AccessRefused):
                        self.answering = False
                    if self.deadline > answered:
                        pause = BACKOFF_MIN_MS / 1000
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, self._client.config.backoff_max_ms / 1000)
        except TimeoutError:
            return
        finally:
            self.answering = False
            self.lost.set()

    async def revoke(self) -> None:
        """Give it back at once, with all keys bound to it. Raises CallFailed."""
        try:
            await self._client.lease_revoke(self.id)
        except LeaseGone:
            return

    async def _keep_on_one_stream(self, until_deadline: asyncio.Timeout) -> None:
        endpoint = self._client.endpoint
        call = await self._client.open_keepalive()
        try:
            while True:
                await self._renew(call, endpoint, until_deadline)
                # A third of the TTL leaves two more tries before it is over.
                await asyncio.sleep(self.ttl_s / 3)
        except aio.AioRpcError as error:
            raise self._client.broken(error, "LeaseKeepAlive", endpoint) from None
        except asyncio.InvalidStateError:
            # Written to a stream that is already over: its status has the reason.
            raise await self._client.ended(call, "LeaseKeepAlive", endpoint) from None
        finally:
            call.cancel()

    async def _renew(self, call: Any, endpoint: str, until_deadline: asyncio.Timeout) -> None:
        sent_at = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._client.config.call_timeout_ms / 1000):
                await call.write(rpc.LeaseKeepAliveRequest(ID=self.id))
                answer = await call.read()
        except TimeoutError:
            self._client.rotate(endpoint)
            raise CallFailed("LeaseKeepAlive", endpoint, "TIMEOUT", "not answered") from None
        if answer is aio.EOF:
            raise await self._client.ended(call, "LeaseKeepAlive", endpoint)
        if answer.TTL <= 0:
            raise LeaseGone(self.id)
        self.deadline = max(self.deadline, sent_at + answer.TTL)
        self.answering = True
        until_deadline.reschedule(self.deadline)
