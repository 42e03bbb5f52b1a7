"""Clients return to streams of a former log: real replicas on a log that does not name them, and engines
that have them, by script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from relume.controlplane.replay.verify import verify
from relume.controlplane.replica.former_log.former_streams import ADOPTED_TICKS, FormerStreams
from relume.controlplane.stream import event_ids
from relume.events import vocabulary as v
from relume.events.wire import frames as wire
from relume.events.wire.envelope import Envelope
from relume.events.wire.stream_origin import StreamOrigin
from relume.policies.state.fleet import Fleet
from tests.gateway.peers import Behaviour, expected_stream, frames, token_ids
from tests.gateway.raw_client import Answer, RawClient
from tests.gateway.replica_scene import BODY, INCARNATION, TEXT, Scene, scene, until

TOKEN = event_ids.resume_token(bytes(16))
FORMER, PRESENT = "log0", "log1"
HAS = 5
"""Tokens that the client has."""
ARRIVED = v.RequestArrived(
    request="q-1", model="m", route=TEXT, stream=True, prompt_tokens=3, max_tokens=12, verdict="exact",
    client_id="q", resumable=event_ids.digest(TOKEN), grace_ticks=600,
)  # fmt: skip


def origin(log: str = FORMER, attempt: int = 2, **changes: Any) -> bytes:
    """What an engine answers that has the stream."""
    arrival = msgspec.structs.replace(ARRIVED, **changes)
    text = StreamOrigin(FORMER, arrival).format()
    return json.dumps({"origin": text, "log": log, "attempt": attempt}).encode()


def attached() -> list[bytes]:
    """The answer to a gateway that attaches: all that its client lacks."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: application/x-relume-frames\r\n"
        b"x-relume-from: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    envelope = wire.encode_envelope(Envelope(TEXT, "q", "1700000000", BODY).pack())
    known = wire.encode_tokens(0, token_ids(BODY, 12)[:HAS])
    rest = frames(
        body=BODY, response_id="q", created="1700000000", n=12, start=HAS, chat=False, stream=True, size=8
    )  # fmt: skip
    chunks = [b"%x\r\n%b\r\n" % (len(f), f) for f in (envelope, known, *rest)]
    return [head, *chunks, b"0\r\n\r\n"]


async def returned(s: Scene, gateway: int = 0, token: str = TOKEN, more: str = "") -> Answer:
    """What a client that returns gets at last."""
    headers = f"x-request-id: q\r\nlast-event-id: q-1:{token}:{HAS}\r\n{more}"
    async with asyncio.timeout(30):
        while True:
            async with RawClient(s.gateways[gateway].port) as client:
                answer = await client.ask(TEXT, headers=headers)
            if answer.status != 503:
                return answer
            assert answer.json()["error"]["code"] == "log_behind" and answer.headers["retry-after"]
            await asyncio.sleep(0.02)


@asynccontextmanager
async def restated(replicas: int = 1, attempt: int = 2) -> AsyncIterator[Scene]:
    """The engine of w0 reports an attempt without a dispatch, as in a new log."""
    async with scene(exact=("restart", "resume")) as s:
        for number in range(replicas):
            await s.replica(f"r{number}")
            s.replicas[number].scheduler.decisions.log_id = PRESENT
        step = v.EngineStep(
            incarnation=INCARNATION, step=0, duration_us=0, batch=0, sum_context=0, prefill_tokens=0,
            waiting=0, kv_used=1, changes=(v.RequestQueued("q-1", attempt, 8), v.FirstToken("q-1", attempt)),
        )  # fmt: skip
        s.workers[0].writer.append(step)
        await s.folded()
        yield s


async def proven(s: Scene) -> None:
    """The log replays, with one decision more, up to a state hash after it."""
    s.script(Behaviour())
    assert await s.ask()
    hashes = len([e for e in s.told("fleet") if type(e) is v.StateHashed])
    await until(lambda: len([e for e in s.told("fleet") if type(e) is v.StateHashed]) > hashes + 1)
    verdict = verify(s.log.groups)
    assert verdict.divergences == [] and verdict.decisions


def lines(answer: Answer) -> bytes:
    """The events, without their ids."""
    return b"".join(
        line + b"\n" for line in answer.body.split(b"\n")[:-1] if not line.startswith(b"id: ")
    )


async def test_a_stream_continues_where_it_runs_and_ends_in_the_new_log() -> None:
    async with restated() as s:
        w0 = s.workers[0].engine
        w0.origins["q-1"] = origin()
        w0.default = Behaviour(raw=attached())
        answer = await returned(s)
        assert answer.complete and answer.status == 200
        whole = expected_stream(BODY, "q", "1700000000", 12, False)
        assert whole.endswith(lines(answer)) and lines(answer).count(b"index") == 12 - HAS
        (call,) = [json.loads(seen.body) for seen in w0.seen]
        assert (call["attempt"], call["tokens"], call["log"]) == (2, HAS, PRESENT)
        await until(lambda: any(type(e) is v.RequestEnded for e in s.told()))
        own = [e for e in s.told() if getattr(e, "request", "") == "q-1"]
        assert [type(e) for e in own] == [v.RequestArrived, v.ClientReturned, v.RequestEnded]
        assert own[0] == ARRIVED and own[1].attempt == 2 and own[2].outcome == "completed"
        assert not s.workers[1].engine.seen
        await s.folded()
        fleet = s.replicas[0].fleet
        assert fleet.arrived == fleet.ended == 1 and not fleet.requests
        await proven(s)


@pytest.mark.parametrize("resumable", [True, False])
async def test_engines_have_where_a_resumable_stream_began(resumable: bool) -> None:
    async with restated() as s:
        async with RawClient(s.gateways[0].port) as client:
            headers = "x-relume-resumable: 1\r\n" if resumable else ""
            assert (await client.ask(TEXT, BODY, headers=headers)).complete
        (seen,) = (seen for worker in s.workers for seen in worker.engine.seen)
        (arrived,) = (e for e in s.told() if type(e) is v.RequestArrived)
        if resumable:
            assert StreamOrigin.parse(seen.headers["x-relume-origin"]) == StreamOrigin(
                PRESENT, arrived
            )
        else:
            assert "x-relume-origin" not in seen.headers


async def test_its_engine_dies_and_it_continues_on_another_worker() -> None:
    async with restated() as s:
        w0, w1 = (worker.engine for worker in s.workers)
        w0.origins["q-1"] = origin()
        w0.default = Behaviour(raw=attached()[:3], cut_after=3)
        answer = await returned(s)
        assert answer.complete and lines(answer).count(b"index") == 12 - HAS
        (seen,) = w1.seen
        assert seen.headers["x-relume-attempt"] == "3" and len(seen.ids) == HAS
        assert StreamOrigin.parse(seen.headers["x-relume-origin"]).log == PRESENT
        await proven(s)


@pytest.mark.parametrize(
    "answers",
    [
        None,
        b"no JSON",
        origin(log=PRESENT),
        origin(request="q-2"),
        origin(resumable=event_ids.digest("x" * 22)),
        origin(tenant="another"),
        json.dumps({"origin": f"{FORMER} AAAA", "log": FORMER}).encode(),
    ],
    ids=[
        "not there",
        "garbage",
        "of this log",
        "another's",
        "another token",
        "tenant",
        "unreadable",
    ],
)
async def test_what_is_no_stream_of_that_client_is_gone(answers: bytes | None) -> None:
    async with restated() as s:
        s.replicas[0].scheduler.returns._settled_us = 0
        if answers is not None:
            s.workers[0].engine.origins["q-1"] = answers
        for _ in range(2):
            answer = await returned(s)
            assert answer.status == 410 and answer.json()["error"]["code"] == "stream_gone"
        sought = s.workers[0].engine.sought
        assert 1 <= len(sought) <= 2, "no engine is queried again and again"
        assert not [e for e in s.told() if type(e) in (v.RequestArrived, v.ClientReturned)]


async def test_an_engine_that_does_not_answer_says_nothing_about_its_streams() -> None:
    async with restated() as s:
        s.replicas[0].scheduler.returns._settled_us = 0
        s.workers[0].engine.stop()
        async with RawClient(s.gateways[0].port) as client:
            for _ in range(20):
                answer = await client.ask(TEXT, headers=f"last-event-id: q-1:{TOKEN}:5\r\n")
                assert answer.status in (503, 410)
                if answer.status == 410:
                    pytest.fail("the stream may run there")


async def test_a_client_that_returns_to_two_replicas_is_served_by_the_last() -> None:
    async with restated(replicas=2) as s:
        w0 = s.workers[0].engine
        w0.origins["q-1"] = origin()
        w0.script.append(Behaviour(raw=attached()[:2], hang_at=10_000))
        first = asyncio.create_task(returned(s, 0))
        await until(lambda: w0.seen)
        w0.default = Behaviour(raw=attached())
        answer = await returned(s, 1)
        assert answer.complete and lines(answer).count(b"index") == 12 - HAS
        assert not (await first).complete
        await until(lambda: any(type(e) is v.RequestEnded for e in s.told("r.r1")))
        calls = [json.loads(seen.body) for seen in w0.seen]
        assert [call["attempt"] for call in calls] == [2, 2], "the log says where it runs"
        assert not [e for e in s.told() if type(e) is v.RequestEnded]
        await proven(s)


def former(*events: tuple[int, Any]) -> tuple[FormerStreams, Fleet]:
    """After these events of w.w0, each with its revision."""
    fleet = Fleet()
    decisions: Any = SimpleNamespace(view=SimpleNamespace(fleet=fleet), log_id=PRESENT)
    found = FormerStreams(decisions)
    for revision, event in events:
        if fleet.revision != revision:
            found.folded(None)
        fleet.revision = revision
        found.seen("w.w0", 1, event)
    return found, fleet


STARTED = v.EngineStarted("w0", 1, 2, 3)
READY = v.EngineReady(
    worker="w0", incarnation=1, host="h", port=1, model="m", max_model_len=9, block_size=1, kv_blocks=1
)  # fmt: skip


@pytest.mark.parametrize(
    ("events", "ticks", "is_sought"),
    [
        (((7, STARTED), (7, READY)), 0, True),
        (((7, STARTED), (7, READY)), ADOPTED_TICKS, False),
        (((7, STARTED), (8, READY)), 0, False),
        (((7, READY),), 0, False),
        ((), 0, False),
    ],
)
async def test_engines_are_requested_after_they_came_from_a_former_log(
    events: tuple[tuple[int, Any], ...], ticks: int, is_sought: bool
) -> None:
    """What no engine reports may have been finished before the log began."""
    found, fleet = former(*events)
    fleet.tick = ticks
    assert found.known("q-1") is None and found.is_sought("q-1") is is_sought


async def test_a_log_without_an_id_has_no_former_one() -> None:
    found, _ = former((7, STARTED), (7, READY))
    found._decisions.log_id = ""
    assert found.known("q-1") is None and not found.is_sought("q-1")
