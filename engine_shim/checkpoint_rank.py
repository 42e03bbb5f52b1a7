"""A rank's part of checkpointing: copying full blocks out, and bringing blocks back.

Out: on the engine's thread one copy a block, into buffers the link's thread hashes and
sends; what finds no room is shed, and said. In: on a thread of its own, into blocks that
belong to the waiting request alone, while other requests run. A cache that is no memory of
ours (`staged_saves.Staged`) is read and written by way of staging memory.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from relume.engine_shim.checkpoint_links import LinkConfig, Links
from relume.engine_shim.checkpointing import DropJob, LoadJob, SaveJob
from relume.engine_shim.kv_stream import messages as m
from relume.engine_shim.kv_stream.errors import KvStreamError, Unreachable
from relume.engine_shim.kv_stream.fingerprint import Fingerprint
from relume.engine_shim.kv_stream.image import pack_tokens
from relume.engine_shim.kv_stream.peer import Peer
from relume.engine_shim.kv_stream.stream import (
    BlockIn,
    BlockOut,
    CacheView,
    LayeredOut,
    Loaded,
    gather,
    reason_of,
    scatter,
)
from relume.engine_shim.link_probe import LinkProbe, Saved
from relume.engine_shim.staged_saves import STOP_S, Loading, Staged, StagedSaves
from relume.events.vocabulary import RestoreDone, RestoreFailed, RestoreStarted

logger = logging.getLogger(__name__)
Reached = dict[tuple[str, int, int, str], int]
Begin = Callable[[], Loading]


class _Layered:
    """A step's blocks of one request on their way to one peer, layer by layer. A block that
    is shed, and those behind it, are begun again in a later step."""

    def __init__(self, job: SaveJob, blocks: list[BlockOut], peer: Peer, view: CacheView) -> None:
        self.job = job
        self.taken = len(blocks)
        self._peer = peer
        self._pieces = [view.pieces(block.block_id) for block in blocks]
        self._heads = [memoryview(pack_tokens(block.tokens)) for block in blocks]
        sizes = (
            len(head) + sum(map(len, pieces))
            for head, pieces in zip(self._heads, self._pieces, strict=True)
        )
        self._out = [LayeredOut(b, size) for b, size in zip(blocks, sizes, strict=True)]

    def send(self, layer: int) -> None:
        """Copies one layer of what has not been shed."""
        for n in range(self.taken):
            parts = [memoryview(bytes(self._pieces[n][layer]))]
            if layer == 0:
                parts.insert(0, self._heads[n])
            if not self._out[n].send(self._peer, parts):
                self.taken = n
                return


class CheckpointRank:
    """One rank's cache and its links. `report` takes events for the log."""

    def __init__(
        self,
        view: CacheView | Staged,
        rank: int,
        config: LinkConfig,
        worker: str,
        incarnation: int,
        fingerprint: Fingerprint,
        report: Callable[[Any], None],
    ) -> None:
        self._view = view
        self._staged = view if isinstance(view, Staged) else None
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
        self._layered: list[_Layered] = []
        self._block_bytes = fingerprint.layers * fingerprint.piece_bytes
        self.saved_blocks = 0
        self.shed_blocks = 0
        self._writers = Links(
            config, worker, incarnation, "writer", fingerprint, self._refused, self._reset
        )
        self._readers = Links(config, worker, incarnation, "reader", fingerprint)
        self._probe = LinkProbe(self._readers, rank, incarnation, config.load_timeout_s, report)
        self._saves: StagedSaves | None = None
        if self._staged is not None:
            self._saves = StagedSaves(
                self._staged, self._writers, self._rows, self._taken, self._refused_for_good
            )
        self._loads: queue.SimpleQueue[tuple[LoadJob, Begin | None] | None] = queue.SimpleQueue()
        self._loader = threading.Thread(target=self._load_all, name="relume-kv-load", daemon=True)
        self._loader.start()

    # --- out ---------------------------------------------------------------------------

    def save(self, job: SaveJob) -> None:
        """Copies the job's blocks and queues them; tells how far it got."""
        blocks = self._blocks(job)
        try:
            peer = self._writers.peer(job.endpoint)
            taken = scatter(self._view, blocks, peer, self._config.buffered)
            if not self._config.overlap:
                peer.drained(self._config.load_timeout_s)
        except Unreachable:
            taken = 0
        self._taken(job, taken)

    def _blocks(self, job: SaveJob) -> list[BlockOut]:
        return self._rows(job, 0, job.block_ids)

    def _rows(self, job: SaveJob, skip: int, ids: Sequence[int]) -> list[BlockOut]:
        """The job's blocks from one on, which lie at `ids`."""
        key = job.key
        blocks = []
        for n, block_id in enumerate(ids, skip):
            place = (key.request, key.child, self._rank, job.first + n, key.attempt)
            blocks.append(BlockOut(*place, block_id, job.tokens[n], job.priority, job.scope))
        return blocks

    def _taken(self, job: SaveJob, taken: int) -> None:
        count = len(job.block_ids)
        self.saved_blocks += taken
        self.shed_blocks += count - taken
        key, have = job.key, job.first + taken
        if taken < count:
            self._tell(key.request, key.attempt, key.child, job.endpoint, have)
        size = self._block_bytes
        self._probe.saved(Saved(job.endpoint, key.request, key.child, have, size))

    def save_layer(self, jobs: list[SaveJob], layer: int) -> None:
        """`layer` of the jobs' blocks is computed; layers come in order. Jobs of one block
        are left to `save`."""
        if layer == 0:
            self._layered = []
            for job in jobs:
                if len(job.block_ids) > 1:
                    with contextlib.suppress(Unreachable):
                        peer = self._writers.peer(job.endpoint)
                        self._layered.append(_Layered(job, self._blocks(job), peer, self._view))
        for sending in self._layered:
            sending.send(layer)

    def save_rest(self, jobs: list[SaveJob]) -> None:
        """The step is over: what has not left layer by layer leaves now."""
        if self._saves is not None:
            self._saves.offer(jobs)
            return
        sent, self._layered = self._layered, []
        for sending in sent:
            self._taken(sending.job, sending.taken)
        for job in jobs:
            if not any(sending.job is job for sending in sent):
                self.save(job)

    def drop(self, job: DropJob) -> None:
        """Behind what was saved of the request."""
        if self._saves is not None:
            self._saves.then(lambda: self._drop(job))
        else:
            self._drop(job)

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
        """Begins to bring blocks; `take_loaded` tells when it ended."""
        begin: Begin | None = None
        if self._staged is not None:
            try:
                begin = self._staged.loading()
            except RuntimeError as error:
                self._staged.fail(error)
        self._loads.put((job, begin))

    def _load_all(self) -> None:
        while (due := self._loads.get()) is not None:
            job, begin = due
            loaded = Loaded(0, 0, "internal")
            try:
                loaded = self._load_one(job, begin)
            except Exception:  # thread edge: the request must go on, by computing
                logger.exception("loading blocks of %s failed", job.key.request)
            with self._lock:
                self._failed.update(job.block_ids[loaded.blocks :])
                self._loaded.add(job.engine_id)

    def _load_one(self, job: LoadJob, begin: Begin | None) -> Loaded:
        key, size = job.key, len(job.tokens[0])
        named = (self._incarnation, key.request, key.child, key.attempt, job.endpoint)
        lender = job.lender.request if job.lender is not None else ""
        self._report(RestoreStarted(*named, len(job.block_ids) * size, job.first * size, lender))
        began = time.monotonic_ns()
        loaded = self._fetch(job, begin)
        tokens = loaded.blocks * size
        if loaded.failure:
            self._report(RestoreFailed(*named, tokens, loaded.failure))
        else:
            took_us = (time.monotonic_ns() - began) // 1000
            self._report(RestoreDone(*named, tokens, loaded.bytes, took_us))
        return loaded

    def _fetch(self, job: LoadJob, begin: Begin | None) -> Loaded:
        source = job.lender or job.key
        chains = job.lender.chains if job.lender is not None else ()
        wanted = [
            BlockIn(index, block_id, tokens, chains[index] if chains else b"")
            for index, (block_id, tokens) in enumerate(
                zip(job.block_ids, job.tokens, strict=True), job.first
            )
        ]
        whose = source.request, source.child, self._rank, self._config.load_timeout_s
        try:
            peer = self._readers.peer(job.endpoint)
            if self._staged is None:
                return gather(self._view, wanted, peer, *whose)
            return self._fetch_staged(wanted, peer, whose, begin)
        except KvStreamError as error:
            return Loaded(0, 0, reason_of(error))

    def _fetch_staged(
        self, wanted: list[BlockIn], peer: Peer, whose: tuple[Any, ...], begin: Begin | None
    ) -> Loaded:
        """Nothing is under way to the blocks when it returns."""
        assert self._staged is not None
        if begin is None:
            return Loaded(0, 0, "device")
        if self._closing:
            return Loaded(0, 0, "internal")
        loading = begin()
        try:
            try:
                return gather(loading, wanted, peer, *whose, loading.landed)
            finally:
                loading.finish()
        except RuntimeError as error:
            self._staged.fail(error)
            return Loaded(0, 0, "device")

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
        if self._saves is not None:
            self._saves.close()
        self._writers.close()
        self._readers.close()
        if self._staged is not None:
            self._loader.join(STOP_S)
            self._readers.close()  # one may have been made meanwhile
            self._staged.close()
