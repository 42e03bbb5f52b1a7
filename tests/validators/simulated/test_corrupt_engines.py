"""Which engines the faults of a run made compute wrong results."""

from __future__ import annotations

from relume.chaos.validators.corrupt_engines import NEVER, verdicts
from tests.policies.story import Story, died, ready, started


def restarted() -> Story:
    """The engine of w0 is ready; its next incarnation after 2 s."""
    told = Story()
    told.worker()
    told.at_ms = 2000
    told.tell("w.w0", died(), started(incarnation=2), ready(incarnation=2))
    return told


def test_a_fault_damages_the_engine_of_its_time() -> None:
    assert verdicts(restarted().groups, [("w0", 1000)]) == {("w0", 1): NEVER}
    assert verdicts(restarted().groups, [("w0", 3000)]) == {("w0", 2): NEVER}


def test_a_second_fault_leaves_what_the_first_damaged() -> None:
    """I2 and I14 of composed 9171 took the first engine as sound, since the second was damaged too."""
    both = {("w0", 1): NEVER, ("w0", 2): NEVER}
    assert verdicts(restarted().groups, [("w0", 1000), ("w0", 3000)]) == both
