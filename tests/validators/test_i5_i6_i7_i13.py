"""I5, I6, I7 and I13: the log is fenced, chained, replayable and durable."""

from __future__ import annotations

import msgspec

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.promises.log import (
    i5_fencing_no_gap,
    i6_hash_chain,
    i7_replay,
    i13_durable,
)
from relume.chaos.validators.records import THE_RUN
from relume.events.log.codec import encode
from tests.policies.story import died, engine_step
from tests.replay.tamper import dropped, exchanged, places
from tests.validators.builders import Run, about, whole

# --- I5


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


def test_i5_finds_answers_of_etcd_that_fit_no_order(run: Run) -> None:
    keys: dict[str, str | None] = {"/own/fleet": "no order of the calls", "/own/w.w0": ""}
    (found,) = i5_fencing_no_gap.check(run.groups, [], GroundTruth(etcd_keys=keys))
    assert (found.about, found.detail) == ("/own/fleet", "no order of the calls")


def test_i5_says_so_if_the_calls_prove_nothing(run: Run) -> None:
    unknown: dict[str, str | None] = {"/own/fleet": None}
    for truth in (GroundTruth(etcd_keys={}), GroundTruth(etcd_keys=unknown)):
        (found,) = i5_fencing_no_gap.check(run.groups, [], truth)
        assert found.about == THE_RUN
    assert i5_fencing_no_gap.check(run.groups, [], GroundTruth()) == []


# --- I6


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


# --- I7


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


# --- I13


def test_i13_finds_a_lost_or_changed_acknowledgement(run: Run) -> None:
    ack = run.landed[-1]
    gone = msgspec.structs.replace(ack, seq=ack.seq + 1000)
    assert "is gone" in about(i13_durable.check(run.groups, [], [gone]))
    other = msgspec.structs.replace(ack, last=ack.last + 1)
    assert "acknowledged as" in about(i13_durable.check(run.groups, [], [other]))
