"""Measures the bandwidth of links to an engine's holders, before a failure needs it.

Theory of operation. Streaming does not show it: blocks are sent as they fill, and confirmed with
the next tick. So a few blocks that a holder has acknowledged are read back, as a restore would read
them, and thrown away: once for each of the first `MOST_PROBED` holders of an engine's life. Rates
of further links are estimated from both hosts' other links
(`relume.policies.checkpoints.decisions`). It has its own thread; a failed probe is repeated with a
later request, and has no other effect.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from relume.engine_shim.checkpoints.daemon_links import Links
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.events.vocabulary import LinkMeasured
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import KvStreamError

logger = logging.getLogger(__name__)

PROBE_BYTES = 32 << 20
"""Read of one holder at most."""
LEAST_PROBED = 1 << 20
"""A smaller read would measure the round trip, not the link."""
MOST_PROBED = 16
SETTLES_S = 1.0
"""After this time, what was handed over has arrived."""
WAITING = 64


class SavedBlocks(Struct, frozen=True, kw_only=True):
    """Blocks of a request that were handed to a link: `count` from the first one on, of
    `size` bytes each."""

    endpoint: str
    request: str
    child: int
    count: int
    size: int


class LinkProbe:
    """One for a rank. `readers`: its links for reading; `report` takes events for the log."""

    def __init__(
        self,
        readers: Links,
        rank: int,
        incarnation: int,
        timeout_s: float,
        report: Callable[[Any], None],
    ) -> None:
        self._readers = readers
        self._rank = rank
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._report = report
        self._known: set[str] = set()
        self._tried: dict[str, float] = {}
        self._due: queue.Queue[tuple[float, SavedBlocks] | None] = queue.Queue(WAITING)
        threading.Thread(target=self._run, name="relume-kv-probe", daemon=True).start()

    def saved(self, what: SavedBlocks) -> None:
        """Blocks are on their way; called by the engine's thread, and cheap."""
        if what.endpoint in self._known or what.count * what.size < LEAST_PROBED:
            return
        now = time.monotonic()
        if now < self._tried.get(what.endpoint, 0.0) or len(self._known) >= MOST_PROBED:
            return
        self._tried[what.endpoint] = now + 2 * SETTLES_S
        try:
            self._due.put_nowait((now + SETTLES_S, what))
        except queue.Full:
            return

    def close(self) -> None:
        """Nothing more is measured."""
        self._known.update(self._tried)
        try:
            self._due.put_nowait(None)
        except queue.Full:
            return

    def _run(self) -> None:
        while (due := self._due.get()) is not None:
            at, what = due
            time.sleep(max(at - time.monotonic(), 0.0))
            if what.endpoint in self._known:
                continue
            try:
                self._probe(what)
            except KvStreamError as error:
                logger.debug("no measure of %s: %s", what.endpoint, error)

    def _probe(self, what: SavedBlocks) -> None:
        peer = self._readers.peer(what.endpoint)
        self._read(peer, what, 1)  # the link is there, and has been greeted
        began = time.monotonic_ns()
        read = self._read(peer, what, min(what.count, max(PROBE_BYTES // what.size, 1)))
        took_us = max((time.monotonic_ns() - began) // 1000, 1)
        if read >= LEAST_PROBED:
            self._known.add(what.endpoint)
            self._report(LinkMeasured(self._incarnation, what.endpoint, read, took_us))

    def _read(self, peer: Peer, what: SavedBlocks, count: int) -> int:
        """Number of blocks, copied as a restore copies them."""
        at_once = min(max(peer.read_bytes // what.size, 1), m.MAX_PIECES)
        first, read, requests = 0, 0, []
        while first < count:
            wanted = min(at_once, count - first)
            get = m.Get(
                seq=0,
                request=what.request,
                child=what.child,
                rank=self._rank,
                first=first,
                count=wanted,
                chain=b"",
            )
            requests.append(peer.request(get))
            first += wanted
        for at, question in enumerate(requests):
            try:
                with peer.fetch(question, self._timeout_s) as blocks:
                    read += sum(len(bytes(image)) for _, image in blocks)
            except KvStreamError:
                for other in requests[at + 1 :]:
                    peer.forget(other)
                raise
        return read
