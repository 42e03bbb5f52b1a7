"""A word that a newer build wrote does not stop an older one from reading the log."""

from __future__ import annotations

import copy
import pickle

import msgspec
import pytest

from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.errors import MalformedRecord
from relume.events.vocabulary import enums
from relume.events.vocabulary.enums import EnginePhase, TransportKind, Word
from relume.policies.state.fleet import Fleet, dump
from tests.policies.story import Story, arrived, decided, observed

WORDS = [
    x for x in vars(enums).values() if isinstance(x, type) and issubclass(x, Word) and x is not Word
]


def with_word(event: v.Event, old: str, new: str) -> bytes:
    """The record of `event` as a build writes it that has another word."""
    fields = msgspec.msgpack.decode(codec.encode(event))
    fields[fields.index(old)] = new
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize("words", WORDS)
def test_an_unknown_word_is_kept_and_equal_to_no_member(words: type[Word]) -> None:
    later = words("a later word")
    assert not later.known and later not in list(words)
    assert (later, hash(later), f"{later}") == (
        "a later word",
        hash("a later word"),
        "a later word",
    )
    for copied in (pickle.loads(pickle.dumps(later)), copy.deepcopy(later)):
        assert copied == later and type(copied) is words
    assert all(word.known and words(word.value) is word for word in words)


def test_a_record_with_an_unknown_word_decodes_and_is_written_back_unchanged() -> None:
    record = with_word(observed("q", kind="reset"), "reset", "evaporated")
    event = codec.decode(record)
    assert event.kind == "evaporated" and not event.kind.known
    assert codec.encode(event) == record
    known = codec.encode(arrived("q"))
    assert codec.decode_all([known, record, known])[1] == event


def test_a_word_that_is_no_text_is_malformed() -> None:
    fields = msgspec.msgpack.decode(codec.encode(observed("q", kind="reset")))
    fields[fields.index("reset")] = 7
    with pytest.raises(MalformedRecord):
        codec.decode(msgspec.msgpack.encode(fields))


def test_the_fold_continues_over_an_unknown_word() -> None:
    story = Story()
    story.worker("w0")
    story.replica("r0")
    story.tell("r.r0", arrived("q"), decided("q", worker="w0"))
    story.tell("r.r0", codec.decode(with_word(observed("q", kind="reset"), "reset", "evaporated")))
    death = v.EngineDied("w0", 1, enums.DeathReason.EXIT)
    story.tell("w.w0", codec.decode(with_word(death, "exit", "evaporated")))
    assert story.fleet.workers["w0"].engine == EnginePhase.DEAD
    assert "q" in story.fleet.requests


def test_a_state_with_an_unknown_word_survives_a_snapshot() -> None:
    story = Story()
    story.worker("w0")
    story.fleet.workers["w0"].engine = EnginePhase("evaporated")
    again = msgspec.msgpack.decode(dump(story.fleet), type=Fleet)
    assert again.workers["w0"].engine == "evaporated"


def test_words_are_written_as_strings() -> None:
    event = observed("q", kind=TransportKind.RESET)
    assert codec.encode(event) == codec.encode(observed("q", kind="reset"))


def test_request_states_are_live_and_the_outcomes() -> None:
    assert set(enums.RequestState) == {"live", *enums.RequestOutcome}


def test_worker_states_cover_the_phases_of_an_engine() -> None:
    """`worker_state` shows a phase as it is while the engine is not ready."""
    assert set(enums.EnginePhase) - {"ready"} <= set(enums.WorkerState)


def test_every_effect_is_a_command() -> None:
    """But the canaries of engines that answer differently, limits of batches, and caches with blocks of
    a corrupt worker: the leader's alone."""
    kinds = enums.EffectKind
    own = {kinds.CANARY, kinds.LIMIT_BATCH, kinds.RESET_PREFIX_CACHE}
    assert set(kinds) - own <= set(enums.AdminCommand)
