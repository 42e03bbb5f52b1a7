"""A death told by the agent itself: a real agent's board, a real replica, scripted engines
that never close a connection, so that nothing else can tell."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from relume.controlplane.replica.death_notices import IN_THE_LOG, SEEN_DEAD
from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.notice_server import NoticeBoard
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.wire.notices import DeathNotice, hello_line
from relume.policies.liveness.stall import StallConfig
from tests.gateway.peers import (
    Behaviour,
    Engine,
    Seen,
    _EngineConnection,
    token_ids,
)
from tests.gateway.replica_scene import BODY, INCARNATION, TEXT, WANT, scene, until


def raw_bytes(tokens: int) -> int:
    """Raw bytes of an answer up to and including its first `tokens` tokens."""
    head = {"x-relume-request": "r", "x-relume-incarnation": "3", "x-request-id": "q"}
    connection = _EngineConnection(Engine("w0", INCARNATION))
    pieces = connection.render(Behaviour(), Seen(path=TEXT, headers=head, body=BODY))
    return len(b"".join(pieces[: tokens + 1]))


@pytest.mark.parametrize("away", [False, True], ids=["log there", "log away"])
async def test_streams_move_at_once_and_the_log_tells_why(away: bool) -> None:
    async with scene() as s:
        await s.replica()
        await s.listening()
        s.script(Behaviour(hang_at=raw_bytes(5)))
        asked = [asyncio.create_task(s.ask()) for _ in range(6)]
        await until(lambda: s.on(s.workers[0]) == s.on(s.workers[1]) == [5, 5, 5])
        if away:
            s.log.pause()
        s.script(Behaviour())
        dead, other = s.workers
        dead.board.tell(INCARNATION)
        await until(lambda: not s.on(dead))
        moved = other.engine.seen[3:]
        await until(lambda: len(other.engine.seen) == 6)
        moved = other.engine.seen[3:]
        assert [m.resume for m in moved] == ["continue 5"] * 3
        assert [list(m.ids) for m in moved] == [token_ids(BODY, 12)[:5]] * 3
        if away:
            assert s.suspected() == []
            s.log.resume()
        other.board.tell(INCARNATION)  # nobody is left: the others wait for capacity
        await until(lambda: not s.on(other))
        dead.writer.append(
            v.EngineDied("w0", INCARNATION, "killed"),
            v.EngineStarted("w0", INCARNATION + 1, 2, 3),
        )
        dead.engine.incarnation = INCARNATION + 1
        dead.writer.append(
            v.EngineReady(
                worker="w0",
                incarnation=INCARNATION + 1,
                host="127.0.0.1",
                port=dead.engine.port,
                model="m",
                max_model_len=4096,
                block_size=16,
                kv_blocks=512,
            ),
        )
        assert await asyncio.gather(*asked) == [WANT] * 6
        observed = [e for e in s.told() if type(e) is v.TransportObserved]
        first = [e for e in observed if e.worker == "w0"]
        assert [(e.kind, e.detail, e.delivered) for e in first] == [
            ("engine_dead", SEEN_DEAD, 5)
        ] * 3
        assert [(e.worker, e.incarnation, e.reason) for e in s.suspected()] == [
            ("w0", INCARNATION, SEEN_DEAD),
            ("w1", INCARNATION, SEEN_DEAD),
        ]
        causes = [e.cause for e in s.told() if type(e) is v.RouteDecided and e.worker]
        assert causes[:9] == ["arrival"] * 6 + ["engine_dead"] * 3
        await s.proven()


async def test_a_death_that_only_the_log_reports_is_recorded_as_a_death() -> None:
    """Not as a reset, which no gateway saw."""
    async with scene(w0_registers=False) as s:
        dead, other = s.workers
        dead.register(notices="")
        await s.replica()
        await s.listening(other)
        s.script(Behaviour(hang_at=raw_bytes(5)))
        asked = [asyncio.create_task(s.ask()) for _ in range(4)]
        await until(lambda: s.on(dead) == s.on(other) == [5, 5])
        s.script(Behaviour())
        dead.writer.append(v.EngineDied("w0", INCARNATION, "killed"))
        await until(lambda: len(other.engine.seen) == 4)
        observed = [e for e in s.told() if type(e) is v.TransportObserved]
        assert [(e.worker, e.kind, e.detail) for e in observed] == [
            ("w0", "engine_dead", f"{IN_THE_LOG} (killed)")
        ] * 2
        causes = [e.cause for e in s.told() if type(e) is v.RouteDecided and e.worker]
        assert causes == ["arrival"] * 4 + ["engine_dead"] * 2
        s.gateways[0].break_streams("w1", INCARNATION, "engine_error")
        assert await asyncio.gather(*asked) == [WANT] * 4
        await s.proven()


async def test_bytes_that_came_before_the_notice_was_read_are_delivered() -> None:
    """Both lie in our sockets when we come to look: no token is computed again."""
    async with scene() as s:
        await s.replica()
        await s.listening()
        five, nine = raw_bytes(5), raw_bytes(9)
        s.script(Behaviour(hang_at=five))
        asked = asyncio.create_task(s.ask())
        await until(lambda: s.on(s.workers[0]) == [5] or s.on(s.workers[1]) == [5])
        dead, other = sorted(s.workers, key=lambda w: not s.on(w))
        s.script(Behaviour())
        (connection,) = dead.engine.connections
        raw = b"".join(connection.render(Behaviour(), connection.seen))
        fd = connection.transport.get_extra_info("socket").fileno()
        dead.board.tell(INCARNATION)
        assert os.write(fd, raw[five:nine]) == nine - five
        assert await asked == WANT
        assert [seen.resume for seen in other.engine.seen] == ["continue 9"]


@pytest.mark.full
async def test_stale_notices_garbage_and_lost_connections_are_no_evidence() -> None:
    now = INCARNATION + 1
    async with scene(w0_registers=False) as s:
        worker, other = s.workers
        epoch = worker.writer.epoch
        hello, good = hello_line("w0"), DeathNotice(epoch, now).line()
        told = [
            hello_line("w1") + good,  # the agent of another worker
            good,  # a stranger who does not say who it is
            hello + b"died x\n" + good,
            hello + b"x" * 5000,
            b"\xff\x00" * 50 + b"\n",
            hello,  # and then it is lost
            hello
            + DeathNotice(epoch, now - 1).line()
            + DeathNotice(epoch, now + 1).line()
            + DeathNotice(epoch - 1, now).line(),
        ]
        connections: list[asyncio.StreamWriter] = []

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            writer.write(told[len(connections) - 1])
            if told[len(connections) - 1] == hello:
                await writer.drain()
                writer.close()

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        s.stack.callback(server.close)
        worker.register(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", now)
        s.script(Behaviour(hang_at=raw_bytes(5)))
        await s.replica()
        asked = [asyncio.create_task(s.ask()) for _ in range(2)]
        held = s.gateways[0]._attempts
        await until(lambda: set(held) == {("w0", now), ("w1", INCARNATION)})
        await until(lambda: len(connections) == len(told))
        s.script(Behaviour())
        connections[-1].write(good)
        await until(lambda: ("w0", now) not in held)
        assert [(e.worker, e.incarnation, e.reason) for e in s.suspected()] == [
            ("w0", now, SEEN_DEAD)
        ]
        observed = [e for e in s.told() if type(e) is v.TransportObserved]
        assert [(e.kind, e.incarnation) for e in observed] == [("engine_dead", now)]
        connections[-1].transport.abort()
        await until(lambda: any(task.done() for task in asked))
        s.gateways[0].break_streams("w1", INCARNATION, "engine_error")
        assert await asyncio.gather(*asked) == [WANT, WANT]
        assert len(other.engine.seen) == 3


async def test_wrong_notices_cost_a_living_engine_one_move_at_most() -> None:
    """Absurd ones cost nothing. One that could be true moves the streams once: then probes clear
    the engine, and repetitions are ignored. The engine's death is noticed all the same."""
    async with scene(w0_registers=False) as s:
        worker, other = s.workers
        epoch = worker.writer.epoch
        hello, wrong = hello_line("w0"), DeathNotice(epoch, INCARNATION).line()
        absurd = [
            DeathNotice(2**63 - 1, INCARNATION).line(),
            DeathNotice(epoch, 2**31).line(),
            b"died %d %d\n" % (2**64, INCARNATION),
        ]
        connections: list[asyncio.StreamWriter] = []

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            index = len(connections) - 1
            writer.write(hello + (absurd[index] if index < len(absurd) else b""))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        s.stack.callback(server.close)
        worker.register(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        s.script(Behaviour(hang_at=raw_bytes(5)))
        await s.replica(stalls=StallConfig(floor_us=200_000, cap_us=600_000_000))
        (replica,) = s.replicas
        asked = [asyncio.create_task(s.ask()) for _ in range(2)]
        await until(lambda: s.on(worker) == s.on(other) == [5])
        await until(lambda: len(connections) == len(absurd) + 1)
        assert replica.refused_notices == len(absurd)
        assert s.suspected() == [] and s.on(worker) == [5]
        s.script(Behaviour())
        connections[-1].write(wrong)
        await until(lambda: any(type(e) is v.WorkerCleared for e in s.told()))
        assert [(e.worker, e.reason) for e in s.suspected()] == [("w0", SEEN_DEAD)]
        connections[-1].write(wrong)
        s.script(Behaviour(hang_at=raw_bytes(5)))
        later = [asyncio.create_task(s.ask()) for _ in range(2)]
        await until(lambda: 5 in s.on(worker) and sum(map(len, map(s.on, s.workers))) == 3)
        connections[-1].write(wrong)
        s.script(Behaviour())
        worker.writer.append(v.EngineDied("w0", INCARNATION, "killed"))
        await until(lambda: s.on(worker) == [])
        assert len(s.suspected()) == 1 and replica.refused_notices == len(absurd)
        s.gateways[0].break_streams("w1", INCARNATION, "engine_error")
        assert await asyncio.gather(*asked, *later) == [WANT] * 4
        await s.proven()


async def test_replica_that_starts_later_and_an_agent_that_starts_again_are_connected() -> None:
    async with scene() as s:
        await s.replica()
        await s.listening()
        await s.replica("r1")
        await s.listening(gateways=2)
        worker = s.workers[0]
        again = NoticeBoard("w0", "127.0.0.1", 0, "", lambda: worker.writer.epoch, make_logger())
        await s.stack.enter_async_context(again)
        old, worker.board = worker.board, again
        worker.register(again.address)
        await s.listening(worker, gateways=2)
        await until(lambda: old.listeners == 0)
        worker.start(INCARNATION + 1)
        await s.folded()
        again.tell(INCARNATION + 1)
        for stream in ("r.r0", "r.r1"):
            await until(lambda stream=stream: s.suspected(stream))
            (told,) = s.suspected(stream)
            assert (told.worker, told.incarnation, told.reason) == (
                "w0",
                INCARNATION + 1,
                SEEN_DEAD,
            )
        worker.writer.append(v.WorkerDeregistered("w0", "gone"))
        await s.listening(worker, gateways=0)


async def test_death_told_before_a_replica_listens_reaches_it_with_the_greeting() -> None:
    async with scene() as s:
        s.workers[1].board.tell(INCARNATION)
        await s.replica()
        await until(s.suspected)
        assert [e.worker for e in s.suspected()] == ["w1"]
        assert await s.ask() == WANT
        assert s.workers[0].engine.seen and not s.workers[1].engine.seen


def test_registration_written_before_there_were_notices_still_reads() -> None:
    record = msgspec.msgpack.encode(["worker_registered/1", "w0", "host", 7, "http://x"])
    assert codec.decode(record) == v.WorkerRegistered(
        worker="w0", domain="host", agent_pid=7, agent_url="http://x", notices=""
    )
