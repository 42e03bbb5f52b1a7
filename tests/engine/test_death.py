"""How an engine dies: every stream hears of it, and the process goes quickly."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relume.events.wire import frames
from tests.engine import client
from tests.engine.fleet import Engine, StockServe, Zygote, engine_of, wait_until
from tests.signals import slowed, stop
from tests.suite.outcomes import inconclusive

COMPLETIONS = "/v1/completions"
SOON_S = 15.0
"""A second or two, on a machine that has time."""
FOREVER = {"model": "tiny", "prompt": "On", "max_tokens": 1900, "ignore_eos": True}


@contextlib.contextmanager
def running_stream(engine: Engine, stream: bool = True) -> Iterator[Callable[[], bytes]]:
    """A request under way in an engine whose core is stopped meanwhile, so that it cannot end;
    calling the value lets the core go on, if it lives, and reads what is left of the answer."""
    (core,) = [hello.pid for hello in engine.agent.hellos if hello.role == "core"]
    with slowed(core):
        connection, response = client.open_stream(
            engine.port, COMPLETIONS, FOREVER | {"stream": stream}, client.headers_for()
        )
        head = response.read(64)
    assert head
    stop(core)

    def rest() -> bytes:
        go_on(core)
        return head + response.read()

    try:
        yield rest
    finally:
        go_on(core)
        connection.close()


def go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def assert_broken(body: bytes) -> None:
    """The client's part is clean; the last frame says that the engine is gone."""
    answer = client.sort_frames(body)
    assert isinstance(answer.last, frames.Failure)
    assert answer.last.kind == "engine"
    assert b'"error"' not in answer.payload
    assert b'"finish_reason":"abort"' not in answer.payload
    assert b"[DONE]" not in answer.payload


@pytest.mark.full
@pytest.mark.parametrize("stream", (True, False))
def test_terminated_engine_breaks_streams_so_that_they_continue_elsewhere(
    zygote: Zygote, stream: bool
) -> None:
    with engine_of(zygote.fork()) as engine, running_stream(engine, stream) as rest:
        os.kill(engine.pid, signal.SIGTERM)
        notified_at = time.monotonic()
        assert_broken(rest())
        assert time.monotonic() - notified_at < SOON_S
        wait_until(lambda: not engine.alive(), "process ends", SOON_S)


@pytest.mark.full
def test_failing_core_breaks_streams_and_ends_the_process(zygote: Zygote) -> None:
    """A step that raises: here the model runner is taken away under the scheduler."""
    break_after = "tests.engine.broken_scheduler.failing_scheduler"
    with engine_of(zygote.fork("--scheduler-cls", break_after)) as engine:
        answer = client.post(
            engine.port, COMPLETIONS, FOREVER | {"stream": True}, headers=client.headers_for()
        )
        assert_broken(answer.body)
        wait_until(lambda: not engine.alive(), "process ends", SOON_S)


@pytest.fixture
def stock(tmp_path: Path, tiny_model: Path) -> Iterator[Engine]:
    with engine_of(StockServe(tmp_path, tiny_model).start()) as engine:
        yield engine.wait_ready()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_stock_engine_that_lost_a_process_tells_and_ends(stock: Engine) -> None:
    """The last of them. (Each in turn: tests/live/test_stock_serve.py.)"""
    (pid,) = [hello.pid for hello in stock.agent.hellos if hello.role == "worker"]
    with running_stream(stock) as rest:
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        body = rest()
        if client.sort_frames(body).last == frames.End("length"):
            # Only a worker that lives ends a stream so: the core was ahead of what we read.
            inconclusive("the stream ended before its worker was killed")
        assert_broken(body)
        told_s = time.monotonic() - killed_at
        wait_until(lambda: not stock.alive(), "the whole engine ends", SOON_S)
        print(f"streams told after {told_s:.3f} s")
        assert told_s < SOON_S


@pytest.mark.full
@pytest.mark.timeout(300)
def test_stock_engine_without_its_server_ends_with_the_agents_eof(stock: Engine) -> None:
    pids = [hello.pid for hello in stock.agent.hellos]
    os.kill(stock.pid, signal.SIGKILL)
    wait_until(lambda: not stock.alive(), "server dies", SOON_S)
    stock.agent.close()

    def all_gone() -> bool:
        return not any(Path(f"/proc/{p}/exe").exists() and _runs(p) for p in pids)

    wait_until(all_gone, "core and worker end", SOON_S)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
