"""What a replica has read of the log, in a small file beside its spool.

A replica that starts compares it with etcd. The archive alone does not do: it ends at the last snapshot,
and not every fleet has one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from relume.controlplane.history.continuity.lost_log import check_heads
from relume.controlplane.history.files import make_directory, write_whole
from relume.events.decode_errors import UNREADABLE
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import LogUnavailable
from relume.policies.state.fleet import Fleet

NOTE_EVERY_S = 5.0
"""Period in which a replica notes what it has read: a backup that is younger may pass unnoticed."""


class SeenLog(Struct, frozen=True):
    """The last segment of each stream of log `log`: number, and hash in hex."""

    log: str
    heads: dict[str, tuple[int, str]]


class LastSeen:
    """The file `path` of one replica."""

    def __init__(self, path: Path, maintenance: Maintenance) -> None:
        self._path = path
        self._maintenance = maintenance

    @classmethod
    def of_replica(cls, spool_dir: str, name: str, maintenance: Maintenance) -> LastSeen:
        """Where replica `name` notes it."""
        return cls(Path(spool_dir) / name / "seen.json", maintenance)

    async def check(self) -> None:
        """Compare with etcd, if that holds the same log. Raises EtcdLostSegments, LogUnavailable."""
        seen = await asyncio.to_thread(self._read)
        if seen is None or seen.log != await self._maintenance.identity():
            return
        heads = {stream: (seq, bytes.fromhex(h)) for stream, (seq, h) in seen.heads.items()}
        await check_heads(self._maintenance.client, seen.log, heads, "this replica has read it")

    async def note(self, fleet: Fleet) -> None:
        """Write down what `fleet` was folded from. Raises OSError, LogUnavailable."""
        heads = {stream: (head.seq, head.hash.hex()) for stream, head in fleet.streams.items()}
        if log_id := await self._maintenance.identity():
            await asyncio.to_thread(self._write, msgspec.json.encode(SeenLog(log_id, heads)))

    async def keep_noting(self, fleet: Fleet) -> None:
        """For ever. A full disk or an absent etcd only delays it."""
        while True:
            with suppress(OSError, LogUnavailable):
                await self.note(fleet)
            await asyncio.sleep(NOTE_EVERY_S)

    def _read(self) -> SeenLog | None:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=SeenLog)
        except (OSError, *UNREADABLE):
            return None

    def _write(self, data: bytes) -> None:
        make_directory(self._path.parent)
        write_whole(self._path, data)
