"""A run in which one log ends and another begins: what is compared, and what is named."""

from __future__ import annotations

import pytest

from relume.chaos.outcome import FiredFault, History
from relume.chaos.validators.former_log import RENEWAL, STATED_MS, of_present_log, violations
from relume.chaos.validators.records import THE_RUN, ClientRecord
from relume.events import vocabulary as v
from tests.policies.story import Story, died, engine_step, finished, queued, ready, started


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


HAD = engine_step(queued("q1", 1), queued("q2", 2), queued("gone"), finished("gone"), incarnation=3)
FILLS = engine_step(*(v.KvBlocksFilled(f"q{n}", n, 4) for n in (1, 2)), incarnation=3)
ENDS = engine_step(finished("q1"), finished("q2", 2), incarnation=3)


@pytest.mark.parametrize(
    ("first", "later", "named"),
    [
        ((), (), ""),
        (HAD, FILLS, ""),
        (FILLS, (), ""),
        (ENDS, (), ""),
        ((), FILLS, "I21 q1: runs on w0 as attempt 1, and the new log does not count it; I21 q2: "),
        (
            FILLS,
            ENDS,
            "I21 q1: runs on w0 as attempt 1, and the new log does not count it; I21 q2: ",
        ),
        (engine_step(queued("q1", 1), incarnation=3), FILLS, "I21 q2: runs on w0 as attempt 2"),
    ],
)
def test_the_new_log_counts_the_requests_of_engines_that_it_adopts(
    first: object, later: object, named: str
) -> None:
    """Reports that were on their way come first."""
    former, present = log_with(*RAN, HAD), log_with(*RAN)
    for steps, at_ms in ((first, 0), (later, STATED_MS + 1)):
        present.at_ms += at_ms
        if steps:
            present.tell("w.w0", steps)
    said = found(former, present)
    assert said.startswith(named) and bool(said) is bool(named)


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
