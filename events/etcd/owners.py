"""Owners of streams over time, from etcd's history.

Owner keys come and go, and a range at one revision shows only those that live then. A
fold needs all of them, at the revisions at which a watch would have shown them. A key's
create_revision is the epoch, and every segment names the epoch it was written under, so
the beginnings are known; an end is found by asking for the key at past revisions, a
hundred at a time: within one life the answer changes once.

Not found is a life in which nothing was written. History before the compacted revision is gone;
lives that ended before it are not listed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from aetcd import rpc
from msgspec import Struct

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.keys import Keys
from relume.events.etcd.reader.scan import together

_PROBES = 100


class Life(Struct, frozen=True, order=True):
    """`stream` was owned under `epoch`; a segment under it was written at `seen` (or the
    epoch itself when none is known)."""

    stream: str
    epoch: int
    seen: int


class OwnerHistory:
    """Changes of owner keys in (floor, until]; both must be readable revisions, or
    `floor` 0 for a log that was never compacted."""

    def __init__(self, client: EtcdClient, keys: Keys, floor: int, until: int) -> None:
        self._client = client
        self._keys = keys
        self._floor = floor
        self._until = until

    async def changes(self, lives: Iterable[Life]) -> list[tuple[int, str, int]]:
        """(revision, stream, epoch) for every beginning, epoch 0 for every end."""
        by_stream: dict[str, dict[int, int]] = {}
        for life in lives:
            seen = by_stream.setdefault(life.stream, {})
            seen[life.epoch] = max(life.seen, seen.get(life.epoch, 0))
        streams = sorted(by_stream)
        found = await together(self._of_stream(s, by_stream[s]) for s in streams)
        return sorted(change for changes in found for change in changes)

    async def _of_stream(self, stream: str, seen: dict[int, int]) -> list[tuple[int, str, int]]:
        key = self._keys.owner(stream)
        at_floor, at_end = 0, (await self._epochs(key, [self._until]))[0]
        if self._floor:
            at_floor = (await self._epochs(key, [self._floor]))[0]
        claimed = sorted(e for e in seen if self._floor < e <= self._until)
        # A log copied into another cluster names epochs this one never had.
        real = zip(claimed, await self._epochs(key, claimed), strict=True)
        epochs = {e for e, found in real if e == found} | {at_floor, at_end} - {0}
        changes: list[tuple[int, str, int]] = []
        starts = sorted(epochs)
        for epoch, following in itertools.pairwise([*starts, self._until + 1]):
            if epoch > self._floor:
                changes.append((epoch, stream, epoch))
            if epoch != at_end:
                alive = max(epoch, self._floor, min(seen.get(epoch, 0), following - 1))
                changes.append((await self._end(key, epoch, alive, following), stream, 0))
        return changes

    async def _end(self, key: bytes, epoch: int, alive: int, gone: int) -> int:
        """The revision that ended `epoch`: it lived at `alive`, and not after `gone` - 1."""
        low, high = alive + 1, gone - 1  # the end is in [low, high]
        while low < high:
            step = max(1, (high - low) // _PROBES)
            probes = list(range(low, high, step))[:_PROBES]
            for revision, found in zip(probes, await self._epochs(key, probes), strict=True):
                if found == epoch:
                    low = max(low, revision + 1)
                else:
                    high = min(high, revision)
        return high

    async def _epochs(self, key: bytes, revisions: list[int]) -> list[int]:
        """The key's create_revision at each of `revisions`; 0 where it is absent."""
        ops = [
            rpc.RequestOp(
                request_range=rpc.RangeRequest(key=key, keys_only=True, revision=revision)
            )
            for revision in revisions
        ]
        found: list[int] = []
        for at in range(0, len(ops), _PROBES):
            request = rpc.TxnRequest(success=ops[at : at + _PROBES])
            for op in (await self._client.read_txn(request)).responses:
                kvs = op.response_range.kvs
                found.append(kvs[0].create_revision if kvs else 0)
        return found
