"""Checkpoints in a local fleet: what each worker's agent gets to know about its state daemon.

Each worker counts as a separate host, with a daemon and a failure domain. Engines reach
daemons by shared memory, as on one host, or like those of other hosts: over TCP on loopback,
in authenticated plaintext or under CURVE.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from relume.controlplane.local.child_processes import free_port

LINKS = ("shared", "plain", "curve")
KEYS_TIMEOUT_S = 30.0


class LocalCheckpoints:
    """`directory` holds the keys and the files of cold blocks. `advertise`: HOST:PORT at which
    engines reach each worker's daemon instead of its own port, such as a proxy's."""

    def __init__(
        self,
        directory: Path,
        workers: int,
        memory_mb: int,
        link: str,
        file_mb: int,
        advertise: Sequence[str] = (),
    ) -> None:
        """Raises ValueError for an unknown link, subprocess.SubprocessError if the keys cannot be
        made."""
        if link not in LINKS:
            raise ValueError(f"checkpoint link {link!r} is none of {', '.join(LINKS)}")
        self._directory = directory
        self._memory_mb = memory_mb
        self._link = link
        self._file_mb = file_mb
        self.ports = [0 if link == "shared" else free_port() for _ in range(workers)]
        self._advertise = list(advertise) or [f"127.0.0.1:{port}" for port in self.ports]
        directory.mkdir(parents=True, exist_ok=True)
        if link == "plain":
            secret = directory / "secret"
            secret.touch(0o600)
            secret.write_text(secrets.token_hex(32))
        elif link == "curve":
            self._make_keys()

    def _make_keys(self) -> None:
        for file in (*self._directory.glob("w*.json"), *self._directory.glob("w*.secret")):
            file.unlink()
        named = [f"w{index}={address}" for index, address in enumerate(self._advertise)]
        command = [sys.executable, "-m", "relume.engine_shim.checkpoints.curve_keys"]
        command += ["--out", str(self._directory), *named]
        subprocess.run(command, check=True, capture_output=True, timeout=KEYS_TIMEOUT_S)

    def flags(self, index: int) -> list[str]:
        """Options of the agent of worker `w<index>`."""
        flags = ["--checkpoint-mb", str(self._memory_mb), "--checkpoint-allow-unlocked", "true"]
        if self._file_mb:
            cold = self._directory / f"cold{index}"
            cold.mkdir(exist_ok=True)
            flags += ["--checkpoint-file-dir", str(cold)]
            flags += ["--checkpoint-file-mb", str(self._file_mb)]
        if self._link == "shared":
            return flags
        flags += ["--checkpoint-local", "false"]
        flags += ["--checkpoint-listen", f"127.0.0.1:{self.ports[index]}"]
        flags += ["--checkpoint-advertise", self._advertise[index]]
        if self._link == "curve":
            return [*flags, "--checkpoint-curve-file", str(self._directory / f"w{index}.json")]
        return [*flags, "--checkpoint-secret-file", str(self._directory / "secret")]
