"""A record of the log that nobody can read costs its worker the requests, and no replica its life."""

from __future__ import annotations

import asyncio
import time

import aiohttp

from relume.chaos.damaged_bytes import UNREADABLE
from relume.chaos.live.faults import unreadable_records
from relume.chaos.traffic import Stream
from relume.events.failpoints.points import Failpoint
from relume.events.log.codec import UnreadableRecord
from tests.live.conftest import HANG_S, same, whole
from tests.live.core.core_fleet import CORE, CoreFleet

pytestmark = CORE
COUNT = 'relume_unreadable_records_total{stream="w.w1"} '


async def test_the_worker_of_an_unreadable_record_gets_no_requests_until_an_operator_acknowledges_it(
    fleet: CoreFleet,
) -> None:
    calm = await fleet.calm(4, 96)
    replicas = {name: fleet.fleet.children[name].pid for name in ("r0", "r1")}
    before, known = await fleet.worker("w1"), await counted(fleet)
    socket = fleet.fleet.dir / "run" / "w1" / "agent.sock"

    async def write(streams: dict[str, Stream]) -> None:
        await point.reached()
        await fleet.open_all()
        await unreadable_records.write(
            fleet.failpoints, "w1", socket, before["incarnation"], UNREADABLE[0]
        )
        await point.release()

    async with fleet.at(Failpoint.ENGINE_DECODE, "w1", tokens=20) as point:
        struck = await fleet.streams(4, 96, fleet.named("written"), write)
    assert not whole(struck) and same(calm, struck) == [], "its streams continue"
    await fleet.until_told(UnreadableRecord)
    await until_counted(fleet, [count + 1 for count in known])
    later = await fleet.streams(4, 96, fleet.named("later"))
    assert same(calm, later) == []
    assert "w1" not in await workers_of(fleet, later)
    assert (await fleet.worker("w1"))["unreadable"]
    answer = await fleet.fleet.admin("workers/w1/trust", "POST")
    assert answer.get("state") == "decided", answer
    await fleet.only("w1")
    again = await fleet.streams(2, 96, fleet.named("again"))
    assert not whole(again) and await workers_of(fleet, again) == {"w1"}
    after = await fleet.worker("w1")
    assert (after["unreadable"], after["incarnation"]) == ("", before["incarnation"])
    assert replicas == {name: fleet.fleet.children[name].pid for name in replicas}
    assert all(fleet.fleet.children[name].alive for name in replicas)


async def workers_of(fleet: CoreFleet, streams: dict[str, Stream]) -> set[str]:
    await fleet.until_ended(streams)
    return {d.worker for made in (await fleet.routes(streams)).values() for d in made}


async def until_counted(fleet: CoreFleet, counts: list[int]) -> None:
    deadline = time.monotonic() + HANG_S
    while (found := await counted(fleet)) != counts:
        assert time.monotonic() < deadline, (found, counts)
        await asyncio.sleep(0.1)


async def counted(fleet: CoreFleet) -> list[int]:
    """Unreadable records of the worker by the metrics of each replica."""
    found = []
    async with aiohttp.ClientSession() as session:
        for gateway in fleet.fleet.gateways:
            async with session.get(f"{gateway}/metrics") as page:
                lines = (await page.text()).splitlines()
            of_worker = [line for line in lines if line.startswith(COUNT)]
            found.append(int(float(of_worker[0].split()[-1])) if of_worker else 0)
    return found
