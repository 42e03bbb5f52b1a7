"""A simulated etcd that is restored from a backup, as the log's real writer, reader and lease see it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.errors import LogWentBack
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.new_log import AnotherLog, begin_log
from relume.events.log.errors import LogReplaced

TTL_S = 8
FORMER, FRESH = "former", "fresh"


@pytest.fixture(params=[1, 3])
def etcd(request: pytest.FixtureRequest) -> Iterator[SimEtcd]:
    loop = VirtualLoop(7)
    names = [f"e{n}" for n in range(request.param)]
    made = SimEtcd(loop, Wires(loop), names, EtcdConfig(lease_ttl_s=TTL_S))
    yield made
    made.close()
    loop.close()


def numbers(etcd: SimEtcd) -> list[int]:
    """Of the ticks in the log."""
    groups = etcd.groups()
    return [segment.seq for group in groups for segment in group.segments]


def test_it_has_the_revision_and_keys_of_the_backup_and_its_writers_learn_it(etcd: SimEtcd) -> None:
    process = etcd.loop.process("r0")
    seen: list[BaseException] = []

    async def follow() -> None:
        try:
            async for _ in etcd.reader(process).follow():
                pass
        except LogWentBack as error:
            seen.append(error)

    async def work() -> None:
        process.spawn(follow())
        async with etcd.writer("r.r0", process) as writer:
            writer.append(v.Tick(1, 0))
            await writer.flush(5)
            backup, before = etcd.back_up(), etcd.groups()
            for number in (2, 3):
                writer.append(v.Tick(number, 0))
                await writer.flush(5)
            assert len(etcd.groups()) == len(before) + 2 and len(etcd.landed) == 3
            etcd.restore(backup)
            assert etcd.groups() == before and not etcd.landed and etcd.log_number == 1
            writer.append(v.Tick(4, 0))
            async with asyncio.timeout(10):
                await writer.fenced()
            assert isinstance(writer.fence, LogReplaced)
        await asyncio.sleep(5)

    run(etcd, process, work())
    assert len(seen) == 1 and numbers(etcd) == [1]


def test_a_lease_of_the_backup_lives_for_its_ttl_and_its_key_ends_with_it(etcd: SimEtcd) -> None:
    process = etcd.loop.process("r0")

    async def work() -> dict[str, int]:
        async with etcd.writer("r.r0", process) as writer:
            await asyncio.sleep(1)
            backup, epoch = etcd.back_up(), writer.epoch
        assert await etcd.reader(other).owners() == {}
        etcd.restore(backup)
        await asyncio.sleep(TTL_S / 2)
        assert await etcd.reader(other).owners() == {"r.r0": epoch}
        await asyncio.sleep(TTL_S)
        return await etcd.reader(other).owners()

    other = etcd.loop.process("r1")
    assert run(etcd, process, work()) == {}


def test_an_operator_begins_a_new_log_which_is_the_log_from_there_on(etcd: SimEtcd) -> None:
    process = etcd.loop.process("operator")

    async def work() -> None:
        client = etcd.log(process).client
        await Maintenance(client).name_unnamed(FORMER)
        for number in (1, 2):
            async with etcd.writer("r.r0", process) as writer:
                writer.append(v.Tick(number, 0))
            if number == 1:
                backup = etcd.back_up()
        whole = etcd.groups()
        etcd.restore(backup)
        await asyncio.sleep(5)
        with pytest.raises(AnotherLog):
            await begin_log(client, "another", FRESH)
        removed = await begin_log(client, FORMER, FRESH)
        assert removed.segments == 1
        etcd.log_begins()
        assert await Maintenance(client).identity() == FRESH
        assert etcd.former == whole and etcd.groups() == ()
        async with etcd.writer("r.r0", process) as writer:
            writer.append(v.Tick(3, 0))
        assert numbers(etcd) == [1] and await etcd.reader(process).read() == list(etcd.groups())

    run(etcd, process, work())


def run(etcd: SimEtcd, process: Process, work: object) -> object:
    async def main() -> object:
        return await process.spawn(work)  # type: ignore[arg-type]

    return etcd.loop.run(main(), 3600.0)
