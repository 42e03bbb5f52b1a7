"""What the bench `rollout` counts: streams that failed, that changed, and the longest gap."""

from __future__ import annotations

import asyncio

from relume.chaos.bench.failover.rolling_restart import Client, Noticed, Stream


def stream(text: str, gap_s: float = 0.1, failed: str = "") -> Stream:
    made = Stream()
    made.text, made.gap_s, made.failed = text, gap_s, failed
    return made


def test_a_failed_or_altered_stream_is_counted_and_no_failed_one_has_a_gap() -> None:
    client = Client(0, ["http://127.0.0.1:1"], 8)
    client.reference = {"p": "right"}
    client.streams = [
        ("p", stream("right", 0.2)),
        ("p", stream("wrong", 0.4)),
        ("p", stream("ri", 9.0, "APIError: lost")),
        ("other", stream("never seen before", 0.1)),
    ]
    found = Noticed([client])
    assert (found.count, found.failed, found.altered) == (4, ["APIError: lost"], 1)
    assert found.longest_s == 0.4
    assert "4 streams, 1 failed, 1 altered" in found.line("workers")
    asyncio.run(client.close())
