"""The process of this host's state daemon: found, started, watched, ended.

Other workers can resume from what it holds, so it outlives the agent that started it: it runs in
its own session and logs to a file. The run directory records it by kernel boot, pid and start time;
the next agent adopts exactly that process, if it was started with the same settings. Anything else
that serves this socket is of no known life, and is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.engine_process.process_identity import (
    ProcessId,
    describe_exit,
    exit_status,
    is_alive,
    marked_processes,
    open_pidfd,
    signal_process,
    stat_of,
)
from relume.engine_shim.agent.host_daemon.checkpoint_options import Checkpoints, kernel_boot
from relume.engine_shim.agent.run_directory import DaemonRecord, RunDirectory

STOP_S = 5.0
_POLL_S = 0.01
_LOG_LIMIT_BYTES = 8 << 20


class DaemonProcess:
    """At most one living daemon of this run directory."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        run: RunDirectory,
        logger: Logger,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self._checkpoints = checkpoints
        self._run = run
        self._logger = logger
        self._marker = f"RELUME_STATE_SOCKET={checkpoints.socket}"
        # Secrets of the log are the agent's alone.
        self._environment = {k: v for k, v in environment.items() if k != "RELUME_ETCD_ENDPOINTS"}
        self._child: subprocess.Popen[bytes] | None = None

    def recorded(self) -> ProcessId | None:
        """The living daemon a dead agent left, if its settings are ours."""
        record = self._run.state.daemon
        if record is None or record.kernel_boot != kernel_boot() or not is_alive(record.process):
            return None
        return record.process if record.settings == self._checkpoints.digest else None

    async def clear(self, keep: ProcessId | None = None) -> list[int]:
        """Kill daemons of this socket other than `keep`; their pids."""
        found = await asyncio.to_thread(lambda: [*marked_processes(self._marker)])
        others = [process for process in found if process != keep]
        for process in others:
            await self._end(process, 0.0)
        return [process.pid for process in others]

    def start(self, epoch: int) -> ProcessId:
        """A new one, of that fencing epoch or the highest known. Blocks for fork and exec. Raises OSError."""
        path = self._run.path / "daemon.json"
        settings = {**self._checkpoints.daemon, "epoch": max(epoch, self._run.state.fence)}
        with open(path, "wb", opener=_private) as file:
            file.write(msgspec.json.encode(settings))
        log = self._run.path / "daemon.log"
        if log.exists() and log.stat().st_size > _LOG_LIMIT_BYTES:
            log.rename(log.with_suffix(".log.1"))
        name, _, socket = self._marker.partition("=")
        with open(log, "ab") as output:
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "relume.engine_shim.checkpoints.daemon",
                    "--config",
                    str(path),
                ],
                env={**self._environment, name: socket},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        stat = stat_of(self._child.pid)
        if stat is None:
            raise OSError(f"pid {self._child.pid} vanished")
        self._run.remember_daemon(DaemonRecord(kernel_boot(), stat.id, self._checkpoints.digest))
        return stat.id

    def named(self, boot: str) -> None:
        """Note what the recorded daemon calls this life of it."""
        record = self._run.state.daemon
        if record is not None:
            self._run.remember_daemon(msgspec.structs.replace(record, boot=boot))

    async def ended(self, process: ProcessId) -> str:
        """Wait until it is dead; how it died, in words."""
        pidfd = open_pidfd(process)
        if pidfd is None:
            self._reap()
            return "gone"
        loop, dead = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(pidfd, dead.set)
        try:
            await dead.wait()
            return " ".join(describe_exit(exit_status(pidfd, process.pid)))
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            if dead.is_set():
                self._reap()

    async def end(self, process: ProcessId) -> None:
        """SIGTERM, after a while SIGKILL; then nothing is recorded any more."""
        await self._end(process, STOP_S)
        self._reap()
        self._run.remember_daemon(None)

    async def _end(self, process: ProcessId, patience_s: float) -> None:
        if patience_s:
            signal_process(process, signal.SIGTERM)
            signal_process(process, signal.SIGCONT)  # a stopped one could not obey
        deadline = time.monotonic() + patience_s
        while is_alive(process) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        if signal_process(process, signal.SIGKILL):
            while is_alive(process) and time.monotonic() < deadline + STOP_S:
                await asyncio.sleep(_POLL_S)
        if is_alive(process):
            self._logger.error("the state daemon survives SIGKILL", pid=process.pid)

    def _reap(self) -> None:
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=1.0)
            self._child = None

    def last_words(self) -> str:
        """The end of its log."""
        try:
            text = (self._run.path / "daemon.log").read_text(errors="replace")
        except OSError:
            return ""
        return text[-400:].strip().rpartition("\n")[2]


def end_unwanted(run: RunDirectory, logger: Logger) -> str:
    """End the daemon a dead agent left, for an agent that is to have none; its boot."""
    record = run.state.daemon
    if record is None:
        return ""
    if record.kernel_boot == kernel_boot() and signal_process(record.process, signal.SIGKILL):
        logger.warning("state daemon of the previous agent killed", pid=record.process.pid)
    run.remember_daemon(None)
    return record.boot


def _private(path: str, flags: int) -> int:
    """A new file, readable by us alone, in place of any old one: it may hold a key."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_EXCL, 0o600)
