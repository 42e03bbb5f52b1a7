"""Clients of two choices while hosts die."""

from __future__ import annotations

from msgspec.structs import replace

from relume.chaos.scenario.language import Closed, Fault, Fleet, Scenario, Traffic, Uniform, When
from relume.chaos.scenario.schedule import expand
from relume.chaos.sim.sim_fleet import run

SCENARIO = Scenario(
    name="choices",
    about="Hosts die while requests for two choices prefill.",
    fleet=Fleet(workers=4, domains=4, control_planes=2),
    traffic=Traffic(
        arrivals=Closed(8, (0.0, 0.2)),
        lengths=Uniform(prompt=(200, 400), output=(16, 48)),
        requests=40,
    ),
    faults=tuple(
        Fault(what="domain-loss", when=When(during="prefill", nth=n), target=f"d{n % 4}")
        for n in (3, 8, 13, 18)
    ),
)


def test_the_first_token_of_a_cut_frame_has_its_time() -> None:
    """I10 of composed 21561: one choice's frame came before the cut, and its token counted as one of
    the time when the run's loop began."""
    schedule = expand(SCENARIO, 1)
    requests = tuple(replace(request, client="choices") for request in schedule.requests)
    outcome = run(SCENARIO, 1, schedule=replace(schedule, requests=requests))
    assert len(outcome.fired) == 4 and not outcome.error
    times = {
        h.request: (h.sent_ns, h.first_ns) for h in outcome.histories if h.first_ns is not None
    }
    assert len(times) == 40
    assert {name for name, (sent_ns, first_ns) in times.items() if first_ns < sent_ns} == set()
