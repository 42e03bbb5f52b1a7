"""`relume rollout`, and the admin API under it."""

from __future__ import annotations

import json

from relume.events import vocabulary as v
from tests.admin.scene import OPERATOR, Scene
from tests.admin.test_changes import KEY, logged

PATH = "rollout"


async def test_a_rollout_is_a_command_with_its_principal_and_happens_once():
    async with Scene() as scene:
        for name in ("w0", "w1"):
            await scene.worker(name)
        _, answer = await scene.call(PATH)
        assert (answer["rollout"], answer["active"]) == ("", False)
        for _ in range(2):
            body = {"model": "tiny", "deadline_s": 30}
            status, answer = await scene.call(PATH, "POST", OPERATOR, headers=KEY, json=body)
            assert (status, answer["state"], answer["principal"]) == (200, "decided", "olga")
        (commanded,) = logged(scene, v.AdminCommanded)
        assert (commanded.command, commanded.target) == ("rollout", "tiny")
        assert commanded.deadline_ticks * scene.replica.config.tick_s >= 30
        _, shown = await scene.call(PATH)
        assert shown["active"] and shown["todo"] + shown["workers"] == ["w0", "w1"]
        assert shown["principal"] == "olga"
        status, answer = await scene.call(PATH, "POST", json={"model": "tiny"})
        assert status == 409 and "goes on" in answer["error"]["message"]
        status, _ = await scene.call(f"{PATH}/cancel", "POST")
        _, shown = await scene.call(PATH)
        assert status == 200 and not shown["active"] and shown["stage"] == "cancelled"
        status, answer = await scene.call(f"{PATH}/cancel", "POST")
        assert status == 409 and "no rolling restart goes on" in answer["error"]["message"]


async def test_bad_input_gets_a_clear_error():
    async with Scene() as scene:
        await scene.worker("w0")
        for wrong in (
            {},
            {"model": 1},
            {"model": "tiny", "deadline_s": -1},
            {"models": "tiny"},
            [],
        ):
            status, answer = await scene.call(PATH, "POST", json=wrong)
            assert (status, answer["error"]["code"]) == (400, "bad_request"), wrong
        status, answer = await scene.call(PATH, "POST", json={"model": "other"})
        assert status == 409 and "no worker of model 'other'" in answer["error"]["message"]


async def test_the_command_finds_the_model_and_shows_how_far_it_is(relume):
    async with Scene() as scene:
        await scene.worker("w0")
        code, out, _ = await relume(scene, "rollout", "status")
        assert code == 0 and "no rolling restart yet" in out
        await scene.worker("w1", model="other")
        code, _, err = await relume(scene, "rollout", "restart")
        assert code == 1 and "--model" in err and "other, tiny" in err
        code, out, _ = await relume(scene, "rollout", "restart", "--model", "tiny")
        assert code == 0 and "rolling restart of tiny: begun; to come w0" in out
        code, out, _ = await relume(scene, "rollout", "status", "--json")
        assert json.loads(out)["active"]
        code, out, _ = await relume(scene, "rollout", "status", "--wait", "0.2")
        assert code == 1, "it goes on"
        code, out, _ = await relume(scene, "rollout", "cancel")
        assert code == 0 and "cancelled" in out
        code, out, _ = await relume(scene, "events", "--type", "rollout_decided")
        assert code == 0 and out.count("rollout=") == 2


async def test_workers_are_shown_to_leave_for_it(relume):
    async with Scene() as scene:
        for name in ("w0", "w1"):
            await scene.worker(name)
        await relume(scene, "rollout", "restart", "--deadline", "30")
        await scene.until(lambda: scene.replica.fleet.workers["w0"].drains)
        code, out, _ = await relume(scene, "workers")
        assert code == 0 and "rolling restart: requests leave; deadline in " in out
        _, answer = await scene.call("workers/w0")
        assert answer["rolling"] and not answer["draining"] and 0 < answer["drain_ticks_left"]
