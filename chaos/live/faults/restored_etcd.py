"""etcd restored from a backup under a running fleet, and the operator who begins a new log."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

from relume.chaos.live.errors import CannotStrike, LiveError
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes.fleet_host import Host
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state.fleet import Fleet

NOTICED_S = 30.0
"""Maximum time in which replicas say that their log is gone."""
SERVED_S = 90.0
SERVED = 8
"""Requests that have to end in the new log before the fault is over."""
EVENT = "log_replaced_streams_continue"


class RestoredEtcd:
    """One backup of the fleet's etcd, and what follows from it. No other run may use this etcd."""

    def __init__(self, host: Host, watch: Watch) -> None:
        self._host = host
        self._watch = watch
        self._config = EtcdConfig(endpoints=tuple(host.etcd.endpoints), prefix=host.prefix)
        self._backup = Path(host.dir) / "backup.db"
        self._former = ""

    async def back_up(self) -> str:
        """Save the backup. Raises CannotStrike, LiveError."""
        try:
            async with EtcdLog(self._config, "chaos") as log:
                self._former = await Maintenance(log.client).identity()
        except LogError as error:
            raise CannotStrike(str(error)) from None
        if not self._former:
            raise CannotStrike("the log has no id yet")
        await self._host.etcd.back_up(self._backup)
        return f"backup of log {self._former}, {self._backup.stat().st_size} bytes"

    async def renew(self) -> None:
        """Restore etcd, begin a new log, and wait until that serves. Raises LiveError."""
        before = {name: self._losses(name) for name in self._host.schedule.control_planes}
        self._watch.end_log()
        await self._host.etcd.restore(self._backup)
        await _until(lambda: all(self._losses(name) > n for name, n in before.items()), NOTICED_S)
        await self._begin()
        self._watch.begin_log()
        if not await self._watch.until(self._serves, SERVED_S):
            raise LiveError(f"the new log does not serve after {SERVED_S:.0f} s")

    def _losses(self, replica: str) -> int:
        """How often the replica said that its log is gone."""
        try:
            text = self._host.children[replica].log_path.read_text(errors="replace")
        except OSError:
            return 0
        return text.count(EVENT)

    async def _begin(self) -> None:
        """As an operator does it."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "relume.controlplane.cli.relume_command", "log", "begin",
            "--etcd", ",".join(self._config.endpoints), "--prefix", self._config.prefix,
            "--archive-dir", str(self._host.dir / "archive"), "--replace", self._former,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output = (await process.communicate())[0].decode(errors="replace")
        if process.returncode:
            raise LiveError(f"relume log begin: {output}")

    def _serves(self, fleet: Fleet) -> bool:
        """Whether every worker is ready in the new log, and requests have ended there."""
        workers = [fleet.workers.get(name) for name in self._host.schedule.workers]
        is_ready = all(w is not None and w.engine == EnginePhase.READY for w in workers)
        return is_ready and self._watch.count("RequestEnded") >= SERVED


async def _until(found: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not found() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
