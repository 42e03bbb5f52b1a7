"""Records whose fields hold anything that their types permit: the fold takes each, and soon.

Numbers are as large as a record may have them: its reader refuses larger ones. Sums of a few near
2**63 could not be encoded any more, and with them the state.
"""

from __future__ import annotations

import random
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.vocabulary import AnyEvent
from relume.events.vocabulary.enums import Word
from relume.policies.decision_versions import DECISION_VERSIONS, PREFIX
from relume.policies.recorded_settings import SETTINGS
from relume.policies.state.fleet import Fleet, dump, load
from relume.policies.state.fold import fold
from tests.policies.state.test_fleet import loaded_story

INTEGERS = (0, 1, 2, 3, 5, -1, 100, 10**6, 2**31, codec.INTEGERS[0], codec.INTEGERS[-1])
STREAMS = ("w.w0", "w.w1", "r.r0", "r.r1", "fleet")
RECORDS = 12
KEYS = (*SETTINGS, *(PREFIX + k for k in DECISION_VERSIONS))
TEXTS = ("", "abc", "0", "-1", "1.5", "on", "99999999999999999999", "1")


class Records:
    """Events with names that the fleet knows, and others."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.random = random.Random(seed)
        known = (*fleet.workers, *fleet.requests, *fleet.replicas, *fleet.holders)
        self.names = ("", "w1", "r1", "fleet", "nobody", *known, *fleet.open_commands)

    def of(self, kind: Any) -> Any:
        """Any value of type `kind`."""
        plain = {
            int: INTEGERS,
            str: self.names,
            bool: (False, True),
            float: (0.0, 1.5, -1.0, 1e300),
            bytes: (b"", b"x", bytes(8)),
        }
        if kind in plain:
            return self.random.choice(plain[kind])
        arguments = get_args(kind)
        if arguments and getattr(kind, "__origin__", None) is tuple:
            if arguments[-1] is Ellipsis:
                return tuple(self.of(arguments[0]) for _ in range(self.random.randrange(4)))
            return tuple(map(self.of, arguments))
        if arguments:
            return self.of(self.random.choice(arguments))
        if issubclass(kind, msgspec.Struct):
            hints = get_type_hints(kind)
            return kind(**{name: self.of(hints[name]) for name in kind.__struct_fields__})
        assert issubclass(kind, Word), kind
        return self.random.choice([*kind, kind("of a newer build")])

    def setting(self) -> Any:
        """A setting that is recorded, with any text: by an operator, or by a replica that starts."""
        key, text = self.random.choice(KEYS), self.random.choice(TEXTS)
        if self.random.random() < 0.7:
            return v.ConfigChanged(key, text)
        return msgspec.structs.replace(self.of(v.ReplicaStarted), settings=((key, text),))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.timeout(60)
def test_no_record_that_can_be_read_ends_the_fold(seed: int) -> None:
    base = dump(loaded_story().fleet)
    for turn in range(5):
        fleet = load(base)
        records = Records(fleet, 1000 * seed + turn)
        for _ in range(RECORDS):
            event = records.of(records.random.choice(get_args(AnyEvent)))
            fold(fleet, records.random.choice(STREAMS), 1, event)
        assert load(dump(fleet)) == fleet


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.timeout(60)
def test_no_text_of_a_setting_ends_the_fold(seed: int) -> None:
    base = dump(loaded_story().fleet)
    for turn in range(10):
        fleet = load(base)
        records = Records(fleet, 1000 * seed + turn)
        for _ in range(3):
            fold(fleet, "fleet" if records.random.random() < 0.5 else "r.r0", 1, records.setting())
            for _ in range(RECORDS):
                event = records.of(records.random.choice(get_args(AnyEvent)))
                fold(fleet, records.random.choice(STREAMS), 1, event)
        assert load(dump(fleet)) == fleet
