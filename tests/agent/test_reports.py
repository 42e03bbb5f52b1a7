"""The report socket: what is taken, what is refused, and that the engine survives both."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest

from relume.chaos.damaged_bytes import UNREADABLE
from relume.engine_shim.agent import report_server, unread_reports
from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.agent.report_server import Readable, ReportServer, is_step, readable
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.log.codec import TAGS, decode, encode
from relume.events.log.errors import LogFull
from relume.events.log.memory import MemoryLog, MemoryWriter
from relume.events.vocabulary import (
    EngineDied,
    EngineStep,
    LinkMeasured,
    ReportsDropped,
    RequestQueued,
    Tick,
)
from relume.events.wire.reports import Hello, Ready, frame, hello_frame, ready_frame
from tests.agent.stage import staged
from tests.mixed_versions.next_build import NEXT, NoteWritten, WeatherReported, next_build
from tests.pace import outlast

E = TypeVar("E")
MALFORMED = b"\x93\xadengine_step/1\x01"


def step(number: int) -> bytes:
    return encode(
        EngineStep(
            incarnation=1,
            step=number,
            duration_us=900,
            batch=1,
            sum_context=10,
            prefill_tokens=0,
            waiting=0,
            kv_used=1,
            changes=(RequestQueued("r", 1, 5),),
        )
    )


class Desk:
    """A report server with its log and what it heard."""

    def __init__(self, path: Path, log: MemoryLog, writer: MemoryWriter) -> None:
        self.path = path
        self.log = log
        self.writer = writer
        self.logger = make_logger("error")
        self.server = ReportServer(path, Journal(writer, self.logger), self.logger)
        self.hellos: list[tuple[int, Hello]] = []
        self.readies: list[Ready] = []
        self.server.on_hello = lambda pid, hello: self.hellos.append((pid, hello))
        self.server.on_ready = self.readies.append

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(self.path))
        return client

    def engine(self) -> socket.socket:
        client = self.connect()
        client.sendall(hello_frame(Hello(os.getpid(), "core", 1)))
        return client

    def events(self, kind: type[E]) -> list[E]:
        records = [
            decode(record)
            for group in self.log.groups
            for segment in group.segments
            for record in segment.records
        ]
        return [event for event in records if isinstance(event, kind)]

    def steps(self) -> list[int]:
        return [step.step for step in self.events(EngineStep)]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    log = MemoryLog()
    async with log.writer("w.w0") as writer:
        found = Desk(tmp_path / "agent.sock", log, writer)
        async with found.server:
            found.server.begin(1)
            yield found


async def settle() -> None:
    await asyncio.sleep(0.05)


def closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_only_step_records_pass_as_steps() -> None:
    assert is_step(step(1))
    assert not is_step(encode(Tick(1, 2)))
    assert not is_step(b"")
    assert not is_step(b"\xadengine_step/1")
    assert not is_step(b"\x81\xadengine_step/1")


def test_every_event_that_engines_make_passes_as_a_step() -> None:
    """An event that the agent does not know damages the trust in its engine, which is restarted."""
    kinds = {kind.__name__: tag for tag, kind in TAGS.items()}
    shim = Path(report_server.__file__).parents[1]
    made = {
        name
        for folder in ("engine", "checkpoints", "plain")
        for path in sorted((shim / folder).rglob("*.py"))
        if "daemon" not in path.relative_to(shim).parts
        for name in re.findall(r"\b([A-Z]\w+)\(", path.read_text())
        if name in kinds
    }
    assert {"EngineStep", "RestoreDone", "LinkMeasured", "StreamsReported"} <= made
    for name in made:
        tag = kinds[name].encode()
        assert is_step(bytes((0x93, 0xA0 | len(tag))) + tag if len(tag) < 32 else b""), name


async def test_the_speed_of_a_link_goes_to_the_log(desk: Desk) -> None:
    client = desk.engine()
    measured = LinkMeasured(1, "tcp://w1:1", 1 << 20, 900)
    client.sendall(frame(encode(measured)) + frame(step(1)))
    await settle()
    assert desk.events(LinkMeasured) == [measured] and desk.steps() == [1]
    assert desk.server.frames_dropped == 0


async def test_steps_go_to_the_log_as_they_are(desk: Desk) -> None:
    client = desk.engine()
    client.sendall(b"".join(frame(step(n)) for n in range(1, 501)))
    await settle()
    assert desk.steps() == list(range(1, 501))
    assert desk.hellos == [(os.getpid(), Hello(os.getpid(), "core", 1))]


async def test_frames_cut_anywhere_are_put_together(desk: Desk) -> None:
    client = desk.connect()
    hello = hello_frame(Hello(os.getpid(), "core", 1))
    data = (
        hello
        + frame(step(1))
        + ready_frame(
            Ready(port=1, max_model_len=2, block_size=3, kv_blocks=4, model="m", vllm="v", exact={})
        )
    )
    for at in range(len(data)):
        client.sendall(data[at : at + 1])
        await asyncio.sleep(0)
    await settle()
    assert desk.steps() == [1]
    assert [r.port for r in desk.readies] == [1]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        struct.pack("<I", 1 << 31),
        frame(step(1)),
        frame(b"\x81\xa5hello\xc0"),
        frame(b"\x81\xa5hello\x01"),
        frame(b"\xc1"),
        frame(b""),
        ready_frame(
            Ready(port=1, max_model_len=2, block_size=3, kv_blocks=4, model="m", vllm="v", exact={})
        ),
    ],
)
async def test_a_stranger_who_sends_garbage_is_sent_away(desk: Desk, garbage: bytes) -> None:
    client = desk.connect()
    client.sendall(garbage)
    await settle()
    assert closed(client)
    assert desk.steps() == [] and desk.readies == [] and desk.hellos == []


async def test_a_process_of_another_incarnation_is_sent_away(desk: Desk) -> None:
    client = desk.connect()
    client.sendall(hello_frame(Hello(1, "core", 7)))
    await settle()
    assert closed(client)


async def test_a_strangers_events_never_reach_the_log(desk: Desk) -> None:
    client = desk.engine()
    client.sendall(frame(encode(Tick(1, 2))) + frame(step(3)))
    await settle()
    assert desk.steps() == [3]
    assert desk.server.frames_dropped == 1
    assert not closed(client)


async def test_an_engine_that_loses_framing_keeps_its_lifeline(desk: Desk) -> None:
    client = desk.engine()
    client.sendall(frame(step(1)) + struct.pack("<I", 1 << 31) + b"xxxx")
    await settle()
    client.sendall(frame(step(2)))
    await settle()
    assert desk.steps() == [1]
    assert not closed(client)
    desk.server.end()
    (dropped,) = desk.events(ReportsDropped)
    assert dropped.muted and (dropped.worker, dropped.incarnation) == ("w0", 1)


async def test_a_new_log_learns_that_no_more_is_read_of_an_engine(desk: Desk) -> None:
    client = desk.engine()
    desk.server.state_again()
    client.sendall(frame(step(1)) + struct.pack("<I", 1 << 31) + b"xxxx")
    await settle()
    client.sendall(frame(step(2)))
    await settle()
    desk.server.state_again()
    desk.server.end()
    first, again = desk.events(ReportsDropped)
    assert again.muted and again.reason == first.reason
    desk.server.begin(2)
    desk.server.state_again()
    desk.server.end()
    assert len(desk.events(ReportsDropped)) == 2, "the next engine can be read"


@pytest.mark.parametrize("end", [b"", b"\x01", b"\x01\xa1x"])
async def test_a_record_that_the_log_could_not_read_is_dropped(desk: Desk, end: bytes) -> None:
    """In the log it would take the worker out of service."""
    client = desk.engine()
    malformed = b"\x93\xadengine_step/1" + end
    assert is_step(malformed)
    client.sendall(frame(step(1)) + frame(malformed) + frame(step(2)))
    await settle()
    assert desk.steps() == [1, 2]
    assert desk.server.describe()["frames_dropped"] == 1
    assert not closed(client)
    desk.server.end()
    (dropped,) = desk.events(ReportsDropped)
    assert (dropped.worker, dropped.incarnation, dropped.count) == ("w0", 1, 1)
    assert "malformed" in dropped.reason and not dropped.muted


async def test_a_failpoint_lets_a_record_pass_unchecked(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of the named process: and a stranger's connection is closed all the same."""
    passed: list[int] = []

    def reach(point: Failpoint, **facts: int) -> None:
        if point == Failpoint.AGENT_CHECK and facts["bytes"] == len(UNREADABLE[0]):
            passed.append(facts["pid"])
            raise failpoint_client.FailpointReached

    monkeypatch.setattr(failpoint_client, "active", True)
    monkeypatch.setattr(failpoint_client, "reach", reach)
    desk.connect().sendall(frame(UNREADABLE[0]))
    client = desk.engine()
    client.sendall(frame(step(1)) + frame(MALFORMED) + frame(UNREADABLE[0]) + frame(step(2)))
    await settle()
    records = [r for g in desk.log.groups for s in g.segments for r in s.records]
    assert (records.count(UNREADABLE[0]), MALFORMED in records) == (1, False)
    assert passed == [os.getpid()]
    assert not closed(client)


async def test_an_engine_that_reports_only_garbage_does_not_fill_the_log(desk: Desk) -> None:
    """The first is said at once, the rest a second later, or before its death is."""
    client = desk.engine()
    client.sendall(frame(MALFORMED) * 1000)
    await settle()
    assert [dropped.count for dropped in desk.events(ReportsDropped)] == [1]
    desk.server.end()
    assert [dropped.count for dropped in desk.events(ReportsDropped)] == [1, 999]


async def test_what_was_dropped_is_said_after_the_last_report_that_was(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unread_reports, "INTERVAL_S", 0.1)
    client = desk.engine()
    client.sendall(frame(MALFORMED) * 3 + frame(step(1)))
    await settle()
    await outlast(0.1, "INTERVAL_S")
    assert [dropped.count for dropped in desk.events(ReportsDropped)] == [1, 2]
    await outlast(0.3, "INTERVAL_S")
    assert len(desk.events(ReportsDropped)) == 2, "nothing more was dropped"


async def test_an_oversized_record_is_dropped_and_the_rest_continues(desk: Desk) -> None:
    client = desk.engine()
    many = tuple(RequestQueued(f"r{i}", 1, 5, bytes(1000)) for i in range(400))
    client.setblocking(True)
    large = frame(
        encode(
            EngineStep(
                incarnation=1,
                step=1,
                duration_us=900,
                batch=1,
                sum_context=10,
                prefill_tokens=0,
                waiting=0,
                kv_used=1,
                changes=many,
            )
        )
    )
    await asyncio.to_thread(client.sendall, large + frame(step(2)))
    await settle()
    assert desk.steps() == [2]
    assert not closed(client)


async def test_the_last_steps_of_a_dead_engine_are_taken(desk: Desk) -> None:
    client = desk.engine()
    await settle()
    client.sendall(b"".join(frame(step(n)) for n in range(1, 50)))
    client.close()
    desk.server.end()
    assert desk.steps() == list(range(1, 50))


async def test_early_processes_wait_for_their_engine_to_be_known(tmp_path: Path) -> None:
    log = MemoryLog()
    async with log.writer("w.w0") as writer:
        desk = Desk(tmp_path / "agent.sock", log, writer)
        async with desk.server:
            client = desk.engine()
            client.sendall(frame(step(1)))
            await settle()
            assert desk.hellos == []
            desk.server.begin(1)
            await settle()
            assert len(desk.hellos) == 1 and desk.steps() == [1]


@pytest.mark.full
async def test_a_full_log_stops_the_reading_not_the_engine(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = []

    def full(*_: object) -> int:
        refused.append(len(refused))
        raise LogFull("w.w0", 1)

    client = desk.engine()
    await settle()
    with monkeypatch.context() as patch:
        patch.setattr(desk.writer, "append", full)
        client.sendall(b"".join(frame(step(n)) for n in range(1, 10)))
        async with asyncio.timeout(20):
            while len(refused) < 5:  # it tries again and again
                await asyncio.sleep(0.01)
        assert not closed(client)
    async with asyncio.timeout(20):
        while desk.steps() != list(range(1, 10)):
            await asyncio.sleep(0.01)


async def test_garbage_of_the_engine_itself_does_not_end_it(tmp_path: Path) -> None:
    async with staged(tmp_path, "--steps", "2", "--garbage") as stage:
        await stage.nth(EngineStep, 2)
        await stage.until(lambda: stage.agent.describe()["reports"]["frames_dropped"] == 1)
        state = stage.agent.describe()
        assert state["engine"]["incarnation"] == 1 and state["engine"]["ready"]
        assert stage.events(EngineDied) == []
        assert [dropped.count for dropped in stage.events(ReportsDropped)] == [1]


def test_an_engines_report_is_lowered_to_what_all_replicas_read() -> None:
    """An engine does not know the level of the fleet; its agent does."""
    note = NoteWritten(text="a", mood="b")
    with next_build():
        assert readable(encode(note), NEXT) == Readable(encode(note))
        assert readable(encode(note), 1) == Readable(encode(NoteWritten(text="a")))
        assert readable(encode(WeatherReported(sky="grey")), NEXT).record
        above = readable(encode(WeatherReported(sky="grey")), 1)
        assert not above.record and "feature level 1" in above.why
        assert not above.is_at_fault, "an engine does not know the level"
    assert readable(step(1), 1) == Readable(step(1))
