"""One running engine as the agent sees it: its processes, their death, their end.

An engine is one process (forked by a zygote) or several (`vllm serve`: API server,
EngineCore, Workers) in a session of their own. Each is watched by a pidfd on the event
loop. The death of any of them is the death of the engine: the rest serves no request and could
survive for half a minute, so it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable

from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.engine_process.process_identity import (
    ProcessId,
    describe_exit,
    exit_status,
    is_alive,
    is_resource_tracker,
    marked_processes,
    open_pidfd,
    session_members,
    signal_process,
    stat_of,
)
from relume.engine_shim.engine.hosts.deathwatch import DeathWatch

_POLL_S = 0.01
GONE_TIMEOUT_S = 10.0
TIDY_S = 8.0
"""Maximum time for a multiprocessing resource tracker to remove what dead processes left."""


class EngineProcesses:
    """The processes of one incarnation.

    `leader` is the process that was started; `marker` the `NAME=value` all it spawns
    carry in their environment; `child` its Popen when it is our own child.
    """

    def __init__(
        self,
        leader: ProcessId,
        logger: Logger,
        marker: str,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.leader = leader
        self.members: dict[ProcessId, str] = {}
        self.dead = asyncio.Event()
        self.serving = asyncio.Event()
        self.reason = ""
        self.detail = ""
        self.died_at = 0.0
        self._logger = logger
        self._child = child
        self._marker = marker
        self._pidfds: dict[ProcessId, int] = {}
        self._early: list[DeathWatch] = []
        self.on_dying: Callable[[], None] = lambda: None
        """Called at the first sign of a death that ends the engine, in any thread."""
        self._watch(leader, "engine")

    def adopt(self, process: ProcessId, role: str) -> bool:
        """Watch another process of this engine; False when it is known already."""
        if process == self.leader or process in self.members:
            return False
        self.members[process] = role
        self._watch(process, role)
        return True

    def _watch(self, process: ProcessId, role: str) -> None:
        pidfd = open_pidfd(process)
        if pidfd is None:
            self._ended(process, role, None)
            return
        self._pidfds[process] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_end, process, role)

    def watch_early(self, process: ProcessId, role: str, path: str) -> None:
        """Detect its death before the kernel has freed its memory, if the process supports that."""
        loop = asyncio.get_running_loop()

        def dying() -> None:
            if process == self.leader or self.ready:
                self.on_dying()
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(self._on_dying, process, role)

        watch = DeathWatch(path, dying)
        if watch.armed:
            self._early.append(watch)

    def _on_dying(self, process: ProcessId, role: str) -> None:
        if process not in self._pidfds:
            return  # its pidfd was faster
        stat = stat_of(process.pid)
        known = stat is not None and stat.id == process
        self._ended(process, role, stat.exit_code if stat is not None and known else None)

    def _on_end(self, process: ProcessId, role: str) -> None:
        pidfd = self._pidfds.pop(process)
        asyncio.get_running_loop().remove_reader(pidfd)
        status = exit_status(pidfd, process.pid)
        os.close(pidfd)
        self._ended(process, role, status)

    def _ended(self, process: ProcessId, role: str, status: int | None) -> None:
        reason, detail = describe_exit(status)
        if process != self.leader:
            detail = f"{role} (pid {process.pid}) {detail}"
            if not self.ready:
                # Before that, helpers come and go, and a real loss ends the leader.
                self.members.pop(process, None)
                self._logger.warning("engine process ended while loading", role=role, detail=detail)
                return
        if not self.dead.is_set():
            self.reason, self.detail, self.died_at = reason, detail, time.monotonic()
            self.dead.set()

    @property
    def ready(self) -> bool:
        """Whether the end of any member ends the engine."""
        return self.serving.is_set()

    def condemn(self, reason: str, detail: str) -> None:
        """Kill it, and let the log say why."""
        if not self.dead.is_set():
            self.reason, self.detail, self.died_at = reason, detail, time.monotonic()
            self.dead.set()
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process known by pidfd; takes microseconds."""
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _remaining(self) -> list[ProcessId]:
        known = (self.leader, *self.members)  # a copy: the loop may change it meanwhile
        found = {p for p in known if is_alive(p)}
        found.update(stat.id for stat in session_members(self.leader.pid))
        found.update(marked_processes(self._marker))
        return sorted(found, key=lambda p: p.pid)

    async def destroy(self) -> None:
        """Kill what is left of it, whatever it spawned, until nothing is; then let go.

        Its resource tracker ends by itself when the others are dead, and removes their
        shared memory from this host: killed, it would leave that for ever.
        """
        self.kill()
        began = time.monotonic()
        deadline = began + GONE_TIMEOUT_S
        # The scans of /proc take tens of milliseconds on a busy host: in a thread, so that
        # the log hears of the death meanwhile.
        while remaining := await asyncio.to_thread(self._remaining):
            tidying = time.monotonic() < began + TIDY_S
            for process in remaining:
                if not (tidying and is_resource_tracker(process.pid)):
                    signal_process(process, signal.SIGKILL)
            if time.monotonic() > deadline:
                self._logger.error("processes survive SIGKILL", pids=[p.pid for p in remaining])
                break
            await asyncio.sleep(_POLL_S)
        self.close()

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM to the leader, wait up to the timeout, then `destroy`."""
        if not self.dead.is_set():
            signal_process(self.leader, signal.SIGTERM)
            signal_process(self.leader, signal.SIGCONT)  # a stopped one could not obey
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.dead.wait()
        await self.destroy()

    def close(self) -> None:
        """Stop watching; reap our child. Its pid stays allocated until here, so that the
        session number cannot have been given to another process meanwhile."""
        loop = asyncio.get_running_loop()
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._pidfds.clear()
        for watch in self._early:
            watch.stop()
        self._early.clear()
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=1.0)
