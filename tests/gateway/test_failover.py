"""Failover on the token path: whatever is cut, the client's bytes stay the same."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from relume.controlplane.stream.answer import DONE
from tests.gateway.peers import Behaviour, decoded_dispatch, expected_stream, token_ids

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat_body(**extra) -> bytes:
    return json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "hi"}],
            "temperature": 0,
            "stream": True,
            **extra,
        }
    ).encode()


def text_body(**extra) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", "temperature": 0, **extra}).encode()


async def test_undisturbed_stream_is_the_engines_bytes(rig):
    async with rig() as r:
        body = chat_body()
        answer = await r.ask(CHAT, body, headers="x-request-id: abc.1\r\n")
        assert answer.status == 200 and answer.complete
        assert answer.body == expected_stream(body, "chatcmpl-abc.1", "1700000000", 12, True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == "abc.1"
        assert answer.headers["x-relume-verdict"] == "exact"
        seen = r.engines[0].seen[0]
        assert seen.headers["x-relume-attempt"] == "1"
        assert seen.headers["x-relume-incarnation"] == "3"
        assert seen.headers["x-request-id"] == "abc.1"
        request = seen.headers["x-relume-request"]
        assert decoded_dispatch(seen) == b"decision-" + request.encode()
        assert seen.body == body
        assert r.scheduler.log == [
            ("assign", "arrival", 0),
            ("ended", "completed", 200, 12, "length"),
        ]


async def test_each_attempt_names_its_holders_and_a_later_one_where_its_blocks_are(rig):
    async with rig() as r:
        r.scheduler.checkpoints = True
        r.engines[0].script.append(Behaviour(cut_at=400))
        answer = await r.ask(CHAT, chat_body())
        assert answer.status == 200 and answer.complete
        first, second = r.engines[0].seen[0].headers, r.engines[1].seen[0].headers
        assert first["x-relume-checkpoint"] == "tcp://h1:1,unix:/run/d"
        assert first["x-relume-priority"] == "1" and "x-relume-restore" not in first
        assert second["x-relume-checkpoint"] == "tcp://h2:1,unix:/run/d"
        assert second["x-relume-restore"] == "tcp://h1:1"


@pytest.mark.parametrize(
    "headers,priority,weight",
    [
        ("", -4, "5"),
        ("", -(1 << 40), "100"),
        ("", 3, "0"),
        ("x-relume-priority: 7\r\n", 3, "7"),
        ("X-Relume-Priority: 0\r\n", None, "0"),
    ],
)
async def test_each_attempt_tells_what_the_client_says_it_is_worth(rig, headers, priority, weight):
    async with rig() as r:
        r.scheduler.checkpoints = True
        r.engines[0].script.append(Behaviour(cut_at=400))
        answer = await r.ask(TEXT, text_body(stream=True, priority=priority), headers=headers)
        assert answer.status == 200 and answer.complete
        told = [engine.seen[0].headers["x-relume-priority"] for engine in r.engines]
        assert told == [weight, weight]


@pytest.mark.parametrize("header", ("-1", "101", "x", "", "1.5"))
async def test_a_weight_that_is_none_is_refused(rig, header):
    async with rig() as r:
        wrong = f"x-relume-priority: {header}\r\n"
        answer = await r.ask(TEXT, text_body(stream=True), headers=wrong)
        assert answer.status == 400 and b"x-relume-priority" in answer.body
        answer = await r.ask(TEXT, text_body(stream=True, priority="high"))
        assert answer.status == 400 and b"priority" in answer.body


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("cut,apart", [("fin", False), ("rst", False), ("fin", True)])
async def test_cut_at_any_byte_leaves_the_stream_identical(rig, seed, chat, cut, apart):
    """Every region of the raw response: in the head, in chunk sizes, in frame headers, in
    payloads, at every boundary, after [DONE]. The second engine answers with another
    `created`, so it must have been told the first one's."""
    rng = random.Random(seed)
    path = CHAT if chat else TEXT
    body = chat_body() if chat else text_body(stream=True)
    async with rig() as r:
        r.engines[1].created = "1700009999"
        for engine in r.engines:
            engine.default = Behaviour(apart=apart)
        prefix = "chatcmpl-" if chat else "cmpl-"
        first = await r.ask(path, body, headers="x-request-id: q\r\n")
        want = expected_stream(body, prefix + "q", "1700000000", 12, chat)
        assert first.body == want
        size = 1900 if chat else 1700
        offsets = sorted({0, 1, *rng.sample(range(2, size), 120)})
        for offset in offsets:
            r.engines[0].script.append(Behaviour(cut_at=offset, cut=cut, apart=apart))
            answer = await r.ask(path, body, headers="x-request-id: q\r\n")
            begun = b'"created":1700000000' in answer.body
            expected = (
                want if begun else expected_stream(body, prefix + "q", "1700009999", 12, chat)
            )
            assert answer.complete and answer.status == 200, f"seed {seed} offset {offset}"
            assert answer.body == expected, f"seed {seed} offset {offset}"
        assert {e[0] for e in r.scheduler.endings()} == {"completed"}
        assert all(e[2] == 12 for e in r.scheduler.endings())


@pytest.mark.parametrize("chat", [True, False])
async def test_cut_of_a_paced_stream_leaves_it_identical(rig, chat):
    """Each chunk in a read of its own takes the short way through the relay."""
    path = CHAT if chat else TEXT
    body = chat_body() if chat else text_body(stream=True)
    async with rig(engines=3) as r:
        want = expected_stream(
            body, ("chatcmpl-" if chat else "cmpl-") + "q", "1700000000", 12, chat
        )
        for engine in r.engines:
            engine.default = Behaviour(pause_s=0.001)
        for cut in range(19):
            r.engines[0].script.append(Behaviour(pause_s=0.001, cut_after=cut))
            r.engines[1].script.append(Behaviour(pause_s=0.001, cut_after=max(0, 9 - cut)))
            answer = await r.ask(path, body, headers="x-request-id: q\r\n")
            assert answer.body == want, cut
        assert {e[0] for e in r.scheduler.endings()} == {"completed"}
        assert {e[2] for e in r.scheduler.endings()} == {12}


async def test_chunks_that_do_not_fit_reads_take_the_long_way(rig):
    body = chat_body()
    async with rig(engines=1) as r:
        want = expected_stream(body, "chatcmpl-q", "1700000000", 12, True)
        for piece in (3, 50, 97, 150, 333):
            r.engines[0].script.append(Behaviour(piece=piece, pause_s=0.0005))
            answer = await r.ask(CHAT, body, headers="x-request-id: q\r\n")
            assert answer.body == want, piece


async def test_cut_at_every_frame_boundary_resumes_after_the_delivered_tokens(rig):
    body = text_body(stream=True)
    async with rig() as r:
        for keep in range(12):
            frames_head = r.engines[0]
            # the raw length up to and including frame `keep`
            probe = await r.ask(TEXT, body, headers="x-request-id: q\r\n")
            raw = raw_response(body, "cmpl-q")
            r.engines[0].script.append(Behaviour(cut_at=len(b"".join(raw[: keep + 1]))))
            answer = await r.ask(TEXT, body, headers="x-request-id: q\r\n")
            assert answer.body == probe.body
            resumed = r.engines[1].seen[-1]
            if keep:
                assert resumed.resume == f"continue {keep}"
                assert list(resumed.ids) == token_ids(body, 12)[:keep]
                assert resumed.headers["x-relume-created"] == "1700000000"
                assert resumed.headers["x-relume-attempt"] == "2"
            else:
                assert resumed.resume == ""
            assert frames_head.seen


def raw_response(body: bytes, response_id: str) -> list[bytes]:
    from tests.gateway.peers import frames

    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/x-relume-frames\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    out = frames(
        body=body,
        response_id=response_id,
        created="1700000000",
        n=12,
        start=0,
        chat=False,
        stream=True,
        size=8,
    )
    return [head, *(b"%x\r\n%b\r\n" % (len(f), f) for f in out), b"0\r\n\r\n"]


async def test_ids_whose_bytes_are_refused_are_not_delivered(rig):
    """A resumed engine repeats other bytes behind the last token than the client has: its ids
    must not count either, or the next engine would leave a token out."""
    body = text_body(stream=True)
    head, *parts = raw_response(body, "cmpl-q")
    note = b": a comment behind the second token\n\n"
    remark = b":r 2 %d\n%b" % (len(note), note)
    first = head + parts[0] + parts[1] + b"%x\r\n%b\r\n" % (len(remark), remark)
    async with rig(engines=3) as r:
        r.engines[0].script.append(Behaviour(raw=first, cut_at=len(first)))
        r.engines[1].script.append(Behaviour(raw=head + parts[2]))
        async with r.client() as client:
            client.send(TEXT, body, headers="x-request-id: q\r\n")
            async with asyncio.timeout(5):
                while not r.engines[2].seen:
                    await asyncio.sleep(0.01)
        assert r.engines[1].seen[0].resume == "continue 2"
        assert r.engines[2].seen[0].resume == "continue 2"


async def test_two_cuts_in_a_row_hit_one_request(rig):
    body = chat_body()
    want = expected_stream(body, "chatcmpl-q", "1700000000", 12, True)
    async with rig(engines=3) as r:
        for first in (400, 700, 1100):
            for second in (0, 130, 260, 400):
                r.engines[0].script.append(Behaviour(cut_at=first))
                r.engines[1].script.append(Behaviour(cut_at=second, cut="rst"))
                answer = await r.ask(CHAT, body, headers="x-request-id: q\r\n")
                assert answer.body == want, (first, second)
                assert r.engines[2].seen[-1].headers["x-relume-attempt"] == "3"
        assert r.gateway.counters.failovers == 24


async def test_whole_response_survives_a_cut(rig):
    body = text_body()
    async with rig() as r:
        plain = await r.ask(TEXT, body, headers="x-request-id: q\r\n")
        for offset in (0, 50, 115, 150, 300, 380, 460):
            r.engines[0].script.append(Behaviour(cut_at=offset))
            answer = await r.ask(TEXT, body, headers="x-request-id: q\r\n")
            assert answer.status == 200
            assert answer.body == plain.body
            assert answer.headers["content-length"] == str(len(plain.body))


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


class _none:
    open_streams = 0


async def test_what_cannot_be_continued_fails_honestly_inside_the_stream(rig):
    body = text_body(stream=True, n=2, best_of=2)
    async with rig() as r:
        events = b'data: {"a":1}\n\n'
        frame = b":r -1 %d\n%b" % (len(events), events)
        raw = raw_response(body, "q")[0] + b"%x\r\n%b\r\n" % (len(frame), frame)
        r.engines[0].script.append(Behaviour(raw=raw + b"garbage", cut_at=10_000))
        answer = await r.ask(TEXT, body)
        assert answer.complete and answer.body.startswith(events)
        error = json.loads(answer.body[len(events) :].removeprefix(b"data: "))
        assert "the worker sent no token ids" in error["error"]["message"]
        assert b"[DONE]" not in answer.body
        assert answer.headers["x-relume-verdict"] == "restart"
        assert answer.headers["x-relume-reason"].startswith("best_of=2")
        assert r.scheduler.endings()[-1][:2] == ("failed", 502)
        # before the first byte it is simply started anew
        r.engines[0].script.append(Behaviour(cut_at=60))
        assert (await r.ask(TEXT, body)).complete


def framed(*frames: bytes) -> list[bytes]:
    """An engine's answer of these frames."""
    head = raw_response(text_body(), "q")[0]
    return [head, *(b"%x\r\n%b\r\n" % (len(f), f) for f in frames), b"0\r\n\r\n"]


async def test_each_of_several_choices_continues_from_its_own_tokens(rig):
    body = text_body(stream=True, n=2)
    async with rig() as r:
        events = [b"data: %d\n\n" % i for i in range(5)]
        first = [
            b":c 0 0 %d 70\n%b" % (len(events[0]), events[0]),
            b":c 1 0 %d 80\n%b" % (len(events[1]), events[1]),
            b":c 0 1 %d 71\n%b" % (len(events[2]), events[2]),
        ]
        raw = b"".join(framed(*first)[:-1])
        r.engines[0].script.append(Behaviour(raw=raw, cut_at=len(raw)))
        rest = [
            b":c 1 1 %d 81\n%b" % (len(events[3]), events[3]),
            b":c 0 2 %d 72\n%b" % (len(events[4]) + len(DONE), events[4] + DONE),
            b":e multi\n",
        ]
        r.engines[1].script.append(Behaviour(raw=framed(*rest)))
        answer = await r.ask(TEXT, body)
        assert answer.body == b"".join(events) + DONE
        assert r.engines[1].seen[0].resume == "continue 2,1"
        assert r.engines[1].seen[0].ids == (70, 71, 80)
        assert r.scheduler.endings()[-1][:3] == ("completed", 200, 5)


async def test_notes_beside_the_tokens_of_a_whole_answer_are_given_back(rig):
    async with rig() as r:
        raw = b"".join(framed(b":r 0 3 70\nabc", b":r 1 2 71\nde")[:-1])
        r.engines[0].script.append(Behaviour(raw=raw, cut_at=len(raw)))
        rest = framed(b":r 2 1 72\nf", b":w 200 2\n{}", b":e stop\n")
        r.engines[1].script.append(Behaviour(raw=rest))
        answer = await r.ask(TEXT, text_body(logprobs=1))
        assert answer.body == b"{}"
        resumed = r.engines[1].seen[0]
        assert (resumed.resume, resumed.ids, resumed.notes) == ("continue 2:5", (70, 71), b"abcde")


async def test_mismatch_of_a_replay_is_reported_and_not_retried(rig):
    body = text_body(stream=True, prompt_logprobs=1)
    async with rig() as r:
        raw = raw_response(body, "cmpl-q")
        r.engines[0].script.append(Behaviour(cut_at=len(b"".join(raw[:6]))))
        broken = b":x mismatch 2\nno"
        r.engines[1].script.append(
            Behaviour(raw=raw[0] + b"%x\r\n%b\r\n0\r\n\r\n" % (len(broken), broken))
        )
        answer = await r.ask(TEXT, body, headers="x-request-id: q\r\n")
        assert r.engines[1].seen[0].resume == "replay 5"
        assert b'"error"' in answer.body and answer.complete
        assert r.scheduler.endings()[-1][:3] == ("failed", 502, 5)


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
        assert answer.json()["error"]["type"] == "service_unavailable_error"
        assert r.scheduler.endings() == [("failed", 503, 0, "-")]


async def test_no_worker_inside_a_stream_ends_it_with_an_error_event(rig):
    body = text_body(stream=True)
    async with rig(engines=1, wait_timeout_s=0.2) as r:
        r.engines[0].script.append(
            Behaviour(cut_at=len(b"".join(raw_response(body, "cmpl-q")[:5])))
        )
        async with r.client() as client:
            answer = await client.ask(TEXT, body, headers="x-request-id: q\r\n")
            assert b'"error"' in answer.body and b"[DONE]" not in answer.body and answer.complete
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


async def until(condition, timeout_s=5.0):
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_attempts_are_bounded(rig):
    async with rig(engines=1, max_attempts=4) as r:
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
        assert len([e for e in r.scheduler.log if e[0] == "observed"]) == 4


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


async def test_a_rejection_reaches_the_client_with_its_status(rig):
    from relume.controlplane.stream.arrival import Rejected

    async with rig() as r:
        r.scheduler.hopeless = Rejected(404, "the model `x` does not exist")
        answer = await r.ask(TEXT, text_body())
        assert answer.status == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert r.scheduler.endings() == [("rejected", 404, 0, "-")]


async def test_byte_by_byte_engine_changes_nothing(rig):
    body = chat_body()
    async with rig(engines=1) as r:
        r.engines[0].script.append(Behaviour(piece=1))
        answer = await r.ask(CHAT, body, headers="x-request-id: q\r\n")
        assert answer.body == expected_stream(body, "chatcmpl-q", "1700000000", 12, True)


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
