"""Damaged reports of an engine end no agent, and nothing of them is lost without a count.

Frames as an engine sends them, damaged, go over a real socket into an agent's report server and journal.
What must come of them follows from a reading of the bytes in this module.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import event, example, given, settings
from hypothesis import strategies as st
from msgspec import Struct, field

from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.agent.report_server import ReportServer
from relume.events import vocabulary as v
from relume.events.log.codec import decode, encode
from relume.events.log.errors import LogError
from relume.events.log.memory import MemoryLog
from relume.events.vocabulary.enums import EngineKind, RestoreFailure
from relume.events.wire.reports import (
    MAX_FRAME_BYTES,
    Hello,
    Layout,
    Ready,
    frame,
    hello_frame,
    layout_frame,
    ready_frame,
)
from tests.damage.damaged_bytes import damage

HELLO = hello_frame(Hello(os.getpid(), "core", 1))
FOREIGN = hello_frame(Hello(os.getpid(), "core", 7))
OTHER = hello_frame(Hello(os.getpid(), "api", 1))
REPORTS = (
    v.EngineStep,
    v.RestoreStarted,
    v.RestoreDone,
    v.RestoreFailed,
    v.StreamsReported,
    v.PrefixBlocksChanged,
)
LAST = encode(v.StreamsReported(1, (("the-last", 1),)))
"""What another process of the engine reports after all damage."""
Map = dict[str, Any]


def step(number: int, **more: Any) -> v.EngineStep:
    return v.EngineStep(
        incarnation=1, step=number, duration_us=900, batch=1, sum_context=10,
        prefill_tokens=0, waiting=0, kv_used=1, **more,
    )  # fmt: skip


def ready(number: int) -> Ready:
    return Ready(
        port=number, max_model_len=2, block_size=3, kv_blocks=4, model="m", vllm="v", exact={}
    )


def restore(kind: type, number: int, **more: Any) -> bytes:
    named: Map = {"incarnation": 1, "request": "r", "child": 0, "attempt": 1, "holder": "h"}
    return encode(kind(**named, tokens=number, **more))


FRAMES: tuple[Callable[[int], bytes], ...] = (
    lambda n: frame(encode(step(n))),
    lambda n: frame(encode(step(n, changes=(v.RequestQueued("r", 1, n, b"hash"),)))),
    lambda n: frame(encode(v.StreamsReported(1, (("streams", n),)))),
    lambda n: frame(encode(v.PrefixBlocksChanged(incarnation=1, stored=bytes(8), block_tokens=n))),
    lambda n: frame(restore(v.RestoreStarted, n)),
    lambda n: frame(restore(v.RestoreDone, n, bytes=1, duration_us=1)),
    lambda n: frame(restore(v.RestoreFailed, n, reason=RestoreFailure.GONE)),
    lambda n: ready_frame(ready(n)),
    lambda n: layout_frame(Layout("ab", n)),
)
"""Valid frames of an engine, each with a number of its own."""


def control(**changed: Any) -> bytes:
    """A ready frame with some fields as no engine writes them."""
    named = msgspec.structs.asdict(ready(1)) | changed
    return frame(msgspec.msgpack.encode({"ready": named}))


NESTED = bytes([0x9E]) + encode(step(1))[1:] + b"\x91" * 5000 + b"\xc0"
"""A step with one field more than this build knows: arrays within arrays."""
LARGE = frame(encode(step(1, changes=(v.RequestQueued("r", 1, 5, bytes(1 << 18)),))))
MALFORMED = (
    frame(b"\x93\xadengine_step/1\x01"),
    frame(encode(step(1))[:-1]),
    frame(encode(step(1)).replace(b"\x01", b"\xa1x", 1)),
    frame(encode(step(1 << 60))),
    frame(NESTED),
    frame(b"\x91\xadengine_step/9"),
    frame(encode(v.Tick(1, 2))),
    frame(encode(v.EngineDied("w0", 1, "killed"))),
    frame(b""),
    frame(b"\xc1"),
    frame(b"\x81\xa5hello\xc0"),
    frame(b"\x81\xa5ready" + b"\x91" * 5000),
    control(kind="steam"),
    control(kv_blocks=1 << 60),
    control(port=-1),
    control(model="m" * (1 << 18)),
    LARGE,
    FOREIGN,
    HELLO,
)
"""Frames that are dropped and counted, also after valid ones."""
LENGTHS = (0, 1, 3, 255, 1 << 16, MAX_FRAME_BYTES, MAX_FRAME_BYTES + 1, (1 << 32) - 1)


class Damaged:
    """Frames of a connection, and the bytes that an agent gets in their place."""

    def __init__(self, sent: list[bytes], data: bytes) -> None:
        self.sent, self.data = sent, data

    def __repr__(self) -> str:
        """Short: the payloads, cut."""
        read = reading(self.data)
        shown = [p if len(p) < 100 else p[:60] + b"..." for p in read.payloads]
        return f"{shown}, then {'an absurd length' if read.is_lost else 'a part' * read.is_torn}"


@st.composite
def damaged_frames(draw: Any) -> Damaged:
    """Up to three frames are damaged, and then perhaps the bytes."""
    kinds = draw(st.lists(st.sampled_from(FRAMES), min_size=1, max_size=12))
    sent = [HELLO, *(make(number) for number, make in enumerate(kinds, 1))]
    frames = list(sent)
    for _ in range(draw(st.integers(0, 3))):
        _damage_frame(draw, frames)
    data = b"".join(frames)
    return Damaged(sent, draw(damage())(data) if draw(st.booleans()) else data)


def _damage_frame(draw: Any, frames: list[bytes]) -> None:
    kind = draw(st.sampled_from(("repeat", "swap", "lose", "malformed", "length", "foreign")))
    at = draw(st.integers(0, len(frames) - 1))
    other = draw(st.integers(0, len(frames) - 1))
    if kind == "repeat":
        frames.insert(other, frames[at])
    elif kind == "swap":
        frames[at], frames[other] = frames[other], frames[at]
    elif kind == "lose" and len(frames) > 1:
        del frames[at]
    elif kind == "malformed":
        frames.insert(at, draw(st.sampled_from(MALFORMED)))
    elif kind == "length":
        frames[at] = draw(st.sampled_from(LENGTHS)).to_bytes(4, "little") + frames[at][4:]
    elif kind == "foreign":
        frames[0] = FOREIGN


class Received(Struct):
    """What an agent made of a connection: records of its log, the process messages that it took, lines
    that it logged, and exceptions that no one caught."""

    records: list[bytes] = field(default_factory=list)
    messages: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def dropped(self) -> list[v.ReportsDropped]:
        return [found for r in self.records if type(found := decode(r)) is v.ReportsDropped]

    def reports(self) -> list[bytes]:
        return [r for r in self.records if type(decode(r)) is not v.ReportsDropped]


class Lines:
    """A logger of the agent."""

    def __init__(self, lines: list[str]) -> None:
        self.debug = self.info = self.warning = self.error = lambda what, **_: lines.append(what)


async def received(pieces: Sequence[bytes], closes: bool) -> Received:
    """What an agent makes of an engine process that sends these pieces, and of another one that reports
    later. `closes`: the first ends before; else the agent finds both at the engine's end."""
    found = Received()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, about: found.errors.append(str(about))
    )
    log, logger = MemoryLog(), Lines(found.lines)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent.sock"
        async with log.writer("w.w0") as writer:
            server = ReportServer(path, Journal(writer, logger), logger)
            server.on_hello = lambda _pid, hello: found.messages.append(hello)
            server.on_ready = server.on_layout = found.messages.append
            async with server:
                server.begin(1)
                first = await connected(path)
                for piece in pieces:
                    await send(first, piece)
                if closes:
                    first.close()
                    await turns()
                second = await connected(path)
                await send(second, OTHER + frame(LAST))
                server.end()
                first.close()
                second.close()
    segments = (segment for group in log.groups for segment in group.segments)
    found.records = [record for segment in segments for record in segment.records]
    return found


async def connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(path))
    await turns()
    return client


async def send(client: socket.socket, data: bytes) -> None:
    """As an engine does: a connection that its agent closed takes all."""
    client.setblocking(False)
    while data:
        try:
            data = data[client.send(data) :]
        except BlockingIOError:
            pass
        except OSError:
            return
        await turns()


async def turns() -> None:
    """The agent reads what there is: it does so in one turn of the loop, or two for a new connection."""
    for _ in range(3):
        await asyncio.sleep(0)


class Reading(Struct):
    """The bytes of a connection as this module reads them. `is_lost`: the payloads end with a length that
    is absurd; `is_torn`: with a part of a frame."""

    payloads: list[bytes]
    is_lost: bool
    is_torn: bool


def reading(data: bytes) -> Reading:
    payloads, at = [], 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        if length > MAX_FRAME_BYTES:
            return Reading(payloads, True, False)
        if at + 4 + length > len(data):
            break
        payloads.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return Reading(payloads, False, at < len(data))


def is_report(payload: bytes) -> bool:
    """Whether it is for the log: readers can read it, and engines write such."""
    if not 0x90 <= (payload[0] if payload else 0) <= 0x9F or len(payload) > 254 * 1024:
        return False
    try:
        return isinstance(decode(payload), REPORTS)
    except LogError:
        return False


def sound_frames(sent: list[bytes], data: bytes) -> list[bytes]:
    """The payloads of the frames before the first damage."""
    found, at = [], 0
    for one in sent:
        if data[at : at + len(one)] != one:
            break
        found.append(one[4:])
        at += len(one)
    return found


@settings(deadline=None, max_examples=300)
@given(damaged_frames(), st.lists(st.floats(0, 1), max_size=3), st.booleans())
@example(Damaged([HELLO], HELLO + b"".join(MALFORMED)), [], True)
@example(Damaged([HELLO], HELLO + FRAMES[0](1) + b"\xff\xff\xff\xff"), [], False)
def test_each_report_is_in_the_log_or_counted(
    damaged: Damaged, cuts: list[float], closes: bool
) -> None:
    """All that readers of the log can read is there, in order. All else of the engine is counted, and
    a process that is not the engine's is sent away. The next process is heard."""
    data = damaged.data
    places = sorted({0, len(data), *(int(cut * len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in pairwise(places)]
    found = asyncio.run(received(pieces, closes))
    errors = list(found.errors)
    assert not errors
    *reports, last = found.reports()
    assert last == LAST
    *messages, hello = found.messages
    assert hello == Hello(os.getpid(), "api", 1)
    read = reading(data)
    sound = sound_frames(damaged.sent, data)
    assert bool(messages) or not sound, "a sound hello is taken"
    if not messages:
        event("the process is a stranger")
        assert not reports and not found.dropped()
        assert any("sent away" in line or "closed" in line for line in found.lines) or not (
            read.payloads or read.is_lost
        )
        return
    assert reports == [payload for payload in read.payloads if is_report(payload)]
    assert reports[: sum(map(is_report, sound))] == [p for p in sound if is_report(p)]
    assert type(messages[0]) is Hello and Hello not in map(type, messages[1:])
    assert all(map(can_be_recorded, messages))
    dropped = sum(one.count for one in found.dropped())
    assert any(one.muted for one in found.dropped()) == read.is_lost
    assert len(reports) + len(messages) + dropped == len(read.payloads) + (
        read.is_lost or read.is_torn
    )
    event(f"dropped: {'some' if dropped else 'none'}")


def can_be_recorded(message: Any) -> bool:
    """Whether readers of the log can read what an agent writes of it."""
    if type(message) is not Ready:
        return True
    known = {f: getattr(message, f) for f in ("port", "max_model_len", "block_size", "kv_blocks")}
    started = v.EngineReady(
        worker="w0", incarnation=1, host="h", model=message.model, build=message.vllm,
        kind=EngineKind(message.kind), max_seqs=message.max_seqs,
        step_tokens=message.step_tokens, **known,
    )  # fmt: skip
    return bool(decode(encode(started)) == started)
