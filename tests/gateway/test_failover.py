"""Failover on the token path: whatever is cut, the client's bytes stay the same."""

from __future__ import annotations

import asyncio
import random

import pytest

from relume.controlplane.stream.answer import DONE
from tests.gateway.client_requests import CHAT, TEXT, chat_body, ends_as_vllm, text_body
from tests.gateway.peers import (
    Behaviour,
    decoded_dispatch,
    expected_stream,
    raw_response,
    token_ids,
)


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
        for cut in range(0, 19, 2):
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


async def test_what_cannot_be_continued_fails_honestly_inside_the_stream(rig):
    body = text_body(stream=True, n=2, best_of=2)
    async with rig() as r:
        events = b'data: {"a":1}\n\n'
        frame = b":r -1 %d\n%b" % (len(events), events)
        raw = raw_response(body, "q")[0] + b"%x\r\n%b\r\n" % (len(frame), frame)
        r.engines[0].script.append(Behaviour(raw=raw + b"garbage", cut_at=10_000))
        answer = await r.ask(TEXT, body)
        assert answer.complete and answer.body.startswith(events)
        assert "the worker sent no token ids" in ends_as_vllm(answer.body)["message"]
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


async def test_byte_by_byte_engine_changes_nothing(rig):
    body = chat_body()
    async with rig(engines=1) as r:
        r.engines[0].script.append(Behaviour(piece=1))
        answer = await r.ask(CHAT, body, headers="x-request-id: q\r\n")
        assert answer.body == expected_stream(body, "chatcmpl-q", "1700000000", 12, True)
