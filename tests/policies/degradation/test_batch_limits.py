"""The leader limits the batches of engines while capacity is short, and lifts that in reverse order."""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from relume.events import vocabulary as v
from relume.events.log.codec import decode
from relume.events.vocabulary.enums import EffectKind
from relume.policies.degradation import levels
from tests.policies.degradation.short_fleet import ON, ShortFleet

NAMES = ("w0", "w1", "w2", "w3")


@pytest.fixture
def fleet() -> ShortFleet:
    return ShortFleet(config=replace(ON, batch_percent=75))


def limits(fleet: ShortFleet) -> list[tuple[str, str]]:
    """Workers and limits, in the order of the log."""
    records = [r for group in fleet.groups for s in group.segments for r in s.records]
    decided = [e for e in map(decode, records) if type(e) is v.EffectsDecided and e.again < 0]
    return [
        (effect.worker, effect.argument)
        for event in decided
        for effect in event.effects
        if effect.kind == EffectKind.LIMIT_BATCH
    ]


def test_the_limit_follows_the_level_and_ends_with_it(fleet: ShortFleet) -> None:
    rate = fleet.rate()
    fleet.ticks(8, rate)
    assert limits(fleet) == []
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    assert limits(fleet) == [("w0", "50")], "level 3, of the one that serves, once"
    assert fleet.fleet.workers["w0"].batch_limit == 50
    for name in NAMES[1:]:
        fleet.worker(name, incarnation=2)
    fleet.ticks(40, rate)
    assert fleet.level() == 0
    of_w0 = [value for name, value in limits(fleet) if name == "w0"]
    assert of_w0 == ["50", "75", "100"]
    assert fleet.fleet.workers["w0"].batch_limit is UNSET, "the state has no trace of it"
    assert not fleet.divergences()


def test_an_engine_that_starts_while_capacity_is_short_gets_the_limit(fleet: ShortFleet) -> None:
    rate = fleet.rate()
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    fleet.tell("w.w0", v.EngineDied("w0", 1, "killed"))
    fleet.ticks(1, rate)
    fleet.worker("w0", incarnation=2)
    assert not isinstance(fleet.fleet.workers["w0"].batch_limit, int), "its engine has none yet"
    fleet.ticks(2, rate)
    assert isinstance(fleet.fleet.workers["w0"].batch_limit, int)
    assert [name for name, _ in limits(fleet)] == ["w0", "w0"]


@pytest.mark.parametrize("mode", ["observe", "off"])
def test_limits_end_when_levels_no_longer_act(fleet: ShortFleet, mode: str) -> None:
    rate = fleet.rate()
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    fleet.tell("fleet", v.ConfigChanged("degradation.mode", mode))
    fleet.ticks(3, rate)
    assert limits(fleet) == [("w0", "50"), ("w0", "100")]
    (command,) = fleet.divergences()
    assert "ConfigChanged" in command.expected, "the test commanded it, no operator"


def test_without_the_setting_no_engine_is_limited() -> None:
    fleet = ShortFleet()
    rate = fleet.rate()
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(10, rate)
    assert fleet.level() == 3 and limits(fleet) == []


@pytest.mark.parametrize(
    ("percent", "expected"),
    [(100, [100] * 5), (75, [100, 75, 75, 50, 50]), (40, [100, 40, 40, 1, 1])],
)
def test_a_higher_level_never_allows_a_larger_batch(percent: int, expected: list[int]) -> None:
    assert [levels.batch_percent(level, percent) for level in range(5)] == expected
