"""Engines learn what a link carries from what a holder has, before they need it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from relume.engine_shim.checkpoints.daemon_links import LinkConfig, Links
from relume.engine_shim.checkpoints.link.block_stream import BlockOut, scatter
from relume.engine_shim.checkpoints.link_probe import LEAST_PROBED, LinkProbe, SavedBlocks
from relume.events.vocabulary import LinkMeasured
from tests.state_daemon.daemon import Cache, daemon_in, fingerprint, local, peer_of, tokens_of

PIECE = 1 << 19


@pytest.mark.full
def test_a_link_is_measured_once_by_reading_what_the_holder_has(tmp_path: Path) -> None:
    told: list[LinkMeasured] = []
    measured = threading.Event()

    def report(event: Any) -> None:
        told.append(cast(LinkMeasured, event))
        measured.set()

    cache = Cache(4, piece=PIECE)
    size = len(cache.block(0))
    with daemon_in(tmp_path / "d") as daemon, peer_of(local(daemon.socket)) as writer:
        blocks = [
            BlockOut(
                request="q", child=0, rank=0, index=n, attempt=1, block_id=n, tokens=tokens_of(n)
            )
            for n in range(4)
        ]
        assert scatter(cache, blocks, writer) == 4 and writer.drained(30.0)
        endpoint = f"unix:{daemon.socket}"
        readers = Links(LinkConfig(epoch=1), "w0", 1, "reader", fingerprint())
        probe = LinkProbe(readers, 0, 1, 10.0, report)
        try:
            small = SavedBlocks(
                endpoint=endpoint, request="q", child=0, count=1, size=LEAST_PROBED // 2
            )
            probe.saved(small)
            assert not probe._tried, "so little tells nothing of a link"
            probe.saved(SavedBlocks(endpoint=endpoint, request="q", child=0, count=4, size=size))
            assert measured.wait(60.0)
            probe.saved(SavedBlocks(endpoint=endpoint, request="q", child=0, count=4, size=size))
            assert probe._due.empty(), "it is known"
        finally:
            probe.close()
            readers.close()
    (event,) = told
    assert event.holder == endpoint and event.incarnation == 1 and event.duration_us > 0
    assert event.bytes >= 4 * size
