"""Stored images, each once: their location, references and readers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.daemon.store.extents import rounded
from relume.engine_shim.checkpoints.daemon.store.file_tier import FileTier
from relume.engine_shim.checkpoints.link.image import Buffer, digest_of


class Content:
    """One stored image. `refs` blocks are it; `pins` readers copy from it."""

    __slots__ = ("digest", "family", "length", "offset", "pins", "refs", "tier")

    def __init__(self, family: bytes, digest: bytes, length: int, offset: int, tier: str) -> None:
        self.family = family
        self.digest = digest
        self.length = length
        self.offset = offset
        self.tier = tier
        self.refs = 0
        self.pins = 0


class Contents:
    """Images over a memory tier and perhaps a file tier. One thread."""

    def __init__(self, arena: Arena, cold: FileTier | None) -> None:
        self.arena = arena
        self.cold = cold
        self.shared = 0
        self._stored = 0
        self._by_digest: dict[tuple[bytes, bytes], Content] = {}

    def __len__(self) -> int:
        """Images stored, also those that are hidden, or kept for a reader only."""
        return self._stored

    def same_as(self, family: bytes, digest: bytes, data: Buffer) -> Content | None:
        """The stored image equal to `data` byte for byte."""
        content = self._by_digest.get((family, digest))
        if content is None or content.length != len(data):
            return None
        if memoryview(self.read(content)) != data:
            return None
        self.shared += 1
        return content

    def allocate(self, family: bytes, digest: bytes, length: int) -> Content | None:
        """Room in memory for a new image that nothing refers to yet; None without room."""
        offset = self.arena.allocate(length)
        if offset is None:
            return None
        return Content(family, digest, length, offset, self.arena.name)

    def writable(self, content: Content) -> memoryview:
        """Its bytes, while it is being written."""
        return self.arena.view(content.offset, content.length)

    def abandon(self, content: Content) -> None:
        """Frees an image that nothing ever referred to."""
        self.arena.release(content.offset)

    def refer(self, content: Content) -> None:
        """One block more is this image."""
        self._stored += content.refs == 0
        content.refs += 1
        self._by_digest.setdefault((content.family, content.digest), content)

    def unrefer(self, content: Content) -> bool:
        """One block less; True when that freed memory."""
        content.refs -= 1
        if content.refs:
            return False
        self.hide(content)
        if content.pins:
            return False
        return self._free(content)

    def hide(self, content: Content) -> None:
        """No further block becomes this image (it is damaged, or gone)."""
        if self._by_digest.get((content.family, content.digest)) is content:
            del self._by_digest[content.family, content.digest]

    def _free(self, content: Content) -> bool:
        self._stored -= 1
        if content.tier == self.arena.name:
            self.arena.release(content.offset)
            return True
        assert self.cold is not None
        self.cold.release(content.offset)
        return False

    def demote(self, content: Content) -> bool:
        """Moves it from memory to the file; False when it is not there, pinned, or the
        file is full."""
        if self.cold is None or content.tier != self.arena.name or content.pins:
            return False
        offset = self.cold.write(self.arena.read(content.offset, content.length))
        if offset is None:
            return False
        self.arena.release(content.offset)
        content.offset, content.tier = offset, self.cold.name
        return True

    def read(self, content: Content) -> memoryview | bytes:
        """Its bytes as they lie; a failing disk gives none."""
        if content.tier == self.arena.name:
            return self.arena.read(content.offset, content.length)
        assert self.cold is not None
        try:
            return self.cold.read(content.offset, content.length)
        except OSError:
            return b""

    def span(self, contents: Sequence[Content], most: int) -> memoryview | None:
        """Memory in which these images follow each other, with no more than the rest
        of a page between two; None when they do not, or it is more than `most` bytes."""
        if not contents or any(c.tier != self.arena.name for c in contents):
            return None
        if any(a.offset + rounded(a.length) != b.offset for a, b in pairwise(contents)):
            return None
        first, last = contents[0], contents[-1]
        length = last.offset + last.length - first.offset
        return self.arena.read(first.offset, length) if length <= most else None

    def verified(self, content: Content) -> memoryview | bytes | None:
        """Its bytes, checked against its digest; None when they are damaged."""
        image = self.read(content)
        return image if digest_of(image) == content.digest else None

    def pin(self, content: Content) -> None:
        """Its bytes stay where they are until `unpin`, whatever is dropped."""
        content.pins += 1

    def unpin(self, content: Content) -> None:
        content.pins -= 1
        if content.pins == 0 and content.refs == 0:
            self._free(content)

    def close(self) -> None:
        self._by_digest.clear()
        self.arena.close()
        if self.cold is not None:
            self.cold.close()
