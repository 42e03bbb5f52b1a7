"""A gateway that reaches no worker, and one that dies with what it did not write."""

from __future__ import annotations

from collections import Counter

import pytest

from relume.chaos.scenario.language import Fault, Fixed, Fleet, Poisson, Scenario, Traffic, When
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators import check_all
from relume.chaos.validators.records import events_of
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 26])
def test_a_gateway_cut_from_every_worker_loses_no_stream(seed: int) -> None:
    """Each attempt fails as its turn comes: more of them than a request may have failures."""
    cut = Scenario(
        name="cut",
        about="The gateway is cut from 36 workers.",
        fleet=Fleet(workers=36, domains=6, control_planes=1),
        traffic=Traffic(arrivals=Poisson(20.0), lengths=Fixed(32, 400), for_s=6.0),
        faults=(Fault(what="cut", when=When(at_s=3.0), target="all", peer="gateway", for_s=9.0),),
    )
    outcome = run(cut, seed)
    assert not outcome.error and len(outcome.fired) == 1
    assert {history.record.outcome for history in outcome.histories} == {"completed"}
    events = [entry.event for entry in events_of(outcome.groups)]
    assert max(e.attempt for e in events if type(e) is v.RouteDecided) > 8
    assert verify(outcome.groups).ok


@pytest.mark.parametrize("after_ms", [20, 40, 60])
def test_what_a_killed_replica_did_not_write_is_ended_by_the_leader(after_ms: int) -> None:
    """It is killed before its arrivals are sent: engines alone know some of its requests."""
    killed = Scenario(
        name="killed",
        about="A replica dies under dense traffic.",
        fleet=Fleet(workers=2, domains=2, control_planes=2),
        traffic=Traffic(arrivals=Poisson(60.0), lengths=Fixed(32, 50), for_s=4.0),
        faults=(Fault(what="gateway-kill", when=When(at_s=2.0 + after_ms / 1000), target="r0"),),
    )
    outcome = run(killed, 3)
    entries = list(events_of(outcome.groups))
    steps = [entry.event for entry in entries if type(entry.event) is v.EngineStep]
    queued = {c.request for e in steps for c in e.changes if type(c) is v.RequestQueued}
    arrived = {entry.event.request for entry in entries if type(entry.event) is v.RequestArrived}
    unwritten = queued - arrived
    assert unwritten, "known from engines alone"
    ends = [entry for entry in entries if type(entry.event) is v.RequestEnded]
    counted = Counter(entry.event.request for entry in ends)
    assert {counted[request] for request in unwritten} == {1}
    assert {e.stream for e in ends if e.event.request in unwritten} == {"fleet"}
    records = [history.record for history in outcome.histories]
    assert check_all(outcome.groups, records) == [] and verify(outcome.groups).ok
