"""Limits processes to a share of a core, without control groups. Like cpulimit, it stops a process
that has used more than its share until its use is below the share again.

    python -I -S cpu_limit.py SHARE SECONDS     pids in lines on stdin, each line all of them

A separate process does this. It continues all stopped processes after SECONDS, and when its input
ends, which the runner has open: so no process stays stopped, even if the runner dies.
Do not combine it with another fault that stops the same process: this one would continue it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

SLICE_S = 0.005
"""Interval between two checks of the CPU time used."""

PERIOD_S = 0.04
"""Period of the share. Unused credit beyond one period is lost; a stopped process continues when
it has half a period's credit again."""

MOST_S = 180.0
AGAIN_S = 0.25
STARTS_S = 30.0


class Held:
    """One limited process. `credit_s`: CPU time that it may use at once."""

    def __init__(self, pid: int, share: float, now: float) -> None:
        """Raises ProcessLookupError."""
        self.credit_s = share * PERIOD_S
        self.stopped = False
        self._share = share
        self._fd = os.pidfd_open(pid)
        self._clock = ~pid << 3 | 2  # CPU time of all its threads (clock_getcpuclockid(3))
        self._seen, self._used = now, self._now_used()

    def _now_used(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            raise ProcessLookupError from None

    def look(self, now: float) -> None:
        """Stop it or let it continue. Raises ProcessLookupError."""
        used = self._now_used()
        earned = self._share * (now - self._seen)
        self.credit_s = min(self.credit_s + earned - used + self._used, self._share * PERIOD_S)
        self._seen, self._used = now, used
        if not self.stopped and self.credit_s < 0:
            self._send(signal.SIGSTOP)
        elif self.stopped and self.credit_s >= self._share * PERIOD_S / 2:
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._fd, number)
        self.stopped = number == signal.SIGSTOP

    def let_go(self) -> None:
        """Let it continue, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            if self.stopped:
                self._send(signal.SIGCONT)
        os.close(self._fd)


def hold(share: float, most_s: float) -> None:
    """Limit processes until the end of stdin, or for `most_s`."""
    held: dict[int, Held] = {}
    deadline = time.monotonic() + most_s
    line = b""
    try:
        while (now := time.monotonic()) < deadline:
            if select.select([0], [], [], SLICE_S)[0]:
                if not (data := os.read(0, 65536)):
                    return
                *lines, line = (line + data).split(b"\n")
                for newest in lines[-1:]:
                    _follow(held, {int(pid) for pid in newest.split()}, share, now)
                    print(*sorted(held), flush=True)
            for pid in list(held):
                try:
                    held[pid].look(time.monotonic())
                except ProcessLookupError:
                    held.pop(pid).let_go()
    finally:
        for one in held.values():
            one.let_go()


def _follow(held: dict[int, Held], pids: set[int], share: float, now: float) -> None:
    for pid in set(held) - pids:
        held.pop(pid).let_go()
    for pid in pids - set(held):
        with contextlib.suppress(ProcessLookupError):
            held[pid] = Held(pid, share, now)


class Limit:
    """Limits the processes that `pids` returns to a `share` of a core each, from `begin` to `end`."""

    def __init__(self, share: float, pids: Callable[[], list[int]]) -> None:
        self._share = share
        self._pids = pids
        self._process: asyncio.subprocess.Process | None = None
        self._telling: asyncio.Task[None] | None = None

    async def begin(self) -> list[int]:
        """Start it; return the processes that it limits. Raises OSError, TimeoutError."""
        # The script imports no module of Relume, so it is small and up at once.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", __file__, f"{self._share}", f"{MOST_S}",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.timeout(STARTS_S):
                held = await self._process.stdout.readline()
        except TimeoutError:
            await self.end()
            raise
        return list(map(int, held.split()))

    async def _tell(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        sent: list[int] | None = None
        while True:
            if (pids := self._pids()) != sent:
                sent = pids
                self._process.stdin.write(f"{' '.join(map(str, pids))}\n".encode())
            await asyncio.sleep(AGAIN_S)

    async def end(self) -> None:
        """Let the processes run, even if the limiting process was killed."""
        assert self._process is not None and self._telling is not None
        self._telling.cancel()
        await asyncio.gather(self._telling, return_exceptions=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def main() -> None:
    """See the module."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    hold(float(sys.argv[1]), float(sys.argv[2]))


if __name__ == "__main__":
    main()
