"""Incidents in the admin API."""

from __future__ import annotations

from relume.events import vocabulary as v
from tests.admin.scene import VIEWER, Scene
from tests.admin.test_openapi import mismatches


async def killed(scene: Scene) -> None:
    """w0's engine is killed and comes back, w1's stays dead."""
    for name in ("w0", "w1"):
        writer = await scene.worker(name)
        writer.append(v.EngineDied(name, 1, "killed"), v.EngineRestartScheduled(name, 2, 250))
        await scene.until(lambda name=name: scene.replica.fleet.workers[name].deaths)
    writer = scene.worker_writers["w0"]
    ready = v.EngineReady(
        worker="w0", incarnation=2, host="127.0.0.1", port=9000, model="tiny", max_model_len=2048,
        block_size=32, kv_blocks=100,
    )  # fmt: skip
    writer.append(v.EngineStarted("w0", 2, 5001, 1), ready)
    await scene.until(lambda: not scene.replica.incidents.incidents[0].open)


async def test_incidents_are_listed_with_a_plain_sentence():
    async with Scene() as scene:
        _, before = await scene.call("incidents")
        assert before == {"since": 1, "incidents": []}
        await killed(scene)
        status, answer = await scene.call("incidents", token=VIEWER)
        assert status == 200
        first, second = answer["incidents"]
        assert first["summary"] == "w0's engine was killed; no stream was touched."
        assert (first["open"], second["open"]) == (False, True)
        assert first["capacity_back_ms"] >= 0 > second["capacity_back_ms"]
        assert "events" not in first and "touched" not in first


async def test_the_list_is_narrowed():
    async with Scene() as scene:
        await killed(scene)

        async def names(query: str) -> list[str]:
            _, answer = await scene.call(f"incidents?{query}")
            return [i["name"] for i in answer["incidents"]]

        assert await names("worker=w0") == ["w0"]
        assert await names("open=1") == ["w1"]
        assert await names("limit=1") == ["w1"], "the newest"
        for limit in ("0", "x", "100000"):
            status, refused = await scene.call(f"incidents?limit={limit}")
            assert status == 400 and refused["error"]["param"] == "limit"


async def test_one_incident_has_its_causal_chain_and_the_described_shape():
    async with Scene() as scene:
        await killed(scene)
        _, listed = await scene.call("incidents")
        identity = listed["incidents"][0]["id"]
        status, shown = await scene.call(f"incidents/{identity}")
        assert status == 200
        kinds = [e["type"] for e in shown["events"]]
        assert kinds[0] == "engine_died" and "engine_ready" in kinds
        assert (await scene.call("incidents/w0"))[1] == shown, "or by the worker's name"
        _, document = await scene.call("openapi.json")
        schemas = document["components"]["schemas"]
        assert mismatches(document, schemas["Incident"], shown) == []
        assert mismatches(document, schemas["IncidentList"], listed) == []
        status, missing = await scene.call("incidents/w9")
        assert status == 404 and missing["error"]["param"] == "id"


async def test_a_replica_that_starts_later_knows_what_the_log_says():
    async with Scene() as scene:
        await killed(scene)
        _, known = await scene.call("incidents")
        async with Scene(scene.log, name="r1", lead=False) as later:
            _, learnt = await later.call("incidents")
            assert learnt == known
