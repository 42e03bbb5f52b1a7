"""An etcd that no longer has what it acknowledged: writers end with LogReplaced, not with silence."""

from __future__ import annotations

import asyncio

import pytest

from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.log.errors import Fenced, LogReplaced
from tests.etcd_server import EtcdServer
from tests.events.support import tick

pytestmark = pytest.mark.etcd


async def lost(writer) -> LogReplaced:
    """What the writer ends with."""
    async with asyncio.timeout(10):
        await writer.fenced()
    assert isinstance(writer.fence, LogReplaced)
    with pytest.raises(Fenced, match="restored from a backup"):
        writer.append(tick(99))
    return writer.fence


async def test_a_writer_notices_that_a_backup_was_restored(etcd: EtcdServer, log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer:
        writer.append(tick(0))
        await writer.flush(5)
        etcd.back_up()
        writer.append(tick(1))
        await writer.flush(5)
        etcd.restore()
        writer.append(tick(2))
        assert (await lost(writer)).seq == 2


async def test_a_writer_notices_an_empty_etcd(etcd: EtcdServer, log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer:
        writer.append(tick(0))
        await writer.flush(5)
        etcd.restore()
        writer.append(tick(1))
        await lost(writer)


async def test_an_idle_writer_notices_an_empty_etcd(etcd: EtcdServer, log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer:
        writer.append(tick(0))
        await writer.flush(5)
        etcd.restore()
        await lost(writer)


async def test_a_writer_notices_an_owner_of_before_the_backup(
    etcd: EtcdServer, log: EtcdLog
) -> None:
    """The backup has the owner key of this stream's former life."""
    async with log.writer("w.w0") as former:
        former.append(tick(0))
        await former.flush(5)
        etcd.back_up()
    async with log.writer("w.w0", wait_s=5) as writer:
        etcd.restore()
        writer.append(tick(1))
        await lost(writer)


async def test_a_deleted_stream_is_a_replaced_log(log: EtcdLog) -> None:
    async with log.writer("w.w0") as writer:
        writer.append(tick(0))
        await writer.flush(5)
        prefix = Keys(log.config.prefix).log
        await log.client.delete(prefix, after_prefix(prefix))
        writer.append(tick(1))
        await lost(writer)
