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

from relume.controlplane.local_fleet import FleetOptions
from relume.events import vocabulary as v
from tests.live.conftest import MODEL, Scene, same, scene_of, whole

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
    prompt = " ".join(f"word {number} of many" for number in range(60))
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    asked = []
    async with aiohttp.ClientSession() as session:
        for number in range(4):
            headers = {"x-request-id": f"again-{number}"}
            url = f"{scene.url}/v1/completions"
            async with session.post(url, json=body, headers=headers) as answer:
                asked.append((await answer.json())["usage"]["prompt_tokens"])
            await scene.until_told(v.PrefixBlocksChanged)
    deadline = time.monotonic() + 30
    while True:
        events = await scene.events()
        arrived = {e.client_id: e for e in events if type(e) is v.RequestArrived}
        sent = {e.request: e for e in events if type(e) is v.RouteDecided}
        if len(arrived.keys() & {f"again-{n}" for n in range(4)}) == 4 and len(sent) >= 4:
            break
        assert time.monotonic() < deadline, arrived
        await asyncio.sleep(0.05)
    first, *again = (arrived[f"again-{number}"] for number in range(4))
    assert not first.estimated and first.prompt_tokens == asked[0] > 300
    place = sent[first.request].worker
    for one in again:
        decision = sent[one.request]
        assert decision.worker == place
        held = {c.worker: c.hit_tokens for c in decision.candidates}
        assert (
            decision.cached_tokens
            == held[place]
            > 300
            > max(tokens for worker, tokens in held.items() if worker != place)
        )


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
    assert any(len(made) > 1 for made in (await scene.routes(hit)).values())
    await scene.until_ready(name, victim["incarnation"] + 1)


async def _unknown_model(scene: Scene) -> None:
    """404 in OpenAI's shape at once; no worker hears of it, none is thought worse of."""
    before = {w["name"]: w["requests"] for w in await scene.fleet.workers()}
    async with openai.AsyncOpenAI(
        base_url=f"{scene.url}/v1", api_key="-", max_retries=0, timeout=5
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
    deadline = time.monotonic() + 10
    unknown: set[str] = set()
    while not unknown:
        assert time.monotonic() < deadline, "the arrival is not in the log"
        events = await scene.events()
        unknown = {e.request for e in events if type(e) is v.RequestArrived and e.model == "huge"}
    assert not [e for e in events if type(e) is v.RouteDecided and e.request in unknown]
    ends = [e for e in events if type(e) is v.RequestEnded and e.request in unknown]
    assert {(e.outcome, e.status) for e in ends} == {("rejected", 404)}
