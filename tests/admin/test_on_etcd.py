"""The admin API on a real etcd: the same answers, and history read back from the log."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from relume.chaos.live.faults.tcp_links import Link
from relume.controlplane.replay.recorded_log import from_etcd
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.log.codec import decode
from tests.admin.scene import OPERATOR, Scene
from tests.cli.conftest import relume  # noqa: F401
from tests.etcd_server import EtcdServer, etcd_binary
from tests.pace import outlast

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(etcd_binary() is None, reason="no etcd"),
]


async def test_changes_history_and_resend_on_etcd(tmp_path):
    with EtcdServer() as server:
        config = EtcdConfig(endpoints=server.endpoints, spool_dir=str(tmp_path))
        key = {"Idempotency-Key": "once"}
        async with EtcdLog(config) as log:
            async with Scene(log, name="r1") as first:
                await first.worker("w0")
                await first.worker("w1")
                await first.serve_request("old-1")
                before = await first.call("workers/w0/drain", "POST", headers=key)
                assert before[0] == 200 and before[1]["state"] == "decided"
            async with Scene(log, name="r2") as second:
                await second.worker("w1")
                again = await second.call("workers/w0/drain", "POST", headers=key)
                assert again == before
                status, detail = await second.call("requests/old-1")
                assert status == 200 and detail["request"]["state"] == "completed"
                _, page = await second.call("events?from=0&type=admin_commanded,route_decided")
                kinds = [e["event"]["type"] for e in page["events"]]
                assert kinds == ["route_decided", "admin_commanded"] and page["complete"]
                assert all(e["at_ms"] > 0 for e in page["events"])
                _, streams = await second.call("streams")
                assert {"fleet", "r.r1", "r.r2", "w.w0", "w.w1"} <= {
                    s["stream"] for s in streams["streams"]
                }


async def test_the_leader_resigns_once_and_the_other_replica_takes_over(tmp_path, relume):  # noqa: F811
    key = {"Idempotency-Key": "once"}
    with EtcdServer() as server:
        config = EtcdConfig(endpoints=server.endpoints, spool_dir=str(tmp_path))
        async with EtcdLog(config) as log, AsyncExitStack() as scenes:
            first = await scenes.enter_async_context(Scene(log, name="r1"))
            await first.until(lambda: "r1" in first.replica.fleet.replicas)
            alone = await first.call("leader/resign", "POST")
            assert alone[0] == 409 and "no other replica" in alone[1]["error"]["message"]
            second = await scenes.enter_async_context(Scene(log, name="r2"))
            await first.until(lambda: "r2" in first.replica.fleet.replicas)
            assert (await second.call("leader/resign", "POST", OPERATOR))[0] == 403
            done = await second.call("leader/resign", "POST", headers=key)
            assert done[0] == 200 and done[1]["state"] == "decided"
            assert done[1]["principal"] == "ada"
            await first.until(lambda: second.replica.leadership.leading, 20)
            await first.until(lambda: first.replica.fleet.leader == "r2")
            assert not first.replica.leadership.leading
            for scene in (first, second):
                assert await scene.call("leader/resign", "POST", headers=key) == done
            tick = second.replica.fleet.tick  # the new leader is at work, and stays
            await first.until(lambda: second.replica.fleet.tick > tick + 3)
            assert first.replica.fleet.leader == "r2"
            code, out, _ = await relume(first, "leader", "resign")
            assert code == 0 and "decided at revision" in out
            await first.until(lambda: second.replica.fleet.leader == "r1", 20)
        groups = await EtcdLog(config).reader().read()
    told = [e for g in groups for s in g.segments for e in map(decode, s.records)]
    asked = [e for e in told if type(e) is v.AdminCommanded]
    assert [(e.principal, e.command) for e in asked] == [("ada", "resign")] * 3
    steps = [
        (type(e).__name__, e.replica)
        for e in told
        if type(e) in (v.LeaderElected, v.LeaderResigned)
    ]
    assert steps[:5] == [
        ("LeaderElected", "r1"),
        ("LeaderResigned", "r1"),
        ("LeaderElected", "r2"),
        ("LeaderResigned", "r2"),
        ("LeaderElected", "r1"),
    ]
    assert verify(groups).divergences == []


async def test_a_command_that_waits_for_the_log_beyond_its_lease_is_refused(tmp_path):
    """The replica accepts it before it notices that etcd is away; later ones it does not accept. (An etcd
    that stood still may renew leases that lapsed meanwhile, by calls that wait in its sockets.)"""
    with EtcdServer() as server:
        async with AsyncExitStack() as stack:
            link = await stack.enter_async_context(Link(server.endpoints[0]))
            config = EtcdConfig(endpoints=(link.endpoint,), spool_dir=str(tmp_path), lease_ttl_s=2)
            log = await stack.enter_async_context(EtcdLog(config))
            scene = await stack.enter_async_context(Scene(log, name="r1"))
            for name in ("w0", "w1"):
                await scene.worker(name)
            await scene.until(lambda: len(scene.replica.fleet.workers) == 2)
            scene.admin.commands._wait_s = 0.05
            link.cut()
            key = {"Idempotency-Key": "late"}
            early = await scene.call("workers/w0/drain", "POST", headers=key)
            assert early[0] == 202 and early[1]["state"] == "accepted"
            await scene.until(lambda: not scene.writer.healthy, 10.0)
            status, answer = await scene.call("workers/w1/drain", "POST")
            assert status == 503 and answer["error"]["code"] == "log_unavailable"
            await outlast(4.0, "leases of 2 s")
            link.mend()
            await scene.until(lambda: scene.writer.healthy, 20.0)
            scene.admin.commands._wait_s = 5.0
            status, answer = await scene.call("workers/w0/drain", "POST", headers=key)
            assert status == 409 and "send it again" in answer["error"]["message"]
            assert not scene.replica.fleet.workers["w0"].draining
            status, answer = await scene.call("workers/w0/drain", "POST")
            assert status == 200 and answer["state"] == "decided"
        found = await from_etcd(EtcdConfig(endpoints=server.endpoints))
    assert verify(found.groups).divergences == []
