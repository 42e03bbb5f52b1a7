"""Whether etcd still holds the log of which more is known than it has.

Trimming leaves the last segment of each stream in etcd. If a stream ends earlier in etcd than in the
archive or in what a replica noted, or has another segment there, etcd was restored from a backup.
The revision of etcd does not show it: `--bump-revision` raises it, and so do other writers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from relume.controlplane.history.archive import Archive
from relume.controlplane.history.errors import EtcdLostSegments
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.keys import Keys
from relume.events.etcd.reader.scan import READ_CONCURRENCY, Scan, together
from relume.events.log.damaged_segment import ignore_damage, may_be_skipped


def begin_remedy(log_id: str = "LOG_ID") -> str:
    """What ends it, for people."""
    return (
        f"relume log begin --replace {log_id}, then start the replicas; the former log stays "
        "readable in the archive (docs/operations/disaster.md)"
    )


async def check_archived(client: EtcdClient, directory: Path, log_id: str) -> None:
    """Compare etcd with the archive of log `log_id` in `directory`.

    Raises EtcdLostSegments, LogUnavailable.
    """
    archive = await asyncio.to_thread(Archive, directory, log_id)
    heads = {stream: (seq, digest) for stream, (seq, digest, _) in archive.heads().items()}
    await check_heads(client, log_id, heads, "the archive")


async def check_heads(
    client: EtcdClient, log_id: str, heads: Mapping[str, tuple[int, bytes]], source: str
) -> None:
    """Compare etcd with the last segments, number and hash, that `source` has of log `log_id`.

    Raises EtcdLostSegments, LogUnavailable.
    """
    scan = Scan(client, Keys(client.config.prefix), 0, on_damage=ignore_damage)

    async def check(stream: str, seq: int, digest: bytes) -> None:
        extent = await scan.extent(stream)
        is_lost = extent.last < seq
        if extent.first <= seq <= extent.last:
            is_lost = (await scan.segment(stream, seq)).segment.hash != digest
        if is_lost:
            raise EtcdLostSegments(log_id, stream, min(extent.last, seq - 1), seq, source)

    # A worker may have damaged its own stream. What lost the end of the log lost ticks of the leader.
    streams = {stream: head for stream, head in heads.items() if not may_be_skipped(stream)}
    found = [(stream, seq, digest) for stream, (seq, digest) in streams.items()]
    for at in range(0, len(found), READ_CONCURRENCY):
        await together(check(*head) for head in found[at : at + READ_CONCURRENCY])


def archived_logs(root: Path) -> dict[str, int]:
    """Ids of the logs archived under `root`, each with the last revision it has. Blocking."""
    found = {}
    for directory in sorted(path.parent for path in root.glob("*/manifest.jsonl")):
        found[directory.name] = Archive(directory, directory.name).last
    return found
