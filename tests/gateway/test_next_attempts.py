"""Which worker gets the next attempt, and when a request ends without one."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import openai
import pytest
import structlog

from relume.controlplane.gateway import request_service
from relume.controlplane.stream import error_codes
from relume.controlplane.telemetry.logs import setup_logging
from relume.events.log.errors import LogUnavailable
from tests.gateway.client_requests import CHAT, TEXT, chat_body, ends_as_vllm, text_body, until
from tests.gateway.peers import Behaviour, expected_stream, raw_response


async def test_engine_killed_while_idle_connections_are_pooled(rig):
    """The pooled connection dies with the engine; the next request must not."""
    async with rig() as r:
        await r.ask(TEXT, text_body())
        r.engines[0].stop()
        answer = await r.ask(TEXT, text_body())
        assert answer.status == 200
        assert ("observed", "refused", 0) in r.scheduler.log


async def test_idle_connection_closed_by_a_living_engine_is_not_its_failure(rig):
    async with rig() as r:
        r.engines[0].default = Behaviour(cut_at=0)
        r.engines[0].script.append(Behaviour())
        r.engines[0].script.append(Behaviour(cut_at=0))  # as if its keep-alive had run out
        r.engines[0].script.append(Behaviour())
        await r.ask(TEXT, text_body())
        answer = await r.ask(TEXT, text_body())
        assert answer.status == 200
        assert not [e for e in r.scheduler.log if e[0] == "observed"]


async def test_stale_incarnation_is_asked_again(rig):
    async with rig() as r:
        r.scheduler.wrong_incarnation = 1
        answer = await r.ask(TEXT, text_body())
        assert answer.status == 200
        assert ("observed", "stale", 0) in r.scheduler.log
        assert ("assign", "stale", 0) in r.scheduler.log


async def test_5xx_before_any_frame_goes_elsewhere_but_not_for_ever(rig):
    async with rig(engines=4) as r:
        r.engines[0].script.append(Behaviour(status=503))
        assert (await r.ask(TEXT, text_body())).status == 200
        for engine in r.engines:
            engine.default = Behaviour(status=500)
        r.scheduler.busy = {engine.name for engine in r.engines}
        answer = await r.ask(TEXT, text_body())
        assert answer.status == 502
        assert r.scheduler.endings()[-1][:2] == ("failed", 502)
        assert sum(len(e.seen) for e in r.engines) == 2 + 3


async def test_4xx_is_relayed_and_never_the_workers_failure(rig):
    async with rig() as r:
        error = b'{"error":{"message":"prompt too long","code":400}}'
        r.engines[0].script.append(Behaviour(status=400, body=error))
        answer = await r.ask(TEXT, text_body())
        assert (answer.status, answer.body) == (400, error)
        assert not [e for e in r.scheduler.log if e[0] == "observed"]
        assert r.scheduler.endings() == [("rejected", 400, 0, "-")]


async def test_engine_that_reports_its_death_is_left_at_once(rig):
    body = text_body(stream=True)
    async with rig() as r:
        raw = b"".join(raw_response(body, "cmpl-q")[:4])
        broken = b":x engine 4\ndead"
        raw += b"%x\r\n%b\r\n0\r\n\r\n" % (len(broken), broken)
        r.engines[0].script.append(Behaviour(raw=raw))
        answer = await r.ask(TEXT, body, headers="x-request-id: q\r\n")
        assert answer.body == expected_stream(body, "cmpl-q", "1700000000", 12, False)
        assert ("observed", "engine_dead", 3) in r.scheduler.log


@pytest.mark.parametrize(
    "garbage",
    [
        b"hello\n",
        b":r 0 5 1\nhe",
        b":r 7 2 1\nxx",
        b":r 0 99999999999 1\n",
        b":r 0 2 -1\nxx",
        b":r 0 2 4294967296\nxx",
        b":q 1\n",
        b":e stop\n:e stop\n",
        b":w 200 2\n{}",
        b":r 0 2 1 x\nxx",
        b":r\n",
        b"\n",
    ],
)
async def test_garbled_frames_are_an_engine_error(rig, garbage):
    body = text_body(stream=True)
    async with rig() as r:
        head = raw_response(body, "cmpl-q")[0]
        raw = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(garbage), garbage)
        r.engines[0].script.append(Behaviour(raw=raw))
        answer = await r.ask(TEXT, body, headers="x-request-id: q\r\n")
        if garbage.startswith(b":w"):
            assert answer.body == b"{}"
        else:
            assert answer.body == expected_stream(body, "cmpl-q", "1700000000", 12, False)
            assert [e for e in r.scheduler.log if e[0] == "observed"]


async def test_stall_watch_moves_streams_of_a_hung_engine(rig):
    body = chat_body()
    async with rig() as r:
        r.engines[0].default = Behaviour(hang_at=900)
        tasks = [
            asyncio.create_task(r.ask(CHAT, body, headers=f"x-request-id: q{i}\r\n"))
            for i in range(5)
        ]
        while sum(r.gateway.activity.get(("w0", 3), _none).open_streams for _ in (1,)) < 5:
            await asyncio.sleep(0.01)
        activity = r.gateway.activity["w0", 3]
        await until(lambda: r.gateway.clock() - activity.last_byte > 0.05)
        assert r.gateway.break_streams("w0", 3, "stall") == 5
        for i, answer in enumerate(await asyncio.gather(*tasks)):
            assert answer.body == expected_stream(body, f"chatcmpl-q{i}", "1700000000", 12, True)
        assert next(e for e in r.scheduler.log if e[0] == "observed")[1] == "stall"
        assert all(s.gone for s in r.engines[0].seen)
        assert r.gateway.break_streams("w0", 3, "stall") == 0


async def test_streams_of_higher_tiers_are_dispatched_first(rig, monkeypatch):
    tiers = {"q0": "batch", "q1": "", "q2": "interactive", "q3": "batch", "q4": "interactive"}
    body = chat_body()
    async with rig() as r:
        r.engines[0].default = Behaviour(hang_at=900)
        tasks = []
        for number, (name, tier) in enumerate(tiers.items(), 1):
            headers = f"x-request-id: {name}\r\n" + f"x-relume-tier: {tier}\r\n" * bool(tier)
            tasks.append(asyncio.create_task(r.ask(CHAT, body, headers=headers)))
            await until(lambda n=number: r.gateway.activity.get(("w0", 3), _none).open_streams == n)
        activity = r.gateway.activity["w0", 3]
        await until(lambda: r.gateway.clock() - activity.last_byte > 0.05)
        order, assign = [], r.scheduler.assign

        def noted(request, cause, delivered):
            order.append(r.scheduler.arrivals[request].client_id)
            return assign(request, cause, delivered)

        monkeypatch.setattr(r.scheduler, "assign", noted)
        assert r.gateway.break_streams("w0", 3, "stall") == 5
        assert order == ["q2", "q4", "q1", "q0", "q3"]
        await asyncio.gather(*tasks)


class _none:
    open_streams = 0


async def test_no_worker_waits_then_continues(rig):
    async with rig(engines=1) as r:
        r.scheduler.serving = False
        task = asyncio.create_task(r.ask(TEXT, text_body()))
        await until(lambda: r.gateway.counters.waits)
        r.scheduler.serving = True
        r.scheduler.changed.set()
        assert (await task).status == 200
        assert ("assign", "wait_over", 0) in r.scheduler.log


async def test_no_worker_until_the_bound_is_503_with_retry_after(rig):
    async with rig(engines=1, wait_timeout_s=0.2) as r:
        r.scheduler.serving = False
        answer = await r.ask(TEXT, text_body())
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) > 0
        error = answer.json()["error"]
        assert error["type"] == "service_unavailable_error"
        assert (error["message"], error["code"]) == (error_codes.NO_WORKER, "no_worker")
        assert r.scheduler.endings() == [("failed", 503, 0, "-")]


async def test_no_worker_inside_a_stream_ends_it_with_an_error_event(rig):
    body = text_body(stream=True)
    async with rig(engines=1, wait_timeout_s=0.2) as r:
        r.engines[0].script.append(
            Behaviour(cut_at=len(b"".join(raw_response(body, "cmpl-q")[:5])))
        )
        async with r.client() as client:
            answer = await client.ask(TEXT, body, headers="x-request-id: q\r\n")
            assert ends_as_vllm(answer.body) and answer.complete
            assert await client.reader.read() == b""
        assert r.scheduler.endings() == [("failed", 503, 4, "-")]


async def test_client_gone_while_waiting_or_streaming_is_cancelled(rig):
    async with rig(engines=1) as r:
        r.engines[0].default = Behaviour(hang_at=500)
        async with r.client() as client:
            client.send(CHAT, chat_body())
            await client.reader.read(100)
        await until(lambda: r.scheduler.endings())
        assert r.scheduler.endings()[0][:2] == ("cancelled", 499)
        await until(lambda: r.engines[0].seen[0].gone)
        r.scheduler.serving = False
        async with r.client() as client:
            client.send(CHAT, chat_body())
            await until(lambda: r.scheduler.arrivals)
        await until(lambda: len(r.scheduler.endings()) == 2)


async def test_attempts_are_bounded(rig):
    async with rig(engines=1, max_attempts=2) as r:
        r.engines[0].default = Behaviour(cut_at=0)

        class Stubborn(set):
            def add(self, _name):
                pass

        r.scheduler.arrived_before = r.scheduler.arrived

        def arrived(arrival):
            r.scheduler.arrived_before(arrival)
            r.scheduler.avoid[arrival.request] = Stubborn()
            return arrival

        r.scheduler.arrived = arrived
        answer = await r.ask(TEXT, text_body())
        assert answer.status == 502
        assert len([e for e in r.scheduler.log if e[0] == "observed"]) == 2


async def test_engines_found_hung_one_after_another_use_up_no_attempts(rig):
    """A gateway cut from many engines gives them up within moments (simulation, seed 3)."""
    body = chat_body()
    async with rig(engines=8, max_attempts=3) as r:
        for engine in r.engines[:7]:
            engine.default = Behaviour(hang_at=0)
        task = asyncio.create_task(r.ask(CHAT, body, headers="x-request-id: q\r\n"))
        for number, engine in enumerate(r.engines[:7]):
            await until(lambda engine=engine: engine.seen)
            r.gateway.break_streams(f"w{number}", 3, "stall")
        answer = await task
        assert answer.body == expected_stream(body, "chatcmpl-q", "1700000000", 12, True)
        assert r.scheduler.endings()[0][0] == "completed"


async def test_a_planned_attempt_is_given_up_with_its_engine(rig):
    """It pauses before it goes to the only worker left, which failed it before."""
    body = chat_body()
    async with rig(engines=2) as r:
        failed, other = r.engines
        failed.default = Behaviour(hang_at=900)
        r.scheduler.engines = [failed]
        task = asyncio.create_task(r.ask(CHAT, body, headers="x-request-id: q\r\n"))
        await until(lambda: r.gateway.activity.get(("w0", 3), _none).open_streams)
        await until(lambda: failed.seen)
        r.scheduler.avoid = defaultdict(Forgetful)
        assert r.gateway.break_streams("w0", 3, "stall") == 1
        r.scheduler.engines = [other]
        assert r.gateway.break_streams("w0", 3, "corrupt") == 1
        assert (await task).body == expected_stream(body, "chatcmpl-q", "1700000000", 12, True)
        assert [e[1] for e in r.scheduler.log if e[0] == "observed"] == ["stall", "detached"]


class Forgetful(set):
    """A scheduler that sends a request to the same worker again."""

    def add(self, _name):
        pass


async def test_a_rejection_reaches_the_client_with_its_status(rig):
    from relume.controlplane.stream.arrival import Rejected

    async with rig() as r:
        r.scheduler.hopeless = Rejected(404, "the model `x` does not exist")
        answer = await r.ask(TEXT, text_body())
        assert answer.status == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert r.scheduler.endings() == [("rejected", 404, 0, "-")]


async def test_all_workers_dead_then_back_loses_nothing(rig):
    """Each dies under the stream; asked again they refuse, until one is there anew."""
    body = chat_body()
    async with rig(engines=2, max_attempts=12) as r:
        want = expected_stream(body, "chatcmpl-q", "1700000000", 12, True)
        for engine, cut in zip(r.engines, (600, 400), strict=True):
            engine.script.append(Behaviour(cut_at=cut))
        r.engines[0].default = r.engines[1].default = Behaviour(status=503)
        task = asyncio.create_task(r.ask(CHAT, body, headers="x-request-id: q\r\n"))
        await until(lambda: len(r.engines[1].seen) == 1)
        for engine in r.engines:
            engine.stop()
        await until(lambda: r.gateway.counters.waits)
        back = r.engines[0]
        back.incarnation += 1
        back.default = Behaviour()
        await back.__aenter__()
        r.scheduler.changed.set()
        assert (await task).body == want
        assert r.scheduler.endings() == [("completed", 200, 12, "length")]
        assert back.seen[-1].headers["x-relume-incarnation"] == "4"


async def test_a_rack_that_dies_at_once_is_not_run_through(rig, monkeypatch):
    """Six engines are dead; that the last four are is known 10 ms after the second showed it."""
    async with rig(engines=7) as r:
        for engine in r.engines[:6]:
            engine.default = Behaviour(cut_at=0)
        observed = r.scheduler.observed
        failed = []

        def seen(*args):
            observed(*args)
            failed.append(args)
            if len(failed) == 2:
                asyncio.get_running_loop().call_later(
                    0.01, lambda: r.scheduler.engines.__delitem__(slice(2, 6))
                )

        monkeypatch.setattr(r.scheduler, "observed", seen)
        answer = await r.ask(CHAT, chat_body())
        assert answer.status == 200 and answer.complete
        assert [len(engine.seen) for engine in r.engines] == [1, 1, 0, 0, 0, 0, 1]
        assert ("timer", "retry") in [entry[:2] for entry in r.scheduler.log]


async def test_what_kills_engine_after_engine_is_given_up(rig):
    async with rig(engines=7) as r:
        for engine in r.engines:
            engine.default = Behaviour(cut_at=0)
        answer = await r.ask(CHAT, chat_body())
        assert answer.status == 502 and b"4 workers died on this request" in answer.body
        assert [len(engine.seen) for engine in r.engines] == [1, 1, 1, 1, 0, 0, 0]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("client_class", [openai.OpenAI, openai.AsyncOpenAI])
async def test_openai_s_clients_raise_when_a_stream_breaks(rig, chat, client_class):
    """What came before is there, and the end is no success."""
    got = []

    def read(resource, request):
        got.extend(resource.create(**request))  # chunk by chunk: those before the error stay

    async with rig(engines=1, wait_timeout_s=0.2) as r:
        r.engines[0].script.append(Behaviour(cut_after=5))
        base_url = f"http://127.0.0.1:{r.gateway.port}/v1"
        client = client_class(base_url=base_url, api_key="x", max_retries=0)
        resource = client.chat.completions if chat else client.completions
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
        request = {"model": "m", "temperature": 0, "stream": True, **prompt}
        with pytest.raises(openai.APIError) as raised:
            if client_class is openai.OpenAI:
                await asyncio.to_thread(read, resource, request)
            async for chunk in await resource.create(**request):
                got.append(chunk)
    assert got and raised.value.code == "no_worker"
    assert error_codes.NO_WORKER in raised.value.message


@pytest.mark.parametrize("route", [TEXT, "/v1/embeddings"])
async def test_a_request_that_the_log_does_not_take_is_503_log_unavailable(rig, route):
    def unwritable(arrival):
        raise LogUnavailable("away")

    async with rig(engines=1) as r:
        r.scheduler.arrived = unwritable
        answer = await r.ask(route, text_body())
        error = answer.json()["error"]
        assert (answer.status, error["code"]) == (503, "log_unavailable")
        assert (error["message"], int(answer.headers["retry-after"]) > 0) == (
            error_codes.NO_LOG,
            True,
        )
        assert not r.scheduler.endings()


async def test_a_closed_stream_of_the_process_s_log_costs_no_request_its_answer(
    rig, fresh_logging, monkeypatch, tmp_path
):
    """The line says that the event log refused the request."""

    def unwritable(arrival):
        raise LogUnavailable("away")

    out = (tmp_path / "log").open("w")
    setup_logging("info", "json", out)
    monkeypatch.setattr(request_service, "log", structlog.get_logger("relume.gateway"))
    out.close()
    async with rig(engines=1) as r:
        arrived, r.scheduler.arrived = r.scheduler.arrived, unwritable
        answer = await r.ask(TEXT, text_body())
        assert (answer.status, answer.json()["error"]["code"]) == (503, "log_unavailable")
        r.scheduler.arrived = arrived
        assert (await r.ask(TEXT, text_body())).status == 200
