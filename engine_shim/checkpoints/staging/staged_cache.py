"""A rank's KV cache, read and written by copies, in device memory and in host memory alike.

Out: blocks are gathered into one piece of memory beside the cache (DéjàVu's buffered copies),
which costs the device little, and go to host memory from there by one transfer. In: blocks are
written to host memory, checked there, and go the other way, a buffer at a time while the next
one fills.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping, Sequence

import torch

from relume.engine_shim.checkpoints.link.block_stream import BlockIn
from relume.engine_shim.checkpoints.staging.block_rows import BlockRows
from relume.engine_shim.checkpoints.staging.copies import Copies, Event, Way

logger = logging.getLogger(__name__)

STAGING_BYTES = 8 << 20
SAVES, LOADS = 4, 2
"""Buffers of that size: the former are shed for when they are all in use, the latter filled in
turn."""


class Buffer:
    """Memory for some blocks beside the cache and in host memory."""

    def __init__(self, cache: BlockRows, capacity: int, copies: Copies) -> None:
        """Raises RuntimeError when there is no memory."""
        self._cache = cache
        self.capacity = capacity
        self._host = [
            copies.staging(capacity, region.width, torch.uint8) for region in cache.regions
        ]
        self._near = [copies.beside(host) for host in self._host]
        ids = copies.staging(1, capacity, torch.int64)
        self._ids_host, self._ids_near = ids[0], copies.beside(ids)[0]
        self._views = [
            (memoryview(host.numpy()).cast("B"), region.width)
            for host, region in zip(self._host, cache.regions, strict=True)
        ]
        self.block_ids: list[int] = []
        self.copied: Event | None = None

    def pieces(self, block_id: int) -> list[memoryview]:
        """A row's bytes."""
        return [view[block_id * size : (block_id + 1) * size] for view, size in self._views]

    def place(self, block_id: int) -> int:
        """See staged_saves.Staging."""
        if len(self.block_ids) == self.capacity:
            return -1
        self.block_ids.append(block_id)
        return len(self.block_ids) - 1

    def wait(self) -> None:
        """Until its copy is over; at once when none is on its way. Raises RuntimeError."""
        copied, self.copied = self.copied, None
        if copied is not None:
            copied.synchronize()

    def empty(self) -> None:
        self.block_ids = []
        self.copied = None

    def settle(self) -> None:
        """Its blocks are final: they are what is copied."""
        self._ids_host[: len(self.block_ids)] = torch.tensor(self.block_ids, dtype=torch.int64)

    # On a side stream. Nothing in here waits for the device.

    def gather(self) -> None:
        """From the cache into the memory beside it."""
        count, ids = self._ids()
        for region, near in zip(self._cache.regions, self._near, strict=True):
            region.read(ids, near[:count])

    def to_host(self) -> None:
        count = len(self.block_ids)
        for near, host in zip(self._near, self._host, strict=True):
            host[:count].copy_(near[:count], non_blocking=True)

    def to_cache(self) -> None:
        count, ids = self._ids()
        for region, near, host in zip(self._cache.regions, self._near, self._host, strict=True):
            near[:count].copy_(host[:count], non_blocking=True)
            region.write(ids, near[:count])

    def _ids(self) -> tuple[int, torch.Tensor]:
        count = len(self.block_ids)
        ids = self._ids_near[:count]
        ids.copy_(self._ids_host[:count], non_blocking=True)
        return count, ids


class StagedCache:
    """See `staged_saves.StagedCacheProtocol`. `blocks`: how many the cache has."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        blocks: int,
        copies_for: Callable[[torch.device], Copies],
        staging_bytes: int = 0,
    ) -> None:
        """`staging_bytes`: of a buffer; 0: STAGING_BYTES. One block has room in any case. A
        cache that cannot have its buffers has failed from the start. Raises Unshapeable."""
        self.failed = ""
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._loads: list[Buffer] = []
        self._copies: Copies | None = None
        with torch.inference_mode():  # as the runner, whose tensors these are
            self.rows = BlockRows(tensors, blocks)
            capacity = max((staging_bytes or STAGING_BYTES) // self.row_bytes, 1)
            try:
                self._copies = copies_for(self.rows.device)
                for _ in range(SAVES):
                    self._free.put(Buffer(self.rows, capacity, self._copies))
                self._loads = [Buffer(self.rows, capacity, self._copies) for _ in range(LOADS)]
            except RuntimeError as error:
                total = (SAVES + LOADS) * capacity * self.row_bytes
                logger.error(
                    "no %d bytes of staging memory, neither pinned nor on %s; `staging_bytes` "
                    "(now %d) makes it less", total, self.rows.device, capacity * self.row_bytes,
                )  # fmt: skip
                self.fail(error)

    @property
    def layers(self) -> int:
        return self.rows.layers

    @property
    def piece_bytes(self) -> int:
        return self.rows.piece_bytes

    @property
    def row_bytes(self) -> int:
        return self.rows.row_bytes

    @property
    def dtype(self) -> str:
        return self.rows.dtype

    def fail(self, error: Exception) -> None:
        """From now on nothing is saved, and what is to be loaded is computed."""
        if not self.failed:
            self.failed = str(error).partition("\n")[0] or type(error).__name__
            logger.error("this engine stops writing checkpoints: %s", self.failed)

    # --- out ---------------------------------------------------------------------------

    def take(self) -> Buffer | None:
        """See staged_saves.StagedCacheProtocol, also for what follows."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return None

    def give(self, staging: Buffer) -> None:
        staging.empty()
        self._free.put(staging)

    @torch.inference_mode()
    def begin(self, filled: Sequence[Buffer]) -> None:
        assert self._copies is not None
        for buffer in filled:
            buffer.settle()
        computed = self._copies.computed()
        for buffer in filled:
            read = self._copies.start(Way.READ, buffer.gather, computed)
        for buffer in filled:
            buffer.copied = self._copies.start(Way.OUT, buffer.to_host, read)
        # For copies within the device only; and now, since the runner may write to blocks
        # (zeroing, copies) before it informs connectors of a step.
        self._copies.hold(read)

    # --- in ----------------------------------------------------------------------------

    def loading(self) -> Callable[[], StagedLoading]:
        if self.failed or self._copies is None:
            raise RuntimeError(self.failed)
        copies = self._copies
        # Blocks that were just freed may still be written to by steps that are under way.
        computed = copies.computed()
        return lambda: StagedLoading(self._loads, copies, computed)

    def close(self) -> None:
        if self._copies is not None:
            try:
                self._copies.close()
            except RuntimeError as error:
                self.fail(error)
        while self.take() is not None:
            pass
        self._loads.clear()
        self.failed = self.failed or "closed"


class StagedLoading:
    """See `staged_saves.Loading`; one at a time."""

    def __init__(self, buffers: Sequence[Buffer], copies: Copies, computed: Event) -> None:
        self._buffers = list(buffers)
        self._copies = copies
        self._after: Event | None = computed
        self._at = 0

    def pieces(self, block_id: int) -> list[memoryview]:
        """Where the next block may be written, whichever it is."""
        buffer = self._buffers[self._at]
        if buffer.copied is not None:
            try:
                buffer.wait()
            finally:
                buffer.empty()
        return buffer.pieces(len(buffer.block_ids))

    def landed(self, block: BlockIn) -> None:
        buffer = self._buffers[self._at]
        buffer.place(block.block_id)
        if len(buffer.block_ids) == buffer.capacity:
            self._start(buffer)
            self._at = (self._at + 1) % len(self._buffers)

    @torch.inference_mode()
    def _start(self, buffer: Buffer) -> None:
        buffer.settle()
        after, self._after = self._after, None
        buffer.copied = self._copies.start(Way.BACK, buffer.to_cache, after)

    def finish(self) -> None:
        """Also after a failure, before the blocks may be reused."""
        error: RuntimeError | None = None
        try:
            buffer = self._buffers[self._at]
            if buffer.block_ids and buffer.copied is None:
                self._start(buffer)
        except RuntimeError as failed:
            error = failed
        for buffer in self._buffers:
            try:
                buffer.wait()
            except RuntimeError as failed:
                error = error or failed
            buffer.empty()
        if error is not None:
            raise error
