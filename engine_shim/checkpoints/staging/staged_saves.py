"""Checkpoints of a rank's cache, out by way of staging memory.

Theory of operation. When a step's work has been given to the device, the blocks it fills are
copied: side by side within the device, then in one transfer to pinned host memory. The engine's
thread only starts that. The device's next step waits until the first copy is over, because a block
may be reused by then. A thread here waits for the second, and hands the blocks to the links in the
order in which they filled; what ends a request's checkpoint goes the same way, so that it overtakes
nothing.

What finds no staging memory, or no room on its link, is shed, which delays nothing but itself:
the scheduler offers it again. No torch in this module; `staged_cache` has it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from relume.engine_shim.checkpoints.checkpoint_spec import SaveJob
from relume.engine_shim.checkpoints.daemon_links import Links
from relume.engine_shim.checkpoints.link.block_stream import BlockIn, BlockOut, CacheView, scatter
from relume.events.wire.kv.fingerprint import TOKEN_BYTES
from relume.events.wire.kv.kv_errors import Unreachable

logger = logging.getLogger(__name__)
STOP_S = 5.0


class Staging(CacheView, Protocol):
    """Host memory for some blocks on their way; `pieces` returns a row's bytes."""

    def place(self, block_id: int) -> int:
        """The row the block will have; -1: it is full."""

    def wait(self) -> None:
        """Until the blocks have been copied here. Raises RuntimeError."""


class Loading(CacheView, Protocol):
    """One restore; `pieces` returns where the next block may be written."""

    def landed(self, block: BlockIn) -> None:
        """It was written, and is what it must be. Raises RuntimeError."""

    def finish(self) -> None:
        """Waits until all that landed is in the cache, or never will be. Raises RuntimeError."""


class StagedCacheProtocol(Protocol):
    """A cache that is read and written by copies. `failed`: why it stopped; empty while it
    works."""

    failed: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one block in staging memory."""

    def take(self) -> Staging | None:
        """Empty staging memory; None when all is in use."""

    def give(self, staging: Any) -> None:
        """Release what `take` returned."""

    def begin(self, filled: Sequence[Any]) -> None:
        """Starts the copies of what `take` gave; on the engine's thread. Raises RuntimeError."""

    def loading(self) -> Callable[[], Loading]:
        """On the engine's thread: the event that the load's thread starts with, after all that was
        computed so far."""

    def fail(self, error: Exception) -> None:
        """The device failed: nothing is copied any more."""

    def close(self) -> None:
        """Frees its memory, if it has no user."""


class _QueuedSend:
    """One job: where its first blocks are staged."""

    __slots__ = ("bytes", "job", "places")

    def __init__(self, job: SaveJob) -> None:
        self.job = job
        self.places: list[tuple[Staging, int]] = []
        self.bytes = 0


class StagedSaves:
    """One rank's. `blocks_of` makes what is sent of a job's blocks from one on, given their rows.
    `taken` is called with the number that a link accepted, `refused` with a job for which a retry
    is useless. Both are called on the thread here."""

    def __init__(
        self,
        cache: StagedCacheProtocol,
        links: Links,
        blocks_of: Callable[[SaveJob, int, Sequence[int]], list[BlockOut]],
        taken: Callable[[SaveJob, int], None],
        refused: Callable[[SaveJob], None],
    ) -> None:
        self._cache = cache
        self._links = links
        self._blocks_of = blocks_of
        self._taken = taken
        self._refused = refused
        self._lock = threading.Lock()
        self._staged: dict[str, int] = {}  # bytes by endpoint that no link was offered yet
        self._due: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="relume-kv-save", daemon=True)
        self._thread.start()

    # --- the engine's thread -----------------------------------------------------------

    def offer(self, jobs: Sequence[SaveJob]) -> None:
        """Starts to save what the step filled; never waits."""
        if not jobs:
            return
        sendings = [_QueuedSend(job) for job in jobs]
        if self._cache.failed:
            self._due.put(lambda: self._send([], sendings))
            return
        stagings: list[Staging] = []
        where: dict[int, tuple[Staging, int]] = {}
        for sending in sendings:
            for block_id in sending.job.block_ids[: self._space(sending.job)]:
                place = where.get(block_id) or self._place(block_id, stagings)
                if place is None:
                    break
                where[block_id] = place
                sending.places.append(place)
            self._count(sending, len(sending.places))
        if stagings:
            try:
                self._cache.begin(stagings)
            except RuntimeError as error:
                self._cache.fail(error)
        self._due.put(lambda: self._send(stagings, sendings))

    def _place(self, block_id: int, stagings: list[Staging]) -> tuple[Staging, int] | None:
        if stagings and (row := stagings[-1].place(block_id)) >= 0:
            return stagings[-1], row
        staging = self._cache.take()
        if staging is None:
            return None
        stagings.append(staging)
        return staging, staging.place(block_id)

    def _space(self, job: SaveJob) -> int:
        """Blocks its link would take, beside those on their way to it; one where there are
        none. What would be shed there need not be copied."""
        try:
            waiting = self._links.peer(job.endpoint).pending_bytes
        except Unreachable:
            return 0
        with self._lock:
            waiting += self._staged.get(job.endpoint, 0)
        size = self._image_bytes(job)
        return max((self._links.bound_bytes - waiting) // size, 0 if waiting else 1)

    def _image_bytes(self, job: SaveJob) -> int:
        return TOKEN_BYTES * len(job.tokens[0]) + self._cache.row_bytes

    def _count(self, sending: _QueuedSend, blocks: int) -> None:
        """Bytes on their way to the link: more, or none of these any more."""
        endpoint = sending.job.endpoint
        with self._lock:
            before = self._staged.get(endpoint, 0) - sending.bytes
            sending.bytes = blocks * self._image_bytes(sending.job)
            self._staged[endpoint] = before + sending.bytes

    def then(self, what: Callable[[], None]) -> None:
        """Queues it after all that was offered."""
        self._due.put(what)

    def close(self) -> None:
        """Waits for what was offered, a few seconds at most."""
        self._due.put(None)
        self._thread.join(STOP_S)

    # --- the saves' own thread ---------------------------------------------------------

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            try:
                due()
            except Exception:  # thread edge: what is not sent is computed one day
                logger.exception("saving blocks failed")

    def _send(self, stagings: list[Staging], sendings: list[_QueuedSend]) -> None:
        try:
            for staging in stagings if not self._cache.failed else ():
                staging.wait()
        except RuntimeError as error:
            self._cache.fail(error)
        try:
            for sending in sendings:
                if self._cache.failed:
                    self._refused(sending.job)
                else:
                    self._taken(sending.job, self._scattered(sending))
        finally:
            for sending in sendings:
                self._count(sending, 0)
            for staging in stagings:
                self._cache.give(staging)

    def _scattered(self, sending: _QueuedSend) -> int:
        """How many of the job's blocks its link took, from the first one on."""
        job, places, taken = sending.job, sending.places, 0
        try:
            peer = self._links.peer(job.endpoint)
            while taken < len(places):
                staging = places[taken][0]
                rows = []
                for other, row in itertools.islice(places, taken, None):
                    if other is not staging:
                        break
                    rows.append(row)
                more = scatter(staging, self._blocks_of(job, taken, rows), peer)
                taken += more
                if more < len(rows):
                    break
        except Unreachable:
            pass
        except Exception:  # the edge of one job: its other blocks are offered again
            logger.exception("handing blocks to a link failed")
        return taken
