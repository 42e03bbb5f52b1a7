"""A resumable stream whose client is away, and whose engine gives it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from relume.events.vocabulary.enums import TransportKind
from tests.gateway.client_requests import CHAT, chat_body
from tests.gateway.peers import Behaviour, token_ids


async def until(found: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not found():
            await asyncio.sleep(0.01)


async def left_alone(r, handed_over: int = 0) -> tuple[str, bytes, int]:
    """A stream of w0 that hangs there, its client gone: (request, body, tokens delivered). The attempt
    `handed_over` is handed over before the client leaves."""
    body = chat_body()
    r.engines[0].script.append(Behaviour(hang_at=900))
    _, writer = await asyncio.open_connection("127.0.0.1", r.gateway.port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += f"x-relume-resumable: 1\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await until(lambda: any(r.gateway.delivered_on("w0", 3).values()))
    assert not r.gateway.away_on("w0", 3), "its client is there"
    if handed_over:
        ((request, delivered),) = r.gateway.delivered_on("w0", 3).items()
        r.gateway.given_up(request, handed_over)
        writer.close()
        return request, body, delivered
    writer.close()
    await until(lambda: r.gateway.away_on("w0", 3))
    ((request, delivered),) = r.gateway.away_on("w0", 3).items()
    assert delivered and not r.gateway.movable_on("w0", 3)
    assert r.gateway.movable_tokens("w0", 3, request) == delivered
    return request, body, delivered


async def test_it_continues_elsewhere_and_is_detached_there(rig):
    async with rig() as r:
        r.scheduler.checkpoints = True
        request, body, delivered = await left_alone(r)
        r.engines[1].script.append(Behaviour(hang_at=700))
        r.gateway.given_up(request, 2)
        assert r.gateway.away_on("w0", 3), "another attempt than the one given up"
        r.gateway.given_up(request, 1)
        await until(lambda: r.gateway.away_on("w1", 3))
        seen = r.engines[1].seen[-1]
        assert seen.ids == tuple(token_ids(body, 12)[:delivered])
        assert seen.headers["x-relume-restore"] == "tcp://h1:1"
        assert "x-relume-grace" in seen.headers and "x-relume-claim" in seen.headers
        await until(lambda: seen.gone)
        await until(lambda: any(s.path == "/relume/release" for s in r.engines[0].seen))
        assert r.gateway.counters.moves == 1 and not r.gateway.counters.failovers
        assert [e[:2] for e in r.scheduler.log] == [
            ("assign", "arrival"), ("observed", "moved"), ("assign", "moved"),
        ]  # fmt: skip
        r.gateway._streams.open[request].expire()
        await until(lambda: r.scheduler.endings())
        assert r.scheduler.endings()[0][:2] == ("cancelled", 499)


async def test_one_whose_client_leaves_just_after_the_handover_continues_elsewhere(rig):
    """Composed 90481: the answer that would have said so was read no more, so nothing ran."""
    async with rig() as r:
        r.engines[1].script.append(Behaviour(hang_at=700))
        request, body, delivered = await left_alone(r, handed_over=1)
        await until(lambda: r.gateway.away_on("w1", 3))
        assert r.engines[1].seen[-1].ids == tuple(token_ids(body, 12)[:delivered])
        r.gateway._streams.open[request].expire()
        await until(lambda: r.scheduler.endings())


async def test_a_handover_of_another_attempt_says_nothing_about_this_one(rig):
    async with rig() as r:
        request, _, _ = await left_alone(r, handed_over=2)
        await until(lambda: r.gateway.away_on("w0", 3))
        r.gateway._streams.open[request].expire()
        await until(lambda: r.scheduler.endings())
        assert not r.engines[1].seen


async def test_one_that_is_given_up_before_it_begins_there_continues_elsewhere(rig):
    async with rig() as r:
        request, _, _ = await left_alone(r)
        r.engines[1].script.append(Behaviour(before_s=60))
        r.gateway.given_up(request, 1)
        await until(lambda: r.engines[1].seen)
        r.gateway.given_up(request, 2)
        await until(lambda: len(r.scheduler.log) >= 5)
        assert [e[:2] for e in r.scheduler.log] == [
            ("assign", "arrival"), ("observed", "moved"), ("assign", "moved"),
            ("observed", "moved"), ("assign", "moved"),
        ]  # fmt: skip
        r.gateway._streams.open[request].expire()
        await until(lambda: r.scheduler.endings())


async def test_a_place_that_fails_it_is_replaced_and_where_none_is_left_it_waits(rig):
    async with rig(engines=2, wait_timeout_s=0.1) as r:
        request, _, delivered = await left_alone(r)
        r.engines[1].script.append(Behaviour(cut_at=0))
        r.scheduler.serving = True
        r.gateway.given_up(request, 1)
        await until(lambda: ("timer", "wait") in r.scheduler.log)
        assert ("observed", "eof", delivered) in r.scheduler.log
        assert request in r.scheduler.arrivals and not r.scheduler.endings()
        assert not r.gateway.away_on("w1", 3)
        r.gateway._streams.open[request].expire()
        await until(lambda: r.scheduler.endings())


async def test_one_whose_engine_dies_continues_elsewhere_at_once(rig):
    """Its client may return to another replica, which does not have the tokens."""
    async with rig() as r:
        request, body, delivered = await left_alone(r)
        r.engines[1].script.append(Behaviour(hang_at=700))
        r.gateway.break_streams("w0", 3, TransportKind.ENGINE_DEAD, "signal 9")
        await until(lambda: r.gateway.away_on("w1", 3))
        assert r.engines[1].seen[-1].ids == tuple(token_ids(body, 12)[:delivered])
        assert [e[:2] for e in r.scheduler.log] == [
            ("assign", "arrival"), ("observed", "engine_dead"), ("assign", "engine_dead"),
        ]  # fmt: skip
        r.gateway._streams.open[request].expire()
        await until(lambda: r.scheduler.endings())
