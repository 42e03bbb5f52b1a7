"""The agreed state of an etcd cluster: keys with their history, leases, revisions.

It has only the features that the log uses: ranges at any revision, transactions that compare create
revisions, puts, deletes, leases whose expiry deletes their keys, and the changes of each revision
for watches. Members, time and faults are in `relume.chaos.sim.etcd.members`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any

from msgspec import Struct, field

from relume.events.etcd.keys import Keys
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Segment, unpack

CLUSTER = 0x51A
PUT, DELETE = 0, 1
_VALUE = 3  # Compare.CompareTarget.VALUE


DAMAGED = b"no segment"
"""A value of which no reader makes anything."""


class KeyValue(Struct, frozen=True, gc=False, kw_only=True):
    """As `mvccpb.KeyValue`. A deleted key has `create_revision` 0."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


class Event(Struct, frozen=True, gc=False):
    """As `mvccpb.Event`."""

    type: int
    kv: KeyValue


class Header(Struct, frozen=True):
    """As `ResponseHeader`."""

    revision: int
    cluster_id: int = CLUSTER


class Found(Struct, frozen=True):
    """As `RangeResponse`."""

    kvs: list[KeyValue]
    count: int
    header: Header
    more: bool = False


class Op(Struct, frozen=True):
    """As `ResponseOp`."""

    response_range: Found


class Done(Struct, frozen=True):
    """As `TxnResponse`."""

    succeeded: bool
    responses: list[Op]
    header: Header


class Range(Struct, frozen=True, gc=False, kw_only=True):
    """A range to read; `end` empty: one key. `revision` 0: the present one."""

    key: bytes
    end: bytes = b""
    revision: int = 0
    limit: int = 0
    keys_only: bool = False
    count_only: bool = False


class Txn(Struct, frozen=True, kw_only=True):
    """Compares are (key, create revision, whether greater instead of equal); `values` are of keys that
    must exist with this value."""

    compares: tuple[tuple[bytes, int, bool], ...]
    puts: tuple[tuple[bytes, bytes, int], ...]
    reads: tuple[Range, ...]
    otherwise: tuple[Range, ...]
    drops: tuple[bytes, ...] = ()
    values: tuple[tuple[bytes, bytes], ...] = ()


class Lease(Struct):
    """A granted lease and the keys bound to it."""

    id: int
    ttl_s: int
    deadline_s: float
    keys: dict[bytes, None] = field(default_factory=dict)


class OutOfHistory(Exception):
    """The requested revision is compacted, or in the future."""


class NoSuchLease(Exception):
    """etcd does not know the lease."""


class Store:
    """The agreed state. Every change is one revision."""

    def __init__(self) -> None:
        self.revision = 1
        self.compacted = 0
        self.changes: list[tuple[Event, ...]] = [()]
        """Changes of revision 1, 2, ..."""
        self.leases: dict[int, Lease] = {}
        self._versions: dict[bytes, list[KeyValue]] = {}
        self._folders: dict[bytes, list[bytes]] = {}
        self._decoded: dict[bytes, Segment] = {}
        self._names: list[bytes] = []
        """Keys of folders, in order."""

    # --- reading -------------------------------------------------------------------------

    def range(self, request: Range) -> Found:
        """Raises OutOfHistory."""
        revision = request.revision or self.revision
        if revision > self.revision:
            raise OutOfHistory("etcdserver: mvcc: required revision is a future revision")
        if revision < self.compacted:
            raise OutOfHistory("etcdserver: mvcc: required revision has been compacted")
        header = Header(self.revision)
        if not request.end:
            found = self._at(request.key, revision)
            kvs = [found] if found is not None else []
        else:
            keys = self._keys_in(request.key, request.end)
            kvs = [kv for key in keys if (kv := self._at(key, revision)) is not None]
        count = len(kvs)
        if request.count_only:
            kvs = []
        elif request.limit:
            kvs = kvs[: request.limit]
        more = not request.count_only and len(kvs) < count
        return Found(kvs, count, header, more)

    def changes_from(self, revision: int) -> Iterable[tuple[int, tuple[Event, ...]]]:
        """(revision, its events) from `revision` to the present."""
        for at in range(max(revision, 1), self.revision + 1):
            yield at, self.changes[at - 1]

    def groups(self, prefix: str, first: int = 1, last: int = 0) -> tuple[RevisionGroup, ...]:
        """The log under `prefix` from revision `first` on (up to `last`, if not 0), as a reader
        that had watched from the beginning."""
        keys = Keys(prefix)
        until = min(last or self.revision, self.revision)
        groups = (self._group(keys, at) for at in range(first, until + 1))
        return tuple(g for g in groups if g is not None)

    def unpack(self, data: bytes) -> Segment:
        """As `relume.events.log.segment.unpack`; each segment is decoded once for all readers."""
        found = self._decoded.get(data)
        if found is None:
            found = self._decoded[data] = unpack(data)
        return found

    def _group(self, keys: Keys, revision: int) -> RevisionGroup | None:
        events = self.changes[revision - 1]
        segments: list[Segment] = []
        owners: list[tuple[str, int]] = []
        for event in events:
            kv = event.kv
            if kv.key.startswith(keys.own):
                if event.type == DELETE:
                    owners.append((keys.owned_stream(kv.key), 0))
                elif kv.create_revision == revision:
                    owners.append((keys.owned_stream(kv.key), revision))
            elif kv.key.startswith(keys.log) and event.type == PUT and kv.value != DAMAGED:
                segments.append(self.unpack(kv.value))
        if not segments and not owners:
            return None
        segments.sort(key=lambda s: (s.stream, s.seq))
        return RevisionGroup(revision, tuple(segments), tuple(sorted(owners)))

    def _keys_in(self, key: bytes, end: bytes) -> Iterable[bytes]:
        names = self._names
        folder = key[: key.rfind(b"/") + 1]
        behind = folder[:-1] + b"0"  # "0" follows "/"
        first = bisect_left(names, folder) if folder and end <= behind else 0
        for name in names[first : bisect_left(names, end)]:
            keys = self._folders[name]
            yield from keys[bisect_left(keys, key) : bisect_left(keys, end)]

    def _at(self, key: bytes, revision: int) -> KeyValue | None:
        for kv in reversed(self._versions.get(key, ())):
            if kv.mod_revision <= revision:
                return kv if kv.create_revision else None
        return None

    # --- changing ------------------------------------------------------------------------

    def txn(self, txn: Txn) -> Done:
        """Raises NoSuchLease, OutOfHistory."""
        for key, revision, greater in txn.compares:
            kv = self._at(key, self.revision)
            created = kv.create_revision if kv is not None else 0
            if not (created > revision if greater else created == revision):
                return self._done(False, txn.otherwise)
        for key, value in txn.values:
            kv = self._at(key, self.revision)
            if kv is None or kv.value != value:
                return self._done(False, txn.otherwise)
        for _, _, lease in txn.puts:
            if lease and lease not in self.leases:
                raise NoSuchLease
        if txn.puts:
            revision = self.revision + 1
            self._commit([self._put(*put, revision) for put in txn.puts])
        if txn.drops:
            self._drop(txn.drops)
        return self._done(True, txn.reads)

    def delete(self, key: bytes, end: bytes = b"") -> int:
        """Delete a range; return the number of keys."""
        keys = list(self._keys_in(key, end)) if end else [key]
        gone = [k for k in keys if self._at(k, self.revision) is not None]
        self._drop(gone)
        return len(gone)

    def grant(self, lease: Lease) -> None:
        """A new lease."""
        self.leases[lease.id] = lease

    def revoke(self, lease: int) -> None:
        """Revoke a lease; deletes its keys in one revision. Raises NoSuchLease."""
        found = self.leases.pop(lease, None)
        if found is None:
            raise NoSuchLease
        self._drop(found.keys)

    def go_back(self, revision: int, leases: Iterable[Lease]) -> None:
        """Be what it was at `revision`, when it had these leases."""
        self.revision = revision
        del self.changes[revision:]
        self.leases = {lease.id: lease for lease in leases}
        self._folders.clear()
        versions, self._versions = self._versions, {}
        for key in sorted(versions):
            if found := [kv for kv in versions[key] if kv.mod_revision <= revision]:
                self._versions[key] = found
                self._folders.setdefault(key[: key.rfind(b"/") + 1], []).append(key)
                if found[-1].lease in self.leases:
                    self.leases[found[-1].lease].keys[key] = None
        self._names = sorted(self._folders)

    def _done(self, succeeded: bool, reads: tuple[Range, ...]) -> Done:
        return Done(succeeded, [Op(self.range(r)) for r in reads], Header(self.revision))

    def _drop(self, keys: Iterable[bytes]) -> None:
        revision = self.revision + 1
        events = []
        for key in sorted(keys):
            before = self._at(key, self.revision)
            if before is None:
                continue
            if before.lease in self.leases:
                self.leases[before.lease].keys.pop(key, None)
            gone = KeyValue(key=key, value=b"", create_revision=0, mod_revision=revision)
            self._versions[key].append(gone)
            events.append(Event(DELETE, gone))
        if events:
            self._commit(events)

    def _put(self, key: bytes, value: bytes, lease: int, revision: int) -> Event:
        versions = self._versions.get(key)
        if versions is None:
            versions = self._versions[key] = []
            folder = key[: key.rfind(b"/") + 1]
            if folder not in self._folders:
                self._folders[folder] = []
                insort(self._names, folder)
            keys = self._folders[folder]
            if not keys or keys[-1] < key:
                keys.append(key)
            else:
                insort(keys, key)
        before = versions[-1] if versions and versions[-1].create_revision else None
        if before is not None and before.lease in self.leases:
            self.leases[before.lease].keys.pop(key, None)
        if lease:
            self.leases[lease].keys[key] = None
        created = before.create_revision if before is not None else revision
        kv = KeyValue(
            key=key, value=value, create_revision=created, mod_revision=revision, lease=lease
        )
        versions.append(kv)
        return Event(PUT, kv)

    def _commit(self, events: list[Event]) -> None:
        self.revision += 1
        self.changes.append(tuple(events))


def txn_of(request: Any) -> Txn:
    """A `TxnRequest`, read once: its sender may fill it again for the next append."""
    compares, values = [], []
    for c in request.compare:
        if c.target == _VALUE:
            values.append((c.key, c.value))
        else:
            compares.append((c.key, c.create_revision, c.result == 1))
    puts, reads, drops = [], [], []
    for op in request.success:
        if op.HasField("request_put"):
            put = op.request_put
            puts.append((put.key, put.value, put.lease))
        elif op.HasField("request_delete_range"):
            drops.append(op.request_delete_range.key)
        else:
            reads.append(range_of(op.request_range))
    otherwise = tuple(range_of(op.request_range) for op in request.failure)
    return Txn(
        compares=tuple(compares),
        puts=tuple(puts),
        reads=tuple(reads),
        otherwise=otherwise,
        drops=tuple(drops),
        values=tuple(values),
    )


def range_of(request: Any) -> Range:
    """A `RangeRequest`."""
    return Range(
        key=request.key,
        end=request.range_end,
        revision=request.revision,
        limit=request.limit,
        keys_only=request.keys_only,
        count_only=request.count_only,
    )
