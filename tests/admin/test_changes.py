"""Every change is in the log with its principal, and resent it changes nothing more (I16)."""

from __future__ import annotations

import asyncio

from relume.events import vocabulary as v
from relume.events.log.codec import decode
from tests.admin.scene import ADMIN, OPERATOR, Scene

KEY = {"Idempotency-Key": "k-1"}


def logged(scene: Scene, kind: type) -> list:
    """All events of a kind in the log."""
    return [
        event
        for group in scene.log.groups
        for segment in group.segments
        for event in map(decode, segment.records)
        if type(event) is kind
    ]


async def test_drain_is_decided_by_the_leader_and_names_its_principal():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        status, answer = await scene.call("workers/w0/drain", "POST", OPERATOR)
        assert status == 200 and answer["state"] == "decided" and answer["principal"] == "olga"
        assert scene.replica.fleet.workers["w0"].draining
        (commanded,) = logged(scene, v.AdminCommanded)
        assert (commanded.principal, commanded.command, commanded.target) == ("olga", "drain", "w0")
        _, worker = await scene.call("workers/w0")
        assert worker["state"] == "drained"
        await scene.call("workers/w0/undrain", "POST", OPERATOR)
        assert not scene.replica.fleet.workers["w0"].draining


async def test_a_drain_that_leaves_too_few_workers_is_a_conflict_with_its_code():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1", model="other")
        status, answer = await scene.call("workers/w0/drain", "POST")
        assert (status, answer["error"]["code"]) == (409, "too_few_workers")
        assert "force" in answer["error"]["message"]
        status, _ = await scene.call("workers/w0/drain", "POST", json={"force": True})
        assert status == 200 and scene.replica.fleet.workers["w0"].draining
        for wrong in ({"forced": True}, {"deadline_s": -1}, {"reason": "x" * 201}, []):
            status, answer = await scene.call("workers/w0/drain", "POST", json=wrong)
            assert (status, answer["error"]["code"]) == (400, "bad_request")


async def test_the_log_has_reason_and_deadline_of_a_drain():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        order = {"reason": "new driver", "deadline_s": 0.5}
        await scene.call("workers/w0/drain", "POST", OPERATOR, headers=KEY, json=order)
        (commanded,) = logged(scene, v.AdminCommanded)
        assert (commanded.reason, commanded.deadline_ticks) == ("new driver", 3)
        assert not commanded.force
        status, answer = await scene.call("workers/w0/drain", "POST", OPERATOR, headers=KEY)
        assert status == 409 and answer["error"]["param"] == "Idempotency-Key"


async def test_a_resent_change_gets_the_same_answer_and_happens_once():
    async with Scene() as scene:
        await scene.worker("w0")
        first = await scene.call("workers/w0/restart", "POST", headers=KEY)
        again = await scene.call("workers/w0/restart", "POST", headers=KEY)
        assert first == again and first[0] == 200
        assert len(logged(scene, v.AdminCommanded)) == 1
        assert len(logged(scene, v.EffectsDecided)) == 1
        other = await scene.call("workers/w0/restart", "POST", OPERATOR, headers=KEY)
        assert other[0] == 200 and other[1]["command_id"] != first[1]["command_id"]


async def test_the_same_key_at_once_happens_once():
    async with Scene() as scene:
        await scene.worker("w0")
        answers = await asyncio.gather(
            *(scene.call("workers/w0/drain", "POST", headers=KEY) for _ in range(8))
        )
        assert all(answer == answers[0] for answer in answers)
        assert len(logged(scene, v.AdminCommanded)) == 1


async def test_a_key_used_for_another_change_is_a_conflict():
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        await scene.call("workers/w0/drain", "POST", headers=KEY)
        status, answer = await scene.call("workers/w0/undrain", "POST", headers=KEY)
        assert status == 409 and answer["error"]["param"] == "Idempotency-Key"
        assert scene.replica.fleet.workers["w0"].draining
        status, _ = await scene.call(
            "workers/w0/drain", "POST", headers={"Idempotency-Key": "a b\tc"}
        )
        assert status == 400


async def test_a_resent_change_is_known_to_another_replica_that_started_later():
    async with Scene(name="r1") as first:
        await first.worker("w0")
        await first.worker("w1")
        before = await first.call("workers/w0/drain", "POST", headers=KEY)
        async with Scene(first.log, name="r2", lead=False) as second:
            again = await second.call("workers/w0/drain", "POST", headers=KEY)
            assert again == before
            assert len(logged(first, v.AdminCommanded)) == 1
            status, detail = await second.call(f"commands/{before[1]['command_id']}")
            assert status == 200 and detail["command"] == before[1]


async def test_without_a_leader_a_change_is_accepted_and_carried_out_later():
    async with Scene(lead=False) as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        scene.admin.commands._wait_s = 0.05
        status, answer = await scene.call("workers/w0/drain", "POST", headers=KEY)
        assert status == 202 and answer["state"] == "accepted"
        assert not scene.replica.fleet.workers["w0"].draining
        async with Scene(scene.log, name="r1"):
            await scene.until(lambda: scene.replica.fleet.workers["w0"].draining)
        again = await scene.call("workers/w0/drain", "POST", headers=KEY)
        assert again[0] == 200 and again[1]["state"] == "decided"
        assert len(logged(scene, v.AdminCommanded)) == 1


async def test_no_change_is_accepted_while_the_log_takes_no_events():
    """It would be carried out when etcd is back, whenever that is."""
    async with Scene() as scene:
        await scene.worker("w0")
        await scene.worker("w1")
        before = await scene.call("workers/w0/drain", "POST", headers=KEY)
        scene.log.pause()
        for path, method, more in (
            ("workers/w1/restart", "POST", {}),
            ("config", "PUT", {"json": {"key": "stall.factor", "value": 9}}),
            ("leader/resign", "POST", {}),
        ):
            status, answer = await scene.call(path, method, **more)
            assert (status, answer["error"]["code"]) == (503, "log_unavailable")
            assert "nothing was changed" in answer["error"]["message"]
        assert await scene.call("workers/w0/drain", "POST", headers=KEY) == before, "it is known"
        scene.log.resume()
        status, _ = await scene.call("workers/w1/restart", "POST")
        assert status == 200
        assert [c.command for c in logged(scene, v.AdminCommanded)] == ["drain", "restart"]


async def test_the_effects_of_a_command_are_shown_when_the_agent_applied_them():
    async with Scene() as scene:
        writer = await scene.worker("w0")
        _, answer = await scene.call("workers/w0/hold", "POST")
        path = f"commands/{answer['command_id']}"
        _, detail = await scene.call(path)
        assert [e["outcome"] for e in detail["effects"]] == ["pending"]
        writer.append(v.EffectApplied(answer["command_id"], 0))
        await scene.until(lambda: not scene.replica.fleet.pending_effects)
        _, detail = await scene.call(path)
        assert [e["outcome"] for e in detail["effects"]] == ["applied"]
        assert (await scene.call("commands/admin:none"))[0] == 404


async def test_settings_are_checked_changed_and_logged():
    async with Scene() as scene:
        _, before = await scene.call("config")
        assert {s["key"] for s in before["settings"]} >= {"stall.cap_us", "stall.factor"}
        assert before["serve"]["admin_tokens"] == "<3 set>"
        for bad in (
            {"key": "nope", "value": "1"},
            {"key": "stall.cap_us", "value": "-4"},
            {"k": 1},
        ):
            assert (await scene.call("config", "PUT", ADMIN, json=bad))[0] == 400
        status, answer = await scene.call(
            "config", "PUT", ADMIN, json={"key": "stall.cap_us", "value": 5000000}
        )
        assert status == 200 and answer["principal"] == "ada"
        _, after = await scene.call("config")
        (cap,) = [s for s in after["settings"] if s["key"] == "stall.cap_us"]
        assert cap["value"] == "5000000" and cap["changed"] is True
