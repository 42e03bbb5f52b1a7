"""Logs of a running control plane replay to the same decisions."""

from __future__ import annotations

import asyncio

import pytest

from relume.controlplane.replay.divergence import Verdict
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.codec import decode
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet, dump
from relume.policies.state.fold import apply_group
from tests.replay.scene import Scene


async def eventful_log(
    seed: int, requests: int = 120, workers: int = 3, policy: str = "least_load"
) -> list[RevisionGroup]:
    """Deaths, restarts, suspicion, outages, a vanished host, a killed leader."""
    async with Scene(seed, workers=workers, policy=policy) as scene:
        rng = scene.rng
        traffic = asyncio.create_task(scene.traffic(requests))
        await scene.until(lambda: traffic.done() or scene.running_covered("w0"), 20.0)
        scene.workers["w0"].die()
        await asyncio.sleep(0.01)
        scene.workers["w2"].kill_daemon()
        await asyncio.sleep(0.01)
        scene.log.pause()
        await asyncio.sleep(0.01)
        scene.workers["w1"].die()
        scene.workers["w1"].start()
        await asyncio.sleep(0.01)
        scene.log.resume()
        scene.workers["w0"].start()
        scheduler = scene.replicas["r0"].scheduler
        scheduler.emit(v.WorkerSuspected("w2", scene.workers["w2"].incarnation, "played"))
        scene.workers["w2"].start_daemon()
        await scene.traffic(10, "suspected")
        scheduler.emit(v.WorkerCleared("w2", scene.workers["w2"].incarnation, "played"))
        await traffic
        scene.workers["w2"].vanish()
        await scene.traffic(20, "late")
        await scene.workers["w2"].register()
        scene.workers["w2"].start()
        again = asyncio.create_task(scene.traffic(100, "again"))
        leader = next(n for n, r in scene.replicas.items() if r.leadership.leading)
        await asyncio.sleep(rng.random() * 0.02)
        await scene.kill_replica(leader)
        await again
        await scene.settled()
        await scene.start_replica(leader)
        await scene.traffic(20, "last")
        await scene.settled()
    return scene.log.groups


def assert_same(verdict: Verdict, seed: int) -> None:
    assert verdict.divergences == [], f"seed {seed}: {verdict.divergences[:2]}"
    assert verdict.ok


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_eventful_log_replays_without_divergence(seed: int) -> None:
    groups = await eventful_log(seed)
    verdict = verify(groups)
    assert_same(verdict, seed)
    assert verdict.contested > 100
    assert verdict.holders > 100 and verdict.plans > 0
    assert verdict.hashes > 4
    assert verdict.answers > 0, "the killed replica's orphans were ended by the leader"
    assert verdict.skipped == 0


async def test_replay_from_any_snapshot_gives_the_same() -> None:
    groups = await eventful_log(4)
    whole = verify(groups)
    assert_same(whole, 4)
    fleet = Fleet()
    cuts = {len(groups) // 4, len(groups) // 2, len(groups) * 3 // 4}
    for index, group in enumerate(groups):
        apply_group(fleet, group)
        if index in cuts:
            rest = verify(groups[index + 1 :], fleet)
            assert_same(rest, 4)
            assert rest.decisions + rest.skipped < whole.decisions
            assert rest.skipped <= 2 * 24, "two for each request under way"
            assert rest.revision == whole.revision


async def test_every_request_ends_once() -> None:
    groups = await eventful_log(5)
    ends: dict[str, int] = {}
    arrived: set[str] = set()
    for group in groups:
        for segment in group.segments:
            for record in segment.records:
                event = decode(record)
                if isinstance(event, v.RequestArrived):
                    arrived.add(event.request)
                elif isinstance(event, v.RequestEnded):
                    ends[event.request] = ends.get(event.request, 0) + 1
    assert set(ends) == arrived
    assert set(ends.values()) == {1}


async def test_after_the_drain_no_account_holds_anything() -> None:
    async with Scene(6) as scene:
        await scene.traffic(150)
        await scene.settled()
        for replica in scene.replicas.values():
            for worker in replica.fleet.workers.values():
                assert (worker.prefill_left, worker.attempts) == (0, {})
                assert replica.view.load(worker) == (0, 0)
            assert replica.fleet.requests == {}
            assert replica.scheduler.live == {}


async def test_outage_does_not_stop_decisions_and_they_replay() -> None:
    """The whole run decides on the overlay: nothing lands until the end."""
    async with Scene(7) as scene:
        await scene.traffic(10, "before")
        scene.log.pause()
        await scene.traffic(60, "during")
        scene.log.resume()
        await scene.settled()
    verdict = verify(scene.log.groups)
    assert_same(verdict, 7)
    bases = {
        e.basis.revision
        for g in scene.log.groups
        for s in g.segments
        if s.stream.startswith("r.")
        for e in map(decode, s.records)
        if isinstance(e, v.RouteDecided) and e.request.startswith("during")
    }
    assert len(bases) <= 2, "all on what was known when the log went away"


@pytest.mark.full
@pytest.mark.parametrize("seed", [11, 12, 13])
async def test_death_and_restart_in_one_segment_replay(seed: int) -> None:
    """Streams are dispatched anew on the whole group, which their basis names, not in the
    middle of it: there the engine is dead, at its end it is starting."""
    async with Scene(seed) as scene:
        traffic = asyncio.create_task(scene.traffic(80))
        for name in ("w0", "w1", "w2"):
            worker = scene.workers[name]
            await scene.until(lambda worker=worker: worker._running)
            worker.restart()
        await traffic
        await scene.settled()
        broken = {at for clients in scene.clients.values() for at in clients.broken}
        moved = sum(clients.moved for clients in scene.clients.values())
    assert broken == {("w0", 1), ("w1", 1), ("w2", 1)}
    assert moved > 0
    assert_same(verify(scene.log.groups), seed)


async def test_both_replicas_fold_the_same_state() -> None:
    async with Scene(8) as scene:
        await scene.traffic(60)
        await scene.settled()
        scene.log.pause()
        folds = [r.fleet for r in scene.replicas.values()]
        await scene.until(lambda: all(f.revision == scene.log.revision for f in folds))
        assert len(folds) == 2
        assert dump(folds[0]) == dump(folds[1])


async def test_log_without_competing_candidates_proves_nothing() -> None:
    async with Scene(9, workers=1, replicas=1) as scene:
        await scene.traffic(20)
        await scene.settled()
    verdict = verify(scene.log.groups)
    assert verdict.divergences == []
    assert verdict.decisions >= 20
    assert verdict.contested == 0
    assert not verdict.ok


def test_empty_log_is_not_ok() -> None:
    assert not verify([]).ok
