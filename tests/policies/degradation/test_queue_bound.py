"""While levels act, requests wait where tiers count: a worker takes few that do not decode yet."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.events import vocabulary as v
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.degradation.degradation_settings import DegradationConfig
from relume.policies.routing.eligibility import queue_limit
from relume.policies.routing.saturation import FREE, SATURATED, saturation
from relume.policies.state.overlay.view import View
from tests.policies.degradation.short_fleet import ON, ShortFleet
from tests.policies.story import MODEL, arrived, decided

WAITING = WaitingConfig()


def bound(config: DegradationConfig, queued: int = 256) -> int:
    view = View("r.r0", ShortFleet(config=config).fleet)
    return queue_limit(view, replace(WAITING, queued=queued)).queued


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_levels_that_do_not_act_change_no_bound(mode: str) -> None:
    assert bound(replace(ON, mode=mode)) == WAITING.queued == 256


@pytest.mark.parametrize(
    ("queued", "config", "expected"),
    [(256, ON, 2), (1, ON, 1), (0, ON, 0), (256, replace(ON, queued=0), 256)],
    ids=["lower", "lower anyway", "no bound", "not wanted"],
)
def test_the_lower_bound_holds(queued: int, config: DegradationConfig, expected: int) -> None:
    assert bound(config, queued) == expected


def test_replicas_that_record_no_bound_have_none() -> None:
    """As in logs of earlier builds: their decisions come out as they were."""
    fleet = ShortFleet()
    del fleet.fleet.replicas["r0"].settings["degradation.queued"]
    assert queue_limit(View("r.r0", fleet.fleet), WAITING).queued == 256


@pytest.mark.parametrize(("config", "cause"), [(ON, SATURATED), (replace(ON, queued=3), FREE)])
def test_further_requests_wait_at_the_replica(config: DegradationConfig, cause: str) -> None:
    """At level 0, too: the backlog grows before a level rises."""
    fleet = ShortFleet(workers=1, config=config)
    idle = v.EngineStep(
        incarnation=1, step=99, duration_us=9000, batch=0, sum_context=0, prefill_tokens=0,
        waiting=0, kv_used=0,
    )  # fmt: skip
    fleet.tell("w.w0", idle)
    for name in ("x1", "x2"):
        fleet.tell("r.r0", arrived(name), decided(name, 1, "w0"))
    found, _ = saturation(View("r.r0", fleet.fleet), MODEL, WAITING, 0, glance=False)
    assert found == cause
