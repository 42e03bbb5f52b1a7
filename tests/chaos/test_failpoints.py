"""Failpoints: a process stands, waits, fails or ends where a rule says so, and nowhere else."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relume.chaos import failpoint_table
from relume.chaos.live.failpoint_server import FailpointError, FailpointServer
from relume.events.failpoints.failpoint_client import ENVIRONMENT
from relume.events.failpoints.points import PLACES, Action, Failpoint

PROCESS = """
import asyncio, sys
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
failpoint_client.start(sys.argv[1])
print("active", failpoint_client.active, flush=True)

async def passage(stream):
    seq = int(stream)
    failpoint_client.reach(Failpoint.ENGINE_COMPUTE, took_s=0.1, rank=0)
    failpoint_client.reach(Failpoint.ENGINE_DECODE, request="r", tokens=seq)
    await failpoint_client.reach_async(Failpoint.LOG_APPEND, ValueError, stream="s", seq=seq)

for line in sys.stdin:
    try:
        asyncio.run(passage(line))
        print("passed", line.strip(), flush=True)
    except (OSError, ValueError) as error:
        print(type(error).__name__, error, flush=True)
"""


class Passing:
    """A process that passes each kind of failpoint once for each number it is given."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def go(self, seq: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seq}\n")
        self.process.stdin.flush()

    async def said(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            return (await asyncio.to_thread(self.process.stdout.readline)).strip()


@contextmanager
def passing(name: str, path: Path | None) -> Iterator[Passing]:
    given = {ENVIRONMENT: str(path)} if path is not None else {}
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, name],
        env={**{k: v for k, v in os.environ.items() if k != ENVIRONMENT}, **given},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield Passing(process)
    finally:
        process.kill()
        process.communicate()


async def test_without_the_variable_nothing_is_active() -> None:
    with passing("engine w0", None) as process:
        assert await process.said() == "active False"
        process.go(1)
        assert await process.said() == "passed 1"


async def test_without_a_server_the_start_fails_and_names_the_remedy(tmp_path: Path) -> None:
    with passing("engine w0", tmp_path / "none") as process:
        _, said = await asyncio.to_thread(process.process.communicate, timeout=30)
    assert process.process.returncode == 1
    assert f"{ENVIRONMENT}={tmp_path}/none: no failpoint server answers" in said
    assert "unset it" in said


async def test_a_pause_lasts_until_its_rule_is_released(tmp_path: Path) -> None:
    async with FailpointServer(tmp_path / "s") as server:
        with passing("engine w0", server.path) as process:
            assert await process.said() == "active True"
            for point, facts in (
                (Failpoint.ENGINE_DECODE, {"tokens": 2}),
                (Failpoint.LOG_APPEND, {"seq": 4}),
            ):
                number = next(iter(facts.values()))
                async with server.armed(point, process="engine w0", **facts) as armed:
                    process.go(number - 1)
                    assert await process.said() == f"passed {number - 1}"
                    process.go(number)
                    hit = await armed.reached()
                    assert (hit.process, hit.pid) == ("engine w0", process.process.pid)
                    assert hit.facts.items() >= facts.items()
                    answer = asyncio.create_task(process.said())
                    done, _ = await asyncio.wait({answer}, timeout=0.2)
                    assert not done, "it stands there"
                assert await answer == f"passed {number}"


async def test_rules_act_at_the_nth_passage_and_so_often(tmp_path: Path) -> None:
    async with FailpointServer(tmp_path / "s") as server:
        with passing("engine w0", server.path) as process:
            await process.said()
            twice = {"nth": 2, "times": 2}
            async with server.armed(Failpoint.LOG_APPEND, Action.FAIL, **twice) as armed:
                found = []
                for number in range(1, 5):
                    process.go(number)
                    found.append(await process.said())
            failed = "ValueError failpoint log.append"
            assert found == ["passed 1", failed, failed, "passed 4"]
            assert [hit.facts["seq"] for hit in armed.hits] == [2], "the first is reported"
            async with server.armed(Failpoint.ENGINE_DECODE, Action.FAIL, times=0):
                for _ in range(2):
                    process.go(1)
                    assert await process.said() == "FailpointReached failpoint engine.decode"
            for point, action, given in (
                (Failpoint.ENGINE_DECODE, Action.DELAY, {"seconds": 0.3}),
                (Failpoint.ENGINE_COMPUTE, Action.STRETCH, {"factor": 4.0}),
            ):
                async with server.armed(point, action, **given):
                    began = time.monotonic()
                    process.go(1)
                    assert await process.said() == "passed 1"
                    assert time.monotonic() - began >= 0.3


async def test_an_exit_is_that_of_kill_9_in_the_named_process_alone(tmp_path: Path) -> None:
    async with FailpointServer(tmp_path / "s") as server:
        with passing("engine w0", server.path) as one, passing("engine w1", server.path) as other:
            await one.said()
            await other.said()
            async with server.armed(Failpoint.ENGINE_DECODE, Action.EXIT, process="engine w0"):
                other.go(1)
                assert await other.said() == "passed 1"
                one.go(1)
                assert await asyncio.to_thread(one.process.wait, 30) == -signal.SIGKILL


async def test_who_is_paused_continues_when_the_server_leaves(tmp_path: Path) -> None:
    with passing("engine w0", tmp_path / "s") as process:
        async with FailpointServer(tmp_path / "s") as server:
            await process.said()
            async with server.armed(Failpoint.ENGINE_DECODE) as armed:
                process.go(1)
                await armed.reached()
                await server.__aexit__()
                assert await process.said() == "passed 1"


async def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    async with FailpointServer(tmp_path / "s") as server:
        with pytest.raises(FailpointError, match=r"engine.decode knows .*tokens.*not \['token'\]"):
            async with server.armed(Failpoint.ENGINE_DECODE, token=4):
                pass
        with pytest.raises(
            FailpointError, match=r"engine.decode does not say .*engine.compute does"
        ):
            async with server.armed(Failpoint.ENGINE_DECODE, Action.STRETCH, factor=2):
                pass
        async with server.armed(Failpoint.ENGINE_DECODE) as armed:
            with pytest.raises(FailpointError, match="nothing reached"):
                await armed.reached(0.01)


def test_every_failpoint_is_described_and_passed_somewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(PLACES) == set(Failpoint)
    root = Path(__file__).parents[2]
    code = "".join(
        path.read_text()
        for package in ("events", "controlplane", "engine_shim")
        for path in (root / package).rglob("*.py")
        if path.parent.name != "failpoints"
    )
    assert [point for point in Failpoint if f"Failpoint.{point.name}" not in code] == []
    monkeypatch.setattr(sys, "argv", ["failpoints"])
    assert failpoint_table.main() == 0
    listed = capsys.readouterr().out
    assert [point for point in Failpoint if point not in listed] == []
