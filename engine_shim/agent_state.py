"""What the agent must remember over its own death: one small file in its run directory.

Written whole to a temporary name, fsynced, renamed. The counter of incarnations is
raised here *before* an engine starts, and an engine is written down right after, so a
successor can kill it by pid and start time. `RunDirectory` also holds the lock that
keeps two agents out of one directory.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from engine_shim.agent_errors import ConfigInvalid, RunDirectoryBusy, StateUnreadable
from engine_shim.agent_process import ProcessId

MAX_APPLIED = 1024
_UNIX_PATH_MAX = 107


class EngineRecord(Struct, frozen=True):
    """The engine that runs, or ran when the agent died. `members`: its other processes."""

    incarnation: int
    process: ProcessId
    members: tuple[ProcessId, ...] = ()


class DaemonRecord(Struct, frozen=True):
    """The state daemon that runs, or ran when the agent died: in which boot of the kernel,
    which process, a digest of the settings it was started with, and its own name for this
    life, once it was told."""

    kernel_boot: str
    process: ProcessId
    settings: str
    boot: str = ""


class AgentState(Struct, frozen=True):
    """Everything remembered. `epoch` is that of the stream as last owned. `applied` are
    (decision, index) of effects carried out, the newest last, bounded: the whole list is in
    the worker's own stream."""

    epoch: int = 0
    incarnation: int = 0
    engine: EngineRecord | None = None
    held: bool = False
    draining: bool = False
    applied: tuple[tuple[str, int], ...] = ()
    daemon: DaemonRecord | None = None


class RunDirectory:
    """The agent's directory: lock, state file, socket, engine log. A context manager.

    Entering raises RunDirectoryBusy when another agent lives in it, StateUnreadable when
    the state file does not decode, ConfigInvalid when its path is too long for a socket.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.socket_path = self.path / "agent.sock"
        self.engine_log = self.path / "engine.log"
        self.marker = f"RELUME_AGENT_SOCKET={self.socket_path}"
        """In the environment of all an engine of this directory spawns."""
        self.state = AgentState()
        self._file = self.path / "state.json"
        self._lock = -1

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        if len(os.fsencode(self.socket_path)) > _UNIX_PATH_MAX:
            raise ConfigInvalid("--run-dir", f"{self.path} is too long to hold a unix socket")
        self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunDirectoryBusy(str(self.path)) from None
        try:
            self.state = msgspec.json.decode(self._file.read_bytes(), type=AgentState)
        except FileNotFoundError:
            self.state = AgentState()
        except msgspec.DecodeError as error:
            os.close(self._lock)
            raise StateUnreadable(str(self._file), str(error)) from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def update(self, **changes: object) -> AgentState:
        """Replace fields of the state and make it durable before returning."""
        state = msgspec.structs.replace(self.state, **changes)
        if state != self.state:
            self._write(state)
            self.state = state
        return state

    def _write(self, state: AgentState) -> None:
        temporary = self._file.with_suffix(".tmp")
        with open(temporary, "wb") as file:
            file.write(msgspec.json.encode(state))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self._file)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def next_incarnation(self) -> int:
        """Count one engine start; never gives a number twice."""
        return self.update(incarnation=self.state.incarnation + 1).incarnation

    def remember_epoch(self, epoch: int) -> None:
        """Note under which epoch the stream is owned now."""
        self.update(epoch=epoch)

    def remember_engine(self, engine: EngineRecord | None) -> None:
        """Note the engine that runs now (None: none does)."""
        self.update(engine=engine)

    def remember_daemon(self, daemon: DaemonRecord | None) -> None:
        """Note the state daemon that runs now (None: none does)."""
        self.update(daemon=daemon)

    def remember_applied(self, effect: tuple[str, int], *, held: bool, draining: bool) -> None:
        """Note an effect and the target state it leads to, in one write."""
        applied = (*self.state.applied, effect)[-MAX_APPLIED:]
        self.update(applied=applied, held=held, draining=draining)
