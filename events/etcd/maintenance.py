"""Upkeep of the log in etcd: identity, snapshot manifests, trimming, space.

Everything that removes or announces something is one transaction on the condition that
`epoch` still owns the leader's stream (0: that it has no owner), so a deposed leader's
upkeep is refused by etcd, as its appends are. etcd has no conditional compaction; it is only
requested at revisions that a committed manifest or a sealed archive covers, where it is harmless
from any caller.

Deleting and compacting work under etcd's NOSPACE alarm; puts and lease grants do not.
A deleted segment's bytes are free for reuse once a revision at or after the deletion is compacted,
and leave the file (which is what etcd's quota counts) by defragmenting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from aetcd import rpc
from msgspec import Struct

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.errors import CallFailed
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.etcd.reader.scan import Scan
from relume.events.log.damaged_segment import ignore_damage
from relume.events.log.errors import Compacted, Fenced, LogUnavailable

NOSPACE = 1
"""etcd's number of the alarm."""

_WINDOW = 256  # segments one delete operation may cover
_OPERATIONS = 4  # delete operations in a transaction; etcd does nothing else meanwhile
_RANGES = 100  # reads in a transaction; etcd allows 128
_TRIES = 5


class MemberSpace(Struct, frozen=True, kw_only=True):
    """One member's database. `size_bytes` is the file, which the quota is held against;
    `used_bytes` is what of it holds data."""

    endpoint: str
    member: int
    size_bytes: int
    used_bytes: int
    full: bool


class Space(Struct, frozen=True):
    """The space of all members that answered."""

    members: tuple[MemberSpace, ...]

    @property
    def size_bytes(self) -> int:
        """The largest file of a member: the first to meet the quota."""
        return max((m.size_bytes for m in self.members), default=0)

    @property
    def used_bytes(self) -> int:
        """The most that a member's data takes."""
        return max((m.used_bytes for m in self.members), default=0)

    @property
    def full(self) -> bool:
        """Whether any member has raised NOSPACE: the whole cluster refuses puts."""
        return any(m.full for m in self.members)


class Maintenance:
    """Upkeep through `client`; the owner of `stream` may do it."""

    def __init__(self, client: EtcdClient, stream: str = "fleet") -> None:
        self.stream = stream
        self.client = client
        self._keys = Keys(client.config.prefix)

    # --- identity ----------------------------------------------------------------------

    async def identity(self) -> str:
        """The log's own name, empty when it has none yet. Raises LogUnavailable.

        etcd's cluster id does not distinguish a wiped cluster from the one before it.
        """
        answer = await self.client.range(self._keys.identity)
        return answer.kvs[0].value.decode() if answer.kvs else ""

    async def is_empty(self) -> bool:
        """Whether etcd holds no segment. Raises LogUnavailable."""
        end = after_prefix(self._keys.log)
        return not (await self.client.range(self._keys.log, end, count_only=True)).count

    async def name(self, fresh: str, epoch: int) -> str:
        """Name the log `fresh` unless it has a name; returns the name it has.

        Raises Fenced, LogUnavailable.
        """
        known = await self.identity()
        if known:
            return known
        unnamed = _created(self._keys.identity, 0)
        await self._guarded([_put(self._keys.identity, fresh.encode())], epoch, unnamed)
        return await self.identity()

    async def name_unnamed(self, fresh: str) -> None:
        """Name the log `fresh` if it has no name, whoever leads. Raises LogUnavailable."""
        request = rpc.TxnRequest(
            compare=[_created(self._keys.identity, 0)],
            success=[_put(self._keys.identity, fresh.encode())],
        )
        await self.client.txn(request)

    # --- snapshot manifests ------------------------------------------------------------

    async def manifests(self) -> dict[int, bytes]:
        """Every committed manifest by its snapshot's revision, newest first."""
        end = after_prefix(self._keys.snap)
        answer = await self.client.range(self._keys.snap, end)
        ours = [kv for kv in answer.kvs if self._keys.is_ours(kv.key)]
        found = {self._keys.snapshot_of(kv.key): kv.value for kv in ours}
        return dict(sorted(found.items(), reverse=True))

    async def commit(self, revision: int, manifest: bytes, epoch: int) -> None:
        """Make `manifest` the one of the snapshot at `revision`.

        Raises Fenced, NoSpace, LogUnavailable (unknown: commit again).
        """
        await self._guarded([_put(self._keys.snapshot(revision), manifest)], epoch)

    async def forget(self, revisions: Iterable[int], epoch: int) -> None:
        """Delete the manifests of snapshots that are not needed any more."""
        doomed = [_delete(self._keys.snapshot(revision)) for revision in revisions]
        for at in range(0, len(doomed), _RANGES):
            await self._guarded(doomed[at : at + _RANGES], epoch)

    # --- trimming ----------------------------------------------------------------------

    async def revision(self) -> int:
        """The cluster's present revision."""
        answer = await self.client.range(self._keys.identity, count_only=True)
        return int(answer.header.revision)

    async def holds(self, after: int) -> bool:
        """Whether etcd still has everything that happened after revision `after`."""
        try:
            await self.client.range(self._keys.identity, count_only=True, revision=max(after, 1))
        except Compacted:
            return False
        return True

    async def whole(self) -> bool:
        """Whether no segment of the log was ever deleted. Then any compaction was by other users of
        etcd, and the log can be read from its beginning.

        Raises LogUnavailable.
        """
        extents = await self._scan().extents(())
        return all(extent.first == 1 for extent in extents)

    async def compact(self, revision: int, physical: bool = False) -> None:
        """Drop etcd's history up to `revision`; nothing when that has happened already.

        `physical`: return when its space is free. Raises LogUnavailable.
        """
        with contextlib.suppress(Compacted):
            await self.client.compact(revision, physical=physical)

    async def trim(self, keep_from: Mapping[str, int], epoch: int) -> tuple[int, int]:
        """Delete the segments of each stream below its number in `keep_from`.

        Returns (segments deleted, revision of the last deletion, 0 when there was none).
        The segment numbers themselves stay: an append needs its predecessor. Raises
        Fenced, LogUnavailable; what was deleted till then stays deleted.
        """
        doomed = 0
        at_revision = 0
        operations = []
        firsts = await self._first_seqs(list(keep_from))
        for stream, keep in keep_from.items():
            low = firsts.get(stream, keep)
            while low < keep:
                end = min(low + _WINDOW, keep)
                operations.append(
                    _delete(self._keys.segment(stream, low), self._keys.segment(stream, end))
                )
                low = end
        for at in range(0, len(operations), _OPERATIONS):
            answer = await self._guarded(operations[at : at + _OPERATIONS], epoch)
            at_revision = answer.header.revision
            doomed += sum(op.response_delete_range.deleted for op in answer.responses)
        return doomed, at_revision

    def _scan(self) -> Scan:
        return Scan(self.client, self._keys, 0, on_damage=ignore_damage)

    async def _first_seqs(self, streams: list[str]) -> dict[str, int]:
        """The first segment that each stream still holds; empty streams are left out."""
        found: dict[str, int] = {}
        for at in range(0, len(streams), _RANGES):
            operations = []
            for stream in streams[at : at + _RANGES]:
                prefix = self._keys.stream(stream)
                request = rpc.RangeRequest(
                    key=prefix, range_end=after_prefix(prefix), limit=1, keys_only=True
                )
                operations.append(rpc.RequestOp(request_range=request))
            answer = await self.client.read_txn(rpc.TxnRequest(success=operations))
            for stream, op in zip(streams[at : at + _RANGES], answer.responses, strict=True):
                kvs = op.response_range.kvs
                if kvs and self._keys.is_ours(kvs[0].key):
                    found[stream] = self._keys.segment_of(kvs[0].key)[1]
                elif kvs and (extent := await self._scan().extent(stream)).count:
                    found[stream] = extent.first
        return found

    # --- space -------------------------------------------------------------------------

    async def space(self) -> Space:
        """What the database of each member takes. Members that do not answer are left
        out. Raises LogUnavailable when none does."""
        alarms = await self.client.alarms()
        full = {a.memberID for a in alarms.alarms if a.alarm == NOSPACE}
        found: dict[int, MemberSpace] = {}
        problem: LogUnavailable | None = None
        for endpoint in await self._endpoints():
            try:
                status = await self.client.status(endpoint)
            except LogUnavailable as error:
                problem = error
                continue
            member = status.header.member_id
            if member not in found:
                found[member] = MemberSpace(
                    endpoint=endpoint,
                    member=member,
                    size_bytes=status.dbSize,
                    used_bytes=status.dbSizeInUse,
                    full=member in full,
                )
        if not found and problem is not None:
            raise problem
        for member in full - set(found):
            found[member] = MemberSpace(
                endpoint="", member=member, size_bytes=0, used_bytes=0, full=True
            )
        return Space(tuple(found[m] for m in sorted(found)))

    async def defragment(self, space: Space, timeout_s: float = 60.0) -> None:
        """Shrink the files of all members of `space`, one after the other.

        A member answers nothing while it does. Raises LogUnavailable.
        """
        for member in space.members:
            if member.endpoint:
                await self.client.defragment(member.endpoint, timeout_s)

    async def disarm(self, space: Space) -> None:
        """Lift the NOSPACE alarm of the members that raised it."""
        for member in space.members:
            if member.full:
                await self.client.disarm(member.member, NOSPACE)

    async def _endpoints(self) -> list[str]:
        """Where members answer clients: as configured, then as the cluster says."""
        known = list(self.client.config.endpoints)
        answer = await self.client.members()
        if len(answer.members) > len(known):
            for member in answer.members:
                known += [urlsplit(url).netloc for url in member.clientURLs]
        return list(dict.fromkeys(known))

    # --- inside ------------------------------------------------------------------------

    async def _guarded(
        self, operations: list[rpc.RequestOp], epoch: int, *also: rpc.Compare
    ) -> Any:
        """One transaction while `epoch` owns the stream; tried again when its outcome is
        unknown, so `operations` must bear repeating. With `also` unmet: does nothing."""
        mine = _created(self._keys.owner(self.stream), epoch)
        look = rpc.RequestOp(
            request_range=rpc.RangeRequest(key=self._keys.owner(self.stream), keys_only=True)
        )
        request = rpc.TxnRequest(compare=[mine, *also], success=operations, failure=[look])
        for last in range(_TRIES):
            try:
                answer = await self.client.txn(request)
                break
            except CallFailed:
                if last == _TRIES - 1:
                    raise
        if not answer.succeeded:
            owners = answer.responses[0].response_range.kvs
            if (owners[0].create_revision if owners else 0) != epoch:
                raise Fenced(self.stream, epoch)
        return answer


def _created(key: bytes, revision: int) -> rpc.Compare:
    """The condition that `key` was created at `revision` (0: does not exist)."""
    return rpc.Compare(result=0, target=1, key=key, create_revision=revision)


def _put(key: bytes, value: bytes) -> rpc.RequestOp:
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value))


def _delete(key: bytes, end: bytes = b"") -> rpc.RequestOp:
    request = rpc.DeleteRangeRequest(key=key, range_end=end)
    return rpc.RequestOp(request_delete_range=request)
