"""Gateways that listen hear of a death from the agent itself, ahead of the log."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from relume.engine_shim.agent import notice_server
from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.notice_server import NoticeBoard
from relume.events import vocabulary as v
from relume.events.log.memory import MemoryLog
from relume.events.wire.errors import NoticeError
from relume.events.wire.notices import DeathNotice, NoticeReader, hello_line
from tests.agent.host import until
from tests.agent.stage import staged

HELLO = hello_line("w0")


def board(port: int = 0) -> NoticeBoard:
    return NoticeBoard("w0", "127.0.0.1", port, "", lambda: 7, make_logger())


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


async def received(client: socket.socket, size: int) -> bytes:
    """Exactly that many bytes, or what came before the end."""

    def receive() -> bytes:
        data = b""
        while len(data) < size and (more := client.recv(size - len(data))):
            data += more
        return data

    return await asyncio.to_thread(receive)


async def listeners(of: NoticeBoard, count: int) -> None:
    await until(lambda: of.listeners == count)


def test_lines_are_read_however_they_are_cut() -> None:
    told = [DeathNotice(7, 1), DeathNotice(8, 2)]
    data = HELLO + b"".join(notice.line() for notice in told)
    for size in range(1, len(data) + 1):
        reader = NoticeReader("w0")
        found = [n for i in range(0, len(data), size) for n in reader.feed(data[i : i + size])]
        assert found == told and reader.greeted


@pytest.mark.parametrize(
    "data",
    [
        hello_line("w1"),
        b"died 1 1\n",
        HELLO + HELLO,
        HELLO + b"died 1\n",
        HELLO + b"died 1 -1\n",
        HELLO + b"died 1 1 1\n",
        HELLO + b"lived 1 1\n",
        HELLO + b"died " + b"1" * 200 + b" 1\n",
        b"x" * 129,
        HELLO + b"died 1 " + b"1" * 129,
        "died ١ ١\n".encode(),
    ],
)
def test_what_is_no_notice_is_refused(data: bytes) -> None:
    with pytest.raises(NoticeError):
        NoticeReader("w0").feed(data)


async def test_all_listeners_hear_at_once_and_later_ones_with_the_greeting() -> None:
    line = DeathNotice(7, 3).line()
    async with board() as b:
        with closing(connect(b.address)) as one, closing(connect(b.address)) as two:
            assert await received(one, len(HELLO)) == HELLO
            assert await received(two, len(HELLO)) == HELLO
            teller = threading.Thread(target=b.tell, args=(3,))
            teller.start()
            teller.join()
            b.tell(3)
            b.tell(2)
            assert await received(one, len(line)) == line
            assert await received(two, len(line)) == line
            with closing(connect(b.address)) as late:
                assert await received(late, len(HELLO + line)) == HELLO + line
            b.tell(4)
            assert await received(one, len(line)) == DeathNotice(7, 4).line(), "told once, in order"


async def test_listener_that_speaks_leaves_or_is_one_too_many_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notice_server, "MAX_LISTENERS", 2)
    async with board() as b:
        with closing(connect(b.address)) as speaks, closing(connect(b.address)) as stays:
            await listeners(b, 2)
            with closing(connect(b.address)) as third:
                assert await received(third, 1) == b""
            speaks.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await listeners(b, 1)
            assert await received(stays, len(HELLO)) == HELLO
        await listeners(b, 0)


async def test_listener_that_does_not_read_is_cut_off_and_delays_no_other() -> None:
    async with board() as b:
        with closing(socket.socket()) as deaf, closing(connect(b.address)) as hears:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            host, _, port = b.address.rpartition(":")
            deaf.connect((host, int(port)))
            await listeners(b, 2)
            assert await received(hears, len(HELLO)) == HELLO
            for number in range(1, 2_000_000):
                b.tell(number)
                line = DeathNotice(7, number).line()
                assert hears.recv(len(line), socket.MSG_WAITALL) == line
                if number % 256 == 0:
                    await asyncio.sleep(0)
                    if b.listeners == 1:
                        break
            assert b.listeners == 1


async def test_killed_engine_is_announced_while_the_log_accepts_nothing(tmp_path: Path) -> None:
    log = MemoryLog()
    async with staged(tmp_path, log=log) as stage:
        await stage.nth(v.EngineReady, 1)
        (registered,) = stage.events(v.WorkerRegistered)
        epoch = log.owner_epochs["w.w0"]
        with closing(connect(registered.notices)) as client:
            assert await received(client, len(HELLO)) == HELLO
            log.pause()
            os.kill(stage.events(v.EngineStarted)[0].pid, signal.SIGKILL)
            line = DeathNotice(epoch, 1).line()
            assert await received(client, len(line)) == line
            assert stage.events(v.EngineDied) == []
            log.resume()
            await stage.nth(v.EngineReady, 2)
            assert stage.agent.describe()["gateways_listening"] == 1


async def test_death_is_announced_while_the_agents_loop_is_busy(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        with closing(connect(stage.events(v.WorkerRegistered)[0].notices)) as client:
            assert await received(client, len(HELLO)) == HELLO
            os.kill(stage.events(v.EngineStarted)[0].pid, signal.SIGKILL)
            # This holds the loop, the agent's too, until the line is here.
            assert client.recv(128).startswith(b"died ")
            assert stage.events(v.EngineDied) == []


async def test_engine_that_stops_with_its_agent_is_announced_too(tmp_path: Path) -> None:
    log = MemoryLog()
    async with staged(tmp_path, log=log) as stage:
        await stage.nth(v.EngineReady, 1)
        line = DeathNotice(log.owner_epochs["w.w0"], 1).line()
        client = connect(stage.events(v.WorkerRegistered)[0].notices)
        assert await received(client, len(HELLO)) == HELLO
    with closing(client):
        assert await received(client, len(line) + 1) == line


async def test_port_that_is_taken_costs_the_notices_not_the_worker(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        async with staged(tmp_path, notice_port=port) as stage:
            await stage.nth(v.EngineReady, 1)
            assert stage.events(v.WorkerRegistered)[0].notices == ""
