"""A worker that is not released because of its model files: where operators read why, and what to do."""

from __future__ import annotations

from msgspec.structs import replace

from relume.controlplane.admin.models import worker_info
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.incidents.sentences import summary
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.why import why
from relume.controlplane.ui.moment import lanes_of
from relume.events import vocabulary as v
from relume.policies.state.overlay.view import View
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import arrived, decided, ready, started
from tests.policies.weights.test_model_files import (
    DAMAGED,
    digests,
    fleet_of,
    quarantined,
    reads,
    released,
    right,
)

WHY = "not released, its model files differ from those of w0, w2 (two): replace them"
REMEDIES = ("`relume restart w1`", "`relume trust w1`")


def restarted(fleet: LedFleet, worker: str, incarnation: int) -> None:
    """As the leader or an operator has it done."""
    fleet.tell(f"w.{worker}", v.EngineDied(worker, incarnation - 1, "replaced"))
    fleet.tell(f"w.{worker}", started(worker, incarnation), ready(worker, incarnation))


def held() -> LedFleet:
    fleet = fleet_of()
    quarantined(fleet, restart=restarted)
    for worker in ("w0", "w2"):
        digests(fleet, worker)
    digests(fleet, "w1", DAMAGED)
    right(fleet)
    return fleet


def incident(fleet: LedFleet) -> Incident:
    (found,) = [one for one in incidents_of(fleet.groups) if one.name == "w1"]
    return found


def evidence(fleet: LedFleet) -> str:
    return worker_info(View("r.r0", fleet.fleet), fleet.fleet.workers["w1"]).evidence


def why_text(fleet: LedFleet, name: str) -> str:
    """Why that request went where it went."""
    candidate = v.Candidate(
        worker="w1", incarnation=2, cost=0, prefill_tokens=0, requests=0, excluded="quarantined"
    )
    route = replace(decided(name, worker="w0"), candidates=(candidate,))
    fleet.tell("r.r0", arrived(name), route)
    found = why(fleet.groups, name)
    assert found is not None
    return "\n".join(lines_of(found))


def test_its_incident_says_why_it_is_not_released_and_what_to_do() -> None:
    fleet = held()
    record = incident(fleet)
    text = summary(record)
    assert record.open and WHY in text and all(remedy in text for remedy in REMEDIES)
    assert record.events[-1].type == "weights_compared" and WHY in record.events[-1].text
    restarted(fleet, "w1", 3)
    digests(fleet, "w1")
    right(fleet)
    assert released(fleet)
    assert incident(fleet).not_released == "" and WHY not in summary(incident(fleet))


def test_an_operator_s_trust_ends_that_too() -> None:
    fleet = held()
    command = v.AdminCommanded(command_id="c", principal="ann", command="trust", target="w1")
    fleet.tell("r.r0", command)
    assert incident(fleet).not_released == ""


def test_the_workers_page_says_it() -> None:
    fleet = held()
    text = evidence(fleet)
    (lane,) = [lane for lane in lanes_of(View("r.r0", fleet.fleet)) if lane.name == "w1"]
    assert lane.because == text
    assert "wrong answer to canaries 0, 1" in text and WHY in text
    restarted(fleet, "w1", 3)
    reads(fleet, "w1")
    assert evidence(fleet).endswith("; its model files are being read")
    digests(fleet, "w1")
    right(fleet)
    text = "4 right answers to canaries in a row; its model files are those of w0, w2"
    assert evidence(fleet) == text


def test_why_a_request_did_not_go_there() -> None:
    fleet = held()
    text = why_text(fleet, "q1")
    assert "w1:1 is quarantined (corruption)" in text and WHY in text
    restarted(fleet, "w1", 3)
    digests(fleet, "w1")
    right(fleet)
    assert WHY not in why_text(fleet, "q2")
