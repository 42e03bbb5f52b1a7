"""The stacks of this process's threads, on a signal: for an engine that hangs.

`faulthandler` writes them from the signal handler, also while a thread holds the interpreter's lock
for ever. The file is opened beforehand, since a hung process opens none.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

SIGNAL = signal.SIGRTMIN + 6
"""Which neither Python, vLLM nor CUDA uses. Only for processes that said hello: it ends others."""


def path_of(agent_socket: str, pid: int) -> str:
    """Where process `pid` of the engine writes its stacks."""
    return f"{agent_socket}.{pid}.stacks"


def arm(agent_socket: str) -> None:
    """From here on the signal has the stacks written; into the engine's log if there is no other
    place for them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    try:
        file = os.open(path_of(agent_socket, os.getpid()), flags, 0o600)
    except OSError:
        file = sys.stderr.fileno()
    faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
