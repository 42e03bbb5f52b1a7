"""Owning a stream: taking it, keeping it over an outage, giving it back.

The owner key is bound to a lease and its create_revision is the epoch. A transaction
that compares both the epoch and the place of the next segment is refused for everybody
but the owner; nothing else fences.

A lease lapses in any outage longer than its TTL, and a lapsed lease is not a lost
stream. `regain` therefore checks, in this order:

1. the key is still there under our epoch: bind it to a fresh lease, the epoch stays;
2. the key is absent and the last segment is ours: create it again, a new epoch. The
   comparison is by the create_revision of that segment, which no other segment shares,
   and that its successor is absent;
3. anything else: another owner has been there. Fenced.

The owner key's value holds a nonce of this writer, so that a creation whose answer was
lost is recognized as our own.

A lease whose grant was not answered in time is of no use, and the next try requests another
one. Where each call takes a little longer than its timeout, no try would succeed. So a call that
times out doubles the timeout of the following ones, up to half of the TTL, until the stream is owned.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from aetcd import rpc
from msgspec import Struct

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.client.lease import Lease
from relume.events.etcd.config import BACKOFF_MIN_MS
from relume.events.etcd.errors import TIMED_OUT, AccessRefused, CallFailed, LeaseGone
from relume.events.etcd.keys import Keys
from relume.events.etcd.reader.scan import Scan
from relume.events.log.damaged_segment import unless_skipped
from relume.events.log.errors import Fenced, LogError, LogUnavailable, StreamOwned
from relume.events.log.segment import GENESIS, digest

CREATE = 1  # Compare.CompareTarget.CREATE
EQUAL, GREATER = 0, 1


class Tail(Struct, frozen=True):
    """The end of a stream: its last segment (`seq` 0: none), written at `revision`, and
    the position of the next event."""

    seq: int = 0
    hash: bytes = GENESIS
    revision: int = 0
    position: int = 1


class FoundSegment(Struct, frozen=True):
    """Instead of regaining: a successor of our last segment exists already."""

    hash: bytes
    revision: int


class Ownership:
    """One writer's hold on one stream. `epoch` 0 means not held yet."""

    def __init__(self, client: EtcdClient, stream: str, name: str) -> None:
        self.stream = stream
        self.epoch = 0
        self.cluster = 0
        """etcd's cluster id, known once the stream is owned."""
        self.nonce = uuid.uuid4().hex
        self.lease: Lease | None = None
        self._client = client
        self._keys = Keys(client.config.prefix)
        self._key = self._keys.owner(stream)
        self._value = json.dumps({"owner": name, "nonce": self.nonce}).encode()
        self._fresh: Lease | None = None
        self._timeout_s = client.config.call_timeout_ms / 1000

    async def take(self, wait_s: float) -> Tail:
        """Own the stream, and return where it ends.

        A living other owner is waited for up to `wait_s`, then StreamOwned is raised.
        LogUnavailable when etcd did not answer within open_timeout_ms.
        """
        loop = asyncio.get_running_loop()
        owned_until = loop.time() + wait_s
        answer_until = loop.time() + self._client.config.open_timeout_ms / 1000
        pause = BACKOFF_MIN_MS / 1000
        try:
            while True:
                try:
                    tail = await self._try_to_take()
                    if tail is not None:
                        return tail
                    continue  # the stream moved on while we looked
                except (LogUnavailable, LeaseGone) as error:
                    self._forget(error)
                    if loop.time() >= answer_until:
                        raise
                except StreamOwned:
                    if loop.time() >= owned_until:
                        raise
                    answer_until = loop.time() + self._client.config.open_timeout_ms / 1000
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.25)
        except BaseException:
            await self.give_back()
            raise

    async def regain(self, tail: Tail, is_gone: bool = False) -> FoundSegment | None:
        """Own the stream again after the lease was lost; `epoch` shows whether it is a new one.
        `is_gone`: etcd said that the owner key is absent, which spares one call.

        Returns Found, without owning it, if the segment after `tail` exists: the
        caller knows whether that is its own. Raises LogUnavailable, Fenced, and LeaseGone
        when etcd took longer than the TTL between grant and transaction: try again, it
        begins with a new lease.
        """
        lease = await self._fresh_lease()
        try:
            if is_gone or not self.epoch or not await self._rebind(lease):
                found = await self._recreate(lease, tail)
                if found is not None:
                    return found
        except LeaseGone as error:
            self._forget(error)
            raise
        self._bound(lease)
        return None

    async def give_back(self) -> None:
        """Revoke what leases we have; the owner key goes with them. Errors are ignored:
        an etcd that cannot be reached, or has no account for us any more, lets them lapse."""
        for lease in (self.lease, self._fresh):
            if lease is not None:
                try:
                    await lease.revoke()
                except (LogUnavailable, AccessRefused):
                    continue
        self.lease = self._fresh = None

    # --- inside ------------------------------------------------------------------------

    async def _try_to_take(self) -> Tail | None:
        tail = await read_tail(self._client, self._keys, self.stream)
        lease = await self._fresh_lease()
        compare = [_created(self._key, 0), *self._unmoved(tail)]
        request = rpc.TxnRequest(compare=compare, success=[self._put(lease)], failure=[self._get()])
        answer = await self._call(self._client.txn, request)
        self.cluster = answer.header.cluster_id
        if answer.succeeded:
            self.epoch = answer.header.revision
        else:
            owner = answer.responses[0].response_range.kvs
            if not owner:
                return None
            if not self._is_mine(owner[0]):
                raise StreamOwned(self.stream, _name(owner[0].value))
            self.epoch = owner[0].create_revision
            if not await self._rebind(lease):
                return None
        self._bound(lease)
        return tail

    async def _rebind(self, lease: Lease) -> bool:
        """Bind our living owner key to `lease`; False when it is not there."""
        request = rpc.TxnRequest(
            compare=[_created(self._key, self.epoch)],
            success=[self._put(lease)],
            failure=[self._get()],
        )
        answer = await self._call(self._client.txn, request)
        if answer.succeeded:
            return True
        owner = answer.responses[0].response_range.kvs
        if not owner:
            return False
        if not self._is_mine(owner[0]):
            raise Fenced(self.stream, self.epoch, f"owned by {_name(owner[0].value)}")
        # Created by us in a transaction whose answer was lost.
        self.epoch = owner[0].create_revision
        return await self._rebind(lease)

    async def _recreate(self, lease: Lease, tail: Tail) -> FoundSegment | None:
        next_key = self._keys.segment(self.stream, tail.seq + 1)
        request = rpc.TxnRequest(
            compare=[_created(self._key, 0), *self._unmoved(tail)],
            success=[self._put(lease)],
            failure=[self._get(), _read(next_key)],
        )
        answer = await self._call(self._client.txn, request)
        if answer.succeeded:
            self.epoch = answer.header.revision
            return None
        owner, successor = (op.response_range.kvs for op in answer.responses)
        if successor:
            return FoundSegment(digest(successor[0].value), successor[0].create_revision)
        if owner and self._is_mine(owner[0]):
            self.epoch = owner[0].create_revision
            if await self._rebind(lease):
                return None
        raise Fenced(self.stream, self.epoch, "another owner was there")

    async def _fresh_lease(self) -> Lease:
        if self._fresh is None or not self._fresh.alive:
            self._fresh = await self._call(self._grant, self._client.config.lease_ttl_s)
        assert self._fresh is not None
        return self._fresh

    async def _grant(self, ttl_s: int, timeout_s: float) -> Lease:
        return await Lease.grant(self._client, ttl_s, timeout_s)

    async def _call(self, call: Callable[[Any, float], Awaitable[Any]], request: Any) -> Any:
        """Call etcd. After a timeout the next calls get more time."""
        try:
            return await call(request, self._timeout_s)
        except CallFailed as error:
            if error.code == TIMED_OUT:
                longest_s = self._client.config.lease_ttl_s / 2
                self._timeout_s = max(self._timeout_s, min(2 * self._timeout_s, longest_s))
            raise

    def _bound(self, lease: Lease) -> None:
        """The owner key is bound to `lease`."""
        self.lease, self._fresh = lease, None
        self._timeout_s = self._client.config.call_timeout_ms / 1000

    def _forget(self, error: LogError) -> None:
        """A new lease is not kept alive until it is bound: it may have expired by now."""
        if isinstance(error, LeaseGone):
            self._fresh = None

    def _unmoved(self, tail: Tail) -> list[Any]:
        compare = [_created(self._keys.segment(self.stream, tail.seq + 1), 0)]
        if tail.seq:
            compare.append(_created(self._keys.segment(self.stream, tail.seq), tail.revision))
        return compare

    def _put(self, lease: Lease) -> Any:
        put = rpc.PutRequest(key=self._key, value=self._value, lease=lease.id)
        return rpc.RequestOp(request_put=put)

    def _get(self) -> Any:
        return _read(self._key)

    def _is_mine(self, owner: Any) -> bool:
        return bool(owner.value == self._value)


async def read_tail(client: EtcdClient, keys: Keys, stream: str) -> Tail:
    """Where `stream` ends now; a stray key after its end does not matter, unless it is a worker's
    stream. Raises LogUnavailable, CorruptSegment, BrokenChain."""
    last = await Scan(client, keys, 0, on_damage=unless_skipped(stream)).last(stream)
    if last is None:
        return Tail()
    return Tail(last.segment.seq, last.segment.hash, last.revision, last.segment.last + 1)


async def is_lost(client: EtcdClient, keys: Keys, stream: str, tail: Tail, epoch: int) -> bool:
    """Whether etcd is not the one any more that acknowledged `tail` under `epoch`: the segment is
    gone, though trimming leaves the last one of a stream, or is another, or the stream's owner is
    older than `epoch`. Raises LogUnavailable, BrokenChain, CorruptSegment."""
    owner = (await client.range(keys.owner(stream), keys_only=True)).kvs
    if owner and owner[0].create_revision < epoch:
        return True
    scan = Scan(client, keys, 0)
    extent = await scan.extent(stream)
    if not tail.seq or tail.seq < extent.first <= extent.last:
        return False
    if tail.seq > extent.last:
        return True
    return (await scan.segment(stream, tail.seq)).segment.hash != tail.hash


def _created(key: bytes, revision: int) -> Any:
    return rpc.Compare(key=key, target=CREATE, result=EQUAL, create_revision=revision)


def _read(key: bytes) -> Any:
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def _name(value: bytes) -> str:
    """The owner's name for people; the raw value if the format is unknown."""
    try:
        return str(json.loads(value)["owner"])
    except (ValueError, KeyError, TypeError):
        return repr(value)
