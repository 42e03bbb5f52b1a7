"""All engines die at once, and restarts take longer than a request waits by itself."""

from __future__ import annotations

import pytest

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import Burst, Fault, Fixed, Fleet, Scenario, Traffic, When
from relume.chaos.sim.sim_fleet import Settings, run
from relume.chaos.sim.world.worker_machine import WorkerSettings
from relume.policies.recovery.restart_times import RestartTimes

RELOAD_S = 90.0
SCENARIO = Scenario(
    name="all-restart",
    about="All engines are killed at once; a restart takes 90 s.",
    fleet=Fleet(workers=3, control_planes=2),
    traffic=Traffic(arrivals=Burst(6, 10.0), lengths=Fixed(64, 200), requests=60),
    promises=("I1", "I2", "I3", "I4", "I7"),  # I10 counts the time without any engine
    faults=tuple(Fault(what="engine-kill", when=When(at_s=20.5), target=f"w{n}") for n in range(3)),
)


def outcome_of(seed: int) -> Outcome:
    return run(SCENARIO, seed, settings=Settings(workers=WorkerSettings(reload_s=RELOAD_S)))


def ends(outcome: Outcome) -> set[str]:
    return {h.record.outcome for h in outcome.histories}


@pytest.mark.parametrize("seed", [1, 2])
def test_no_request_fails_while_all_engines_restart(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = outcome_of(seed)
    assert judge(outcome).why == () and ends(outcome) == {"completed"}
    monkeypatch.setattr(RestartTimes, "left_s", lambda *_: 0.0)
    assert ends(outcome_of(seed)) > {"completed"}, "what is learnt makes no difference"
