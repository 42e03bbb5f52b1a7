"""The figures of seed 004 about failures: those that come out, and those that do not."""

from __future__ import annotations

import pytest

from relume.policies.health.failure_rates import (
    check_share,
    corruption_hours,
    days_between,
    failures_per_day,
    worker_failures_per_day,
)


def test_groups_fail_as_often_as_the_text_says() -> None:
    groups = worker_failures_per_day(128, 8, 0.03)
    assert groups == pytest.approx(0.0842, rel=1e-2)
    assert days_between(groups) == pytest.approx(12, abs=0.2)
    assert worker_failures_per_day(1, 8, 0.03) == pytest.approx(6.57e-4, rel=1e-2)
    assert worker_failures_per_day(1_250, 8, 0.03) == pytest.approx(0.82, abs=0.01)
    assert worker_failures_per_day(12_500, 8, 0.03) == pytest.approx(8.2, abs=0.1)


def test_a_gpu_fails_as_often_as_a_group() -> None:
    """The text's two figures for one fleet are one."""
    gpus, groups = failures_per_day(1_024, 0.03), worker_failures_per_day(128, 8, 0.03)
    assert gpus == pytest.approx(groups, rel=1e-3)


def test_a_thousand_gpus_do_not_fail_daily_at_the_texts_rates() -> None:
    least, most = (days_between(failures_per_day(1_000, rate)) for rate in (0.05, 0.02))
    assert (least, most) == (pytest.approx(7.3), pytest.approx(18.25))
    assert days_between(failures_per_day(1_000, 0.365)) == pytest.approx(1.0)


def test_corruption_and_the_cost_of_checks() -> None:
    assert corruption_hours(1_000) == pytest.approx(2.76)
    assert check_share(2.0, 30.0) == pytest.approx(0.000067, rel=0.01)
    assert 60 / 30 == 2, "checks a minute, where the text says 33"


@pytest.mark.parametrize(("gpus", "rate"), [(-1, 0.03), (1, -0.1), (1, 1.1)])
def test_bad_input_is_an_error(gpus: int, rate: float) -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        failures_per_day(gpus, rate)
    with pytest.raises(ValueError, match="no time between"):
        days_between(0.0)
    with pytest.raises(ValueError, match="out of bounds"):
        worker_failures_per_day(-1, 8, 0.03)
