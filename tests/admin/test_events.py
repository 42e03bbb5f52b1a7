"""Events over HTTP: filters, pages from memory and from the log, following without a gap."""

from __future__ import annotations

import asyncio
import json

from relume.controlplane.admin.recent_events import History, OlderLog
from relume.controlplane.history.archive import Archive
from relume.events import vocabulary as v
from relume.events.log.memory import MemoryLog
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.admin.scene import ADMIN, Scene


async def test_filters_narrow_by_type_request_worker_and_stream():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        await scene.worker("w1")
        await scene.serve_request("req-1")
        writer.append(
            v.EngineStep(
                incarnation=1,
                step=1,
                duration_us=9,
                batch=1,
                sum_context=1,
                prefill_tokens=0,
                waiting=0,
                kv_used=1,
                changes=(v.FirstToken("req-1", 1),),
            )
        )
        held = (
            v.HeldPrefix(request="req-1", child=0, attempt=1, blocks=1, tokens=16, bytes=9),
            v.HeldPrefix(request="req-2", child=0, attempt=1, blocks=1, tokens=16, bytes=9),
        )
        writer.append(v.CheckpointsAcknowledged("w0", "b", held))
        writer.append(v.EngineDied("w0", 1, "killed"))
        await scene.until(lambda: scene.replica.fleet.workers["w0"].deaths)

        async def kinds(query: str) -> list[str]:
            _, page = await scene.call(f"events?{query}")
            return [e["event"]["type"] for e in page["events"]]

        assert await kinds("type=engine_died,engine_ready") == ["engine_ready"] * 2 + [
            "engine_died"
        ]
        assert await kinds("request=req-1&exclude=engine_step,checkpoints_acknowledged") == [
            "request_arrived",
            "route_decided",
            "request_ended",
        ]
        assert "engine_step" in await kinds("request=req-1")
        assert await kinds("request=req-2") == ["checkpoints_acknowledged"]
        assert set(await kinds("worker=w1")) >= {"worker_registered", "engine_ready"}
        assert "engine_died" not in await kinds("worker=w1")
        assert await kinds("stream=w.w0&limit=1") == ["engine_died"]
        _, page = await scene.call("decisions")
        assert [e["event"]["type"] for e in page["events"]] == ["route_decided"]


async def test_pages_walk_the_whole_log_without_gap_or_repeat():
    log = MemoryLog()
    async with Scene(log, name="r1") as first:
        await first.worker("w0")
        for number in range(5):
            await first.serve_request(f"req-{number}")
    async with Scene(log, name="r2", lead=False) as scene:
        await scene.worker("w1")
        found, place = [], "from=0"
        while True:
            _, page = await scene.call(f"events?limit=7&{place}")
            found += page["events"]
            if page["complete"]:
                break
            place = f"after={page['next']}"
        ids = [e["id"] for e in found]
        assert (
            len(ids) == len(set(ids)) == sum(len(s.records) for g in log.groups for s in g.segments)
        )
        assert [tuple(map(int, i.split("."))) for i in ids] == sorted(
            tuple(map(int, i.split("."))) for i in ids
        )


async def follow(scene: Scene, query: str, count: int, last_id: str = "") -> list[dict]:
    """The first `count` events of a followed stream."""
    headers = {"Authorization": f"Bearer {ADMIN}"} | ({"Last-Event-ID": last_id} if last_id else {})
    found = []
    url = f"{scene.admin.url}/admin/v1/events?follow=1&{query}"
    async with asyncio.timeout(5), scene.session.get(url, headers=headers) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        async for line in answer.content:
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
                if len(found) == count:
                    return found
    return found


async def attached(scene: Scene) -> None:
    """Until a follower is there: from here on it is told."""
    await scene.until(lambda: scene.admin._events._followers)


async def test_following_shows_what_happens_from_now_on():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        following = asyncio.create_task(follow(scene, "type=engine_died,engine_started", 2))
        await attached(scene)
        writer.append(v.EngineDied("w0", 1, "killed"))
        writer.append(v.EngineStarted("w0", 2, 5001, 2))
        kinds = [e["event"]["type"] for e in await following]
        assert kinds == ["engine_died", "engine_started"]


async def test_an_interrupted_follower_continues_after_what_it_has_seen():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        for step in range(1, 11):
            writer.append(
                v.EngineStep(
                    incarnation=1,
                    step=step,
                    duration_us=5,
                    batch=1,
                    sum_context=1,
                    prefill_tokens=0,
                    waiting=0,
                    kv_used=1,
                )
            )
        await scene.until(lambda: scene.replica.fleet.workers["w0"].step == 10)
        first = await follow(scene, "type=engine_step&from=0", 4)
        rest = await follow(scene, "type=engine_step", 6, first[-1]["id"])
        assert [e["event"]["step"] for e in first + rest] == list(range(1, 11))


async def test_following_from_before_the_memory_reads_the_log():
    log = MemoryLog()
    async with Scene(log, name="r1") as first:
        await first.worker("w0")
        await first.serve_request("old")
    async with Scene(log, name="r2", lead=False) as scene:
        found = await follow(scene, "type=request_ended&from=1", 1)
        assert found[0]["event"]["request"] == "old"


async def test_the_server_stops_at_once_with_followers_attached():
    async with Scene() as scene:
        following = asyncio.create_task(follow(scene, "type=engine_died", 1))
        await attached(scene)
        async with asyncio.timeout(2):
            await scene.admin.__aexit__(None, None, None)
            assert await following == []


async def test_memory_is_bounded_and_what_it_lost_comes_from_the_log():
    log, fleet = MemoryLog(), Fleet()
    history = History(OlderLog(log), 0, capacity=50)
    async with log.writer("w.w0") as writer:
        for step in range(1, 301):
            writer.append(
                v.EngineStep(
                    incarnation=1,
                    step=step,
                    duration_us=5,
                    batch=1,
                    sum_context=1,
                    prefill_tokens=0,
                    waiting=0,
                    kv_used=1,
                ),
                v.EngineStep(
                    incarnation=1,
                    step=step,
                    duration_us=0,
                    batch=1,
                    sum_context=1,
                    prefill_tokens=0,
                    waiting=0,
                    kv_used=1,
                ),
            )
        for group in await log.read():
            apply_group(fleet, group, history.seen)
            history.folded(group)
        assert len(history._entries) <= 100
        cursor, seen = (0, 1 << 62), []
        while cursor < history.end:
            entries, cursor = await history.after(cursor, 33)
            seen += [(e.revision, e.index) for e in entries]
        assert len(seen) == len(set(seen)) == 600 and seen == sorted(seen)
        assert [e.event.step for e in history.last(3, lambda e: True)] == [299, 300, 300]


async def test_what_was_trimmed_from_the_log_comes_from_the_archive(tmp_path):
    log = MemoryLog()
    async with Scene(log, name="r1") as first:
        await first.worker("w0")
        await first.serve_request("old")
    cut = log.revision
    kept = Archive(tmp_path / "log-1", "log-1")
    file = kept.begin("test")
    file.add(log.groups)
    file.seal(cut)
    async with Scene(log, name="r2", lead=False, archive_dir=str(tmp_path)) as scene:
        await scene.worker("w1")
        log.trim(cut)
        _, page = await scene.call("events?from=1&type=request_ended,engine_ready")
        kinds = [e["event"]["type"] for e in page["events"]]
        assert kinds == ["engine_ready", "request_ended", "engine_ready"] and page["complete"]
        status, detail = await scene.call("requests/old")
        assert status == 200 and detail["request"]["state"] == "completed"


async def test_what_was_trimmed_and_not_archived_is_gone_and_said_so():
    async with Scene(lead=False) as scene:
        await scene.worker("w0")
        scene.log.trim(scene.log.revision)
        scene.admin.history.restart(scene.log.revision)
        status, answer = await scene.call("events?from=2")
        assert status == 410 and answer["error"]["code"] == "trimmed"


async def test_a_fold_taken_from_a_snapshot_leaves_no_gap_in_the_memory():
    log = MemoryLog()
    async with Scene(log, lead=False) as scene:
        await scene.worker("w0")
        history = scene.admin.history
        history.restart(history.revision + 5)
        assert history.last(10, lambda e: True) == []
        assert history.begins == history.revision + 1


async def test_events_are_shown_in_plain_words_if_the_caller_wants_them():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        writer.append(v.EngineDied("w0", 1, "killed"))
        await scene.until(lambda: scene.replica.fleet.workers["w0"].deaths)
        _, page = await scene.call("events?type=engine_died&text=1")
        assert [e["text"] for e in page["events"]] == ["the engine w0:1 died (killed)"]
        _, page = await scene.call("events?type=engine_died&text=1&from=1")
        assert [e["text"] for e in page["events"]] == ["the engine w0:1 died (killed)"]
        _, page = await scene.call("events?type=engine_died")
        assert [e["text"] for e in page["events"]] == [""]
