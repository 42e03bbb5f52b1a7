"""`relume up` and `relume demo` as a person runs them: they say what to do next, and however
they end, nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.live.conftest import HANG_S, MODEL

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
GONE_S = 60.0


class Command:
    """A `relume` command in a directory of its own; whatever it starts carries a mark."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.folder = folder
        self.output = folder / "output"
        self._mark = f"RELUME_TEST_MARK={uuid.uuid4()}"
        name, _, value = self._mark.partition("=")
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.environment = {**os.environ, name: value, "PYTHONPATH": paths}
        self._argv = [sys.executable, "-m", "relume.controlplane.cli.relume_command", *argv]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                self._argv,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
            )

    def relume(self, *argv: str) -> Any:
        """What another `relume` command says of the fleet in this directory, as JSON."""
        command = [sys.executable, "-m", "relume.controlplane.cli.relume_command", *argv, "--json"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, check=True
        )
        return json.loads(done.stdout)

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def until(self, text: str) -> None:
        """Wait until it has said `text`."""
        deadline = time.monotonic() + HANG_S
        while text not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def imports(self, module: str, timeout_s: float = 30) -> None:
        """Wait until it has loaded the library of an extension module."""
        deadline = time.monotonic() + timeout_s
        while module not in Path(f"/proc/{self.process.pid}/maps").read_text():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def notices(self, timeout_s: float = 10) -> None:
        """Wait until no SIGINT waits for it: the process took it, or has ended by it."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            pending = [int(n, 16) for n in re.findall(r"(?:Sig|Shd)Pnd:\s(\w+)", status)]
            if not any(mask >> (signal.SIGINT - 1) & 1 for mask in pending):
                return
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def left(self) -> dict[int, str]:
        """Living processes that carry the mark, the command itself excepted."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == self.process.pid:
                continue
            try:
                if self._mark.encode() in (folder / "environ").read_bytes():
                    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(folder.name)] = title
            except (OSError, ValueError):
                continue
        return found

    def ends(self, code: int) -> None:
        """It ends with that exit code, and by then nothing else is left."""
        assert self.process.wait(GONE_S) == code, self.said()
        assert not self.left(), self.said()
        assert "Traceback" not in self.said(), self.said()

    def all_gone(self, timeout_s: float) -> None:
        """Wait until nothing is left."""
        deadline = time.monotonic() + timeout_s
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


@contextmanager
def command(folder: Path, *argv: str) -> Iterator[Command]:
    """A running command; what it leaves behind is killed, after the test has judged."""
    running = Command(folder, *argv)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        for pid in running.left():
            os.kill(pid, signal.SIGKILL)


def up(folder: Path, workers: int = 2) -> Any:
    """`relume up` on free ports."""
    return command(
        folder, "up", "--workers", str(workers), "--model", str(MODEL), "--port", "0",
        "--admin-port", "0", "--migration-moves", "all", "--migration-limits", "gap=6",
    )  # fmt: skip


def test_up_says_what_to_try_answers_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with up(tmp_path) as fleet:
        fleet.until("Ctrl-C stops everything.")
        said = fleet.said()
        for hint in ("curl -N", "relume status", "relume workers", "kill -9", "relume why"):
            assert hint in said
        gateway = re.search(r"curl -N (http://[^/]+)/v1/completions", said)
        body = re.search(r"-d '(\{.*?\})'", said, re.DOTALL)
        assert gateway and body, said
        text = _stream(gateway[1], body[1])
        assert text.count("data: ") > 200 and text.endswith("data: [DONE]\n\n")
        workers = fleet.relume("workers")["workers"]
        assert [w["state"] for w in workers] == ["serving", "serving"]
        assert fleet.relume("status")["serving"] is True
        told = {s["key"]: s["value"] for s in fleet.relume("config", "get")["settings"]}
        assert (told["migration.moves"], told["migration.gap"]) == ("all", "6")
        _engine_comes_back(fleet, workers[0])
        fleet.process.send_signal(signal.SIGINT)
        fleet.ends(0)
        assert not (tmp_path / ".relume/run/fleet.json").exists()


def _stream(gateway: str, body: str) -> str:
    """The printed curl line, without curl."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{gateway}/v1/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def _engine_comes_back(fleet: Command, worker: dict[str, Any]) -> None:
    """The printed kill, and an agent killed: the supervisor starts another."""
    os.kill(worker["engine_pid"], signal.SIGKILL)
    os.kill(worker["agent_pid"], signal.SIGKILL)
    deadline = time.monotonic() + HANG_S
    while True:
        found = next(w for w in fleet.relume("workers")["workers"] if w["name"] == worker["name"])
        if found["state"] == "serving" and found["agent_pid"] != worker["agent_pid"]:
            return
        assert time.monotonic() < deadline, (found, fleet.said())
        time.sleep(0.2)


@pytest.mark.parametrize("moment", ["", "etcd answers", "zygote is importing", "worker w"])
def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path: Path, moment: str) -> None:
    with up(tmp_path) as fleet:
        fleet.until(moment)
        if not moment:
            fleet.imports("msgspec")  # while Python still starts
        fleet.process.send_signal(signal.SIGINT)
        fleet.notices()
        fleet.process.send_signal(signal.SIGINT)  # people press it twice
        code = fleet.process.wait(GONE_S)
        assert code in (0, 130, -signal.SIGINT), fleet.said()
        fleet.all_gone(0.5)


def test_killed_supervisor_takes_everything_with_it(tmp_path: Path) -> None:
    with up(tmp_path, workers=1) as fleet:
        fleet.until("Ctrl-C stops everything.")
        assert len(fleet.left()) >= 5  # etcd, zygote, replica, agent, engine
        fleet.process.kill()
        fleet.process.wait()
        fleet.all_gone(15)


@pytest.mark.core
def test_demo_ends_with_one_line_that_holds(tmp_path: Path) -> None:
    with command(tmp_path, "demo", "--model", str(MODEL),
                 "--state-dir", str(tmp_path / "demo")) as demo:  # fmt: skip
        demo.process.wait(140)
        demo.ends(0)
        told = json.loads(demo.said().splitlines()[-1])
        assert told["streams"] == told["identical"] >= 8
        assert (told["broken"], told["divergences"]) == (0, 0)
        assert told["moved"] >= 8 and told["distinct_tokens_min"] >= 30
        assert told["served_while_down"] > 0 and told["replayed_decisions"] >= told["moved"]
        assert told["back_after_s"] > 0
        assert told["longest_gap_ms"] > 0 and told["undisturbed_gap_ms"] > 0


@pytest.mark.full
def test_health_demo_ends_with_one_line_that_holds(tmp_path: Path) -> None:
    """Takes two minutes; its parts have tests of their own."""
    with command(tmp_path, "demo", "--health", "--model", str(MODEL),
                 "--state-dir", str(tmp_path / "demo")) as demo:  # fmt: skip
        demo.process.wait(280)
        demo.ends(0)
        told = json.loads(demo.said().splitlines()[-1])
        assert told["streams"] > told["identical"] > 0 == told["broken"] + told["unnamed"]
        assert told["canary_ids_equal"] and told["canary_logprobs_differ"]
        assert told["requests_named"] > 0 and told["streams_moved"] > 0
        assert told["breaker_after_failures"] <= 5
        assert told["stacks_stored"] and told["verdicts_when_calm"] == told["divergences"] == 0
        assert min(told[f"{name}_back_after_s"] for name in ("w0", "w1", "w2")) > 0


@pytest.mark.parametrize("moment", ["zygote is importing", "one engine will"])
def test_interrupted_demo_leaves_nothing(tmp_path: Path, moment: str) -> None:
    with command(tmp_path, "demo", "--model", str(MODEL), "--workers", "2", "--streams", "16",
                 "--state-dir", str(tmp_path / "demo")) as demo:  # fmt: skip
        demo.until(moment)
        demo.process.send_signal(signal.SIGINT)
        demo.ends(130)
