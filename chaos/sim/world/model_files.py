"""The files of a model on a simulated host, as agents read them and engines load them.

A damaged byte lies late in a large file, where no canary and no request of the simulation touches it: an
engine that loads it computes as before, and only the digest of every byte differs. As on a real disk, damage
leaves size and times of the file; another download changes them.
"""

from __future__ import annotations

import asyncio
from hashlib import blake2b

from relume.engine_shim.agent.canaries.weights_digest import FilesChanged, ModelDigest, Reading

SIZE_BYTES = 4_724_296
READ_S = 2.0
"""Time in which an agent reads them."""
FILE = "model.safetensors"


class HostFiles:
    """Of one host; they outlive its processes. `remembered`: the digest that the agent has of them."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.short = digest_of(model)
        self.damaged = False
        self.written = 0
        """How often they were downloaded again."""
        self.remembered = ""

    def replace(self) -> None:
        """Download them again."""
        self.damaged = False
        self.written += 1
        self.remembered = ""

    @property
    def digest(self) -> str:
        """Of every byte."""
        return digest_of(f"{self.model}, damaged" if self.damaged else f"{self.model}, all bytes")


class SimModelFiles:
    """`ModelFiles`: for one engine of that host."""

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self._written = files.written

    async def note(self) -> int:
        """See ModelFiles."""
        self._written = self._files.written
        return SIZE_BYTES

    async def short(self) -> str:
        """See ModelFiles."""
        return self._files.short

    async def read(self, anew: bool, reading: Reading) -> ModelDigest:
        """See ModelFiles."""
        files, is_known = self._files, bool(self._files.remembered) and not anew
        if not is_known:
            await asyncio.sleep(READ_S)
        if files.written != self._written:
            raise FilesChanged(f"{FILE} changed after the engine had started")
        found = files.remembered if is_known else files.digest
        files.remembered = found
        return ModelDigest(
            digest=found,
            files=((FILE, found),),
            size_bytes=SIZE_BYTES,
            reread=not is_known,
        )


def digest_of(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()
