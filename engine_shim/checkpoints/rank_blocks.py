"""A rank's part of checkpointing: copying full blocks out, and bringing blocks back.

Out: the engine's thread starts copies into staging memory, from where the links' threads hash
and send them; what does not fit is shed, and reported. In: on a separate thread, by way of staging
memory into blocks that belong to the waiting request alone, while other requests run.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from relume.engine_shim.checkpoints.checkpoint_spec import DropJob, LoadJob, SaveJob
from relume.engine_shim.checkpoints.daemon_links import LinkConfig, Links
from relume.engine_shim.checkpoints.link.block_stream import (
    BlockIn,
    BlockOut,
    LoadResult,
    gather,
    reason_of,
)
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.engine_shim.checkpoints.link_probe import LinkProbe, SavedBlocks
from relume.engine_shim.checkpoints.staging.staged_saves import (
    STOP_S,
    Loading,
    StagedCacheProtocol,
    StagedSaves,
)
from relume.engine_shim.generation import reported
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.vocabulary import RestoreDone, RestoreFailed, RestoreStarted
from relume.events.vocabulary.enums import RestoreFailure
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import Fingerprint
from relume.events.wire.kv.kv_errors import KvStreamError, Unreachable

logger = logging.getLogger(__name__)
Reached = dict[tuple[str, int, int, str], int]
Begin = Callable[[], Loading]


Whose = tuple[str, int, int, float]
"""Request, child, rank, and how long to wait for an answer in seconds."""


class CheckpointRank:
    """One rank's cache and its links. `report` takes events for the log."""

    def __init__(
        self,
        cache: StagedCacheProtocol,
        rank: int,
        config: LinkConfig,
        worker: str,
        incarnation: int,
        fingerprint: Fingerprint,
        report: Callable[[Any], None],
    ) -> None:
        self._cache = cache
        self._rank = rank
        self._config = config
        self._incarnation = incarnation
        self._report = report
        self._closing = False
        self._lock = threading.Lock()
        self._reached: Reached = {}
        self._lost: set[str] = set()
        self._loaded: set[str] = set()
        self._failed: set[int] = set()
        self._block_bytes = fingerprint.layers * fingerprint.piece_bytes
        self.saved_blocks = 0
        self.shed_blocks = 0
        self._writers = Links(
            config, worker, incarnation, "writer", fingerprint, self._refused, self._reset
        )
        self._readers = Links(config, worker, incarnation, "reader", fingerprint)
        self._probe = LinkProbe(self._readers, rank, incarnation, config.load_timeout_s, report)
        self._saves = StagedSaves(
            cache, self._writers, self._rows, self._taken, self._refused_for_good
        )
        self._loads: queue.SimpleQueue[tuple[LoadJob, Begin | None] | None] = queue.SimpleQueue()
        self._loader = threading.Thread(target=self._load_all, name="relume-kv-load", daemon=True)
        self._loader.start()

    # --- out ---------------------------------------------------------------------------

    def save_all(self, jobs: list[SaveJob]) -> None:
        """Starts to save every job after the step that computed its blocks."""
        self._saves.offer(jobs)

    def _rows(self, job: SaveJob, skip: int, ids: Sequence[int]) -> list[BlockOut]:
        """The job's blocks from one on, which lie at `ids`."""
        key = job.key
        blocks = []
        for n, block_id in enumerate(ids, skip):
            blocks.append(
                BlockOut(
                    request=key.request,
                    child=key.child,
                    rank=self._rank,
                    index=job.first + n,
                    attempt=key.attempt,
                    block_id=block_id,
                    tokens=job.tokens[n],
                    priority=job.priority,
                    scope=job.scope,
                )
            )
        return blocks

    def _taken(self, job: SaveJob, taken: int) -> None:
        count = len(job.block_ids)
        self.saved_blocks += taken
        self.shed_blocks += count - taken
        key, have = job.key, job.first + taken
        if taken < count:
            self._tell(key.request, key.attempt, key.child, job.endpoint, have)
        size = self._block_bytes
        self._probe.saved(
            SavedBlocks(
                endpoint=job.endpoint, request=key.request, child=key.child, count=have, size=size
            )
        )

    def drop(self, job: DropJob) -> None:
        """After what was saved of the request."""
        self._saves.then(lambda: self._drop(job))

    def _drop(self, job: DropJob) -> None:
        try:
            self._writers.peer(job.endpoint).drop(job.request, job.attempt, job.moved)
        except Unreachable:
            return  # it expires there

    def _tell(self, request: str, attempt: int, child: int, endpoint: str, index: int) -> None:
        place = request, attempt, child, endpoint
        with self._lock:
            self._reached[place] = min(index, self._reached.get(place, index))

    def _refused(self, endpoint: str, piece: m.Piece, code: str) -> None:
        """On the link's thread. Bytes damaged on the way are sent again; for want of room or
        a newer attempt this request's stream ends there: asking again and again would cost
        more than recomputing."""
        index = piece.index if code == "digest" else -1
        self._tell(piece.request, piece.attempt, piece.child, endpoint, index)

    def _refused_for_good(self, job: SaveJob) -> None:
        self.shed_blocks += len(job.block_ids)
        self._tell(job.key.request, job.key.attempt, job.key.child, job.endpoint, -1)

    def _reset(self, endpoint: str) -> None:
        with self._lock:
            self._lost.add(endpoint)

    def take_progress(self) -> tuple[Reached, tuple[str, ...]]:
        """(how far sequences got where they were shed, endpoints that lost everything)."""
        with self._lock:
            reached, self._reached = self._reached, {}
            lost, self._lost = self._lost, set()
        return reached, tuple(sorted(lost))

    # --- in ----------------------------------------------------------------------------

    def load(self, job: LoadJob) -> None:
        """Starts to load blocks; `take_loaded` shows when it ended."""
        begin: Begin | None = None
        try:
            begin = self._cache.loading()
        except RuntimeError as error:
            self._cache.fail(error)
        self._loads.put((job, begin))

    def _load_all(self) -> None:
        while (due := self._loads.get()) is not None:
            job, begin = due
            loaded = LoadResult(0, 0, "internal")
            try:
                loaded = self._load_one(job, begin)
            except Exception:  # thread edge: the request must continue, by computing
                logger.exception("loading blocks of %s failed", job.key.request)
            with self._lock:
                self._failed.update(job.block_ids[loaded.blocks :])
                self._loaded.add(job.engine_id)

    def _load_one(self, job: LoadJob, begin: Begin | None) -> LoadResult:
        key, size = job.key, len(job.tokens[0])
        named: dict[str, Any] = {
            "incarnation": self._incarnation,
            "request": key.request,
            "child": key.child,
            "attempt": key.attempt,
            "holder": job.endpoint,
        }
        lender = job.lender.request if job.lender is not None else ""
        wanted = len(job.block_ids) * size
        self._report(RestoreStarted(**named, tokens=wanted, first=job.first * size, lender=lender))
        began = time.monotonic_ns()
        loaded = self._fetch(job, begin)
        tokens = loaded.blocks * size
        if loaded.failure:
            self._report(
                RestoreFailed(**named, tokens=tokens, reason=RestoreFailure(loaded.failure))
            )
        else:
            took_us = (time.monotonic_ns() - began) // 1000
            self._report(
                RestoreDone(**named, tokens=tokens, bytes=loaded.bytes, duration_us=took_us)
            )
        return loaded

    def _fetch(self, job: LoadJob, begin: Begin | None) -> LoadResult:
        source = job.lender or job.key
        chains = job.lender.chains if job.lender is not None else ()
        wanted = [
            BlockIn(index, block_id, tokens, chains[index] if chains else b"")
            for index, (block_id, tokens) in enumerate(
                zip(job.block_ids, job.tokens, strict=True), job.first
            )
        ]
        whose: Whose = (source.request, source.child, self._rank, self._config.load_timeout_s)
        try:
            if failpoint_client.active and reported(job.key.request):
                self._reach_fetch(job)
            peer = self._readers.peer(job.endpoint)
            return self._fetch_staged(wanted, peer, whose, begin)
        except KvStreamError as error:
            return LoadResult(0, 0, reason_of(error))

    def _reach_fetch(self, job: LoadJob) -> None:
        """Raises Unreachable where a failpoint says so."""
        failpoint_client.reach(
            Failpoint.RESTORE_FETCH,
            partial(Unreachable, job.endpoint),
            request=job.key.request,
            first=job.first,
            blocks=len(job.block_ids),
        )

    def _fetch_staged(
        self, wanted: list[BlockIn], peer: Peer, whose: Whose, begin: Begin | None
    ) -> LoadResult:
        """Nothing is under way to the blocks when it returns."""
        if begin is None:
            return LoadResult(0, 0, "device")
        if self._closing:
            return LoadResult(0, 0, "internal")
        loading = begin()
        try:
            try:
                return gather(loading, wanted, peer, *whose, loading.landed)
            finally:
                loading.finish()
        except RuntimeError as error:
            self._cache.fail(error)
            return LoadResult(0, 0, "device")

    def take_loaded(self) -> set[str]:
        """Requests (by the engine's name) whose loading ended, well or not."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> set[int]:
        """Blocks that hold nothing of use."""
        with self._lock:
            failed, self._failed = self._failed, set()
        return failed

    def close(self) -> None:
        self._closing = True
        self._probe.close()
        self._loads.put(None)
        self._saves.close()
        self._writers.close()
        self._readers.close()
        self._loader.join(STOP_S)
        self._readers.close()  # one may have been made meanwhile
        self._cache.close()
