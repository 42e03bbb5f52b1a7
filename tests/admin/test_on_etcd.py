"""The admin API on a real etcd: the same answers, and history read back from the log."""

from __future__ import annotations

import pytest

from events.etcd.config import EtcdConfig
from events.etcd.factory import EtcdLog
from tests.admin.scene import Scene
from tests.etcd_server import EtcdServer, etcd_binary

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
