"""`relume top`: what one look shows, in a pipe and on a terminal that a program reads."""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import sys

import pytest
from rich.console import Console

from relume.controlplane.cli.relume_command import main
from relume.controlplane.cli.terminal import top_command
from relume.events import vocabulary as v
from tests.admin.scene import ADMIN, Scene


async def a_fleet(scene: Scene) -> None:
    """w0 serves, w1's engine was killed; one request is live."""
    await scene.worker("w0")
    writer = await scene.worker("w1")
    writer.append(v.EngineDied("w1", 1, "killed"))
    await scene.until(lambda: scene.replica.fleet.workers["w1"].deaths)


async def test_one_look_in_a_pipe_has_workers_and_incidents(relume):
    async with Scene() as scene:
        await a_fleet(scene)
        code, out, _ = await relume(scene, "top")
        assert code == 0 and "1 of 2 workers serve" in out and "leader r0" in out
        assert re.search(r"^w0 +serving +tiny", out, re.MULTILINE)
        assert re.search(r"^w1 +dead", out, re.MULTILINE)
        assert "w1's engine was killed" in out and "Live requests" in out
        code, out, _ = await relume(scene, "top", "--json")
        assert code == 0 and '"lanes"' in out


async def test_a_terminal_shows_what_changes_until_it_is_interrupted():
    async with Scene() as scene:
        await scene.worker("w0")
        parent, child = pty.openpty()
        command = (sys.executable, "-m", "relume.controlplane.cli.relume_command", "top", "--interval", "0.2",
                   "--admin", scene.admin.url)  # fmt: skip
        environment = {**os.environ, "RELUME_ADMIN_TOKEN": ADMIN, "TERM": "xterm", "COLUMNS": "120"}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=child, stdout=child, stderr=child, env=environment
        )
        os.close(child)
        loop, seen = asyncio.get_running_loop(), b""

        async def shows(text: bytes) -> None:
            nonlocal seen
            async with asyncio.timeout(30):
                while text not in seen:
                    seen += await loop.run_in_executor(None, os.read, parent, 65536)

        try:
            await shows(b"1 of 1 workers serve")
            await scene.worker("w7")
            await shows(b"w7")
            process.send_signal(signal.SIGINT)
            async with asyncio.timeout(10):
                assert await process.wait() == 130
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            os.close(parent)


def test_without_an_answer_it_says_how_old_the_look_is() -> None:
    lane = {"name": "w0\x1b[2J", "state": "serving"}
    head = {
        "serving": True, "log_healthy": False, "live_requests": 12, "ended": 3, "leader": "",
        "revision": 7, "at_ms": 0,
    }  # fmt: skip
    request = {
        "request": "q", "client_id": "c", "model": "[red]m", "workers": ["w0", "w1"], "state": "live",
        "ttft_us": -1, "longest_gap_us": 2000,
    }  # fmt: skip
    moment = {"head": head, "lanes": [lane], "incidents": [], "requests": [request]}
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(top_command.frame(moment, "no replica answers; this is 4 s old"))
    text = console.export_text()
    assert "ETCD AWAY" in text and "leader none" in text and "4 s old" in text
    assert "\x1b" not in text and "[red]m" in text and "w0 > w1" in text
    assert "the newest 1 of 12" in text


def test_a_large_fleet_fits_the_terminal_with_those_first_that_do_not_serve() -> None:
    lanes = [{"name": f"w{n:03}", "state": "dead" if n == 700 else "serving"} for n in range(1000)]
    head = {
        "serving": True, "log_healthy": True, "live_requests": 0, "ended": 3, "leader": "r0",
        "revision": 7, "at_ms": 0,
    }  # fmt: skip
    moment = {"head": head, "lanes": lanes, "incidents": [], "requests": []}
    for height, shown in ((40, 28), (10, 5)):
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(top_command.frame(moment, height=height))
        lines = console.export_text().splitlines()
        workers = [line for line in lines if re.match(r"w\d", line)]
        assert len(workers) == shown and len(lines) <= max(height, 16)
        assert workers[0].startswith("w700")
        assert f"Workers, {shown} of 1000" in "\n".join(lines)


@pytest.mark.parametrize("interval", ["0.1", "never", "4000"])
def test_an_interval_that_is_none_is_refused(interval: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["top", "--interval", interval])
    assert interval in capsys.readouterr().err
