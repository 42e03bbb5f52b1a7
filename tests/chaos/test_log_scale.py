"""The arithmetic of what fleets write, and views that hear late."""

from __future__ import annotations

import pytest

from relume.chaos.bench.log_scale import SHARE, STEPS_PER_S, Volume, linger_for, segments_per_s
from relume.chaos.bench.log_scale_age import errors


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


def test_a_view_that_hears_late_is_wrong_and_the_forecast_less_so() -> None:
    fresh, late = errors(0.0, 60.0, 800), errors(250.0, 60.0, 800)
    assert fresh.prefill < 0.05 * fresh.mean_prefill
    assert fresh.context < 0.01 * fresh.mean_context
    assert late.prefill < 0.8 * late.counted_prefill < 0.8 * late.told_prefill
    assert late.context < late.told_context
