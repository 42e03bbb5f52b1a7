"""What the agent must remember over its own death: one small file in its run directory.

Written whole to a temporary name, fsynced, renamed. The counter of incarnations is
raised here *before* an engine starts, and an engine is written down right after, so a
successor can kill it by pid and start time. `RunDirectory` also holds the lock that
keeps two agents out of one directory.

A disk without room. What must be durable (an assigned incarnation, an effect carried out) is not
done unless it can be written: OSError. What has happened (an engine runs or ended, the stream is
owned under another epoch) is known in memory at once and written as soon as that is possible:
`unsaved` says why it is not, `save` tries again.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from relume.engine_shim.agent.agent_errors import (
    RunDirectoryBusy,
    RunDirectoryUnusable,
    StateUnreadable,
)
from relume.engine_shim.agent.engine_process.process_identity import ProcessId
from relume.events.decode_errors import UNREADABLE
from relume.events.settings.config_error import ConfigError

MAX_APPLIED = 1024
_UNIX_PATH_MAX = 107


class EngineRecord(Struct, frozen=True):
    """The engine that runs, or ran when the agent died. `members`: its other processes."""

    incarnation: int
    process: ProcessId
    members: tuple[ProcessId, ...] = ()


class DaemonRecord(Struct, frozen=True):
    """The state daemon that runs, or ran when the agent died: the kernel's boot, the process, a
    digest of the settings it was started with, and the daemon's own name for this life, once
    known."""

    kernel_boot: str
    process: ProcessId
    settings: str
    boot: str = ""


class AgentState(Struct, frozen=True, kw_only=True):
    """Everything remembered. `epoch` is that of the stream as last owned in log `log` (its id, empty
    until it is known). `fence` is the highest epoch in any log: engines and state daemons are fenced
    by it, because epochs of a new log may be lower. `applied` are (decision, index) of effects carried
    out, the newest last, bounded: the whole list is in the worker's own stream."""

    epoch: int = 0
    fence: int = 0
    log: str = ""
    incarnation: int = 0
    engine: EngineRecord | None = None
    held: bool = False
    draining: bool = False
    applied: tuple[tuple[str, int], ...] = ()
    daemon: DaemonRecord | None = None


class RunDirectory:
    """The agent's directory: lock, state file, socket, engine log. A context manager.

    Entering raises RunDirectoryBusy when another agent lives in it, RunDirectoryUnusable
    when it cannot be made or read, StateUnreadable when the state file does not decode,
    ConfigError when its path is too long for a socket.
    """

    unsaved = ""
    """Why the file does not say what `state` does; empty when it does."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.socket_path = self.path / "agent.sock"
        self.engine_log = self.path / "engine.log"
        self.progress = self.path / "progress"
        self.marker = f"RELUME_AGENT_SOCKET={self.socket_path}"
        """In the environment of all an engine of this directory spawns."""
        self.state = AgentState()
        self._file = self.path / "state.json"
        self._lock = -1

    def __enter__(self) -> Self:
        if len(os.fsencode(self.socket_path)) > _UNIX_PATH_MAX:
            problem = "is too long for the path of a Unix socket"
            raise ConfigError("run_dir", str(self.path), problem, "choose a shorter path")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunDirectoryUnusable(str(self.path), str(error)) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunDirectoryBusy(str(self.path)) from None
        try:
            self.state = msgspec.json.decode(self._file.read_bytes(), type=AgentState)
        except FileNotFoundError:
            self.state = AgentState()
        except UNREADABLE as error:
            os.close(self._lock)
            raise StateUnreadable(str(self._file), str(error)) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def update(self, **changes: object) -> AgentState:
        """Replace fields of the state and make it durable before returning.

        Raises OSError; then nothing was replaced.
        """
        state = msgspec.structs.replace(self.state, **changes)
        if state != self.state or self.unsaved:
            self._write(state)
            self.state, self.unsaved = state, ""
        return state

    def note(self, **changes: object) -> None:
        """Replace fields of the state; durable before returning, if that is possible now."""
        state = msgspec.structs.replace(self.state, **changes)
        if state != self.state:
            self.state, self.unsaved = state, self.unsaved or "not written yet"
            self.save()

    def save(self) -> bool:
        """Write what is noted and not in the file yet; whether the file is up to date."""
        if self.unsaved:
            try:
                self._write(self.state)
            except OSError as error:
                self.unsaved = str(error)
            else:
                self.unsaved = ""
        return not self.unsaved

    def _write(self, state: AgentState) -> None:
        temporary = self._file.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(msgspec.json.encode(state))
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        os.rename(temporary, self._file)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def next_incarnation(self) -> int:
        """Count one engine start; never gives a number twice. Raises OSError."""
        return self.update(incarnation=self.state.incarnation + 1).incarnation

    def remember_epoch(self, epoch: int) -> None:
        """Note under which epoch the stream is owned now."""
        state = self.state
        self.note(epoch=epoch, fence=max(state.fence, state.epoch, epoch))

    def remember_log(self, log_id: str) -> None:
        """Note the log's id. What was applied in another log says nothing about this one."""
        is_another = bool(self.state.log) and log_id != self.state.log
        self.note(log=log_id, applied=() if is_another else self.state.applied)

    def remember_engine(self, engine: EngineRecord | None) -> None:
        """Note the engine that runs now (None: none does)."""
        self.note(engine=engine)

    def remember_daemon(self, daemon: DaemonRecord | None) -> None:
        """Note the state daemon that runs now (None: none does)."""
        self.note(daemon=daemon)

    def remember_applied(self, effect: tuple[str, int], *, held: bool, draining: bool) -> None:
        """Note an effect and the target state it leads to, in one write. Raises OSError."""
        applied = (*self.state.applied, effect)[-MAX_APPLIED:]
        self.update(applied=applied, held=held, draining=draining)
