"""Run all tests: three lanes beside each other, then at most twice more what failed, alone.

    python -m tests.lanes [pytest arguments]
    python -m tests.lanes --check [...]   units alone, on as many processors as there are

Most tests wait for real processes, so lanes share the processors well. Each lane is a pytest
process with a session and a cache of its own. Its progress is shown as it comes, headed by the
lane's name; what it says behind that (failures, summary) comes in one piece when it has ended.
Exit status 0 when every test has passed, 130 when interrupted, else 1. A lane that broke off
(a crash) has failed, and nothing is repeated. Ctrl-C interrupts every
lane and waits for it; a second one, or a minute, kills.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tests.lanes.choice import FLEETS, PARTS, UNIT

# Niceness: the engines of fleets have 5 as well; unit tests take what the others leave.
LANES = {FLEETS: 0, PARTS: 5, UNIT: 10}
CHECK = "--check"
MOST_PARTS = 8
REPETITIONS = 2
PATIENCE_S = 60
NOTHING_COLLECTED = 5
FOLDER = Path(".pytest_cache/lanes")


class Lane:
    """One pytest process, and what it says."""

    def __init__(self, name: str, niceness: int, arguments: list[str]) -> None:
        self.name = name
        self.verdict = "said nothing"
        self._report = FOLDER / f"{name}.json"
        self._report.unlink(missing_ok=True)
        self._closing: list[str] = []
        setpriv = shutil.which("setpriv")
        self.process = subprocess.Popen(
            [
                *((setpriv, "--pdeathsig", "INT", "--") if setpriv else ()),
                *(sys.executable, "-m", "pytest", "-p", "tests.lanes.choice"),
                *("--lane-report", str(self._report), "-o", f"cache_dir={FOLDER / name}"),
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            start_new_session=True,
        )
        with suppress(OSError):  # sched(7): where there are autogroups, sessions are weighed
            os.setpriority(os.PRIO_PROCESS, self.process.pid, niceness)
            Path(f"/proc/{self.process.pid}/autogroup").write_text(str(niceness))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if self._closing or (line.startswith("===") and "session starts" not in line):
                self._closing.append(line)
            elif line.strip():
                print(f"{self.name:<8}{line}", end="", flush=True)

    def finish(self) -> None:
        """Print its last words, once it has ended."""
        self._reader.join(5)  # longer only where something it left behind holds the pipe
        closing = list(self._closing)
        print(
            f"\n{self.name} has ended (status {self.process.wait()})\n{''.join(closing)}",
            flush=True,
        )
        if closing:
            self.verdict = closing[-1].strip("= \n")

    def failed(self) -> dict[str, bool] | None:
        """The ids of the tests that failed; None when it broke off."""
        with suppress(FileNotFoundError):
            ids = json.loads(self._report.read_text())
            if ids or self.process.returncode in (0, NOTHING_COLLECTED):
                return ids
        return None


class Run:
    """The lanes that run now, and whether somebody wants an end."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments
        self._running: list[Lane] = []
        self.interrupted = False
        self.words: list[str] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        for lane in self._running:
            with suppress(ProcessLookupError):
                if self.interrupted:
                    os.killpg(lane.process.pid, signal.SIGKILL)
                else:
                    lane.process.send_signal(signal.SIGINT)
        self.interrupted = True
        signal.alarm(PATIENCE_S)

    def run(self, *lanes: tuple[str, int, list[str]]) -> list[Lane]:
        """Run these (name, niceness, arguments) beside each other, to their ends."""
        began = time.monotonic()
        for name, niceness, arguments in lanes:
            if self.interrupted:
                break
            self._running.append(Lane(name, niceness, [*arguments, *self._arguments]))
        started = list(self._running)
        while self._running:
            time.sleep(0.2)
            for lane in [x for x in self._running if x.process.poll() is not None]:
                self._running.remove(lane)
                lane.finish()
                self.words.append(
                    f"{lane.name:<8}{lane.verdict}, {time.monotonic() - began:.0f} s with its start"
                )
        return started

    def again(self, ids: dict[str, bool], name: str) -> Lane | None:
        """Run those tests alone. None when interrupted before."""
        print("\nonce more, only what failed: on a busy machine a test of real processes may fail")
        known = FOLDER / name / "v/cache/lastfailed"
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps(ids))
        only = ["--last-failed", "--last-failed-no-failures", "none"]
        return next(iter(self.run((name, 0, only))), None)


def main(arguments: list[str]) -> int:
    """The whole run; its exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = [(name, nice, ["--lane", name]) for name, nice in LANES.items()]
    if CHECK in arguments:
        parts = min(os.cpu_count() or 1, MOST_PARTS)
        wanted = [
            (f"{UNIT}{n}", 0, ["--lane", UNIT, "--lane-part", f"{n}/{parts}"])
            for n in range(1, parts + 1)
        ]
    run = Run([argument for argument in arguments if argument != CHECK])
    lanes = run.run(*wanted)
    broken = [lane.name for lane in lanes if lane.failed() is None]
    failed = {name: True for lane in lanes for name in lane.failed() or ()}
    if all(lane.process.returncode == NOTHING_COLLECTED for lane in lanes):
        broken.append("nothing to run")
    for turn in range(0 if CHECK in arguments else REPETITIONS):
        if not failed or broken or run.interrupted:
            break
        lane = run.again(failed, f"again{turn + 1}")
        if lane is None or lane.process.returncode == NOTHING_COLLECTED or lane.failed() is None:
            broken.append("again")
        else:
            failed = lane.failed() or {}
    print(*run.words, sep="\n")
    if run.interrupted:
        print("interrupted")
        return 130
    print(*(f"FAILED {name}" for name in failed), *(f"BROKE OFF: {x}" for x in broken), sep="\n")
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
