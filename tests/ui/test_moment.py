"""A moment says what the log says, and changes lead from one to the next."""

from __future__ import annotations

from typing import Any

import msgspec

from relume.controlplane.admin.models import worker_info
from relume.controlplane.ui.live_moments import LiveMoments
from relume.controlplane.ui.moment import ROW_NAMES, SHOWN_REQUESTS, Moment, changes, lanes_of
from relume.events import vocabulary as v
from tests.admin.scene import Scene
from tests.admin.test_checkpoints import checkpointed


def applied(before: Moment, after: Moment) -> dict[str, dict[str, Any]]:
    """What a page has that took `before` and then the changes."""
    change = changes(before, after)
    shown = {}
    for part, name in ROW_NAMES.items():
        rows = {name(row): row for row in getattr(before, part)}
        for gone in change.gone.get(part, ()):
            del rows[gone]
        rows |= {name(row): row for row in getattr(change, part)}
        shown[part] = rows
    return shown


def whole(moment: Moment) -> dict[str, dict[str, Any]]:
    return {part: {name(r): r for r in getattr(moment, part)} for part, name in ROW_NAMES.items()}


async def test_lanes_agree_with_the_workers_of_the_api():
    async with Scene() as scene:
        await checkpointed(scene)
        scene.worker_writers["w1"].append(v.EngineDied("w1", 1, "killed"))
        await scene.until(lambda: scene.replica.fleet.workers["w1"].deaths)
        view = scene.replica.view
        lanes = lanes_of(view)
        assert [lane.name for lane in lanes] == list(view.fleet.workers)
        shared = set(lanes[0].__struct_fields__) & set(
            worker_info(view, view.fleet.workers["w0"]).__struct_fields__
        )
        assert len(shared) > 12
        for lane in lanes:
            known = worker_info(view, view.fleet.workers[lane.name])
            for field in shared:
                assert getattr(lane, field) == getattr(known, field), (lane.name, field)


async def test_a_moment_says_who_holds_whose_checkpoints():
    async with Scene() as scene:
        holder = await checkpointed(scene)
        primary = "w0" if holder == "w1" else "w1"
        _, moment = await scene.call("moment")
        lanes = {lane["name"]: lane for lane in moment["lanes"]}
        assert lanes[holder]["holds"] == {primary: 1} and "holds" not in lanes[primary]
        assert lanes[holder]["daemon_alive"] and lanes[holder]["budget_bytes"] == 1 << 20
        (request,) = moment["requests"]
        assert (request["request"], request["state"]) == ("q", "live")
        assert moment["head"]["live_requests"] == 1 and moment["head"]["serving"] is True


async def test_a_moment_says_what_failed_and_why_a_worker_does_not_serve():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        body = {"reason": "new kernel"}
        assert (await scene.call("workers/w1/drain", "POST", json=body))[0] == 200
        await scene.worker("w2")
        scene.worker_writers["w2"].append(v.EngineDied("w2", 1, "killed"))
        await scene.until(lambda: scene.replica.incidents.incidents)
        _, moment = await scene.call("moment")
        lanes = {lane["name"]: lane for lane in moment["lanes"]}
        assert lanes["w0"]["state"] == "serving" and "because" not in lanes["w0"]
        assert lanes["w1"]["state"] == "drained"
        assert lanes["w1"]["because"] == "drained by ada (new kernel)"
        assert lanes["w2"]["state"] == "dead" and "killed" in lanes["w2"]["because"]
        (incident,) = moment["incidents"]
        assert incident["open"] and incident["summary"].startswith("w2's engine was killed")


async def test_the_newest_requests_are_shown_and_all_are_counted():
    async with Scene() as scene:
        await scene.worker("w0")
        for number in range(SHOWN_REQUESTS + 5):
            await scene.serve_request(f"req-{number}")
        _, moment = await scene.call("moment")
        names = [row["request"] for row in moment["requests"]]
        assert names == [f"req-{number}" for number in range(5, SHOWN_REQUESTS + 5)]
        assert moment["head"]["requests_known"] == SHOWN_REQUESTS + 5


async def test_changes_lead_to_the_next_moment_and_have_only_what_differs():
    async with Scene() as scene:
        live = LiveMoments(scene.replica, scene.admin.book)
        empty = live.moment()
        await scene.worker("w0")
        await scene.worker("w1")
        await scene.serve_request("req-1")
        first = live.moment()
        assert applied(empty, first) == whole(first)
        scene.worker_writers["w1"].append(v.EngineDied("w1", 1, "killed"))
        await scene.until(lambda: scene.replica.incidents.incidents)
        second = live.moment()
        change = changes(first, second)
        assert applied(first, second) == whole(second)
        assert [lane.name for lane in change.lanes] == ["w1"] and not change.requests
        assert len(change.incidents) == 1 and not change.gone
        assert applied(second, empty) == whole(empty)
        assert set(changes(second, empty).gone["lanes"]) == {"w0", "w1"}
        assert msgspec.json.decode(msgspec.json.encode(change))["head"]["revision"] > 0
