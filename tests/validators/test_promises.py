"""Each checker passes a sound run and can fail: a check that cannot fail is a bug."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from relume.chaos.traffic import Stream
from relume.chaos.validators import CHECKS, check_all
from relume.chaos.validators.client_records import record_of
from relume.chaos.validators.promises import (
    i1_one_terminal_event,
    i2_identical_stream,
    i3_indices,
    i4_one_live_epoch,
    i5_fencing_no_gap,
    i6_hash_chain,
    i7_replay,
    i8_budget,
    i10_recovery_bound,
    i12_drained,
    i13_durable,
    i14_no_bad_block,
    i15_effects_once,
    i16_admin_logged,
)
from relume.chaos.validators.records import ClientRecord, Violation, events_of
from relume.events import vocabulary as v
from relume.events.log.codec import decode, encode
from relume.events.log.interface import Landed, RevisionGroup
from relume.events.vocabulary.enums import AttemptMode
from tests.policies.story import (
    Story,
    arrived,
    decided,
    died,
    ended,
    engine_step,
    finished,
    observed,
    queued,
    replica_started,
)
from tests.replay.scene import Scene
from tests.replay.tamper import dropped, exchanged, places, replaced


class Run:
    """A run that kept its promises: its log, its clients, what was acknowledged."""

    def __init__(self) -> None:
        self.groups: list[RevisionGroup] = []
        self.clients: list[ClientRecord] = []
        self.landed: list[Landed] = []


async def sound_run() -> Run:
    run = Run()
    async with Scene(51) as scene:
        for name in scene.replicas:
            scene._writers[name].on_landed(run.landed.append)
        await scene.traffic(40)
        scene.workers["w0"].die()
        admin = scene.replicas["r0"].scheduler
        admin.emit(
            v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w1")
        )
        await scene.traffic(15, "more")
        scene.workers["w0"].start()
        scene.workers["w1"].tell(v.EffectApplied("c1", 0))
        await scene.settled()
        for clients in scene.clients.values():
            for request, (outcome, tokens) in clients.outcomes.items():
                status = {"completed": 200, "cancelled": 0, "failed": 200, "rejected": 503}
                run.clients.append(
                    ClientRecord(
                        request=request,
                        status=status[outcome],
                        outcome=outcome,
                        token_count=tokens,
                        finish="length" if outcome == "completed" else "",
                        text="x" * tokens,
                        asked=str(tokens),
                        starts=list(range(tokens)),
                        gaps_ms=[1.0] * tokens,
                    )
                )
    for tokens in range(1, 13):
        kept = ClientRecord(
            request=f"calm{tokens}",
            status=0,
            outcome="completed",
            text="x" * tokens,
            token_count=tokens,
            finish="length",
        )
        kept.asked, kept.undisturbed = str(tokens), True
        run.clients.append(kept)
    run.groups = [*scene.log.groups]
    return run


@pytest.fixture(scope="module")
def run() -> Run:
    return asyncio.run(sound_run())


def short() -> Story:
    """q1 runs on w0; nothing is wrong, and nothing has ended yet."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    story.tell("r.r0", arrived(), decided())
    story.tell("w.w0", engine_step(queued()))
    return story


def whole() -> Story:
    story = short()
    story.tell("w.w0", engine_step(finished()))
    story.tell("r.r0", ended())
    return story


def about(found: list[Violation]) -> str:
    assert found, "the check found nothing"
    return "; ".join(str(f) for f in found)


def test_sound_run_breaks_no_promise(run: Run) -> None:
    engines = [p for p in CHECKS if p != "I12"]  # scripted engines keep their block figures
    assert check_all(run.groups, run.clients, engines) == []
    assert i13_durable.check(run.groups, run.clients, run.landed) == []
    assert i16_admin_logged.check(run.groups, run.clients, [("c1", "root")]) == []
    assert len(run.landed) > 10
    assert len(run.clients) == 67


# --- I1 --------------------------------------------------------------------------------


def test_i1_finds_requests_without_an_end() -> None:
    assert "no terminal event" in about(i1_one_terminal_event.check(short().groups, []))
    assert i1_one_terminal_event.check(whole().groups, []) == []


def test_i1_finds_a_second_end() -> None:
    story = whole()
    story.tell("r.r0", ended())
    assert "2 terminal events of its gateway" in about(
        i1_one_terminal_event.check(story.groups, [])
    )


def test_i1_finds_an_end_by_another_gateway() -> None:
    story = short()
    story.replica("r1")
    story.tell("r.r1", ended())
    assert "ended by r.r1" in about(i1_one_terminal_event.check(story.groups, []))


def test_i1_lets_a_gateway_that_came_back_have_the_last_word() -> None:
    story = short()
    story.tell("fleet", ended(outcome="failed"))
    story.tell("r.r0", ended())
    client = ClientRecord(
        request="q1", status=200, outcome="completed", token_count=64, finish="length"
    )
    assert i1_one_terminal_event.check(story.groups, [client]) == []
    late = whole()
    late.tell("fleet", ended(outcome="failed"))
    assert "after its gateway" in about(i1_one_terminal_event.check(late.groups, []))


@pytest.mark.parametrize(("ticks", "fine"), [(0, True), (3, False)])
def test_i1_lets_all_that_a_gateway_wrote_land_in_front_of_the_leaders_end(
    ticks: int, fine: bool
) -> None:
    story = Story()
    story.worker("w0")
    story.replica()
    story.tell("r.r0", arrived(), decided(), ended())
    for _ in range(ticks):
        story.tell("w.w0", idle())
    story.tell("fleet", ended(outcome="failed"))
    assert (i1_one_terminal_event.check(story.groups, []) == []) is fine


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"outcome": "failed"}, "told of a failure"),
        ({"token_count": 63}, "63 tokens"),
        ({"finish": "stop"}, "told stop"),
        ({"outcome": "cut"}, "connection broke"),
        ({"request": "unknown"}, "does not know it"),
    ],
)
def test_i1_finds_what_log_and_client_tell_differently(changes: Any, says: str) -> None:
    client = ClientRecord(
        request="q1", status=200, outcome="completed", token_count=64, finish="length"
    )
    assert i1_one_terminal_event.check(whole().groups, [client]) == []
    other = msgspec.structs.replace(client, **changes)
    assert says in about(i1_one_terminal_event.check(whole().groups, [other]))


def test_i1_accepts_a_cut_of_a_relayed_answer_that_failed() -> None:
    client = ClientRecord(request="q1", status=200, outcome="cut", token_count=3)
    for route, outcome, fine in (
        ("/v1/embeddings", "failed", True),
        ("/v1/embeddings", "completed", False),
        ("/v1/completions", "failed", False),
    ):
        story = Story()
        story.worker("w0")
        story.replica()
        came = msgspec.structs.replace(arrived(), route=route)
        story.tell("r.r0", came, decided(), ended(outcome=outcome))
        assert (i1_one_terminal_event.check(story.groups, [client]) == []) is fine


def test_i1_accepts_a_cut_when_the_gateway_died() -> None:
    story = short()
    client = ClientRecord(request="q1", status=200, outcome="cut", token_count=3)
    story.own("r.r0")
    story.tell("r.r0", replica_started(boot="b2"))
    story.tell("fleet", ended(outcome="failed"))
    assert i1_one_terminal_event.check(story.groups, [client]) == []
    heard = ClientRecord(
        request="q1", status=200, outcome="completed", token_count=64, finish="length"
    )
    assert i1_one_terminal_event.check(story.groups, [heard]) == [], "it died before its word"
    alive = short()
    alive.tell("fleet", ended(outcome="failed"))
    assert "whole answer" in about(i1_one_terminal_event.check(alive.groups, [heard]))
    unheard = ClientRecord(request="q7", status=200, outcome="cut", token_count=1)
    assert i1_one_terminal_event.check(story.groups, [unheard]) == []
    assert i1_one_terminal_event.check(whole().groups, [unheard]) != []


@pytest.mark.parametrize(("killed", "fine"), [("r.r1", True), ("r.r0", False)])
def test_i1_asks_for_the_death_of_the_last_owner(killed: str, fine: bool) -> None:
    story = short()
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    story.own(killed)
    story.tell(killed, replica_started(killed[2:], "b2"))
    story.tell("fleet", ended(outcome="failed"))
    left = ClientRecord(request="q1", status=200, outcome="cancelled", token_count=5)
    assert (i1_one_terminal_event.check(story.groups, [left]) == []) is fine


def test_i1_compares_the_status_of_refusals() -> None:
    story = short()
    refusal = v.RequestEnded(
        request="q1",
        outcome="rejected",
        status=503,
        tokens=0,
        finish="-",
        attempts=0,
        verdict="exact",
    )
    story.tell("r.r0", refusal)
    assert (
        i1_one_terminal_event.check(
            story.groups, [ClientRecord(request="q1", status=503, outcome="rejected")]
        )
        == []
    )
    found = i1_one_terminal_event.check(
        story.groups, [ClientRecord(request="q1", status=500, outcome="failed")]
    )
    assert "answered 500" in about(found)


# --- I2, I3 ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"text": "axb"}, {"tokens": [1, 9]}, {"finish": "stop"}, {"token_count": 3}]
)
def test_i2_finds_any_difference(change: Any) -> None:
    calm = ClientRecord(
        request="calm",
        status=200,
        outcome="completed",
        text="abc",
        token_count=2,
        finish="length",
        tokens=[1, 2],
        asked="p",
    )
    calm.undisturbed = True
    hit = msgspec.structs.replace(calm, request="q1", undisturbed=False)
    groups = whole().groups
    assert i2_identical_stream.check(groups, [calm, hit]) == []
    other = msgspec.structs.replace(hit, **change)
    assert i2_identical_stream.check(groups, [calm, other])


def test_i2_is_not_asked_of_what_was_not_promised() -> None:
    story = Story()
    story.worker()
    story.replica()
    story.tell("r.r0", arrived(verdict="sampled"), ended())
    calm = ClientRecord(
        request="calm", status=200, outcome="completed", text="abc", asked="p", undisturbed=True
    )
    other = ClientRecord(request="q1", status=200, outcome="completed", text="xyz", asked="p")
    assert i2_identical_stream.check(story.groups, [calm, other]) == []


def test_i2_run_without_counterparts_is_no_proof() -> None:
    lonely = ClientRecord(request="q1", status=200, outcome="completed", text="abc", asked="p")
    assert "counterpart" in about(i2_identical_stream.check(whole().groups, [lonely]))


@pytest.mark.parametrize("starts", [[1, 2], [0, 2, 2], [0, 5], [0, 3, 1]])
def test_i3_finds_chunks_that_do_not_join(starts: list[int]) -> None:
    good = ClientRecord(
        request="q1", status=200, outcome="completed", token_count=4, starts=[0, 1, 3]
    )
    assert i3_indices.check([], [good]) == []
    assert i3_indices.check([], [msgspec.structs.replace(good, starts=starts)])


def test_i3_finds_ids_that_do_not_add_up() -> None:
    assert i3_indices.check([], [ClientRecord(request="q1", tokens=[1, 2], token_count=3)])


def moved(delivered: int, seen: int = 17) -> Story:
    story = short()
    fields = {f: getattr(observed(), f) for f in v.TransportObserved.__struct_fields__}
    again = {
        f: getattr(decided(attempt=2, worker="w1", delivered=delivered), f)
        for f in v.RouteDecided.__struct_fields__
    }
    story.tell(
        "r.r0",
        v.TransportObserved(**{**fields, "delivered": seen}),
        v.RouteDecided(**{**again, "mode": "continue"}),
    )
    return story


def test_i3_finds_a_continuation_from_elsewhere() -> None:
    assert i3_indices.check(moved(17).groups, []) == []
    for wrong in (16, 18):
        assert "continues from" in about(i3_indices.check(moved(wrong).groups, []))


def test_i3_finds_delivery_that_went_back() -> None:
    story = moved(17)
    story.tell("r.r0", observed(attempt=2))
    assert "had delivered 0" in about(i3_indices.check(story.groups, []))


@pytest.mark.parametrize(("from_there", "fine"), [(3, True), (2, False), (5, False)])
def test_i3_reads_what_each_owner_knows(from_there: int, fine: bool) -> None:
    """r1's client has 5 tokens. r0 has not heard of it, continues after 3, and gets the client
    back: what it wrote before counts."""
    story = short()
    story.worker("w1")
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    lost = msgspec.structs.replace(observed(), delivered=3)
    on = decided(attempt=2, worker="w1", delivered=from_there)
    on = msgspec.structs.replace(on, mode=AttemptMode.CONTINUE)
    story.tell("r.r0", lost, on)
    story.tell("r.r0", v.ClientReturned(request="q1", claim="c2", attempt=2, tokens=7, events=0))
    story.tell("r.r0", msgspec.structs.replace(observed(attempt=2), delivered=7))
    assert (i3_indices.check(story.groups, []) == []) is fine


def test_i3_accepts_that_an_answer_in_one_piece_starts_over() -> None:
    for stream, fine in ((False, True), (True, False)):
        story = Story()
        story.worker("w0")
        story.worker("w1")
        story.replica()
        came = msgspec.structs.replace(arrived(), stream=stream)
        lost = msgspec.structs.replace(observed(), delivered=17)
        anew = decided(attempt=2, worker="w1")
        again = msgspec.structs.replace(observed(attempt=2), delivered=3)
        story.tell("r.r0", came, decided(), lost, anew, again)
        assert (i3_indices.check(story.groups, []) == []) is fine


# --- I4 --------------------------------------------------------------------------------


def test_i4_finds_two_live_attempts() -> None:
    story = short()
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    assert "while 1 was live" in about(i4_one_live_epoch.check(story.groups, []))
    assert i4_one_live_epoch.check(moved(17).groups, []) == []


def test_i4_finds_two_gateways() -> None:
    story = short()
    story.replica("r1")
    story.tell("r.r1", observed())
    assert "r.r0 and r.r1" in about(i4_one_live_epoch.check(story.groups, []))


def test_a_client_that_came_back_changes_the_owner_and_nothing_else() -> None:
    story = short()
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    story.tell("r.r0", observed(attempt=7), ended())  # it had not heard of it: void
    assert "no terminal event" in about(i1_one_terminal_event.check(story.groups, []))
    story.tell("r.r1", observed())
    assert "had delivered 0 tokens, 5" in about(i3_indices.check(story.groups, []))
    story.tell("r.r1", ended())
    assert i1_one_terminal_event.check(story.groups, []) == []
    assert i4_one_live_epoch.check(story.groups, []) == []
    story.tell(
        "r.r0", v.ClientReturned(request="q1", claim="c2", attempt=1, tokens=5, events=0)
    )  # it was over
    assert i1_one_terminal_event.check(story.groups, []) == []


@pytest.mark.parametrize("told", ["before", "after"])
def test_what_an_owner_wrote_is_void_once_another_has_dispatched(told: str) -> None:
    story = short()
    story.worker("w1")
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    if told == "before":
        story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    story.tell("r.r1", observed(), decided(attempt=2, worker="w1"))
    if told == "after":
        story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    story.tell("r.r0", v.ClientReturned(request="q1", claim="c2", attempt=2, tokens=5, events=0))
    assert i4_one_live_epoch.check(story.groups, []) == []


@pytest.mark.parametrize("told", [True, False])
def test_what_an_owner_wrote_before_its_client_came_back_counts(told: bool) -> None:
    """It had gone on meanwhile; what it did not write did not happen."""
    story = short()
    story.worker("w1")
    story.replica("r1")
    story.tell("r.r1", v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=5, events=0))
    if told:
        story.tell("r.r0", observed(attempt=1))
    story.tell("r.r0", v.ClientReturned(request="q1", claim="c2", attempt=1, tokens=5, events=0))
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    found = i4_one_live_epoch.check(story.groups, [])
    assert found == [] if told else "while 1 was live" in about(found)


def test_i4_finds_a_dispatch_after_the_end() -> None:
    story = whole()
    story.tell("r.r0", decided(attempt=2, worker="w1"))
    assert "after the end" in about(i4_one_live_epoch.check(story.groups, []))


def test_i4_finds_a_skipped_attempt() -> None:
    story = short()
    story.tell("r.r0", observed(), decided(attempt=3, worker="w1"))
    assert "follows attempt 1" in about(i4_one_live_epoch.check(story.groups, []))


def test_i4_finds_an_engine_that_was_never_chosen() -> None:
    story = short()
    story.tell("w.w1", engine_step(queued()))
    found = about(i4_one_live_epoch.check(story.groups, []))
    assert "taken by w1:1" in found
    assert "2 engines" in found


# --- I5, I6, I7 ------------------------------------------------------------------------


def test_i5_finds_a_fenced_writer() -> None:
    story = whole()
    old = story.epochs["w.w0"]
    story.own("w.w0")
    story.tell("w.w0", engine_step())
    assert i5_fencing_no_gap.check(story.groups, []) == []
    story.epochs["w.w0"] = old
    story.tell("w.w0", engine_step())
    found = about(i5_fencing_no_gap.check(story.groups, []))
    assert f"epoch {old} wrote after" in found


def test_i5_finds_a_writer_without_lease() -> None:
    story = whole()
    story.lapse("w.w0")
    story.tell("w.w0", engine_step())
    assert "it had no owner" in about(i5_fencing_no_gap.check(story.groups, []))


def test_i5_finds_a_gap() -> None:
    groups = whole().groups
    index = next(i for i, g in enumerate(groups) if g.segments)
    found = about(i5_fencing_no_gap.check(groups[:index] + groups[index + 1 :], []))
    assert "follows segment 0" in found


def test_i6_finds_a_forged_segment(run: Run) -> None:
    index = next(i for i, g in enumerate(run.groups) if g.segments)
    group = run.groups[index]
    segment = group.segments[0]
    forged = msgspec.structs.replace(segment, records=(*segment.records, encode(died())))
    groups = [*run.groups]
    groups[index] = msgspec.structs.replace(group, segments=(forged,))
    assert "hashes to" in about(i6_hash_chain.check(groups, []))
    assert i6_hash_chain.check(run.groups, []) == []


def test_i6_finds_a_missing_segment(run: Run) -> None:
    index = next(i for i, g in enumerate(run.groups) if g.segments)
    groups = run.groups[:index] + run.groups[index + 1 :]
    assert "follows segment 0" in about(i6_hash_chain.check(groups, []))


def test_i7_finds_a_dropped_event_in_an_intact_chain(run: Run) -> None:
    place = list(places(run.groups, "w.w1"))[10][0]
    groups = dropped(run.groups, place)
    assert i6_hash_chain.check(groups, []) == []
    assert i7_replay.check(groups, [])


def test_i7_finds_exchanged_transactions(run: Run) -> None:
    for index, (one, two) in enumerate(zip(run.groups, run.groups[1:], strict=False)):
        streams = [s.stream for g in (one, two) for s in g.segments]
        if index > 40 and len(set(streams)) == 2:
            break
    assert i7_replay.check(exchanged(run.groups, index), [])


def test_i7_a_log_that_proves_nothing_fails() -> None:
    found = about(i7_replay.check(whole().groups, []))
    assert "alternative" in found
    assert "state hash" in found


# --- I10, I12, I13 ---------------------------------------------------------------------


def timed(story: Story, at_ms: dict[int, int]) -> list[RevisionGroup]:
    """The story's groups with a wall clock; revisions not named share the last time."""
    groups, now = [], 0
    for group in story.groups:
        now = at_ms.get(group.revision, now)
        segments = tuple(msgspec.structs.replace(s, at_ms=now) for s in group.segments)
        groups.append(msgspec.structs.replace(group, segments=segments))
    return groups


@pytest.mark.parametrize(("took_ms", "fine"), [(400, True), (900, False)])
def test_i10_measures_from_the_death_to_the_next_first_token(took_ms: int, fine: bool) -> None:
    story = short()
    story.tell("w.w0", died())
    dead = story.revision
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    back = story.revision
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, dead: 5000, back: 5000 + took_ms, back + 1: 60_000})
    found = i10_recovery_bound.check(groups, [], bound_ms=500)
    assert (found == []) is fine


def test_i10_is_not_misled_by_a_worker_that_tells_late() -> None:
    """It was cut from the log; the gateway's word on the end came in time."""
    story = short()
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    story.tell("r.r0", ended(attempts=2))
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 5400, cut + 2: 60_000})
    assert i10_recovery_bound.check(groups, [], bound_ms=500) == []
    assert i10_recovery_bound.check(groups, [], bound_ms=300)


@pytest.mark.parametrize(("lost", "fine"), [("w1", True), ("w0", False)])
def test_i10_grants_the_time_in_which_the_next_worker_could_not_write(
    lost: str, fine: bool
) -> None:
    """Its lease lapsed; its first token has the time of its next segment."""
    story = short()
    story.worker("w1")
    story.tell("r.r0", observed(), decided(attempt=2, worker="w1"))
    cut = story.revision
    story.tell("fleet", v.WorkerLost(worker=lost, epoch=1, reason="lease lapsed"))
    story.tell("w.w1", engine_step(queued(attempt=2), v.FirstToken("q1", 2)))
    told = story.revision
    story.tell("r.r0", ended(attempts=2))
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 9000, told: 30_000, told + 1: 60_000})
    assert (i10_recovery_bound.check(groups, []) == []) is fine


def test_i10_starts_over_when_the_gateway_is_killed() -> None:
    story = short()
    story.tell("r.r0", observed())
    cut = story.revision
    story.tell("r.r0", ended())
    groups = timed(story, {1: 1000, cut: 5000, cut + 1: 5900})
    for stream, at_ms, fine in (
        ("r.r0", 5500, True), ("r.r0", 5100, False), ("r.r1", 5500, False), ("r.r0", 5950, False),
    ):  # fmt: skip
        found = i10_recovery_bound.check(groups, [], bound_ms=500, killed=[(stream, at_ms)])
        assert (found == []) is fine


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


def test_i10_finds_a_cut_that_nothing_followed() -> None:
    story = short()
    story.tell("r.r0", observed())
    assert "nothing followed" in about(i10_recovery_bound.check(story.groups, []))


def test_i10_finds_a_gap_a_client_saw() -> None:
    client = ClientRecord(
        request="q1", status=200, outcome="completed", gaps_ms=[3.0, 10_500.0, 4.0]
    )
    assert i10_recovery_bound.check([], [client])
    assert i10_recovery_bound.check([], [client], bound_ms=11_000) == []


def idle(kv_used: int = 0, waiting: int = 0) -> v.EngineStep:
    return v.EngineStep(
        incarnation=1,
        step=9,
        duration_us=5,
        batch=0,
        sum_context=0,
        prefill_tokens=0,
        waiting=waiting,
        kv_used=kv_used,
    )


def test_i12_finds_what_is_left() -> None:
    story = short()
    found = about(i12_drained.check(story.groups, []))
    assert "q1: is still live" in found
    assert "still holds q1/1" in found
    story.tell("w.w0", engine_step(finished()), idle())
    story.tell("r.r0", ended())
    assert i12_drained.check(story.groups, []) == []
    assert "owner" in about(i12_drained.check(story.groups, [], stopped=True))
    story.tell("w.w0", idle(kv_used=2))
    assert "2 KV blocks" in about(i12_drained.check(story.groups, []))
    story.tell("w.w0", idle(waiting=1))
    assert "waiting" in about(i12_drained.check(story.groups, []))
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    assert "never carried out" in about(i12_drained.check(story.groups, []))


def test_i12_finds_unreleased_checkpoints() -> None:
    story = short()
    story.tell("w.w0", engine_step(finished()), idle())
    story.tell("w.w1", daemon("w1"))
    story.tell("r.r0", chosen("q1", "w1"), ended())
    assert i12_drained.check(story.groups, []) == []
    story.tell("w.w1", held("w1", "q1", 64))
    assert "checkpoints of q1" in about(i12_drained.check(story.groups, []))
    story.tell(
        "w.w1", v.CheckpointDropped(holder="w1", boot="b", request="q1", child=0, reason="finished")
    )
    assert i12_drained.check(story.groups, []) == []


# --- I8 and I14: checkpoints --------------------------------------------------------------


def daemon(worker: str, budget: int = 1000) -> v.StateDaemonStarted:
    return v.StateDaemonStarted(worker=worker, boot="b", epoch=1, address="", budget_bytes=budget)


def held(worker: str, request: str, tokens: int) -> v.CheckpointAcknowledged:
    return v.CheckpointAcknowledged(
        holder=worker,
        boot="b",
        request=request,
        child=0,
        attempt=1,
        blocks=tokens // 16,
        tokens=tokens,
        bytes=10 * tokens,
    )


def chosen(request: str, holder: str, primary: str = "w0", revision: int = 1) -> v.HolderChosen:
    return v.HolderChosen(
        decision="d",
        basis=v.Basis(revision, 0),
        request=request,
        attempt=1,
        cause="arrival",
        primary=primary,
        holders=(holder,),
        policy="load_aware",
        wanted=1,
        expected_blocks=8,
        expected_bytes=80,
    )


def reported(worker: str, **figures: int) -> v.StateDaemonReported:
    return v.StateDaemonReported(worker, "b", tuple(figures.items()))


def hosts() -> Story:
    """w0 and w1 in one domain, w2 in another; each with a daemon."""
    story = Story()
    for name, domain in (("w0", "a"), ("w1", "a"), ("w2", "b")):
        story.tell(
            f"w.{name}", v.WorkerRegistered(worker=name, domain=domain, agent_pid=1), daemon(name)
        )
    story.tell("r.r0", replica_started())
    return story


def test_i8_finds_more_bytes_than_the_budget() -> None:
    story = hosts()
    story.tell("w.w1", held("w1", "q1", 64), reported("w1", memory_used=640, shared=0))
    assert i8_budget.check(story.groups, []) == []
    story.tell("w.w1", held("w1", "q2", 64))
    assert "1280 bytes were acknowledged" in about(i8_budget.check(story.groups, []))
    story.tell("w.w1", reported("w1", memory_used=640, shared=2))
    assert i8_budget.check(story.groups, []) == [], "blocks of both are the same"
    story.tell("w.w1", reported("w1", memory_used=1001, shared=2))
    assert "memory_used is 1001" in about(i8_budget.check(story.groups, []))


def test_i8_finds_a_daemon_that_takes_more_than_its_host_was_given() -> None:
    story = hosts()
    assert i8_budget.check(story.groups, [], given=1000) == []
    assert "given 999" in about(i8_budget.check(story.groups, [], given=999))


def test_i8_counts_the_file_and_starts_over_with_a_new_daemon() -> None:
    story = hosts()
    both = tuple(
        v.HeldPrefix(request=f"q{n}", child=0, attempt=1, blocks=4, tokens=64, bytes=640)
        for n in range(2)
    )
    story.tell("w.w1", v.CheckpointsAcknowledged("w1", "b", both))
    story.tell("w.w1", reported("w1", memory_used=900, file_used=380, file_budget=400))
    assert i8_budget.check(story.groups, []) == []
    story.tell("w.w1", reported("w1", file_used=401, file_budget=400))
    assert "file of 401" in about(i8_budget.check(story.groups, []))
    story = hosts()
    story.tell("w.w1", held("w1", "q1", 64))
    story.tell("w.w1", v.StateDaemonLost("w1", "b", "killed"), daemon("w1"))
    story.tell("w.w1", held("w1", "q2", 64))
    assert i8_budget.check(story.groups, []) == [], "the first is gone with its daemon"


def test_i8_finds_a_holder_beside_its_primary() -> None:
    story = hosts()
    story.tell("r.r0", chosen("q1", "w2", revision=story.revision))
    assert i8_budget.check(story.groups, []) == []
    before = story.revision
    story.tell("r.r0", chosen("q2", "w1", revision=before))
    assert "q2: w1 is in the failure domain of w0; w2 was up" in about(
        i8_budget.check(story.groups, [])
    )
    story = hosts()
    story.tell("w.w2", v.StateDaemonLost("w2", "b", "killed"))
    story.tell("r.r0", chosen("q2", "w1", revision=story.revision))
    assert i8_budget.check(story.groups, []) == [], "nothing else was up"
    story.tell("r.r0", chosen("q3", "w0", revision=story.revision))
    assert "q3" in about(i8_budget.check(story.groups, [])), "never the primary itself"


def restoring(begun: int, end: Any, tokens: int = 64) -> Story:
    """An attempt that restores `tokens` from 16 on, and then computes from `begun` on."""
    story = short()
    story.tell(
        "w.w0",
        v.RestoreStarted(
            incarnation=1,
            request="q1",
            child=0,
            attempt=1,
            holder="unix:/s",
            tokens=tokens,
            first=16,
        ),
    )
    if end is not None:
        story.tell("w.w0", end)
    story.tell("w.w0", engine_step(v.PrefillChunkDone("q1", 1, 100 - begun, 100)))
    return story


def failed(tokens: int) -> v.RestoreFailed:
    return v.RestoreFailed(
        incarnation=1,
        request="q1",
        child=0,
        attempt=1,
        holder="unix:/s",
        tokens=tokens,
        reason="corrupt",
    )


def done(tokens: int) -> v.RestoreDone:
    return v.RestoreDone(
        incarnation=1,
        request="q1",
        child=0,
        attempt=1,
        holder="unix:/s",
        tokens=tokens,
        bytes=999,
        duration_us=9,
    )


@pytest.mark.parametrize(
    ("begun", "end", "fine"),
    [
        (80, done(64), True),
        (96, done(64), False),
        (48, failed(32), True),
        (0, failed(32), True),
        (64, failed(32), False),
        (80, failed(32), False),
        (80, None, False),
    ],
)
def test_i14_finds_blocks_that_were_used_though_they_failed(
    begun: int, end: Any, fine: bool
) -> None:
    story = restoring(begun, end)
    assert (i14_no_bad_block.check(story.groups, []) == []) == fine


def test_i14_leaves_out_what_the_log_cannot_tell() -> None:
    story = restoring(80, None)
    story.tell("w.w0", died())
    assert i14_no_bad_block.check(story.groups, []) == [], "it died in its restore"
    story = short()
    story.tell(
        "w.w0",
        v.RestoreStarted(
            incarnation=1, request="q1", child=0, attempt=1, holder="unix:/s", tokens=64, first=16
        ),
        failed(32),
    )
    lost = v.EngineStep(
        incarnation=1,
        step=9,
        duration_us=5,
        batch=0,
        sum_context=0,
        prefill_tokens=0,
        waiting=0,
        kv_used=0,
        changes=(v.PrefillChunkDone("q1", 1, 9, 100),),
        lost=3,
    )
    story.tell("w.w0", lost)
    assert i14_no_bad_block.check(story.groups, []) == [], "its first chunk may be lost"


@pytest.mark.parametrize(("shared", "fine"), [(64, True), (63, False), (0, False)])
def test_i14_knows_what_others_computed_meanwhile(shared: int, fine: bool) -> None:
    story = restoring(64, failed(32))
    story.tell("r.r0", ended())
    client = ClientRecord(request="q1", status=200, outcome="completed")
    found = i14_no_bad_block.check(story.groups, [client], {"q1": shared} if shared else {})
    assert (found == []) is fine


def test_i14_compares_what_restored_requests_answered() -> None:
    story = restoring(48, failed(32))
    story.tell("r.r0", ended())
    calm = ClientRecord(
        request="calm",
        status=200,
        outcome="completed",
        text="xy",
        token_count=2,
        finish="length",
        tokens=[1, 2],
    )
    calm.asked, calm.undisturbed = "a", True
    same = msgspec.structs.replace(calm, request="q1", undisturbed=False)
    assert i14_no_bad_block.check(story.groups, [calm, same]) == []
    other = msgspec.structs.replace(same, tokens=[1, 3])
    assert "was restored, and tokens differ" in about(
        i14_no_bad_block.check(story.groups, [calm, other])
    )


def test_i13_finds_a_lost_or_changed_acknowledgement(run: Run) -> None:
    ack = run.landed[-1]
    gone = msgspec.structs.replace(ack, seq=ack.seq + 1000)
    assert "is gone" in about(i13_durable.check(run.groups, [], [gone]))
    other = msgspec.structs.replace(ack, last=ack.last + 1)
    assert "acknowledged as" in about(i13_durable.check(run.groups, [], [other]))


# --- I15, I16 --------------------------------------------------------------------------


def commanded() -> Story:
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    effects = (v.Effect("drain", "w0"),)
    story.tell(
        "fleet",
        v.EffectsDecided(
            decision="c1", basis=v.Basis(1, 0), cause="root: drain w0", effects=effects
        ),
    )
    story.tell("w.w0", v.EffectApplied("c1", 0))
    return story


def test_i15_finds_a_second_application() -> None:
    story = commanded()
    assert i15_effects_once.check(story.groups, []) == []
    story.tell("w.w0", v.EffectApplied("c1", 0, "already so"))
    assert i15_effects_once.check(story.groups, []) == []
    story.tell("w.w0", v.EffectApplied("c1", 0))
    assert "2 times" in about(i15_effects_once.check(story.groups, []))


def test_i15_finds_an_application_by_another_worker_or_undecided() -> None:
    story = commanded()
    story.tell("w.w1", v.EffectApplied("c1", 0, "already so"))
    assert "w.w1 applied it" in about(i15_effects_once.check(story.groups, []))
    story = commanded()
    story.tell("w.w0", v.EffectApplied("c9", 0))
    assert "undecided" in about(i15_effects_once.check(story.groups, []))


def test_i15_finds_one_decision_with_two_contents() -> None:
    story = commanded()
    effects = (v.Effect("restart", "w0"),)
    story.tell(
        "fleet", v.EffectsDecided(decision="c1", basis=v.Basis(1, 0), cause="root", effects=effects)
    )
    assert "differently" in about(i15_effects_once.check(story.groups, []))


def test_i16_finds_what_is_missing_or_too_much() -> None:
    story = commanded()
    assert i16_admin_logged.check(story.groups, [], [("c1", "root")]) == []
    assert "not in the log" in about(i16_admin_logged.check(story.groups, [], [("c2", "root")]))
    assert "eve's" in about(i16_admin_logged.check(story.groups, [], [("c1", "eve")]))
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    assert i16_admin_logged.check(story.groups, []) == [], "a resend is no change"
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w1")
    )
    assert "another command" in about(i16_admin_logged.check(story.groups, []))
    story = commanded()
    story.tell("fleet", v.ConfigChanged("stall.cap_us", "5", "c1"))
    assert "carried out 2 times" in about(i16_admin_logged.check(story.groups, []))
    story = commanded()
    story.tell("fleet", v.ConfigChanged("stall.cap_us", "5"))
    assert "without a command" in about(i16_admin_logged.check(story.groups, []))
    story = commanded()
    story.tell(
        "r.r0",
        v.AdminCommanded(
            command_id="c2", principal="", command="config", target="stall.cap_us", value="7"
        ),
    )
    found = about(i16_admin_logged.check(story.groups, []))
    assert "no principal" in found
    assert "carried out 0 times" in found


def test_altered_log_of_a_real_run_is_found_by_name(run: Run) -> None:
    """One end turned into another: the client's word stands against the log's."""
    for at in events_of(run.groups, "r."):
        if type(at.event) is v.RequestEnded and at.event.outcome == "completed":
            break
    for place, segment in places(run.groups, at.stream):
        if decode(segment.records[place[2]]) == at.event:
            break
    fields = {f: getattr(at.event, f) for f in v.RequestEnded.__struct_fields__}
    lie = encode(v.RequestEnded(**{**fields, "outcome": "failed"}))
    promises = {f.promise for f in check_all(replaced(run.groups, place, lie), run.clients)}
    assert {"I1", "I7"} <= promises


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"status": 200, "done": True, "finish": "length"}, "completed"),
        ({"status": 200, "done": True, "finish": "length", "error": "{'code': 500}"}, "failed"),
        ({"status": 200, "error": "ClientPayloadError: cut"}, "cut"),
        ({"status": 200}, "cut"),
        ({"status": 404, "error": "{}"}, "rejected"),
        ({"status": 503, "error": "{}"}, "failed"),
        ({"error": "ClientConnectorError: refused"}, "cut"),
    ],
)
def test_streams_become_records(fields: Any, outcome: str) -> None:
    stream = Stream(request="r", prompt="p", tokens=[1, 2], text="ab", **fields)
    record = record_of(stream)
    assert (record.outcome, record.token_count, record.asked) == (outcome, 2, "p")


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


def test_i1_does_not_expect_the_word_of_a_gateway_that_was_killed_behind_the_last_byte() -> None:
    story = Story()
    story.replica("r0")
    story.tell("r.r0", msgspec.structs.replace(arrived("q1"), client_id="c1"))
    gone = v.RequestEnded(
        request="q1",
        outcome="failed",
        status=502,
        tokens=0,
        finish="-",
        attempts=1,
        verdict="exact",
        detail="its gateway is gone",
    )
    story.tell("fleet", gone)
    client = ClientRecord(request="c1", status=200)
    assert i1_one_terminal_event.check(story.groups, [client])
    story.replica("r0", "b2")
    assert not i1_one_terminal_event.check(story.groups, [client])


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


def test_i1_knows_answers_of_a_gateway_that_died_unheard_from_their_engines() -> None:
    def story(number: int = 2, tokens: int = 64, again: bool = True) -> Story:
        told = short()
        told.tell("r.r0", msgspec.structs.replace(chosen("q1", "w1"), decision="r0.b1.1"))
        dispatch = msgspec.structs.replace(decided("q2"), decision=f"r0.b1.{number}")
        took = msgspec.structs.replace(queued("q2"), dispatch=encode(dispatch))
        told.tell("w.w0", engine_step(took, finished()))
        told.tell("w.w0", engine_step(v.EngineFinished("q2", 1, "length", tokens)))
        told.tell("r.r0", ended())
        if again:
            told.replica("r0", "b2")
        return told

    client = ClientRecord(
        request="c2", status=200, outcome="completed", token_count=64, finish="length"
    )

    def says(told: Story, *clients: ClientRecord) -> str:
        return " ".join(map(str, i1_one_terminal_event.check(told.groups, clients)))

    assert says(story(), client) == ""
    assert "does not know" in says(story(), client, client), "one request is one client's"
    assert "does not know" in says(story(tokens=63), client)
    assert "does not know" in says(story(number=1), client), "it wrote of later decisions"
    assert "does not know" in says(story(again=False), client), "it lives"
    assert "does not know" in says(short(), client)


def test_i1_has_the_leader_end_what_only_an_engine_told_of() -> None:
    def story(behind: int = 6) -> Story:
        told = short()
        event = decided("q2", basis=v.Basis(0, behind))
        dispatch = encode(msgspec.structs.replace(event, decision="r0.b1.9"))
        told.tell("w.w0", engine_step(queued("q2", dispatch=dispatch), finished("q2"), finished()))
        told.tell("r.r0", ended())
        told.replica("r0", "b2")
        told.leader("r0", "b2")
        told.healthy_ticks(i1_one_terminal_event.SLACK_TICKS + 2)
        return told

    def says(told: Story) -> str:
        return " ".join(map(str, i1_one_terminal_event.check(told.groups, [])))

    assert says(story()) == "I1 q2: has no terminal event"
    good = story()
    end = v.RequestEnded(
        request="q2", outcome="failed", status=0, tokens=-1, finish="error", attempts=1, verdict=""
    )
    good.tell("fleet", end)
    assert says(good) == ""
    good.tell("fleet", end)
    assert "2 terminal events of the leader" in says(good)
    never = story()
    never.tell("fleet", end, msgspec.structs.replace(end, request="q3"))
    assert says(never) == "I1 q3: ended without having arrived"
