"""The cold tier: images that memory has no room for, in one bounded file.

The file has no name (it is unlinked while open), so it ends with this process: it
survives pressure on memory and nothing else. Reads are checked by the caller against the
image's digest, as memory's are. The interface is the arena's, and would be that of a
remote store: allocate, write, read, release, used, budget.
"""

from __future__ import annotations

import logging
import os
import tempfile

from relume.engine_shim.checkpoints.daemon.store.extents import Extents

logger = logging.getLogger("relume.state")


class FileTier:
    """`budget` bytes at most in a nameless file under `directory`."""

    name = "file"

    def __init__(self, directory: str, budget: int) -> None:
        """Raises OSError."""
        self._extents = Extents(budget)
        self._failing = False
        handle, path = tempfile.mkstemp(prefix="relume-cold-", dir=directory)
        os.unlink(path)
        self._fd = handle

    @property
    def used(self) -> int:
        return self._extents.used

    @property
    def budget(self) -> int:
        return self._extents.capacity

    def write(self, image: memoryview) -> int | None:
        """Offset of the stored image; None when the tier or its disk is full."""
        offset = self._extents.allocate(len(image))
        if offset is None:
            return None
        try:
            done = 0
            while done < len(image):
                done += os.pwrite(self._fd, image[done:], offset + done)
        except OSError as error:  # a full or failing disk: the block is not stored, others stay
            self._extents.release(offset)
            if not self._failing:
                logger.warning("the file tier cannot store blocks, they stay in memory: %s", error)
            self._failing = True
            return None
        if self._failing:
            logger.info("the file takes blocks again")
        self._failing = False
        # Cached pages would take from the host what this tier is to spare it.
        os.posix_fadvise(self._fd, offset, len(image), os.POSIX_FADV_DONTNEED)
        return offset

    def read(self, offset: int, length: int) -> bytes:
        """Raises OSError; what the disk returns may be shorter, which the digest shows."""
        return os.pread(self._fd, length, offset)

    def release(self, offset: int) -> int:
        return self._extents.release(offset)

    def close(self) -> None:
        os.close(self._fd)
