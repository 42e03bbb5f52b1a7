"""One round of keeping history: archive, snapshot, announce, trim. Each step durable first.

    seal the archive up to R       everything before can be read from files
    write the snapshot at R        a replica may start from it
    commit its manifest            fenced: only the owner of stream `fleet` can
    write SnapshotTaken            and see it folded: it is in the log
    compact and delete up to T     T is the snapshot before (one of grace), or R when
                                   space is short; the newest segment of a stream stays

Compaction comes before deletion: a read at or before T gets an error, and never finds a log with
holes. What is deleted now is freed by the next round's compaction, since a compaction frees what
was deleted before its revision.

`step(name)` is called after each step; tests stop the world there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import structlog
from msgspec import Struct

from relume.controlplane.history.snapshots import Manifest
from relume.controlplane.history.vault import Vault
from relume.controlplane.replica.leader import Leadership
from relume.events import vocabulary as v
from relume.events.decode_errors import UNREADABLE
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import Fenced, LogUnavailable
from relume.policies.state.fleet import Fleet, dump, state_hash

log = structlog.get_logger("relume.history")

ANNOUNCE_S = 15.0
"""The announcement must be in the log within this time, or the round is abandoned."""

REACH_S = 10.0

Step = Callable[[str], None]


class FoldCopy(Struct, frozen=True):
    """The fold at one moment, as bytes. `covers`: the log up to there is in it."""

    revision: int
    covers: int
    dumped: bytes
    state: bytes


class RoundResult(Struct, frozen=True):
    """Outcome of a round. `deleted_at`: revision of the deletion, 0 without one."""

    covers: int
    trimmed: int
    deleted_at: int


def cut(fleet: Fleet, reached: int) -> FoldCopy:
    """Copy the fold; `reached` is the revision that the log has been read up to."""
    return FoldCopy(fleet.revision, max(reached, fleet.revision), dump(fleet), state_hash(fleet))


async def until_reached(reached: Callable[[], int], revision: int) -> None:
    """Return when the log has been read up to `revision`. Raises LogUnavailable."""
    try:
        async with asyncio.timeout(REACH_S):
            while reached() < revision:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise LogUnavailable(f"revision {revision} was not read within {REACH_S} s") from None


async def preserve(vault: Vault, cut: FoldCopy, step: Step) -> Manifest:
    """The part of a round that touches files alone; works without etcd.

    The vault must have been given all groups up to the cut. Raises OSError, BrokenChain.
    """
    await vault.seal(cut.covers)
    step("archived")
    manifest = await vault.snapshot(cut.dumped, cut.covers)
    step("snapshot")
    return manifest


async def trim(
    vault: Vault, maintenance: Maintenance, manifest: Manifest, epoch: int, step: Step
) -> tuple[int, int]:
    """Compact and delete up to the snapshot of `manifest`; returns as Maintenance.trim.

    Raises Fenced, LogUnavailable; ValueError when the archive does not reach so far.
    """
    if manifest.covers > vault.archive.last:
        raise ValueError(f"revision {manifest.covers} is not archived")
    await maintenance.compact(manifest.covers)
    step("compacted")
    keep = {stream: head[1] for stream, head in manifest.streams.items()}
    outcome = await maintenance.trim(keep, epoch)
    step("trimmed")
    return outcome


class Rounds:
    """Does rounds into `vault`. Call `seen` with every event that is folded."""

    def __init__(
        self, vault: Vault, maintenance: Maintenance, keep_snapshots: int, step: Step
    ) -> None:
        self._vault = vault
        self._maintenance = maintenance
        self._keep = keep_snapshots
        self._step = step
        self._announced: asyncio.Event | None = None
        self._announcing = 0

    def seen(self, stream: str, position: int, event: object) -> None:
        """An event was folded: is it our announcement?"""
        if (
            self._announced is not None
            and type(event) is v.SnapshotTaken
            and event.revision == self._announcing
        ):
            self._announced.set()

    async def take(
        self, cut: FoldCopy, leader: Leadership, epoch: int, pressed: bool
    ) -> RoundResult:
        """A whole round. The vault must have been given all groups up to the cut.

        Raises Fenced, LogUnavailable (NoSpace among it), OSError, BrokenChain.
        """
        manifest = await preserve(self._vault, cut, self._step)
        await self._maintenance.commit(cut.covers, msgspec.json.encode(manifest), epoch)
        self._step("committed")
        known = await self._manifests()
        bound = cut.covers if pressed else self._one_before(known, cut.covers)
        await self._announce(v.SnapshotTaken(cut.revision, cut.state, bound), leader, epoch)
        self._step("announced")
        deleted = deleted_at = 0
        if bound:
            deleted, deleted_at = await trim(
                self._vault, self._maintenance, known[bound], epoch, self._step
            )
        await self._prune(known, epoch)
        self._step("pruned")
        log.info(
            "snapshot_taken",
            revision=cut.revision,
            covers=cut.covers,
            bytes=manifest.size,
            trimmed=bound,
            segments_deleted=deleted,
        )
        return RoundResult(cut.covers, bound, deleted_at)

    async def _announce(self, event: v.SnapshotTaken, leader: Leadership, epoch: int) -> None:
        self._announcing = event.revision
        self._announced = asyncio.Event()
        try:
            if leader.epoch != epoch:
                raise Fenced("fleet", epoch)
            leader.append(event)
            async with asyncio.timeout(ANNOUNCE_S):
                await self._announced.wait()
        except TimeoutError:
            raise LogUnavailable(f"SnapshotTaken is not in the log after {ANNOUNCE_S} s") from None
        finally:
            self._announced = None
        if leader.epoch != epoch:
            raise Fenced("fleet", epoch)

    async def _manifests(self) -> dict[int, Manifest]:
        """Committed manifests whose files are here, newest first."""
        found = {}
        for covers, value in (await self._maintenance.manifests()).items():
            try:
                manifest = msgspec.json.decode(value, type=Manifest)
            except UNREADABLE as error:
                log.error("snapshot_manifest_unreadable", covers=covers, reason=str(error))
                continue
            if self._vault.holds_snapshot(covers):
                found[covers] = manifest
        return found

    def _one_before(self, known: dict[int, Manifest], covers: int) -> int:
        return max((c for c in known if c < covers), default=0)

    async def _prune(self, known: dict[int, Manifest], epoch: int) -> None:
        committed = await self._maintenance.manifests()
        newest = sorted(known, reverse=True)[: self._keep]
        oldest = min(newest, default=0)
        await self._maintenance.forget([c for c in committed if c < oldest], epoch)
        await self._vault.prune_snapshots(oldest)
