"""Processes by identity: (pid, start time), pidfds, sessions, free ports.

A pid alone names nothing for long, so everything here that kills first proves that the
pid still is the process it was: by start time (field 22 of /proc/<pid>/stat, in clock
ticks since boot), and by a pidfd opened before the proof was read. A pidfd is also how a
death is seen: it turns readable the moment the process ends, child or not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

_PIDFD_INFO = struct.Struct("<QQ11Ii")
_PIDFD_INFO_EXIT = 1 << 3
# _IOWR(0xFF, 11, 64 bytes), linux/pidfd.h; exit status of a reaped process, Linux >= 6.15.
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11


class ProcessId(Struct, frozen=True, array_like=True):
    """A process of this boot: its pid and its start time in clock ticks."""

    pid: int
    start_ticks: int


class ProcessStat(Struct, frozen=True, kw_only=True):
    """What /proc/<pid>/stat says that matters here."""

    id: ProcessId
    state: str
    group: int
    session: int
    exit_code: int


def stat_of(pid: int) -> ProcessStat | None:
    """/proc/<pid>/stat, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name is in parentheses and may contain anything, so count from the last.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(
        id=ProcessId(pid, int(fields[19])),
        state=fields[0],
        group=int(fields[2]),
        session=int(fields[3]),
        exit_code=int(fields[49]),
    )


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    stat = stat_of(process.pid)
    return stat is not None and stat.id == process and stat.state not in "ZX"


def is_resource_tracker(pid: int) -> bool:
    """Whether it is Python's helper that removes shared memory its processes left behind."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def open_pidfd(process: ProcessId) -> int | None:
    """A pidfd of exactly this process, or None when it is gone."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    stat = stat_of(process.pid)
    if stat is None or stat.id != process:
        os.close(pidfd)
        return None
    return pidfd


def signal_process(process: ProcessId, number: int) -> bool:
    """Send `number` to exactly this process; False when it is gone."""
    pidfd = open_pidfd(process)
    if pidfd is None:
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def session_members(session: int) -> Iterator[ProcessStat]:
    """The living processes of a session (the pid of the process that began it)."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            stat = stat_of(int(entry))
            if stat is not None and stat.session == session and stat.state not in "ZX":
                yield stat


def marked_processes(marker: str) -> Iterator[ProcessId]:
    """Living processes, this one excepted, whose initial environment holds `marker`
    (`NAME=value`): whatever an engine has spawned, in whichever session."""
    needle = marker.encode() + b"\0"
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        stat = stat_of(int(entry))
        if stat is None or stat.state in "ZX":
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue  # gone meanwhile, or not ours to read and so not ours to kill
        if environment.startswith(needle) or b"\0" + needle in environment:
            yield stat.id


def exit_status(pidfd: int, pid: int) -> int | None:
    """The wait status of an ended process that need not be our child; None if unknown.

    /proc has it for a zombie, the pidfd for a reaped process (Linux >= 6.15).
    """
    stat = stat_of(pid)
    if stat is not None and stat.state == "Z":
        return stat.exit_code
    buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *([0] * 13)))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    fields = _PIDFD_INFO.unpack(buffer)
    return fields[13] if fields[0] & _PIDFD_INFO_EXIT else None


def describe_exit(status: int | None) -> tuple[str, str]:
    """(reason, detail) of a wait status in the words of `EngineDied`."""
    if status is None:
        return "unknown", "exit status not available"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(ValueError):
            return "killed", signal.Signals(number).name
        return "killed", f"signal {number}"
    return "exit", f"status {os.WEXITSTATUS(status)}"


# --- ports ---------------------------------------------------------------------------


def free_port(host: str) -> int:
    """A TCP port of `host` without a listener now.

    From below the ephemeral range: an engine binds its port many seconds later, and any outgoing
    connection could hold an ephemeral one by then.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(64):
        port = random.randrange(10_000, low) if low > 12_000 else 0
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError(f"no free TCP port on {host}")
