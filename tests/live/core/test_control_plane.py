"""etcd is away, the leader dies, a gateway dies: streams continue, and the log can say why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import aiohttp
import msgspec

from relume.chaos.traffic import Stream
from relume.controlplane.cli.doctor import check_segments
from relume.controlplane.cli.relume_command import main
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.etcd.keys import Keys
from relume.events.etcd.reader.scan import Scan
from relume.events.failpoints.points import Failpoint
from relume.events.log.entries import entries
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from tests.live.conftest import HANG_S, read_log, same, whole
from tests.live.core.core_fleet import CORE, CoreFleet
from tests.live.resuming import Reader
from tests.live.streams.test_resumable import asking, assert_resumed
from tests.pace import outlast
from tests.signals import stop

pytestmark = CORE


async def test_etcd_away_longer_than_the_leases_changes_nothing(fleet: CoreFleet) -> None:
    calm = await fleet.calm(4, 96)
    before = {w["name"]: w["incarnation"] for w in await fleet.fleet.workers()}
    etcd = fleet.fleet.children["etcd"]
    await asyncio.to_thread(stop, etcd.pid)
    try:
        struck = await fleet.streams(4, 96, fleet.named("away"))
        await outlast(fleet.fleet.options.lease_ttl_s + 1.0, "every lease ends meanwhile")
        late = await fleet.streams(4, 96, fleet.named("away-longer"))
    finally:
        os.kill(etcd.pid, signal.SIGCONT)
    assert not whole(struck) and not whole(late)
    assert same(calm, struck) == [] and same(calm, late) == []
    await fleet.until_ended([*struck, *late])
    assert {w["name"]: w["incarnation"] for w in await fleet.fleet.workers()} == before
    assert [e for e in await fleet.events() if type(e) is v.WorkerLost] == []


async def test_what_etcd_acknowledged_outlives_its_kill(fleet: CoreFleet) -> None:
    """Each answer to an operator names the revision at which the log has it."""
    calm = await fleet.calm(4, 96)
    usual = CrossCheckConfig().share_ppm
    answers, values = [], (usual + 2, usual + 1, usual)

    async def kill(streams: dict[str, Stream]) -> None:
        await point.reached()
        await fleet.open_all()
        for value in values:
            body = {"key": "crosscheck.share_ppm", "value": str(value)}
            answers.append(await fleet.fleet.admin("config", "PUT", body=body))
        etcd = fleet.fleet.children["etcd"]
        etcd.kill()
        await asyncio.to_thread(etcd.process.wait)
        fleet.fleet.restart("etcd")
        await point.release()

    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point:
        struck = await fleet.streams(4, 96, fleet.named("etcd-killed"), kill)
    assert not whole(struck)
    assert same(calm, struck) == []
    assert [answer["state"] for answer in answers] == ["decided"] * 3
    await fleet.until_ended(struck)
    there = {
        (e.revision, e.event.key, e.event.value)
        for e in entries(await read_log(fleet.etcd))
        if type(e.event) is v.ConfigChanged
    }
    for value, answer in zip(values, answers, strict=True):
        assert (answer["revision"], "crosscheck.share_ppm", str(value)) in there


async def test_a_damaged_segment_of_one_workers_stream_ends_no_replica(fleet: CoreFleet) -> None:
    """Its agent cannot write there, and ends with its engine. The doctor names the key."""
    calm = await fleet.calm(4, 96)
    keys = Keys(fleet.etcd.config.prefix)
    replicas = {name: fleet.fleet.children[name].pid for name in ("r0", "r1")}
    before = await fleet.worker("w2")

    async def damage(streams: dict[str, Stream]) -> None:
        await point.reached()
        await fleet.open_all()
        last = (await Scan(fleet.etcd.client, keys, 0).extent("w.w2")).last
        await fleet.etcd.client.put(keys.segment("w.w2", last + 5), b"no segment")
        await point.release()

    async with fleet.at(Failpoint.ENGINE_DECODE, "w2", tokens=20) as point:
        struck = await fleet.streams(4, 96, fleet.named("damaged"), damage)
    assert not whole(struck)
    assert same(calm, struck) == []
    await fleet.until_told(v.SegmentSkipped)
    later = await fleet.streams(4, 96, fleet.named("later"))
    assert same(calm, later) == []
    await fleet.until_ended([*struck, *later])
    decisions = [d for made in (await fleet.routes(later)).values() for d in made]
    assert "w2" not in {d.worker for d in decisions}
    assert replicas == {name: fleet.fleet.children[name].pid for name in replicas}
    assert all(fleet.fleet.children[name].alive for name in replicas)
    (found,) = await check_segments(fleet.etcd)
    command, _, then = found.remedy.partition("; ")
    assert then == "then restart the agent, and relume trust w2"
    agent = fleet.fleet.children[
        "w2"
    ]  # it ends when it comes to that key, which is 5 segments ahead
    await asyncio.to_thread(agent.process.wait, HANG_S)
    await fleet.etcd.client.delete(command.removeprefix("etcdctl del ").encode())
    fleet.fleet.restart("w2")
    await fleet.until_ready("w2", before["incarnation"] + 1)
    answer = await fleet.fleet.admin("workers/w2/trust", "POST")
    assert answer.get("state") == "decided", answer
    assert await check_segments(fleet.etcd) == []


async def test_the_leader_is_killed_and_the_other_replicas_streams_do_not_notice(
    fleet: CoreFleet,
) -> None:
    calm = await fleet.calm(4, 96)
    leader = fleet.state.leader
    index = int(leader[1:])
    mine, survivor = fleet.fleet.gateways[index], fleet.fleet.gateways[1 - index]

    async def kill(streams: dict[str, Stream]) -> None:
        await fleet.until_routed(streams)
        fleet.fleet.children[leader].kill()
        await point.release()

    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point:
        doomed = asyncio.create_task(fleet.streams(1, 96, fleet.named("doomed"), url=mine))
        await point.reached()
        await fleet.until_routed([fleet.named("doomed") + "-0"])
        await fleet.open_all()
        kept = await fleet.streams(4, 96, fleet.named("kept"), kill, url=survivor)
        broken = await doomed
    assert not whole(kept)
    assert same(calm, kept) == []
    assert len(whole(broken)) == 1, "a stream of the killed gateway breaks with its socket"
    deadline = time.monotonic() + HANG_S
    while fleet.state.leader != f"r{1 - index}" or not set(broken) <= set(await fleet.ended()):
        assert time.monotonic() < deadline, f"{fleet.state.leader} leads"
        await asyncio.sleep(0.1)
    assert {(await fleet.ended())[name].outcome for name in broken} == {"failed"}


async def test_a_resumable_stream_continues_at_another_gateway(fleet: CoreFleet) -> None:
    first, second = (f"{url}/v1/completions" for url in fleet.fleet.gateways)
    async with aiohttp.ClientSession() as session:
        calm, torn = Reader(name=fleet.named("calm")), Reader(name=fleet.named("torn"))
        await calm.read(session, second, asking(120))
        async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=60) as point:
            reading = asyncio.create_task(torn.read(session, first, asking(120)))
            await point.reached()
            fleet.fleet.children["r0"].kill()
            await reading
        assert not torn.done and 0 < len(torn.events) < 60
        await torn.read(session, second)
    assert_resumed(fleet, calm, torn, 120)


async def test_why_answers_though_the_gateway_died_before_its_append(fleet: CoreFleet) -> None:
    """The replica decides and sends, and dies before its decision reaches etcd. The worker's agent
    has journalled that decision."""
    append = fleet.failpoints.armed(Failpoint.LOG_APPEND, process="replica r0", stream="r.r0")
    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point, append as waiting:
        doomed = asyncio.create_task(
            fleet.streams(1, 96, fleet.named("why"), url=fleet.fleet.gateways[0])
        )
        await point.reached()
        await waiting.reached()
        request = await _journalled(fleet)
        fleet.fleet.children["r0"].kill()
        await doomed
    decided = [e for e in await fleet.events() if type(e) is v.RouteDecided]
    assert request not in {e.request for e in decided}
    answer = why(await read_log(fleet.etcd), request)
    assert "predicted_ttft" in json.dumps(msgspec.to_builtins(answer))


async def _journalled(fleet: CoreFleet) -> str:
    """The request whose admission carries its decision, as the log has it."""
    deadline = time.monotonic() + HANG_S
    while True:
        steps = [e for e in await fleet.events("w.w0") if type(e) is v.EngineStep]
        queued = [c for e in steps for c in e.changes if type(c) is v.RequestQueued and c.dispatch]
        if queued:
            return queued[-1].request
        assert time.monotonic() < deadline, "no admission with a decision"
        await asyncio.sleep(0.02)


async def test_every_decision_so_far_is_retaken_by_replay(fleet: CoreFleet) -> None:
    await fleet.calm(4, 96)
    where = ["--etcd", fleet.fleet.etcd_endpoint, "--state-dir", str(fleet.fleet.dir)]
    assert await asyncio.to_thread(main, ["replay", "--verify", *where]) == 0
