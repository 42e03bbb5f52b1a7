"""I2 and I3: a client reads the stream of an undisturbed request, without a gap or a repeat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relume.chaos.validators.promises.requests import i2_identical_stream, i3_indices
from relume.chaos.validators.records import ClientRecord
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AttemptMode
from tests.policies.story import Story, arrived, decided, ended, observed
from tests.validators.builders import about, moved, short, whole

# --- I2


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
        content_id="p",
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
        request="calm",
        status=200,
        outcome="completed",
        text="abc",
        content_id="p",
        undisturbed=True,
    )
    other = ClientRecord(request="q1", status=200, outcome="completed", text="xyz", content_id="p")
    assert i2_identical_stream.check(story.groups, [calm, other]) == []


def test_i2_run_without_counterparts_is_no_proof() -> None:
    lonely = ClientRecord(request="q1", status=200, outcome="completed", text="abc", content_id="p")
    assert "counterpart" in about(i2_identical_stream.check(whole().groups, [lonely]))


# --- I3


@pytest.mark.parametrize("starts", [[1, 2], [0, 2, 2], [0, 5], [0, 3, 1]])
def test_i3_finds_chunks_that_do_not_join(starts: list[int]) -> None:
    good = ClientRecord(
        request="q1", status=200, outcome="completed", token_count=4, starts=[0, 1, 3]
    )
    assert i3_indices.check([], [good]) == []
    assert i3_indices.check([], [msgspec.structs.replace(good, starts=starts)])


def test_i3_finds_ids_that_do_not_add_up() -> None:
    assert i3_indices.check([], [ClientRecord(request="q1", tokens=[1, 2], token_count=3)])


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


def test_i3_reads_a_return_after_the_leaders_end() -> None:
    """Composed 50304: of 17 tokens that were sent, 2 had reached its client."""
    story = moved(17)
    end = msgspec.structs.replace(ended(attempts=2), outcome="failed", status=0, tokens=-1)
    story.tell("fleet", end)
    story.tell("r.r0", v.ClientReturned(request="q1", claim="c", attempt=2, tokens=2, events=0))
    story.tell("r.r0", msgspec.structs.replace(observed(attempt=2), delivered=2))
    assert i3_indices.check(story.groups, []) == []


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


def test_i3_reads_an_end_without_an_arrival() -> None:
    story = Story()
    story.replica()
    story.tell("r.r0", ended())
    assert i3_indices.check(story.groups, []) == []
