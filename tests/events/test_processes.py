"""Writers in processes of their own: stopped beyond their lease, killed in an outage."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relume.events.etcd.factory import EtcdLog
from relume.events.vocabulary import StreamResumed
from tests.etcd_server import EtcdServer
from tests.events.conftest import config_for
from tests.events.support import events_of, numbers, positions, until
from tests.signals import stop

pytestmark = pytest.mark.etcd

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = "lease_ttl_s=2&call_timeout_ms=400&backoff_max_ms=200&spool_sync_ms=10"


class Child:
    """A writer process and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.heard_all = False

    @property
    def taken(self) -> int:
        """How many ticks it says it has taken."""
        return sum(line.startswith("taken") for line in self.lines)

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().strip())
        self.heard_all = True


@asynccontextmanager
async def child_of(etcd: EtcdServer, options: str = OPTIONS) -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.events.writer_process",
        f"{etcd.url}?{options}",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    child = Child(process)
    try:
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(child.listen())
            await until(lambda: child.taken > 10, 20)
            yield child
            listening.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_process_stopped_beyond_its_lease_resumes_without_a_new_owner(
    etcd: EtcdServer, log: EtcdLog
) -> None:
    async with child_of(etcd) as child:
        stop(child.process.pid)
        async with asyncio.timeout(8):
            while await log.reader().owners():
                await asyncio.sleep(0.05)
        before = child.taken
        child.process.send_signal(signal.SIGCONT)
        await until(lambda: child.taken > before + 20, 8)
        async with asyncio.timeout(8):
            while not await log.reader().owners():
                await asyncio.sleep(0.05)
        groups = await log.reader().read()
        found = numbers(groups, "w.w0")
        assert found == list(range(len(found)))
        assert any(isinstance(e, StreamResumed) for e in events_of(groups, "w.w0"))


async def test_process_stopped_beyond_its_lease_is_fenced_when_another_came(
    etcd: EtcdServer, log: EtcdLog
) -> None:
    async with child_of(etcd) as child:
        stop(child.process.pid)
        async with log.writer("w.w0", wait_s=8) as writer:
            groups = await log.reader().read()
            child.process.send_signal(signal.SIGCONT)
            async with asyncio.timeout(8):
                assert await child.process.wait() == 3
            assert child.lines[-1] == "fenced"
            late = await log.reader().read(after=groups[-1].revision)
            assert not [s for g in late for s in g.segments]
            assert (await log.reader().owners()) == {"w.w0": writer.epoch}


async def test_process_killed_in_an_outage_leaves_its_events_to_its_successor(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """Killed, not closed: what it took until some tens of milliseconds before is landed."""
    options = f"{OPTIONS}&spool_dir={tmp_path}"
    async with child_of(etcd, options) as child:
        etcd.kill9()
        count = child.taken
        await until(lambda: child.taken > count + 100, 10)
        child.process.kill()
        await child.process.wait()
        await until(lambda: child.heard_all)
        taken = child.taken
    etcd.restart()
    config = config_for(etcd, spool_dir=str(tmp_path))
    async with EtcdLog(config) as log, log.writer("w.w0", wait_s=8) as writer:
        await writer.flush(10)
        groups = await log.reader().read()
        found = numbers(groups, "w.w0")
        assert found == list(range(len(found)))
        assert taken - 30 <= len(found) <= taken + 1
        assert positions(groups, "w.w0") == list(range(1, len(found) + 2))
        resumed = events_of(groups, "w.w0")[-1]
        assert isinstance(resumed, StreamResumed) and resumed.new_epoch == writer.epoch
        await until(lambda: not list(tmp_path.iterdir()))
