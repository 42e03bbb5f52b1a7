"""Parts of the shim that need no engine: wire formats, reporter, progress, launcher."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec import structs

from relume.engine_shim.engine.hosts import vllm_serve, zygote
from relume.engine_shim.engine.progress import Progress
from relume.engine_shim.engine.reporter import BUFFER_BYTES, AgentUnreachable, Reporter
from relume.events.log import codec
from relume.events.vocabulary import EngineStep, FirstToken
from relume.events.wire import frames, reports
from relume.events.wire.errors import FrameError, ReportError
from relume.events.wire.reports import Hello, Ready

HELLO = Hello(1, "core", 2)
READY = Ready(
    port=8000,
    max_model_len=2048,
    block_size=32,
    kv_blocks=100,
    model="tiny",
    vllm="0.32.0",
    exact={"greedy": True, "seeded": "why"},
)
STEP = EngineStep(
    incarnation=1,
    step=2,
    duration_us=3,
    batch=4,
    sum_context=5,
    prefill_tokens=6,
    waiting=7,
    kv_used=8,
    changes=(FirstToken("r", 1),),
    lost=9,
)


@pytest.mark.parametrize(("name", "stops"), [("cuda00001c00008", False), ("jemalloc_bg_thd", True)])
def test_a_zygote_forks_beside_the_thread_of_the_gpu_driver_and_no_other(
    name: str, stops: bool
) -> None:
    """Threads as those that a zygote with the CUDA build was seen to have; they have these names."""
    code = f"""
import ctypes, threading
from relume.engine_shim.engine.hosts import zygote
named, over = threading.Event(), threading.Event()
def run():
    ctypes.CDLL(None).prctl(zygote.PR_SET_NAME, {name.encode()!r}, 0, 0, 0)
    named.set()
    over.wait()
threading.Thread(target=run, daemon=True).start()
named.wait()
print(zygote._threads())
"""
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (f"['{name}']" if stops else "[]")


def test_a_zygote_that_uses_cuda_does_not_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's thread alone says nothing: `nvmlInit` starts it too."""
    parent = zygote.Zygote(str(tmp_path / "zygote.sock"))
    monkeypatch.setattr(zygote, "_threads", list)
    monkeypatch.setattr(zygote.threading, "active_count", lambda: 1)
    monkeypatch.setattr(zygote.os, "fork", lambda: pytest.fail("it forked"))
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    )
    try:
        with pytest.raises(OSError, match="CUDA is initialized"):
            parent._fork({}, [], "")
    finally:
        parent._listener.close()


@pytest.mark.parametrize(
    "last", (frames.encode_end("length"), frames.encode_failure("engine", "größer"))
)
def test_frames_survive_any_cut(last: bytes) -> None:
    written = [
        frames.encode_tokens(0, [1, 2], b"data: \n:e stop\n"),
        frames.encode_tokens(4, [7], b"x", choice=1),
        frames.encode_tokens(2, [3]),
        frames.encode_response(200, b"{}\n"),
        last,
    ]
    expected = frames.FrameReader().feed(b"".join(written))
    assert len(expected) == len(written)
    reader = frames.FrameReader()
    bytewise = [f for byte in b"".join(written) for f in reader.feed(bytes([byte]))]
    assert bytewise == expected


@pytest.mark.parametrize("data", (b":z 1\n", b":r x 0\n", b"plain\n", b":w 200\n", b":r 0 1 a\nx"))
def test_bytes_that_are_no_frame_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        frames.FrameReader().feed(data)


def test_report_frames_survive_any_cut() -> None:
    stream = reports.hello_frame(HELLO) + reports.ready_frame(READY)
    stream += reports.frame(codec.encode(STEP))
    reader = reports.ReportReader()
    payloads = [p for byte in stream for p in reader.feed(bytes([byte]))]
    hello, ready, step = (reports.parse(p) for p in payloads)
    assert (hello, ready) == (HELLO, READY)
    assert isinstance(step, bytes) and codec.decode(step) == STEP


def test_absurd_report_length_and_unknown_map_are_refused() -> None:
    with pytest.raises(ReportError, match="report frame"):
        reports.ReportReader().feed(b"\xff\xff\xff\xff")
    with pytest.raises(ReportError):
        reports.parse(msgspec.msgpack.encode({}))


def test_progress_is_seen_by_another_mapping_of_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "progress")
    writer, reader = Progress(path), Progress(path)
    writer.write(5, time.monotonic_ns() - 2_000_000, 3, 2, 40)
    seen = reader.read()
    assert (seen["steps"], seen["running"], seen["waiting"], seen["kv_used"]) == (5, 3, 2, 40)
    assert 2_000 <= seen["step_age_us"] < 2_000_000
    assert writer.batch_percent() == 100
    reader.limit_batch(75)
    writer.write(6, 0, 0, 0, 0, expected_us=1 << 40, turns=1 << 40)
    assert reader.read()["step_age_us"] == 0
    assert writer.batch_percent() == 75, "the engine leaves what the agent wrote"
    reader.reset_prefix_cache()
    writer.write(7, 0, 0, 0, 0, expected_us=1 << 40, turns=1 << 40)
    assert (writer.prefix_resets(), writer.batch_percent()) == (1, 75)
    assert (reader.read()["expected_us"], reader.read()["turns"]) == (1 << 40, 1 << 40)


@pytest.fixture
def listener(tmp_path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen(1)
    return listener


def test_agent_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AgentUnreachable, match=r"nobody\.sock"):
        Reporter(str(tmp_path / "nobody.sock"), HELLO)


def test_reporter_never_blocks_and_counts_what_it_drops(listener: socket.socket) -> None:
    reporter = Reporter(listener.getsockname(), HELLO)
    agent, _ = listener.accept()
    frame = reports.frame(codec.encode(STEP) + bytes(10_000))
    began = time.monotonic()
    taken = sum(reporter.send(frame) for _ in range(400))
    assert time.monotonic() - began < 2.0
    assert BUFFER_BYTES / len(frame) < taken < 400
    assert reporter.has_lost
    assert reporter.take_lost() == 400 - taken
    assert reporter.take_lost() == 0 and not reporter.has_lost
    reader, received = reports.ReportReader(), 0
    agent.settimeout(5.0)
    while received < taken + 1:
        received += len(reader.feed(agent.recv(1 << 20)))
    assert reporter.send(frame), "the buffer is drained without further sends"
    # Its thread ends this process at EOF, so the socket stays open to the end of the run.
    test_reporter_never_blocks_and_counts_what_it_drops.kept = agent  # type: ignore[attr-defined]


ORPHAN = """
import os, sys
from relume.engine_shim.engine.reporter import Reporter
from relume.events.wire.reports import Hello
Reporter(sys.argv[1], Hello(os.getpid(), "worker", 1))
while True:
    pass  # a busy main thread must not keep the orphan alive
"""


def test_process_ends_within_a_second_of_eof(listener: socket.socket) -> None:
    child = subprocess.Popen([sys.executable, "-c", ORPHAN, listener.getsockname()])
    try:
        agent, _ = listener.accept()
        agent.recv(1024)
        agent.close()
        assert child.wait(1.0) == 70
    finally:
        child.kill()


def test_launcher_adds_our_hooks_and_places_the_model() -> None:
    assert vllm_serve.serve_arguments(["--port", "1", "--model", "/m", "--seed=3"]) == [
        *("serve", "/m", "--port", "1", "--seed=3"),
        *("--middleware", vllm_serve.MIDDLEWARE, "--scheduler-cls", vllm_serve.SCHEDULER),
    ]
    own = vllm_serve.serve_arguments(["--model=/m", "--scheduler-cls=x.Y"])
    assert own == ["serve", "/m", "--scheduler-cls=x.Y", "--middleware", vllm_serve.MIDDLEWARE]


def test_launcher_refuses_to_run_without_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    with pytest.raises(vllm_serve.PluginNotInstalled):
        vllm_serve.check_plugin()


class LaterStep(EngineStep, frozen=True, tag="engine_step/1", kw_only=True):
    """A step as a later build may have it: with one field more."""

    temperature: int = 0


def test_the_count_of_lost_records_goes_into_its_own_field() -> None:
    step = LaterStep(**structs.asdict(STEP), temperature=7)
    told = reports.with_lost(step, 3)
    assert told == structs.replace(step, lost=3)
    assert (told.lost, told.temperature, told.changes) == (3, 7, STEP.changes)
    assert reports.with_lost(STEP, 0) is STEP
