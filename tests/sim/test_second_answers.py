"""A simulated engine answers a finished request again, over the network, as a real one does."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec
import pytest

from relume.chaos.sim.canary_answers import first_wrong
from relume.chaos.sim.gateway.answer_bytes import WRONG, tokens_of
from relume.chaos.sim.gateway.request_body import RequestBody, encode
from relume.chaos.sim.world.http_transport import Session
from relume.events.wire.worker_calls import CROSS_CHECK_PATH, CrossCheckAnswered, CrossCheckRequest
from tests.sim.test_worker import Bench

TOKENS = 60


async def ask(bench: Bench, content_id: str, incarnation: int = 1, total_s: float = 30.0) -> Any:
    """A replica's call: status and answer. Raises aiohttp.ClientError, TimeoutError."""

    async def call() -> Any:
        timeout = aiohttp.ClientTimeout(total=total_s)
        body = encode(
            RequestBody(content_id=content_id, prompt_tokens=40, output_tokens=TOKENS)
        ).decode()
        check = CrossCheckRequest(request="q", incarnation=incarnation, path="/v1", body=body)
        url = f"http://w0:9001{CROSS_CHECK_PATH}"
        async with Session(bench.wires, timeout=timeout).post(
            url, json=msgspec.to_builtins(check)
        ) as answer:
            return answer.status, await answer.read()

    return await bench.loop.process("r0").spawn(call())


def tokens(answer: tuple[int, bytes]) -> list[int]:
    status, body = answer
    assert status == 200
    answered = msgspec.json.decode(body, type=CrossCheckAnswered)
    assert answered.took_us > 0 and not answered.error
    return list(answered.tokens)


def test_it_gives_the_tokens_that_its_client_got_and_takes_their_time() -> None:
    bench = Bench()

    async def work() -> float:
        began = bench.loop.time()
        assert tokens(await ask(bench, "story")) == tokens_of("story", 0, TOKENS)
        took_s = bench.loop.time() - began
        heard = bench.dispatch(output=TOKENS)
        began = bench.loop.time()
        while not heard.ends:
            await asyncio.sleep(0.001)
        assert took_s == pytest.approx(bench.loop.time() - began, rel=0.2)
        return took_s

    assert bench.run(work()) > 0.1


def test_a_flipped_bit_makes_the_same_tokens_wrong_as_for_clients() -> None:
    bench = Bench()
    flawed = next(name for name in map(str, range(99)) if first_wrong(name, TOKENS) > 5)
    sound = next(name for name in map(str, range(99)) if first_wrong(name, TOKENS) < 0)

    async def work() -> None:
        engine = bench.hosts[0].engine
        engine.flipped = True
        first = first_wrong(flawed, TOKENS)
        right = tokens_of(flawed, 0, first)
        assert tokens(await ask(bench, flawed)) == [*right, *[WRONG] * (TOKENS - first)]
        assert tokens(await ask(bench, sound)) == tokens_of(sound, 0, TOKENS)

    bench.run(work())


def test_another_incarnation_a_stopped_engine_and_a_dead_one_give_none() -> None:
    bench = Bench()

    async def work() -> None:
        engine = bench.hosts[0].engine
        assert (await ask(bench, "story", incarnation=2))[0] == 409
        engine.stop()
        with pytest.raises(TimeoutError):
            await ask(bench, "story", total_s=2.0)
        engine.go_on()
        assert tokens(await ask(bench, "story")) == tokens_of("story", 0, TOKENS)
        asking = asyncio.ensure_future(ask(bench, "story"))
        await asyncio.sleep(0.05)
        engine.kill()
        with pytest.raises(aiohttp.ClientError):
            await asking

    bench.run(work())


def test_it_stops_when_its_caller_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    stopped: list[float] = []

    async def work() -> None:
        engine = bench.hosts[0].engine
        check = engine.cross_check

        def counted(body: Any, reply: Any) -> Any:
            stop = check(body, reply)
            return lambda: (stop(), stopped.append(bench.loop.time()))

        monkeypatch.setattr(engine, "cross_check", counted)
        with pytest.raises(TimeoutError):
            await ask(bench, "story", total_s=0.1)
        await asyncio.sleep(0.05)
        assert len(stopped) == 1

    bench.run(work())
