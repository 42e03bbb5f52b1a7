"""What the admin API shows of the fold."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from relume.events import vocabulary as v
from relume.policies.degradation.demand import models_of
from tests.admin.scene import VIEWER, Scene

ROOT = Path(__file__).resolve().parents[2]


async def test_workers_are_listed_with_state_pids_and_load():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        writer.append(
            v.EngineStep(
                incarnation=1,
                step=1,
                duration_us=9000,
                batch=1,
                sum_context=64,
                prefill_tokens=0,
                waiting=2,
                kv_used=25,
                changes=(v.RequestQueued("a", 1, 100),),
            ),
        )
        await scene.until(lambda: scene.replica.fleet.workers["w0"].kv_used == 25)
        status, answer = await scene.call("workers")
        assert status == 200
        (worker,) = answer["workers"]
        assert worker["name"] == "w0" and worker["state"] == "serving"
        assert (worker["agent_pid"], worker["engine_pid"]) == (4000, 5000)
        assert (worker["requests"], worker["prefill_tokens"]) == (1, 100)
        assert (worker["waiting"], worker["kv_used"], worker["kv_blocks"]) == (2, 25, 100)


async def test_a_dead_engine_says_what_it_died_of():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        writer.append(v.EngineDied("w0", 1, "killed"), v.EngineRestartScheduled("w0", 2, 250))
        await scene.until(lambda: scene.replica.fleet.workers["w0"].restart_delay_ms == 250)
        _, worker = await scene.call("workers/w0")
        assert (worker["state"], worker["died_of"], worker["deaths"]) == ("dead", "killed", 1)
        status, answer = await scene.call("workers/w9")
        assert status == 404 and answer["error"]["param"] == "name"


async def test_fleet_tells_leader_log_and_whether_it_serves():
    async with Scene() as scene:
        _, before = await scene.call("fleet")
        assert before["serving"] is False and before["workers"] == []
        status, _ = await scene.call("/health", token="")
        assert status == 503
        await scene.worker("w0")
        _, after = await scene.call("fleet")
        assert after["serving"] is True and after["models"] == ["tiny"]
        assert after["leader"]["leader"] == "r0" and after["leader"]["answered_by_leads"] is True
        assert after["log"]["healthy"] is True and after["log"]["pending"] == 0
        assert after["replicas"][0]["leader"] is True
        assert (await scene.call("/health", token=""))[0] == 200
        assert (await scene.call("/live", token=""))[0] == 200


async def test_streams_show_heads_owners_and_the_state_hash():
    from relume.policies.state.fleet import state_hash

    async with Scene(lead=False) as scene:
        await scene.worker("w0")
        _, answer = await scene.call("streams")
        assert answer["state_hash"] == state_hash(scene.replica.fleet).hex()
        heads = {s["stream"]: s for s in answer["streams"]}
        assert heads["w.w0"]["position"] == 3
        assert heads["w.w0"]["owner_epoch"] == heads["w.w0"]["epoch"] > 0


async def test_a_request_is_shown_from_arrival_to_end():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.serve_request("req-1")
        _, answer = await scene.call("requests")
        (request,) = answer["requests"]
        assert request["state"] == "completed" and request["workers"] == ["w0"]
        assert (request["tokens"], request["ttft_us"], request["attempts"]) == (7, 12_000, 1)
        _, detail = await scene.call("requests/req-1")
        kinds = [e["event"]["type"] for e in detail["events"]]
        assert kinds == ["request_arrived", "route_decided", "request_ended"]
        _, decisions = await scene.call("requests/req-1/decisions")
        (decision,) = decisions["decisions"]
        assert decision["source"] == "log"
        assert decision["decision"]["basis"]["revision"] > 0
        assert decision["decision"]["candidates"][0]["worker"] == "w0"
        assert (await scene.call("requests/none"))[0] == 404


async def test_requests_are_searched_by_parts_of_their_ids():
    async with Scene() as scene:
        await scene.worker("w0")
        for name in ("req-1", "req-2", "other-12"):
            await scene.serve_request(name)

        async def found(query: str) -> list[str]:
            return [r["request"] for r in (await scene.call(f"requests?{query}"))[1]["requests"]]

        assert await found("search=req-") == ["req-1", "req-2"]
        assert await found("search=er-1") == ["other-12"]
        assert await found("search=mine-req") == ["req-1", "req-2"]
        assert await found("search=mine-req&limit=1") == ["req-2"], "the newest"
        assert await found("search=nothing") == []
        assert await found("state=live") == [] and await found("worker=w9") == []
        assert await found("state=completed&worker=w0&search=2") == ["req-2", "other-12"]
        assert await found("model=tiny&limit=1") == ["other-12"] and await found("model=x") == []


async def test_requests_come_in_pages():
    async with Scene() as scene:
        await scene.worker("w0")
        for name in ("a-1", "b-2", "a-3", "b-4", "a-5"):
            await scene.serve_request(name)

        async def page(query: str) -> tuple[list[str], bool]:
            _, found = await scene.call(f"requests?{query}")
            return [r["request"] for r in found["requests"]], found["more"]

        assert await page("limit=2") == (["b-4", "a-5"], True)
        assert await page("limit=2&before=b-4") == (["b-2", "a-3"], True)
        assert await page("limit=2&before=b-2") == (["a-1"], False)
        assert await page("before=a-1") == ([], False)
        assert await page("search=a-&limit=1&before=b-4") == (["a-3"], True)
        assert await page("search=a-&before=a-3") == (["a-1"], False)
        status, error = await scene.call("requests?before=gone")
        assert status == 404 and "no request 'gone' in memory" in error["error"]["message"]


async def test_a_request_from_before_this_replica_is_found_in_the_log():
    async with Scene(name="r1") as first:
        await first.worker("w0")
        await first.serve_request("old-1")
        async with Scene(first.log, name="r2", lead=False) as second:
            _, listed = await second.call("requests")
            assert listed["requests"] == []
            status, detail = await second.call("requests/old-1")
            assert status == 200 and detail["request"]["state"] == "completed"


async def test_a_dispatch_whose_gateway_died_is_shown_from_the_admission():
    from relume.events.log import codec

    async with Scene() as scene:
        writer = await scene.worker("w0")
        lost = v.RouteDecided(
            decision="r9.1.1",
            basis=v.Basis(3, 4),
            request="ghost",
            attempt=1,
            cause="arrival",
            mode="new",
            delivered=0,
            prompt_tokens=5,
            worker="w0",
            incarnation=1,
            policy="least_load",
            model="tiny",
        )
        writer.append(
            v.EngineStep(
                incarnation=1,
                step=1,
                duration_us=0,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=0,
                kv_used=0,
                changes=(v.RequestQueued("ghost", 1, 5, codec.encode(lost)),),
            )
        )
        await scene.until(lambda: "ghost" in scene.admin.book.courses)
        status, answer = await scene.call("requests/ghost/decisions")
        assert status == 200
        (decision,) = answer["decisions"]
        assert decision["source"] == "admission" and decision["decision"]["worker"] == "w0"


async def test_a_request_is_found_by_every_name_it_has():
    async with Scene(name="r1") as first:
        await first.worker("w0")
        await first.serve_request("req-1")
        async with Scene(first.log, name="r2", lead=False) as second:
            for scene in (first, second):  # from memory, and from the log
                for name in ("req-1", "cmpl-req-1", "chatcmpl-req-1", "mine-req-1"):
                    status, detail = await scene.call(f"requests/{name}")
                    assert status == 200, (scene.config.name, name)
                    assert detail["request"]["request"] == "req-1"
                    assert detail["request"]["client_id"] == "mine-req-1"
                    scene.admin.book.courses.pop("req-1") if scene is second else None


async def test_the_book_of_requests_is_bounded():
    from relume.controlplane.admin.request_book import RequestBook
    from relume.events.log.entries import Entry

    book = RequestBook(limit=10)
    for number in range(1000):
        name = f"r{number}"
        arrived = v.RequestArrived(
            request=name,
            model="m",
            route="c",
            stream=True,
            prompt_tokens=1,
            max_tokens=1,
            verdict="exact",
            client_id=f"c{number}",
        )
        book.note(
            Entry(
                revision=number, index=0, epoch=1, stream="r.r0", position=1, at_ms=0, event=arrived
            )
        )
        if number % 3:
            ended = v.RequestEnded(
                request=name,
                outcome="completed",
                status=200,
                tokens=1,
                finish="stop",
                attempts=1,
                verdict="exact",
            )
            book.note(
                Entry(
                    revision=number,
                    index=1,
                    epoch=1,
                    stream="r.r0",
                    position=2,
                    at_ms=0,
                    event=ended,
                )
            )
    assert len(book.courses) <= 20 and len(book._of_client) <= 20
    assert book.find("c998") == "r998" and book.find("c1") == ""


async def test_degradation_shows_level_and_wanted_workers_of_each_model():
    async with Scene(lead=False) as scene:
        await scene.worker("w0")
        async with scene.log.writer("fleet") as leader:
            leader.append(
                v.ConfigChanged("degradation.mode", "on"),
                v.LeaderElected("r0", scene.replica.boot),
                v.Tick(0, 1000),
                v.DegradationDecided(model="tiny", level=2, was=0, since=0, due_ticks=3, share=600),
            )
            await scene.until(lambda: scene.replica.fleet.tick == 0)
            await scene.until(lambda: scene.replica.fleet.demand["tiny"].level == 2)
            status, answer = await scene.call("degradation")
            assert status == 200 and answer["mode"] == "on"
            (found,) = answer["models"]
            assert (found["model"], found["level"], found["known"]) == ("tiny", 2, False)
            assert (found["workers"], found["wanted_workers"]) == (1, 1)
            _, other = await scene.call("degradation?model=other")
            assert other["models"] == []


async def test_keda_reads_the_wanted_workers_as_the_documentation_says():
    """The trigger in docs/operations/degradation.md, read as KEDA's scaler `metrics-api` does: a GET with
    a bearer token, and a path into the JSON of the answer."""
    page = (ROOT / "docs/operations/degradation.md").read_text()
    (text,) = re.findall(r"```yaml\n(triggers:.*?)```", page, re.DOTALL)
    (trigger,) = yaml.safe_load(text)["triggers"]
    wanted = trigger["metadata"]
    assert (trigger["type"], wanted["authMode"]) == ("metrics-api", "bearer")
    async with Scene(lead=False) as scene:
        for name in ("w0", "w1"):
            await scene.worker(name)
        async with scene.log.writer("fleet") as leader:
            leader.append(
                v.ConfigChanged("degradation.mode", "observe"),
                v.LeaderElected("r0", scene.replica.boot),
                v.Tick(0, 1000),
            )
            await scene.until(lambda: "tiny" in models_of(scene.replica.fleet))
        path = wanted["url"].partition("/admin/v1/")[2].replace("MODEL", "tiny")
        status, answer = await scene.call(path, token=VIEWER)
        assert status == 200
        found = answer
        for part in wanted["valueLocation"].split("."):
            found = found[int(part)] if part.isdecimal() else found[part]
        assert found == 2, "as many as there are while the capacity is unknown"
        assert (trigger["metricType"], wanted["targetValue"]) == ("AverageValue", "1")


async def test_a_spare_says_so_while_it_could_serve():
    async with Scene(lead=False) as scene:
        writer = await scene.worker("w0")
        async with scene.log.writer("fleet") as leader:
            leader.append(
                v.LeaderElected("r0", scene.replica.boot),
                v.SparesDecided(
                    model="tiny", spares=("w0",), was=(), since=0, workers=4, failed=0, due=1,
                    short_ticks=5,
                ),
            )  # fmt: skip
            await scene.until(lambda: "tiny" in (scene.replica.fleet.spares or ()))
            _, worker = await scene.call("workers/w0")
            assert worker["state"] == "spare"
            writer.append(v.EngineDied("w0", 1, "killed"))
            await scene.until(lambda: scene.replica.fleet.workers["w0"].deaths == 1)
            _, worker = await scene.call("workers/w0")
            assert worker["state"] == "dead"
