"""Two models in one fleet: requests and failovers stay within their model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import msgspec
import openai
import pytest

from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.events.wire.prefix import blocks_at, unpack
from tests.live.conftest import HANG_S, MODEL, Scene, same, scene_of, whole
from tests.suite.outcomes import inconclusive

MAKER = Path(__file__).parents[2] / "deploy/dev/make_model.py"
HOLDERS = {"tiny": {"w0", "w2"}, "small": {"w1", "w3"}}


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A second model, of another shape."""
    path = tmp_path_factory.mktemp("models") / "small"
    command = [sys.executable, str(MAKER), "--size", "draft", "--out", str(path)]
    subprocess.run(command, check=True)
    return str(path)


async def test_each_model_is_served_by_its_own_workers(
    options: FleetOptions, small_model: str
) -> None:
    models = (f"{MODEL}=tiny", f"{small_model}=small")
    options = msgspec.structs.replace(options, workers=4, models=models, tokenizer=True)
    async with scene_of(options) as scene:
        await _both_are_listed(scene)
        await _goes_where_its_prefix_is(scene)
        calm = {m: await scene.streams(8, 200, f"calm-{m}", model=m) for m in HOLDERS}
        tiny, small = (list(calm[m].values()) for m in ("tiny", "small"))
        assert not whole(calm["tiny"]) and not whole(calm["small"])
        assert [s.text for s in tiny] != [s.text for s in small]
        await _stays_within(scene, "tiny", calm["tiny"])
        for model, victim in (("tiny", "w2"), ("small", "w1")):
            await _killed(scene, model, victim, calm[model])
        await _unknown_model(scene)
        await scene.sound()


async def _both_are_listed(scene: Scene) -> None:
    async with openai.AsyncOpenAI(base_url=f"{scene.url}/v1", api_key="-") as client:
        assert [m.id async for m in client.models.list()] == ["small", "tiny"]
        assert (await client.models.retrieve("small")).id == "small"


async def _goes_where_its_prefix_is(scene: Scene) -> None:
    """Prompts are counted by their model's tokenizer, and the same one again goes to the worker
    that holds it, though an idle fleet is used in turn."""
    prompt = " ".join(f"word {number} of many" for number in range(250))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    asked, sent = [], []
    async with aiohttp.ClientSession() as session:
        for number in range(4):
            name = f"again-{number}"
            url = f"{scene.url}/v1/completions"
            async with session.post(url, json=body, headers={"x-request-id": name}) as answer:
                asked.append((await answer.json())["usage"]["prompt_tokens"])
            sent.append(await _folded(scene, name))
    events = await scene.events()
    first = next(e for e in events if type(e) is v.RequestArrived and e.client_id == "again-0")
    assert not first.estimated and first.prompt_tokens == asked[0] > 1200
    place = sent[0].worker
    for decision in sent[1:]:
        hits = {c.worker: c.hit_tokens for c in decision.candidates}
        first_us = {c.worker: c.ttft_us for c in decision.candidates if not c.excluded}
        held = hits.pop(place)
        assert held > 1000 > max(hits.values())
        if first_us[place] > min(first_us.values()):
            inconclusive(f"{place} is slower with the prefix than others without: {first_us}")
        assert decision.worker == place
        assert decision.cached_tokens == held


async def _folded(scene: Scene, name: str) -> v.RouteDecided:
    """Wait until the replica knows that request `name` has ended and that its worker holds its
    prompt; how it was routed."""
    deadline = time.monotonic() + HANG_S
    while True:
        fleet, made = await scene.fold(), (await scene.routes([name]))[name]
        known = await scene.fleet.admin("checkpoints")
        if made and name in await scene.ended() and known["revision"] >= fleet.revision:
            worker = fleet.workers[made[0].worker]
            held = sum(mark in worker.cached.marks for mark in unpack(made[0].prefix))
            if blocks_at(held) * worker.cached.block_tokens > 1000 and not worker.attempts:
                return made[0]
        assert time.monotonic() < deadline, (name, made)
        await asyncio.sleep(0.05)


async def _stays_within(scene: Scene, model: str, streams: dict) -> None:
    used = {d.worker for made in (await scene.routes(streams)).values() for d in made}
    assert used <= HOLDERS[model], used


async def _killed(scene: Scene, model: str, name: str, calm: dict) -> None:
    """One of the model's two workers dies: its streams go on on the other one."""
    victim = await scene.worker(name)

    async def kill(streams: dict) -> None:
        await scene.paced(streams, 12, name, victim["engine_pid"])
        os.kill(victim["engine_pid"], signal.SIGKILL)

    hit = await scene.streams(8, 200, f"{model}-killed", kill, model=model)
    assert not whole(hit)
    assert same(calm, hit) == []
    await _stays_within(scene, model, hit)
    if not any(len(made) > 1 for made in (await scene.routes(hit)).values()):
        inconclusive(f"all streams on {name} had ended before the kill")
    await scene.until_ready(name, victim["incarnation"] + 1)


async def _unknown_model(scene: Scene) -> None:
    """404 in OpenAI's shape at once; no worker hears of it, none is thought worse of."""
    before = {w["name"]: w["requests"] for w in await scene.fleet.workers()}
    async with openai.AsyncOpenAI(
        base_url=f"{scene.url}/v1", api_key="-", max_retries=0, timeout=HANG_S
    ) as client:
        for name in ("huge", "Tiny", "tiny/../small"):
            with pytest.raises(openai.NotFoundError) as refused:
                await client.completions.create(model=name, prompt="a", max_tokens=2)
            assert refused.value.code == "model_not_found"
            assert name in refused.value.message
        with pytest.raises(openai.BadRequestError):  # two models: one must be named
            await client.completions.create(model="", prompt="a", max_tokens=2)
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "a", "max_tokens": 2}
        async with session.post(f"{scene.url}/v1/completions", json=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "model"
    assert {w["name"]: w["requests"] for w in await scene.fleet.workers()} == before
    deadline = time.monotonic() + HANG_S
    unknown: set[str] = set()
    while not unknown:
        assert time.monotonic() < deadline, "the arrival is not in the log"
        events = await scene.events()
        unknown = {e.request for e in events if type(e) is v.RequestArrived and e.model == "huge"}
    assert not [e for e in events if type(e) is v.RouteDecided and e.request in unknown]
    ends = [e for e in events if type(e) is v.RequestEnded and e.request in unknown]
    assert {(e.outcome, e.status) for e in ends} == {("rejected", 404)}
