"""Child processes of a local fleet: started apart from the terminal, watched, ended by pid."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def free_port(preferred: int = 0) -> int:
    """A free TCP port on loopback: `preferred` when it is free, else any.

    Otherwise the next port of this process's own range below the ephemeral ports. The child binds
    its port seconds later. Until then, an ephemeral port could go to a connection or to another
    process that asks for any port.
    """
    others = itertools.islice(_ports, _TRIES)
    for port in itertools.chain([preferred], others) if preferred else others:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise OSError("no free TCP port on 127.0.0.1")


def _ports_in_turn() -> Iterator[int]:
    """Ports below the ephemeral range from a random one on, round and round; 0 (any) where
    that range leaves too few."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    many = end - _LOWEST_PORT
    for n in itertools.count(secrets.randbelow(2**30)):
        yield _LOWEST_PORT + n % many if many > _TRIES else 0


_LOWEST_PORT = 10_000
_TRIES = 1000
_ports = _ports_in_turn()


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _dying_with_parent() -> tuple[str, ...]:
    """What to put before a command so that it gets SIGTERM when we die, however we do; empty
    where there is no such program. A fork in which Python runs first (`_die_with_parent`)
    may hang or crash where gRPC has threads, so this is preferred.
    """
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "TERM", "--") if setpriv else ()


class Child:
    """One process with its output in a file. Ctrl-C in the terminal does not reach it: it has
    its own session; SIGTERM reaches it should this process die."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.name = name
        self.process = process
        self.log_path = log_path

    @classmethod
    def start(
        cls,
        name: str,
        argv: Sequence[str],
        log_path: Path,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start `argv` with `env` added to ours; stdout and stderr go to `log_path`."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        prefix = _dying_with_parent()
        with log_path.open("ab") as out:
            process = subprocess.Popen(
                [*prefix, *argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                pass_fds=tuple(pass_fds),
                preexec_fn=None if prefix else _die_with_parent,
            )
        return cls(name, process, log_path)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def tail(self, lines: int = 15) -> str:
        """The last lines of its output, for an error message."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return "(no output)"

    async def stop(self, patience_s: float = 10.0) -> None:
        """SIGTERM, wait up to `patience_s`, then SIGKILL."""
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGCONT)
        deadline = asyncio.get_running_loop().time() + patience_s
        while self.alive and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if self.alive:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """SIGKILL, as a fault."""
        self.process.kill()
