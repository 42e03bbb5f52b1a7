"""A run in which one log ends and another begins: what is compared, and what is named."""

from __future__ import annotations

import pytest

from relume.chaos.outcome import FiredFault, History
from relume.chaos.validators.former_log import RENEWAL, of_present_log, violations
from relume.chaos.validators.records import THE_RUN, ClientRecord
from relume.events import vocabulary as v
from tests.policies.story import Story, died, ready, started


def log_with(*events: object) -> Story:
    """The beginning of a log, in which the agent of w0 writes these events."""
    story = Story()
    story.replica()
    register = v.WorkerRegistered(worker="w0", domain="h", agent_pid=1, agent_url="", notices="")
    story.tell("w.w0", register, *events)
    return story


def found(former: Story, present: Story) -> str:
    """Without what only says that a short log proves little."""
    return "; ".join(
        str(one) for one in violations(former.groups, present.groups) if one.about != THE_RUN
    )


RAN = (started("w0", 3), ready("w0", 3))


def test_an_engine_that_the_new_log_adopts_is_well() -> None:
    assert found(log_with(*RAN), log_with(*RAN)) == ""


@pytest.mark.parametrize(
    ("present", "named"),
    [
        (
            (started("w0", 4), ready("w0", 4)),
            "its engine 3 (pid 103) ended with the former log; the new one has engine 4 (pid 104)",
        ),
        ((v.EngineStarted("w0", 3, 99, 3),), "the new one has engine 3 (pid 99)"),
        ((), "its engine 3 ran when the new log began, which lacks it"),
    ],
)
def test_an_engine_that_ends_with_its_log_is_named(present: tuple[object, ...], named: str) -> None:
    said = found(log_with(*RAN), log_with(*present))
    assert said.startswith("I20 w0: ") and named in said


def test_an_engine_that_died_before_need_not_be_adopted() -> None:
    assert found(log_with(*RAN, died("w0", 3)), log_with(started("w0", 4))) == ""


def test_a_former_log_with_a_gap_is_named() -> None:
    former = log_with(*RAN)
    for _ in range(3):
        former.tell("w.w0", v.WorkerDeregistered("w0", "test"))
    broken = [g for g in former.groups if g is not former.groups[-2]]
    said = "; ".join(map(str, violations(broken, log_with(*RAN).groups)))
    assert "I6 former log, w.w0" in said


def sent(name: str, at_ns: int) -> History:
    return History(request=name, record=ClientRecord(request=name, status=200), sent_ns=at_ns)


def test_what_was_sent_before_the_new_log_is_looked_for_only_if_that_knows_it() -> None:
    fired = FiredFault(name="f0", what=RENEWAL, target="e0", at_ns=10, until_ns=100)
    histories = [sent("lost", 50), sent("late", 50), sent("new", 101)]
    after = of_present_log(histories, [fired], {"late"})
    assert [one.record.status for one in after] == [0, 200, 200]
    assert of_present_log(histories, [], ()) == histories
