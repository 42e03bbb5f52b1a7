"""I10: time that does not count against the recovery bound."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.requests import i10_recovery_bound
from relume.chaos.validators.records import ClientRecord
from relume.chaos.validators.strikes import Slowed
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import FailureClass, HealthState
from tests.policies.story import (
    MODEL,
    Story,
    arrived,
    decided,
    died,
    dropped,
    ended,
    engine_step,
    observed,
    queued,
    ready,
    started,
)
from tests.validators.builders import about, idle, short
from tests.validators.recovery_bound.test_i10_bounds import stuck, timed


@pytest.mark.parametrize("returns", [True, False])
def test_i10_knows_a_return_that_the_log_has_late(returns: bool) -> None:
    """Composed 24155: all of its replica's records came half a second after the first token."""
    story = short()
    story.tell("w.w0", died())
    dead = story.revision
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    back = v.ClientReturned(request="q1", claim="c", attempt=1, tokens=5, events=1)
    then = observed(), decided(attempt=2, worker="w1"), ended(attempts=2)
    story.tell("r.r0", *((back, *then) if returns else then))
    groups = timed(story, {1: 1000, dead: 5000, dead + 1: 29_000, dead + 2: 29_500})
    assert (i10_recovery_bound.check(groups, [], bound_ms=500) == []) is returns


@pytest.mark.parametrize(
    ("lost", "sent_ms", "fine"), [("w1", 5000, True), ("w0", 5000, False), ("w1", 26_000, False)]
)
def test_i10_grants_the_time_in_which_the_next_worker_could_not_write(
    lost: str, sent_ms: int, fine: bool
) -> None:
    """Its lease lapsed; its first token has the time of its next segment. The time before the
    attempt was sent to it counts."""
    story = short()
    story.worker("w1")
    story.tell("r.r0", observed())
    cut = story.revision
    story.tell("fleet", v.WorkerLost(worker=lost, epoch=1, reason="lease lapsed"))
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    sent = story.revision
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 5000, sent: sent_ms, sent + 1: 30_000, sent + 2: 60_000})
    assert (i10_recovery_bound.check(groups, []) == []) is fine


@pytest.mark.parametrize(
    ("elsewhere", "quarantined", "fine"), [(3, False, True), (0, False, False), (0, True, True)]
)
def test_i10_grants_the_time_in_which_each_engine_had_a_queue(
    elsewhere: int, quarantined: bool, fine: bool
) -> None:
    """Composed 50197: one engine with room for two was left, and 19 requests waited there. If another
    one that may get requests has none waiting, the stream should be there."""
    story = short()
    story.worker("w1")
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    if quarantined:
        story.tell("fleet", corrupt("w0"))
    story.tell("w.w0", idle(waiting=elsewhere))
    story.tell("w.w1", replace(engine_step(queued(attempt=2)), waiting=9))
    story.tell("w.w1", engine_step(v.RequestAdmitted("q1", 2, 0, 1), v.FirstToken("q1", 2)))
    back = story.revision
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 5000, back: 30_000, back + 1: 60_000})
    client = ClientRecord(request="q1", status=200, outcome="completed", gaps_ms=[25_000.0])
    assert (i10_recovery_bound.check(groups, []) == []) is fine
    assert (i10_recovery_bound.check(groups, [client]) == []) is fine, "so of its client's gap"


def corrupt(worker: str) -> v.HealthDecided:
    return v.HealthDecided(
        worker=worker,
        incarnation=1,
        state=HealthState.QUARANTINED,
        failure=FailureClass.CORRUPTION,
        evidence="wrong answers",
        since=1,
    )


@pytest.mark.parametrize(("back_ms", "fine"), [(34_000, True), (36_000, False)])
def test_i10_grants_a_time_once(back_ms: int, fine: bool) -> None:
    """etcd is away for 20 s of which the next worker's lease is lost for 19 s."""
    story = short()
    story.worker("w1")
    story.tell("fleet", v.Tick(number=1, unix_ms=0))
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    story.tell("fleet", v.WorkerLost(worker="w1", epoch=1, reason="lease lapsed"))
    story.tell("w.w1", engine_step(queued(attempt=2)))
    again = story.revision
    story.tell("fleet", v.Tick(number=2, unix_ms=0))
    tick = story.revision
    story.tell("w.w1", engine_step(v.FirstToken("q1", 2)))
    story.tell("r.r0", ended(attempts=2))
    times = {1: 5000, cut: 5000, again: 24_000, tick: 25_000, tick + 1: back_ms, tick + 2: 60_000}
    found = i10_recovery_bound.check(timed(story, times), [], bound_ms=10_000)
    assert (found == []) is fine


@pytest.mark.parametrize(("stream", "fine"), [("w.w1", True), ("w.w0", False)])
def test_i10_grants_the_time_in_which_the_next_workers_agent_stood_still(
    stream: str, fine: bool
) -> None:
    """Composed 90643: its agent stood still for 16 s, and no leader declared it lost."""
    story = short()
    story.worker("w1")
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 21_000, cut + 2: 21_100})
    found = i10_recovery_bound.check(groups, [], bound_ms=500, cut_off=[(stream, 6000, 20_000)])
    assert (found == []) is fine


@pytest.mark.parametrize(
    ("slowed", "fine"),
    [
        (("w1", 6000, 30_000, 4.0), True),  # three quarters of 15 s
        (("w1", 6000, 30_000, 1.5), False),
        (("w1", 6000, 10_000, 4.0), False),
        (("w0", 6000, 30_000, 4.0), False),
    ],
)
def test_i10_does_not_count_what_a_fault_slows_the_next_engine_down_by(
    slowed: tuple[str, int, int, float], fine: bool
) -> None:
    """Composed 140080: each process of each worker had a third of a core."""
    story = short()
    story.worker("w1")
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 6000, cut + 1: 21_000, cut + 2: 21_100})
    client = ClientRecord(
        request="q1", status=200, outcome="completed", text="", token_count=3, gaps_ms=[15_000.0]
    )
    found = i10_recovery_bound.check(
        groups, [client], bound_ms=5000, slowed=Slowed(workers=(slowed,))
    )
    assert len(found) == (0 if fine else 2)


@pytest.mark.parametrize(
    ("worker", "lost_ms", "fine"), [("w1", 5300, True), ("w1", 9000, False), ("w0", 5300, False)]
)
def test_i10_knows_that_the_first_token_may_be_among_lost_reports(
    worker: str, lost_ms: int, fine: bool
) -> None:
    """Composed 140173: it came soon, and the log has the end of the answer alone, 22 s later."""
    story = short()
    story.worker("w1")
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    story.tell(f"w.{worker}", engine_step(lost=7))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: lost_ms, cut + 2: 27_000})
    assert (i10_recovery_bound.check(groups, [], bound_ms=500) == []) is fine


@pytest.mark.parametrize(
    ("before", "tokens", "away", "fine"),
    [
        (0, 25, "w.w1", True),
        (0, 25, "w.w0", False),
        (25, 25, "w.w1", False),  # the attempt gave nothing
        (0, 25, "", False),
    ],
)
@pytest.mark.parametrize("ends", [False, True])
def test_i10_knows_that_the_report_of_a_first_token_may_be_lost_with_the_agent(
    before: int, tokens: int, away: str, fine: bool, ends: bool
) -> None:
    """Composed 167152: the next worker's agent stood still from the dispatch until its host had a new
    one, 15 s later. Its engine made tokens meanwhile, and died. Only its replica says so."""
    story = short()
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1", delivered=before))
    cut = story.revision
    if ends:
        story.tell("r.r0", replace(ended(attempts=2), tokens=tokens))
    else:
        story.tell("r.r0", replace(observed(attempt=2, worker="w1"), delivered=tokens))
        story.tell("r.r0", decided(attempt=3, delivered=tokens))
        story.tell("w.w0", engine_step(queued(attempt=3), v.FirstToken("q1", 3)))
        story.tell("r.r0", ended(attempts=3))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 20_400})
    client = ClientRecord(request="q1", status=200, token_count=64, gaps_ms=[15_400.0])
    cut_off = [(away, 5100, 20_300)] if away else []
    found = i10_recovery_bound.check(groups, [], bound_ms=500, cut_off=cut_off)
    assert (found == []) is fine
    assert i10_recovery_bound.check(groups, [client], bound_ms=500, cut_off=cut_off), (
        "its client knows"
    )


@pytest.mark.parametrize(("position", "fine"), [(5, True), (25, False)])
def test_i10_does_not_count_tokens_that_a_client_brings_as_an_attempts(
    position: int, fine: bool
) -> None:
    """It returned to the attempt, and had more than its replica knew."""
    story = short()
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    back = v.ClientReturned(request="q1", claim="c", attempt=2, tokens=position, events=1)
    story.tell("r.r0", back)
    story.tell("r.r0", replace(observed(attempt=2, worker="w1"), delivered=25))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 5100, cut + 2: 20_400})
    found = i10_recovery_bound.check(groups, [], bound_ms=500, cut_off=[("w.w1", 5000, 20_300)])
    assert (found == []) is fine


def test_i10_knows_when_the_replica_could_not_write() -> None:
    """Composed 0: its calls to etcd were lost for 19 s, and what it did meanwhile landed after that."""
    story = short()
    story.tell("w.w0", died())
    dead = story.revision
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"), ended(attempts=2))
    groups = timed(story, {1: 1000, dead: 5000, dead + 1: 22_000})
    for stream, fine in (("r.r0", True), ("r.r1", False)):
        cut_off = [(stream, 4000, 21_500)]
        found = i10_recovery_bound.check(groups, [], bound_ms=500, cut_off=cut_off)
        assert (found == []) is fine


@pytest.mark.parametrize(
    ("stream", "since_ms", "last", "fine"),
    [
        ("r.r0", 6000, "died", True),
        ("r.r0", 6000, "started", True),  # its agent died too, and could not say that it was dead
        ("r.r0", 6000, "lost", False),  # it may serve on
        ("r.r0", 6000, "", False),
        ("r.r0", 8000, "died", False),  # it had read that the engine was back
        ("r.r1", 6000, "died", False),
    ],
)
def test_i10_does_not_count_the_time_in_which_no_engine_can_become_known(
    stream: str, since_ms: int, last: str, fine: bool
) -> None:
    """Composed 161067 and 160299: all engines died at once, and their replica was cut from etcd before
    they were back."""
    story = short()
    story.tell("w.w0", died())
    dead = story.revision
    story.tell("r.r0", observed())
    ends = {"died": died("w1"), "started": started("w1", 2)}
    if last in ends:
        story.tell("w.w1", ends[last])
    elif last:
        story.tell("fleet", v.WorkerLost("w1", 1, "lease lapsed"))
    story.tell("w.w0", started("w0", 2))
    story.tell("w.w0", ready("w0", 2))
    back = story.revision
    story.tell("r.r0", decided(attempt=2, worker="w0"))
    story.tell("w.w0", engine_step(queued(attempt=2), v.FirstToken("q1", 2), incarnation=2))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, dead: 5000, back: 7000, back + 1: 21_000})
    client = ClientRecord(request="q1", status=200, token_count=3, gaps_ms=[16_000.0])
    slowed = Slowed(blind=[(stream, since_ms, 20_000)])
    found = i10_recovery_bound.check(groups, [client], bound_ms=5000, slowed=slowed)
    assert len(found) == (0 if fine else 2)


@pytest.mark.parametrize(("lives", "fine"), [((), False), (((0, 5000),) * 2, True)])
def test_i10_knows_when_engines_died_whose_agents_wrote_it_late(
    lives: tuple[tuple[int, int], ...], fine: bool
) -> None:
    """Composed 183449: an agent stood still while its engine was killed."""
    story = short()
    story.tell("w.w0", died())
    dead = story.revision
    story.tell("r.r0", observed())
    story.tell("w.w1", died("w1"))
    late = story.revision
    story.tell("w.w0", started("w0", 2), ready("w0", 2))
    story.tell("r.r0", decided(attempt=2, worker="w0"))
    story.tell("w.w0", engine_step(queued(attempt=2), v.FirstToken("q1", 2), incarnation=2))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, dead: 5000, late: 15_000, late + 2: 21_000})
    client = ClientRecord(request="q1", status=200, token_count=3, gaps_ms=[16_000.0])
    slowed = Slowed(blind=[("r.r0", 3000, 20_000)], lives=lives)
    found = i10_recovery_bound.check(groups, [client], bound_ms=5000, slowed=slowed)
    assert (found == []) is fine


@pytest.mark.parametrize(
    ("dead", "gap_ms", "fine"),
    [
        (("w0", "w1"), 19_900, True),
        (("w0", "w1"), 20_100, False),  # 15 s are granted once, though two attempts were cut
        (("w0",), 19_900, False),  # it could have been sent to the other one
    ],
)
def test_i10_knows_when_an_attempt_was_lost_whose_dispatch_was_written_later(
    dead: tuple[str, ...], gap_ms: int, fine: bool
) -> None:
    """Composed 164721: its replica was cut from etcd from before the dispatch until after all engines
    had died and were back. It wrote of all attempts at once, after the first token of the last one."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.at_ms = 4000
    story.tell("w.w0", engine_step(queued(), v.FirstToken("q1", 1)))
    story.tell("w.w1", engine_step(queued(attempt=2)))
    story.at_ms = 5000
    for worker in dead:
        story.tell(f"w.{worker}", died(worker))
    story.at_ms = 7000
    story.tell("w.w0", started("w0", 2), ready("w0", 2))
    story.at_ms = 20_100
    story.tell("w.w0", engine_step(queued(attempt=3), v.FirstToken("q1", 3), incarnation=2))
    story.at_ms = 21_000
    story.tell(
        "r.r0", arrived(), decided(), observed(), decided(attempt=2, worker="w1"),
        observed(attempt=2, worker="w1"), decided(attempt=3, incarnation=2), ended(attempts=3),
    )  # fmt: skip
    client = ClientRecord(request="q1", status=200, token_count=3, gaps_ms=[gap_ms])
    blind = [("r.r0", 3000, 20_000)]
    found = i10_recovery_bound.check(
        story.groups, [client], bound_ms=5000, slowed=Slowed(blind=blind)
    )
    assert (found == []) is fine


@pytest.mark.parametrize(
    ("slowed", "gap_ms", "fine"),
    [
        (
            Slowed(outages=[(6000, 20_000)]),
            13_700,
            True,
        ),  # beyond its bound it was silent for 8.8 s
        (Slowed(outages=[(6000, 20_000)]), 13_900, False),
        (Slowed(outages=[(6000, 8000)]), 6900, True),
        (Slowed(outages=[(6000, 8000)]), 7100, False),
        (Slowed(outages=[(1000, 4000)]), 5100, False),
        (Slowed(blind=[("r.r0", 6000, 20_000)]), 13_700, True),
        (Slowed(blind=[("r.r1", 6000, 20_000)]), 5100, False),
    ],
)
def test_i10_knows_that_a_replica_without_the_log_sees_no_steps_of_engines(
    slowed: Slowed, gap_ms: int, fine: bool
) -> None:
    """Composed 164852: etcd was away for 14 s, a stream got stuck, and its engine was busy with other
    requests. All was written when etcd was back."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.at_ms = 5000
    story.tell("r.r0", arrived(), decided())
    story.at_ms = 22_000
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    judged = v.StreamJudged(
        decision="r0.b.stream1", basis=v.Basis(story.revision, 0), request="q1", attempt=1,
        worker="w0", incarnation=1, silent_us=10_300_000, from_step=0, probe="answered", steps=0,
        decodes=False, finished=False, bound_us=1_500_000, stuck=True, held=0,
    )  # fmt: skip
    stuck = observed(kind="stuck")
    story.at_ms = 27_000
    story.tell("r.r0", judged, stuck, decided(attempt=2, worker="w1"), ended(attempts=2))
    client = ClientRecord(request="q1", status=200, token_count=3, gaps_ms=[gap_ms])
    found = i10_recovery_bound.check(story.groups, [client], bound_ms=5000, slowed=slowed)
    assert (found == []) is fine


@pytest.mark.parametrize(("until_ms", "fine"), [(26_000, True), (6000, False)])
def test_i10_knows_that_a_replica_without_the_log_writes_its_dispatch_late_too(
    until_ms: int, fine: bool
) -> None:
    """Composed 173810: etcd was away, and the dispatch and the judgement landed at once when it was back."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.at_ms = 26_900
    story.tell("r.r0", arrived(), decided())
    story.at_ms = 27_000
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    judged = v.StreamJudged(
        decision="r0.b.stream1", basis=v.Basis(story.revision, 0), request="q1", attempt=1,
        worker="w0", incarnation=1, silent_us=21_700_000, from_step=0, probe="answered", steps=0,
        decodes=False, finished=True, bound_us=1_500_000, stuck=True, held=0,
    )  # fmt: skip
    story.tell(
        "r.r0", judged, observed(kind="stuck"), decided(attempt=2, worker="w1"), ended(attempts=2)
    )
    client = ClientRecord(request="q1", status=200, token_count=3, gaps_ms=[21_800])
    slowed = Slowed(outages=[(5000, until_ms)])
    found = i10_recovery_bound.check(story.groups, [client], bound_ms=5000, slowed=slowed)
    assert (found == []) is fine


def test_i10_knows_that_probes_take_longer_on_slow_links() -> None:
    """Composed 90965: each message took 329 ms."""
    story = short()
    judged = v.StreamJudged(
        decision="r0.b.stream1", basis=v.Basis(story.revision, 0), request="q1", attempt=1,
        worker="w0", incarnation=1, silent_us=3_712_567, from_step=368, probe="answered", steps=200,
        decodes=False, finished=True, bound_us=1_500_000, stuck=True,
    )  # fmt: skip
    story.tell("r.r0", judged, ended())
    groups = timed(story, {1: 1000, story.revision: 9000})
    assert "was stuck on w0 for 3712 ms" in about(i10_recovery_bound.check(groups, []))
    assert i10_recovery_bound.check(groups, [], slowed=Slowed(link_ms=329)) == []


@pytest.mark.parametrize(("worker", "fine"), [("w0", True), ("w1", False)])
def test_i10_knows_that_a_worker_that_is_cut_from_gateways_answers_no_probe(
    worker: str, fine: bool
) -> None:
    """Composed 150620: one of its streams had got stuck before."""
    story = short()
    judged = v.StreamJudged(
        decision="r0.b.stream1", basis=v.Basis(story.revision, 0), request="q1", attempt=1,
        worker="w0", incarnation=1, silent_us=3_907_903, from_step=366, probe="answered", steps=272,
        decodes=False, finished=True, bound_us=1_500_000, stuck=True,
    )  # fmt: skip
    story.tell("r.r0", judged, ended())
    groups = timed(story, {1: 1000, story.revision: 9000})
    slowed = Slowed(cut=[(worker, 6500, 8700)])
    assert (i10_recovery_bound.check(groups, [], slowed=slowed) == []) is fine


@pytest.mark.parametrize(("resumable", "fine"), [("c1", True), ("", False)])
def test_i10_expects_nothing_of_a_stream_that_only_the_leader_ended(
    resumable: str, fine: bool
) -> None:
    """Its replica died, and its client did not come to another."""
    story = Story()
    story.worker("w0")
    story.replica()
    story.tell("r.r0", msgspec.structs.replace(arrived(), resumable=resumable), decided())
    story.tell("r.r0", observed())
    cut = story.revision
    story.tell("fleet", ended(outcome="failed"))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 45_000})
    assert (i10_recovery_bound.check(groups, []) == []) is fine


@pytest.mark.parametrize(("worker", "fine"), [("w0", True), ("w1", False)])
def test_i10_knows_that_a_stuck_stream_shows_late_without_reports(worker: str, fine: bool) -> None:
    """Composed 120109: its engine had finished, and its output did not come."""
    client = ClientRecord(request="c1", status=200, gaps_ms=[60_015.0])
    story = Story()
    story.tell("r.r0", msgspec.structs.replace(arrived("q1"), client_id="c1"), decided())
    story.tell(f"w.{worker}", dropped(worker=worker))
    story.tell("r.r0", ended())
    assert (i10_recovery_bound.check(story.groups, [client]) == []) is fine


def test_i10_grants_the_time_for_which_a_replica_stood_still() -> None:
    client = ClientRecord(request="c1", status=200, gaps_ms=[15_000.0])
    story = Story()
    story.replica("r0")
    story.tell("r.r0", msgspec.structs.replace(arrived("q1"), client_id="c1"), ended("q1"))
    assert i10_recovery_bound.check(story.groups, [client])
    assert i10_recovery_bound.check(story.groups, [client], stopped=[("r.r1", 16_000)])
    stopped = [("r.r0", 16_000)]
    assert not i10_recovery_bound.check(story.groups, [client], stopped=stopped)
    assert not i10_recovery_bound.check(story.groups, [client], stopped=[*stopped, ("r.r0", 1)])


def test_i10_does_not_count_the_time_in_which_nothing_could_be_written() -> None:
    story = Story()
    story.replica("r0")
    story.worker("w0")
    story.tell("r.r0", arrived("q1"), decided("q1"))
    for number in (1, 2):
        story.tell("fleet", v.Tick(number, 1000 * number))
        if number == 1:
            story.tell("r.r0", observed("q1", worker="w0"))
    written = len(story.groups)
    story.tell("fleet", v.Tick(3, 20_000))
    story.tell("r.r0", ended("q1"))

    def at(group: RevisionGroup, at_ms: int) -> RevisionGroup:
        segments = tuple(msgspec.structs.replace(s, at_ms=at_ms) for s in group.segments)
        return msgspec.structs.replace(group, segments=segments)

    groups = [at(g, 2000 if n < written else 20_000) for n, g in enumerate(story.groups)]
    assert not i10_recovery_bound.check(groups, [])
    ticking = [g for g in groups if not any(s.stream == "fleet" for s in g.segments)]
    assert i10_recovery_bound.check(ticking, [])


def test_i10_grants_a_stuck_stream_the_time_in_which_the_log_stood_still() -> None:
    story = short()
    story.tell("fleet", v.Tick(number=1, unix_ms=0))
    first = story.revision
    story.tell("fleet", v.Tick(number=2, unix_ms=0))
    story.tell("r.r0", stuck(20_000, 500), observed(kind="stuck"), ended())
    at_ms = {1: 1000, first: 5000, first + 1: 22_000, first + 2: 23_000}
    assert i10_recovery_bound.check(timed(story, at_ms), []) == []


@pytest.mark.parametrize(("grace_ticks", "fine"), [(30, True), (5, False)])
def test_i10_waits_for_nothing_that_nobody_waits_for(grace_ticks: int, fine: bool) -> None:
    """Composed 130501: its client was away, so the death of its engine was noticed by the log alone."""
    story = Story()
    resumable = msgspec.structs.replace(
        arrived("q1"), client_id="c1", resumable="digest", grace_ticks=grace_ticks
    )
    story.tell("r.r0", resumable, decided())
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    back = story.revision
    story.tell("r.r0", msgspec.structs.replace(ended(outcome="cancelled"), tokens=7))
    groups = timed(story, {1: 1000, cut: 5000, back: 19_000, back + 1: 31_000})
    assert (i10_recovery_bound.check(groups, []) == []) is fine


@pytest.mark.parametrize(
    ("doubted", "delivered", "slowed", "fine"),
    [
        (True, 90, ("w1", 6000, 30_000, 4.0), True),
        (True, 90, ("w1", 6000, 8000, 4.0), False),
        (False, 90, ("w1", 6000, 30_000, 4.0), False),
        (True, 0, ("w1", 6000, 30_000, 4.0), False),
    ],
)
def test_i10_does_not_count_what_a_fault_slows_tokens_in_doubt_down_by(
    doubted: bool, delivered: int, slowed: tuple[str, int, int, float], fine: bool
) -> None:
    """Composed 173452: an engine with a nineteenth of its speed generated 217 tokens again, which their
    client had from a worker that computes wrong results."""
    story = short()
    story.worker("w1")
    again = replace(decided(attempt=2, worker="w1", delivered=delivered), doubted=doubted)
    story.tell("r.r0", observed(), again)
    cut = story.revision
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 6000, cut + 1: 6200, cut + 2: 21_000})
    client = ClientRecord(
        request="q1", status=200, outcome="completed", text="", token_count=3, gaps_ms=[14_000.0]
    )
    found = i10_recovery_bound.check(
        groups, [client], bound_ms=5000, slowed=Slowed(workers=(slowed,))
    )
    assert (found == []) is fine


@pytest.mark.parametrize(("model", "fine"), [(MODEL, True), ("other", False)])
def test_i10_grants_the_time_in_which_every_worker_of_the_model_failed(
    model: str, fine: bool
) -> None:
    """The breaker of the only one lets one waiting request through at a time."""
    story = short()
    story.worker("w1")
    story.tell("r.r0", observed())
    cut = story.revision
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 24_000, cut + 2: 24_100, cut + 3: 25_000})
    slowed = Slowed(failing=((model, 4000, 23_900),))
    assert (i10_recovery_bound.check(groups, [], bound_ms=500, slowed=slowed) == []) is fine
