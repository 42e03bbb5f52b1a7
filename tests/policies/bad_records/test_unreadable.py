"""Records that cannot be read: facts of the fold, which goes on."""

from __future__ import annotations

import pytest
from msgspec import UNSET, structs

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AdminCommand, Exclusion
from relume.policies.degradation.capacity import serves
from relume.policies.leader.duties import step
from relume.policies.routing.eligibility import excluded_at
from relume.policies.state import dirty_set, unreadable
from relume.policies.state.fleet import Fleet, dump, load, state_hash
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View
from tests.policies.state.test_fleet import loaded_story
from tests.policies.story import Story, engine_step, queued

UNKNOWN, BROKEN = b"\x92\xabtelepathy/9\x01", b"\xc1"
SHORT = b"\x92\xadengine_step/1\x01"


def excluded(story: Story, worker: str = "w0") -> Exclusion:
    return excluded_at(View("r.r0", story.fleet), story.fleet.workers[worker])


@pytest.mark.parametrize(
    ("record", "reason"),
    [(UNKNOWN, "telepathy/9"), (BROKEN, "malformed record"), (SHORT, "engine_step/1")],
)
def test_the_fold_goes_on_and_knows_it(record: bytes, reason: str) -> None:
    story = loaded_story()
    assert story.fleet.unreadable is UNSET
    before, kv_used = state_hash(story.fleet), engine_step(queued("q7")).kv_used
    story.tell("w.w0", record, engine_step(queued("q7")))
    (known,) = story.fleet.unreadable.items()  # type: ignore[union-attr]
    assert known[0] == "w.w0" and known[1].count == 1 and reason in known[1].reason
    assert known[1].position == story.fleet.streams["w.w0"].position - 1
    assert story.fleet.workers["w0"].kv_used == kv_used, "what follows it counts"
    assert state_hash(story.fleet) != before
    assert load(dump(story.fleet)) == story.fleet


def test_two_folds_agree_on_it() -> None:
    story = loaded_story()
    story.tell("w.w0", UNKNOWN, BROKEN)
    story.tell("r.r0", BROKEN)
    again = Fleet()
    for group in story.groups:
        apply_group(again, group)
    assert state_hash(again) == state_hash(story.fleet)
    assert unreadable.in_words(again) == unreadable.in_words(story.fleet)
    assert len(unreadable.in_words(again)) == 2


def test_its_worker_gets_no_requests_until_an_operator_trusts_it() -> None:
    story = loaded_story()
    assert excluded(story) == Exclusion.NONE
    story.tell("w.w0", UNKNOWN)
    assert excluded(story) == Exclusion.UNREADABLE
    story.worker("w1")
    model = story.fleet.workers["w0"].model
    counts = {w.name: serves(story.fleet, w, model) for w in story.fleet.workers.values()}
    assert counts == {"w0": False, "w1": True}, "it is no capacity either"
    assert excluded(story, "w1") == Exclusion.NONE
    command = v.AdminCommanded(
        command_id="c9", principal="alice", command=AdminCommand.TRUST, target="w0"
    )
    story.tell("r.r0", command)
    (answer,) = step(story.fleet, command)
    assert type(answer) is v.EffectsDecided, "it is not refused, though no quarantine ends"
    story.tell("fleet", answer)
    assert excluded(story) == Exclusion.NONE
    story.tell("w.w0", UNKNOWN)
    assert excluded(story) == Exclusion.UNREADABLE, "a later one was not acknowledged"


def test_an_index_of_workers_sees_both_changes() -> None:
    story = loaded_story()
    marks = dirty_set.of(story.fleet)
    at = marks.count
    story.tell("w.w0", UNKNOWN)
    assert marks.since(at) == ["w0"]
    at = marks.count
    unreadable.acknowledge(story.fleet, "w0", "c9")
    assert marks.since(at) == ["w0"]


def test_a_record_of_a_replica_excludes_no_worker() -> None:
    story = loaded_story()
    story.tell("r.r0", UNKNOWN)
    assert excluded(story) == Exclusion.NONE
    assert "telepathy/9" in unreadable.in_words(story.fleet)[0]


def test_a_number_that_sums_cannot_have_is_unreadable_and_the_state_is_written() -> None:
    story = loaded_story()
    step_of_years = structs.replace(engine_step(queued("q7")), duration_us=2**63 - 1)
    story.tell("w.w0", *[step_of_years] * 3)
    assert "duration_us" in unreadable.why(story.fleet, "w0")
    assert load(dump(story.fleet)) == story.fleet
