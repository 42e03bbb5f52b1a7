"""Metrics remember no request for ever: some end at another replica, and nobody here is told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from relume.controlplane.admin import routing_metrics, waiting_metrics
from relume.events import vocabulary as v
from tests.policies.story import decided

BASIS = v.Basis(1, 1)


def held(name: str) -> v.RequestHeld:
    return v.RequestHeld("d", BASIS, name, 1000, "saturated", "m", "batch", "", 9, 9, 2000, 0,
                         0, 0, -1, 1)  # fmt: skip


def test_waits_that_end_elsewhere_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_metrics, "OPEN", 3)
    registry = CollectorRegistry()
    waits = waiting_metrics.Waits(registry)
    for number in range(5):
        waits.note(held(f"q{number}"))
    waits.note(decided("q0"))  # forgotten
    waits.note(decided("q4"))
    waits.note(decided("q4"))
    count = registry.get_sample_value("relume_room_wait_seconds_count", {"tier": "batch"})
    assert count == 1
    assert len(waits._since) == 2


def test_predictions_of_requests_that_end_elsewhere_make_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing_metrics, "OPEN", 2)
    registry = CollectorRegistry()
    routes = routing_metrics.Routes(registry)
    for number in range(4):
        routes.note(replace(decided(f"q{number}"), ttft_us=1000))
    routes.note(v.RequestEnded("q3", "completed", 200, 9, "stop", 1, "exact", 1100))
    assert registry.get_sample_value("relume_ttft_actual_to_predicted_ratio_count") == 1
    assert len(routes._predicted) == 1
