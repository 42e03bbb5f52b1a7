"""`relume serve` keeps history by default, and starts from it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relume.controlplane.history.replica_restore import load_history
from relume.controlplane.replay.verify import verify
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.scan import Scan
from tests.etcd_server import EtcdServer, free_port
from tests.history.checks import history_is_whole
from tests.history.stage import config_for, traffic_on

pytestmark = [pytest.mark.etcd, pytest.mark.full]


class Serve:
    """A `relume serve` process and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        self.process = process
        self._output = output

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Its log lines of that event."""
        lines = [json.loads(line) for line in self._output.read_text().splitlines() if line]
        return [line for line in lines if line["event"] == event]


@asynccontextmanager
async def serving(etcd: EtcdServer, folder: Path, life: int) -> AsyncIterator[Serve]:
    """Replica r0 with a round every second."""
    output = folder / f"serve{life}.log"
    with output.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "relume.controlplane.cli.relume_command", "serve", "--name", "r0",
            "--port", str(free_port()), "--admin-port", "0", "--etcd", etcd.endpoints[0],
            "--lease-ttl-s", "2", "--tick-ms", "250", "--log-format", "json",
            "--spool-dir", str(folder / "spool"), "--archive-dir", str(folder / "archive"),
            "--snapshot-every-s", "1",
            stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield Serve(process, output)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_serve_takes_snapshots_trims_and_starts_from_them(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    async with EtcdLog(config_for(etcd), name="test") as log, traffic_on(log) as traffic:
        keys = Keys(log.client.config.prefix)
        root = tmp_path / "archive"
        for life in (1, 2):
            async with serving(etcd, tmp_path, life) as serve, asyncio.timeout(40):
                while len([s for s in serve.logged("snapshot_taken") if s["trimmed"]]) < 2:
                    await traffic.steps(16)
                    await asyncio.sleep(0.05)
                    assert serve.process.returncode is None
                loaded = serve.logged("snapshot_loaded")
                assert len(loaded) == (life > 1)
                assert (await Scan(log.client, keys, 0).extent("w.w0")).first > 1
                serve.process.send_signal(signal.SIGKILL if life == 1 else signal.SIGTERM)
                assert await serve.process.wait() == (-signal.SIGKILL if life == 1 else 0)
            while "r.r0" in await log.reader().owners():  # the dead one's lease
                await asyncio.sleep(0.1)
            await history_is_whole(log, root, traffic)
        groups = await load_history(root, log.reader(), await Maintenance(log.client).identity())
        verdict = verify(groups)
        assert not verdict.divergences and verdict.hashes > 5
