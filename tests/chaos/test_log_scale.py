"""The arithmetic of what fleets write."""

from __future__ import annotations

import pytest

from relume.chaos.bench.eventlog.log_scale import (
    SHARE,
    STEPS_PER_S,
    Volume,
    linger_for,
    segments_per_s,
)


@pytest.mark.parametrize("workers", [64, 256, 1000])
def test_the_linger_brings_a_fleets_segments_to_the_share(workers: int) -> None:
    linger = linger_for(workers, 3000.0)
    assert workers * segments_per_s(linger) == pytest.approx(SHARE * 3000.0, rel=0.001)


def test_few_workers_need_no_linger() -> None:
    assert linger_for(10, 3000.0) == 0.0
    assert segments_per_s(0.0) == STEPS_PER_S


def test_records_are_measured_as_they_are_written() -> None:
    volume = Volume.measured(300)
    assert volume.events == STEPS_PER_S
    assert volume.bytes_per_s(0.0) > volume.bytes_per_s(500.0) > volume.record_bytes
