"""What validators know of the faults of a run."""

from __future__ import annotations

from relume.chaos.runner.strikes import strikes_of
from relume.chaos.scenario import scenario_reader as reading
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.events import vocabulary as v


def test_a_fault_that_kills_a_holder_too_strikes_both() -> None:
    """I26 of composed 9026 asked for blocks of a holder that the same fault had killed."""
    outcome = run(reading.load(reading.find("primary-and-holder-killed")), 5)
    struck = {strike.what: strike for strike in strikes_of(outcome)}
    events = [at.event for at in events_of(outcome.groups, "w.")]
    lost = {event.worker for event in events if type(event) is v.StateDaemonLost}
    assert struck["holder-kill"].targets == lost
    assert struck["primary-and-holder-kill"].targets.isdisjoint(lost)
    assert struck["holder-kill"].since_ms == struck["primary-and-holder-kill"].since_ms
