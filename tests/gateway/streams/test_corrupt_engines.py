"""A resumable stream whose client is away, on an engine that computes wrong results."""

from __future__ import annotations

from relume.events.vocabulary.enums import TransportKind
from tests.gateway.streams.test_away import left_alone, until


async def test_streams_of_absent_clients_leave_an_engine_that_is_quarantined(rig):
    async with rig() as r:
        request, _, delivered = await left_alone(r)
        r.gateway.break_streams("w0", 3, TransportKind.RESET, "another cause")
        assert r.gateway.away_on("w0", 3), "its buffer is there"
        r.gateway.break_streams("w0", 3, TransportKind.CORRUPT, "quarantined")
        assert not r.gateway.away_on("w0", 3)
        await until(lambda: ("observed", "corrupt", delivered) in r.scheduler.log)
        r.gateway._streams.open[request].expire()
        await until(lambda: r.scheduler.endings())
