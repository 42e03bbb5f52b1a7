"""I23 and I24: restores that are planned are covered, and ties rotate."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.decisions import i23_covered_restores, i24_fair_ties
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Exclusion
from tests.policies.story import Story, decided
from tests.validators.builders import about, daemon, held

# --- I23


@pytest.fixture
def story() -> Story:
    """w1 holds 64 tokens of q1."""
    story = Story()
    for name in ("w0", "w1"):
        story.worker(name)
        story.tell(f"w.{name}", daemon(name))
    story.replica()
    story.leader()
    story.tell("w.w1", held("w1", "q1", 64))
    return story


def plan(story: Story, tokens: int, late: int = 0) -> None:
    """A plan restores so much from w1, by what was known `late` revisions ago."""
    option = v.RecoveryOption(
        worker="w0", kind="restore", holder="w1", restored=tokens, wait_us=0, move_us=0,
        compute_us=0, done_us=0,
    )  # fmt: skip
    other = replace(option, kind="recompute", holder="", restored=0)
    choice = v.RecoveryChoice(
        request="q1", attempt=1, tokens=100, chosen=1, options=(other, option)
    )
    planned = v.RecoveryPlanned(
        decision="d",
        basis=v.Basis(story.revision - late, 0),
        worker="w0",
        incarnation=1,
        policy="completion",
        choices=(choice, replace(choice, request="q2", chosen=0), replace(choice, chosen=-1)),
    )
    story.tell("r.r0", planned)


def uncovered(story: Story) -> list[v.Event]:
    return i23_covered_restores.check(story.groups, [])


def test_what_a_holder_has_may_be_restored(story: Story) -> None:
    plan(story, 64)
    assert uncovered(story) == []
    plan(story, 65)
    text = "I23 q1: 65 tokens are to be restored from w1, which has 64"
    assert text in about(uncovered(story))


LOSSES: dict[str, tuple[str, v.Event]] = {
    "evicted": (
        "w.w1",
        v.CheckpointEvicted(holder="w1", boot="b", request="q1", child=0, tokens=48, bytes=480),
    ),
    "dropped": (
        "w.w1",
        v.CheckpointDropped(holder="w1", boot="b", request="q1", child=0, reason="finished"),
    ),
    "another choice has less": ("w.w1", replace(held("w1", "q1", 32), child=1)),
    "voided": ("fleet", v.CheckpointsVoided("w0", 1, (("q1", 1),))),
    "daemon lost": ("w.w1", v.StateDaemonLost("w1", "b", "killed")),
    "daemon restarted": ("w.w1", replace(daemon("w1"), boot="b2", epoch=2)),
    "host lost": ("fleet", v.WorkerLost("w1", 4, "lease lapsed")),
}


@pytest.mark.parametrize("why", LOSSES)
def test_what_it_lost_before_the_basis_may_not(story: Story, why: str) -> None:
    stream, event = LOSSES[why]
    if type(event) is v.WorkerLost:
        event = replace(event, epoch=story.epochs["w.w1"])
    story.tell(stream, event)
    plan(story, 64, late=1)
    assert uncovered(story) == []
    plan(story, 64)
    assert len(uncovered(story)) == 1


def test_what_was_written_before_it_was_voided_does_not_count(story: Story) -> None:
    story.tell("fleet", v.CheckpointsVoided("w0", 1, (("q1", 1),)))
    story.tell("w.w1", held("w1", "q1", 64))
    plan(story, 64)
    assert "which has 0" in about(uncovered(story))
    story.tell("w.w1", replace(held("w1", "q1", 64), attempt=2))
    plan(story, 64)
    assert len(uncovered(story)) == 1


# --- I24


def ties(chosen: list[str], policy: str = "least_load", **second: object) -> str:
    """Dispatches over four workers that are equal, except for `second` of w1."""
    story = Story()
    story.replica()
    first = v.Candidate(worker="w0", incarnation=1, cost=5, prefill_tokens=0, requests=1)
    four = [replace(first, worker=f"w{n}") for n in range(4)]
    four[1] = replace(four[1], **second)
    for number, name in enumerate(chosen):
        event = replace(decided(f"q{number}", worker=name), candidates=tuple(four), policy=policy)
        story.tell("r.r0", event)
    return "\n".join(map(str, i24_fair_ties.check(story.groups, [])))


def test_ties_that_rotate_are_fair() -> None:
    assert ties([f"w{n % 4}" for n in range(200)]) == ""


def test_ties_that_always_go_to_one_worker_are_found() -> None:
    assert ties(["w0"] * 40) == "", "too few to say"
    assert "I24 w1: was in 80 ties, and got 0 of the dispatches" in ties(["w0"] * 80)


@pytest.mark.parametrize(
    "second", [{"cost": 6}, {"requests": 2}, {"hit_tokens": 9}, {"excluded": Exclusion.SUSPECTED}]
)
def test_a_worker_that_is_not_equal_is_in_no_tie(second: dict[str, object]) -> None:
    assert ties([("w0", "w2", "w3")[n % 3] for n in range(200)], **second) == ""


def test_policies_that_go_by_something_else_are_left_out() -> None:
    assert ties(["w0"] * 200, policy="session_affinity") == ""


def turns(bursts: int, size: int) -> str:
    """Bursts over four idle workers: each request makes its worker cost more, and w0 is the last."""
    story = Story()
    story.replica()
    idle = v.Candidate(worker="w0", incarnation=1, cost=5, prefill_tokens=0, requests=0)
    for number in range(bursts * size):
        four = [
            replace(idle, worker=f"w{n}", cost=9 if n > 3 - number % size else 5) for n in range(4)
        ]
        route = decided(f"q{number}", worker=f"w{3 - number % size}")
        story.tell("r.r0", replace(route, candidates=tuple(four)))
    return "\n".join(map(str, i24_fair_ties.check(story.groups, [])))


def test_the_last_of_a_burst_gets_its_turn() -> None:
    """Composed 6025: twelve bursts of four began with the same worker."""
    assert turns(12, 4) == ""
    assert "I24 w0: was in 36 ties, and got 0" in turns(12, 3)


def test_so_does_the_last_of_three_equal_ones_in_bursts_of_four() -> None:
    """Composed 70130: one of four is slower, so each burst begins with a tie of the other three."""
    story = Story()
    story.replica()
    idle = v.Candidate(worker="w0", incarnation=1, cost=5, prefill_tokens=0, requests=0)
    for number in range(60 * 4):
        taken = number % 4
        four = [
            replace(idle, worker=f"w{n}", cost=9 if n == 3 else 20 if n > 2 - taken else 5)
            for n in range(4)
        ]
        route = decided(f"q{number}", worker=f"w{2 - taken}" if taken < 3 else "w3")
        story.tell("r.r0", replace(route, candidates=tuple(four)))
    assert i24_fair_ties.check(story.groups, []) == []
