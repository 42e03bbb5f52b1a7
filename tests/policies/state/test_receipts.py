"""When a replica received what: its view at once, its log later, both the same."""

from __future__ import annotations

import random

import pytest

from relume.policies.state.fleet import Receipts
from relume.policies.state.overlay.receive_clock import (
    TOGETHER_US,
    UNSAID,
    UnrecordedReceipts,
    received_us,
    take,
)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_said_later_is_what_was_known_at_once(seed: int) -> None:
    """At each record: of every revision remembered, whatever came together, was forgotten
    unsaid or lies long back."""
    draw, unsaid, known, record = random.Random(seed), UnrecordedReceipts(), Receipts(), Receipts()
    revision = now = forgotten = recorded = 0
    for _ in range(8000):
        revision += draw.randint(1, 3)
        now += draw.choice((0, 1, TOGETHER_US // 2, TOGETHER_US, 40_000))
        forgotten += not unsaid.received(known, revision, now)
        assert received_us(known, revision) > now - TOGETHER_US
        if draw.random() < (0.2 if revision % 4000 < 1500 else 0.0005):
            event = unsaid.record()
            assert event is not None and len(event.deltas) <= 2 * UNSAID
            unsaid.recorded(known)
            take(record, event)
            recorded += 1
            assert known == record
    assert forgotten and recorded > 100


def test_a_record_that_was_not_written_is_sent_again() -> None:
    unsaid, known, record = UnrecordedReceipts(), Receipts(), Receipts()
    unsaid.received(known, 3, 5000)
    assert unsaid.record() == unsaid.record()
    unsaid.received(known, 4, 9000)
    event = unsaid.record()
    assert event is not None
    unsaid.recorded(known)
    assert unsaid.record() is None
    take(record, event)
    assert known == record and record.times == [5000, 9000]
