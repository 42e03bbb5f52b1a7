"""A private directory for the Unix sockets of an engine's processes.

`vllm serve` names each ZeroMQ socket between its processes `$VLLM_RPC_BASE_PATH/<uuid>`, in /tmp by
default, and a killed engine leaves them there. So each worker has its own directory for them: new
for every engine, and removed with the worker.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

VARIABLE = "VLLM_RPC_BASE_PATH"
_UNIX_PATH_MAX = 107
_NAME_BYTES = 1 + 36  # a slash and the uuid


def ipc_path(run_dir: Path) -> Path:
    """Where they go: in the run directory, or beside other temporary files under a name
    made of it when a socket's path there would be too long."""
    path = run_dir / "ipc"
    if len(os.fsencode(path)) + _NAME_BYTES <= _UNIX_PATH_MAX:
        return path
    digest = hashlib.blake2b(os.fsencode(run_dir), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"relume-{os.getuid()}-{digest}"


def renew(run_dir: Path) -> Path:
    """An empty directory that only we can enter. Raises OSError."""
    remove(run_dir)
    path = ipc_path(run_dir)
    path.mkdir(mode=0o700)
    return path


def remove(run_dir: Path) -> None:
    """Removes it with all that is in it, if it is ours."""
    path = ipc_path(run_dir)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
        shutil.rmtree(path, ignore_errors=True)
