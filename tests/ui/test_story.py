"""`why` over the admin API: the same story as `relume why`."""

from __future__ import annotations

from typing import Any

from relume.controlplane.replay import rendering
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from tests.admin.scene import VIEWER, Scene
from tests.admin.test_openapi import mismatches


async def failed_over(scene: Scene, request: str = "req-1") -> None:
    """A request whose first engine dies; it is sent to the other and ends."""
    for name in ("w0", "w1"):
        await scene.worker(name)
    await scene.serve_request("before")
    scheduler = scene.replica.scheduler
    scheduler.arrived(arrival(request))
    given = scheduler.assign(request, "arrival", 0)
    scene.worker_writers[given.worker].append(v.EngineDied(given.worker, 1, "killed"))
    await scene.until(lambda: scene.replica.fleet.workers[given.worker].deaths)
    scheduler.observed(request, 1, "reset", 3)
    again = scheduler.assign(request, "reset", 3)
    assert again.worker != given.worker
    scheduler.ended(request, "completed", 200, 7, "length", 12_000, 90_000)
    await scene.until(lambda: request not in scene.replica.fleet.requests)


def arrival(request: str) -> Any:
    from relume.controlplane.stream.arrival import Arrival

    return Arrival(
        request=request, model="tiny", route="completions", stream=True, prompt_tokens=5,
        max_tokens=16, verdict="exact", client_id=f"mine-{request}",
    )  # fmt: skip


async def test_the_story_of_a_failover_is_that_of_the_command():
    async with Scene() as scene:
        await failed_over(scene)
        status, story = await scene.call("requests/req-1/why", token=VIEWER)
        assert status == 200 and story["complete"] and story["outcome"] == "completed"
        found = why(scene.log.groups, "req-1")
        assert found is not None
        printed = "\n".join(rendering.lines_of(found))
        assert story["headline"] in printed
        assert [step["text"] for step in story["steps"]] == [
            rendering.words(step)[0] for step in found.steps
        ]
        for step in story["steps"]:
            for line in step["details"]:
                assert line in printed
        kinds = [step["type"] for step in story["steps"]]
        assert kinds[0] == "request_arrived" and kinds[-1] == "request_ended"
        assert "engine_died" in kinds and kinds.count("route_decided") == 2
        first, second = (s for s in story["steps"] if s["type"] == "route_decided")
        assert [c["chosen"] for c in first["candidates"]].count(True) == 1
        dead = next(c for c in second["candidates"] if not c["chosen"])
        assert dead["excluded"] and dead["cost"] >= 0
        _, document = await scene.call("openapi.json")
        assert mismatches(document, document["components"]["schemas"]["Story"], story) == []


async def test_a_request_is_found_by_its_clients_id_and_while_it_lives():
    async with Scene() as scene:
        await scene.worker("w0")
        scene.replica.scheduler.arrived(arrival("req-2"))
        scene.replica.scheduler.assign("req-2", "arrival", 0)
        await scene.until(lambda: "req-2" in scene.replica.fleet.requests)
        status, story = await scene.call("requests/mine-req-2/why")
        assert status == 200 and story["outcome"] == "" and story["request"] == "req-2"
        assert (await scene.call("requests/none/why"))[0] == 404


async def test_a_story_from_before_this_replica_is_read_from_the_log():
    async with Scene(name="r1") as first:
        await failed_over(first)
        _, known = await first.call("requests/req-1/why")
        async with Scene(first.log, name="r2", lead=False) as second:
            _, story = await second.call("requests/req-1/why")
            assert story["since"] < second.admin.history.begins
            assert story["steps"] == known["steps"] and story["complete"]


async def test_what_is_missing_of_a_long_log_is_said(monkeypatch):
    from relume.controlplane.ui import ui_api

    async with Scene() as scene:
        await failed_over(scene)
        monkeypatch.setattr(ui_api, "SEARCH_BUDGET_S", -1.0)
        _, story = await scene.call("requests/req-1/why")
        assert story["complete"] is False
