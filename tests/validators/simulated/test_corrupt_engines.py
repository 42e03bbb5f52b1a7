"""Which engines the faults of a run made compute wrong results."""

from __future__ import annotations

import pytest

from relume.chaos.validators.corrupt_engines import NEVER, CorruptSince, verdicts
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState
from tests.policies.story import Story, died, ready, started


def restarted() -> Story:
    """The engine of w0 is ready; its next incarnation after 2 s."""
    told = Story()
    told.worker()
    told.at_ms = 2000
    told.tell("w.w0", died(), started(incarnation=2), ready(incarnation=2))
    return told


def test_a_fault_damages_the_engine_of_its_time() -> None:
    assert verdicts(restarted().groups, [CorruptSince("w0", 1000)]) == {("w0", 1): NEVER}
    assert verdicts(restarted().groups, [CorruptSince("w0", 3000)]) == {("w0", 2): NEVER}


def test_a_second_fault_leaves_what_the_first_damaged() -> None:
    """I2 and I14 of composed 9171 took the first engine as sound, since the second was damaged too."""
    both = {("w0", 1): NEVER, ("w0", 2): NEVER}
    assert (
        verdicts(restarted().groups, [CorruptSince("w0", 1000), CorruptSince("w0", 3000)]) == both
    )


@pytest.mark.parametrize("convicted", [0, 2, 3])
def test_of_engines_whose_starts_landed_late_the_quarantined_one_was_damaged(
    convicted: int,
) -> None:
    """Composed 150901: etcd was away while two engines could not load and the third was damaged."""
    told = Story()
    told.worker()
    told.at_ms = 9000
    told.tell("w.w0", died(), started(incarnation=2), died("w0", 2), started(incarnation=3))
    if convicted:
        decided = v.HealthDecided(
            worker="w0", incarnation=convicted, state=HealthState.QUARANTINED,
            failure=FailureClass.CORRUPTION, evidence="wrong", since=1,
        )  # fmt: skip
        told.tell("fleet", decided)
    engine = ("w0", convicted or 1)
    expected = told.revision if convicted else NEVER
    assert verdicts(told.groups, [CorruptSince("w0", 5000)]) == {engine: expected}


def test_an_engine_that_is_known_to_be_damaged_needs_no_guess() -> None:
    """Composed 182265: etcd was away while two engines could not load; no one found the third."""
    story = Story()
    story.worker()
    story.at_ms = 9000
    story.tell("w.w0", died(), started(incarnation=2), died("w0", 2), started(incarnation=3))
    assert verdicts(story.groups, [CorruptSince("w0", 5000, 3)]) == {("w0", 3): NEVER}
