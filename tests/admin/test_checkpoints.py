"""Who holds what, as the admin API and the metrics tell it."""

from __future__ import annotations

from relume.controlplane.admin.checkpoints_api import balance_percent
from relume.controlplane.stream.arrival import Arrival
from relume.events import vocabulary as v
from tests.admin.scene import ADMIN, Scene
from tests.admin.test_metrics import samples
from tests.admin.test_openapi import mismatches


async def checkpointed(scene: Scene) -> str:
    """Two workers that take part, and a request of w0 or w1 of which the other has 32 tokens;
    the holder's name."""
    for name in ("w0", "w1"):
        writer = await scene.worker(name)
        ready = v.EngineReady(
            worker=name,
            incarnation=1,
            host="127.0.0.1",
            port=9,
            model="tiny",
            max_model_len=2048,
            block_size=16,
            kv_blocks=100,
            family="f",
            block_bytes=1000,
        )
        started = v.StateDaemonStarted(
            worker=name,
            boot="b1",
            epoch=1,
            address=f"tcp://{name}:1",
            budget_bytes=1 << 20,
            family="f",
        )
        writer.append(ready, started)
    fleet, scheduler = scene.replica.fleet, scene.replica.scheduler
    await scene.until(lambda: len(fleet.holders) == 2 and fleet.workers["w1"].block_bytes)
    scheduler.arrived(
        Arrival(
            request="q",
            model="tiny",
            route="completions",
            stream=True,
            prompt_tokens=40,
            max_tokens=16,
            verdict="exact",
            priority=5,
        )
    )
    given = scheduler.assign("q", "arrival", 0)
    assert given.priority == 5
    holder = "w1" if given.worker == "w0" else "w0"
    assert given.checkpoint == (f"tcp://{holder}:1",) and given.restore == ()
    step = v.EngineStep(
        incarnation=1,
        step=1,
        duration_us=9,
        batch=1,
        sum_context=40,
        prefill_tokens=0,
        waiting=0,
        kv_used=3,
        changes=(v.RequestQueued("q", 1, 40), v.KvBlocksFilled("q", 1, 3)),
    )
    scene.worker_writers[given.worker].append(step)
    held = v.CheckpointAcknowledged(
        holder=holder, boot="b1", request="q", child=0, attempt=1, blocks=2, tokens=32, bytes=2000
    )
    scene.worker_writers[holder].append(held)
    await scene.until(lambda: fleet.placed and fleet.holders[holder].covered)
    await scene.until(lambda: fleet.workers[given.worker].step == 1)
    return holder


async def test_holders_and_the_coverage_of_each_request_are_shown():
    async with Scene() as scene:
        holder = await checkpointed(scene)
        status, told = await scene.call("checkpoints")
        assert status == 200
        (request,) = told["requests"]
        assert (request["request"], request["holders"]) == ("q", [holder])
        assert (request["covered"], request["kv_tokens"]) == ({holder: 32}, 48)
        found = {h["worker"]: h for h in told["holders"]}
        assert found[holder]["held_bytes"] == 2000 and found[holder]["placed_blocks"] == 4
        assert found[holder]["promised_bytes"] == 2000, "of four blocks two are there"
        assert found[holder]["load"] == 4
        assert told["balance_percent"] == 100, "a request weighs as much as four blocks"
        assert (told["placement"], told["recovery"], told["wanted"]) == (
            "load_aware",
            "least_total",
            1,
        )
        _, none = await scene.call("checkpoints?request=other")
        assert none["requests"] == [] and len(none["holders"]) == 2
        _, document = await scene.call("openapi.json")
        schema = document["components"]["schemas"]["CheckpointList"]
        assert mismatches(document, schema, told) == []


async def test_a_policy_changed_at_run_time_counts_from_the_next_dispatch_on():
    async with Scene() as scene:
        await checkpointed(scene)
        wrong = {"key": "checkpoints.placement", "value": "best"}
        status, refused = await scene.call("config", "PUT", ADMIN, json=wrong)
        assert status == 400 and "load_aware, neighbour, none" in refused["error"]["message"]
        right = {"key": "checkpoints.placement", "value": "none"}
        status, _ = await scene.call("config", "PUT", ADMIN, json=right)
        assert status in (200, 202)
        await scene.until(lambda: scene.replica.fleet.config.get("checkpoints.placement"))
        scheduler = scene.replica.scheduler
        scheduler.arrived(
            Arrival(
                request="q2",
                model="tiny",
                route="completions",
                stream=True,
                prompt_tokens=40,
                max_tokens=16,
                verdict="exact",
            )
        )
        assert scheduler.assign("q2", "arrival", 0).checkpoint == ()


async def test_a_lost_engine_sends_its_request_on_with_its_blocks():
    async with Scene() as scene:
        holder = await checkpointed(scene)
        scheduler = scene.replica.scheduler
        scheduler.observed("q", 1, "reset", 3)
        again = scheduler.assign("q", "reset", 3)
        assert again.worker == holder, "the blocks are there"
        assert again.restore == (f"tcp://{holder}:1",)
        assert again.priority == 5
        other = "w1" if holder == "w0" else "w0"
        assert again.checkpoint == (f"tcp://{other}:1",), "a new holder at once"


async def test_balance_and_what_is_computed_again_are_metrics():
    async with Scene() as scene:
        holder = await checkpointed(scene)
        scheduler = scene.replica.scheduler
        scheduler.observed("q", 1, "reset", 3)
        scheduler.assign("q", "reset", 3)
        changes = (v.RequestQueued("q", 2, 43), v.RequestAdmitted("q", 2, 32, 3))
        scene.worker_writers[holder].append(
            v.EngineStep(
                incarnation=1,
                step=1,
                duration_us=9,
                batch=1,
                sum_context=40,
                prefill_tokens=0,
                waiting=0,
                kv_used=3,
                changes=changes,
            )
        )
        await scene.until(lambda: scene.replica.fleet.workers[holder].recomputed_tokens)
        found = await samples(scene)
        assert found["relume_recomputed_tokens_total", ("worker", holder)] == 11
        assert found["relume_checkpoint_balance_ratio",] >= 1
        assert found["relume_decisions_total", ("kind", "holder")] == 2
        assert found["relume_decisions_total", ("kind", "plan")] == 1


async def test_a_draining_holder_does_not_unbalance():
    async with Scene() as scene:
        holder = await checkpointed(scene)
        replica = scene.replica
        writer = await scene.worker("w2")
        ready = v.EngineReady(
            worker="w2",
            incarnation=1,
            host="h",
            port=9,
            model="tiny",
            max_model_len=64,
            block_size=16,
            kv_blocks=9,
            family="f",
            block_bytes=9,
        )
        writer.append(
            ready,
            v.StateDaemonStarted(
                worker="w2",
                boot="b1",
                epoch=1,
                address="tcp://w2:1",
                budget_bytes=1 << 20,
                family="f",
            ),
        )
        await scene.until(lambda: len(replica.fleet.holders) == 3)
        assert balance_percent(replica.view) == 400, "w2 has nothing"
        replica.fleet.workers["w2"].draining = True
        assert balance_percent(replica.view) == 100, holder


async def test_without_checkpoints_nothing_is_said_of_any():
    async with Scene() as scene:
        await scene.worker("w0")
        scheduler = scene.replica.scheduler
        scheduler.arrived(
            Arrival(
                request="q",
                model="tiny",
                route="completions",
                stream=True,
                prompt_tokens=40,
                max_tokens=16,
                verdict="exact",
            )
        )
        given = scheduler.assign("q", "arrival", 0)
        assert (given.checkpoint, given.restore) == ((), ())
        status, told = await scene.call("checkpoints")
        assert status == 200 and told["requests"] == told["holders"] == []
