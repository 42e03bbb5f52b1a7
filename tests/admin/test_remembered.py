"""Metrics remember no request for ever: some end at another replica, and nobody here is told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from relume.controlplane.telemetry import event_counters
from relume.events import vocabulary as v
from tests.policies.story import decided

BASIS = v.Basis(1, 1)


def held(name: str) -> v.RequestHeld:
    return v.RequestHeld(
        decision="d",
        basis=BASIS,
        request=name,
        at_us=1000,
        cause="saturated",
        model="m",
        tier="batch",
        tenant="",
        tokens=9,
        size=9,
        until_us=2000,
        deadline_us=0,
        ahead_requests=0,
        ahead_tokens=0,
        predicted_us=-1,
        depth=1,
    )


def test_waits_that_end_elsewhere_make_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_counters, "OPEN", 3)
    registry = CollectorRegistry()
    waits = event_counters.QueueCounters(registry)
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
    monkeypatch.setattr(event_counters, "OPEN", 2)
    registry = CollectorRegistry()
    routes = event_counters.RouteCounters(registry)
    for number in range(4):
        routes.note(replace(decided(f"q{number}"), ttft_us=1000))
    routes.note(
        v.RequestEnded(
            request="q3",
            outcome="completed",
            status=200,
            tokens=9,
            finish="stop",
            attempts=1,
            verdict="exact",
            ttft_us=1100,
        )
    )
    assert registry.get_sample_value("relume_ttft_actual_to_predicted_ratio_count") == 1
    assert len(routes._predicted) == 1
