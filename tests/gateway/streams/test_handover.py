"""A request that its engine hands over goes on elsewhere as after a failure, and is none."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.gateway.client_requests import CHAT, TEXT, chat_body, text_body
from tests.gateway.peers import Behaviour, expected_stream, token_ids


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("pause_s", [0.0, 0.001])
async def test_a_request_handed_over_at_any_token_leaves_the_stream_identical(rig, chat, pause_s):
    path = CHAT if chat else TEXT
    body = chat_body() if chat else text_body(stream=True)
    async with rig() as r:
        r.scheduler.checkpoints = True
        r.engines[1].created = "1700009999"
        for frames in range(12):
            r.engines[0].script.append(Behaviour(moved_after=frames, pause_s=pause_s))
            answer = await r.ask(path, body, headers="x-request-id: q\r\n")
            prefix = "chatcmpl-" if chat else "cmpl-"
            created = "1700000000" if frames else "1700009999"
            want = expected_stream(body, prefix + "q", created, 12, chat)
            assert answer.complete and answer.status == 200, frames
            assert answer.body == want, frames
            second = r.engines[1].seen[-1]
            assert len(second.ids) == frames
            assert second.headers["x-relume-restore"] == "tcp://h1:1"
        assert {e[0] for e in r.scheduler.endings()} == {"completed"}
        causes = {e[1] for e in r.scheduler.log if e[0] == "assign"}
        assert causes == {"arrival", "moved"}
        assert {e[1] for e in r.scheduler.log if e[0] == "observed"} == {"moved"}
        assert r.gateway.counters.moves == 12 and not r.gateway.counters.failovers


async def test_a_resumable_stream_is_handed_over_and_its_ids_continue(rig):
    body = chat_body()
    async with rig() as r:
        for frames in range(12):
            r.engines[0].script.append(Behaviour(moved_after=frames, pause_s=0.001))
            answer = await r.ask(CHAT, body, headers="x-request-id: q\r\nx-relume-resumable: 1\r\n")
            assert answer.complete and "x-relume-resumable" in answer.headers
            plain = re.sub(rb"id: [^\n]*\n", b"", answer.body)
            created = re.search(rb'"created":(\d+)', plain)[1].decode()
            assert plain == expected_stream(body, "chatcmpl-q", created, 12, True), frames
            ids = re.findall(rb"id: ([^\n]*)\n", answer.body)
            assert len(set(ids)) == len(ids) == answer.body.count(b"data: ")
        assert {e[0] for e in r.scheduler.endings()} == {"completed"}
        assert r.gateway.counters.moves == 12


async def test_an_answer_in_one_piece_is_handed_over_too(rig):
    body = text_body()
    async with rig() as r:
        r.engines[0].script.append(Behaviour(moved_after=5))
        answer = await r.ask(TEXT, body)
        assert answer.status == 200
        assert r.engines[1].seen[0].ids == tuple(token_ids(body, 12)[:5])
        assert r.scheduler.endings() == [("completed", 200, 12, "stop")]


async def test_moves_use_up_no_attempts_and_failures_still_do(rig):
    async with rig(engines=6, max_attempts=2) as r:
        for number, engine in enumerate(r.engines[:5]):
            engine.script.append(Behaviour(moved_after=number % 2))
        answer = await r.ask(CHAT, chat_body())
        assert answer.complete and r.scheduler.endings()[0][0] == "completed"
        assert r.gateway.counters.moves == 5
    async with rig(engines=4, max_attempts=2) as r:
        r.engines[0].script.append(Behaviour(moved_after=3))
        for engine in r.engines[1:3]:
            engine.script.append(Behaviour(cut_at=0))
        answer = await r.ask(CHAT, chat_body())
        assert r.scheduler.endings()[0][0] == "failed"
        assert b"gave up after" in answer.body


async def test_a_handover_behind_the_last_token_changes_nothing(rig):
    async with rig() as r:
        body = chat_body()
        r.engines[0].script.append(Behaviour(moved_after=12))
        answer = await r.ask(CHAT, body, headers="x-request-id: q\r\n")
        assert answer.body == expected_stream(body, "chatcmpl-q", "1700000000", 12, True)
        assert not r.engines[1].seen


async def test_only_what_can_be_taken_up_may_be_handed_over(rig):
    async with rig() as r:
        r.engines[0].default = Behaviour(hang_at=900)
        r.engines[0].script.append(Behaviour(hang_at=0))
        embeddings = json.dumps({"model": "m", "input": "x"}).encode()
        asked = [asyncio.create_task(r.ask("/v1/embeddings", embeddings))]
        async with asyncio.timeout(30):
            while not r.gateway.delivered_on("w0", 3) or not r.engines[0].seen:
                await asyncio.sleep(0.01)
        assert r.gateway.movable_on("w0", 3) == {}
        for body in (chat_body(), chat_body(temperature=0.5, prompt_logprobs=1)):
            asked.append(asyncio.create_task(r.ask(CHAT, body)))
        async with asyncio.timeout(30):
            while sorted(map(bool, r.gateway.delivered_on("w0", 3).values())) != [
                False,
                True,
                True,
            ]:
                await asyncio.sleep(0.01)
        of = {a.verdict: n for n, a in r.scheduler.arrivals.items() if a.route == CHAT}
        assert r.gateway.movable_on("w0", 3).keys() == {of["exact"]}
        assert r.gateway.movable_on("w1", 3) == {}
        assert (r.gateway.movable_tokens("w0", 3, of["exact"]) or 0) > 0
        assert r.gateway.movable_tokens("w1", 3, of["exact"]) is None
        assert [r.gateway.movable_tokens("w0", 3, n) for n in of.values() if n != of["exact"]] == [
            None
        ]
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
