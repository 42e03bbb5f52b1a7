"""I11: what a log of decisions about levels must be like."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.validators.promises.service import i11_batches, i11_degradation
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, ShedReason, Tier
from tests.policies.degradation.short_fleet import ON, ShortFleet
from tests.policies.story import MODEL, Story, arrived, decided, ready, replica_started, started


def short(**change: Any) -> ShortFleet:
    """A fleet that lost three of four workers, and got them back. `change`: to its decisions."""
    fleet = ShortFleet()
    rate = fleet.rate()
    fleet.change = change
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    for name in ("w1", "w2", "w3"):
        fleet.worker(name, incarnation=2)
    fleet.ticks(3, rate)
    return fleet


def limited(change: str = "", *, silent: bool = False) -> ShortFleet:
    """A fleet with limits of batches that got its workers back; they say `change`, or are `silent`."""
    fleet = LimitedFleet(change, silent)
    rate = fleet.rate()
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    for name in ("w1", "w2", "w3"):
        fleet.worker(name, incarnation=2)
    fleet.ticks(40, rate)
    return fleet


class LimitedFleet(ShortFleet):
    """Its leader limits batches to 75 % and 50 %."""

    def __init__(self, change: str, silent: bool) -> None:
        self._change, self._silent_limits = change, silent
        super().__init__(config=replace(ON, batch_percent=75))

    def tell(self, stream: str, *events: Any) -> Any:
        return super().tell(stream, *[found for e in events for found in self._altered(e)])

    def _altered(self, event: Any) -> list[Any]:
        if type(event) is not v.EffectsDecided:
            return [event]
        if self._silent_limits:
            return []
        if not self._change:
            return [event]
        effects = tuple(replace(effect, argument=self._change) for effect in event.effects)
        return [replace(event, effects=effects)]


def test_batches_that_follow_the_level_keep_the_promise() -> None:
    assert found(limited()) == ""


def test_a_limit_that_no_level_explains_is_named() -> None:
    assert "its batches are limited to 40 %, level 3 makes 50" in found(limited("40"))


def test_a_level_without_its_limit_is_named() -> None:
    assert "its batches have a limit of 100 %, not 50, for too long" in found(limited(silent=True))


@pytest.mark.parametrize(("gap_ms", "fine"), [(4000, True), (1000, False)])
def test_a_leader_that_found_a_gap_between_ticks_waits_first(gap_ms: int, fine: bool) -> None:
    """Composed 151471: etcd was slow, and an engine became ready then."""
    log, now_ms = short_of_capacity(), 0
    for number in range(1, 31):
        now_ms += gap_ms if number == 20 else 1000
        if number == 20:
            log.tell("w.w1", started("w1"), ready("w1"))
        log.tell("fleet", v.Tick(number=number, unix_ms=now_ms))
    wrong = [one for one in i11_batches.check(log.groups) if one.about == "w1"]
    assert (wrong == []) is fine


@pytest.mark.parametrize(("together", "fine"), [(True, True), (False, False)])
def test_a_limit_that_is_decided_with_the_level_may_be_that_of_the_one_before(
    together: bool, fine: bool
) -> None:
    log = short_of_capacity()
    limit = v.Effect(EffectKind.LIMIT_BATCH, "w0", 1, "50")
    decided = v.EffectsDecided(
        decision="batch.3", basis=v.Basis(1, 0), cause="a level", effects=(limit,)
    )
    if together:
        log.tell("fleet", at_level(0, 3), decided)
    else:
        log.tell("fleet", at_level(0, 3))
        log.tell("fleet", decided)
    assert (i11_batches.check(log.groups) == []) is fine


def short_of_capacity() -> Story:
    """A leader that limits batches, at level 3, and the ready engine of w0."""
    log = Story()
    settings = (("degradation.mode", "on"), ("degradation.batch_percent", "75"))
    log.tell("r.r0", replica_started(settings=settings))
    log.leader()
    log.worker()
    log.tell("fleet", at_level(3, 0))
    return log


def at_level(level: int, was: int) -> v.DegradationDecided:
    return v.DegradationDecided(
        model=MODEL, level=level, was=was, since=1, due_ticks=1, share=100, workers=1, wanted=2,
        sequences=1, requests_per_ks=1, tokens_per_s=1, usable_per_ks=1, demand_per_ks=1,
        prompt_tokens=1, output_tokens=1,
    )  # fmt: skip


def found(fleet: ShortFleet) -> str:
    return "\n".join(map(str, i11_degradation.check(fleet.groups, [])))


def shed(fleet: ShortFleet, tier: str, revision: int = 0) -> None:
    """r0 refuses a request of that tier because of a level, at a basis."""
    fleet.tell(
        "r.r0",
        arrived("late"),
        v.RequestShed(
            decision="r0.b.x", basis=v.Basis(revision or fleet.revision, 1), request="late",
            at_us=0, reason=ShedReason.DEGRADED, model=MODEL, tier=Tier(tier), tenant="", tokens=1,
            size=1, deadline_us=0, waited_us=-1, ahead_requests=0, ahead_tokens=0, predicted_us=-1,
            depth=0, retry_after_s=1,
        ),
    )  # fmt: skip


def test_a_fleet_that_degrades_and_recovers_keeps_the_promise() -> None:
    fleet = ShortFleet()
    rate = fleet.rate()
    fleet.lose("w1", "w2", "w3")
    fleet.ticks(8, rate)
    shed(fleet, "batch")
    for name in ("w1", "w2", "w3"):
        fleet.worker(name, incarnation=2)
    fleet.ticks(30, rate)
    assert [d.level for d in fleet.decisions] == [3, 2, 1, 0]
    assert found(fleet) == ""


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"level": 2}, "level 3 was due"),
        ({"level": 4}, "level 3 was due"),
        ({"share": 100}, "thousandths of the demand, which are"),
        ({"due_ticks": 1}, "after 1 ticks, not 2"),
        ({"was": 1}, "but it was 0"),
        ({"workers": 0}, "more counts as capacity than there is"),
        ({"usable_per_ks": 1, "share": 0, "level": 4, "demand_per_ks": 5000}, "in 1000 s arrived"),
    ],
)
def test_a_decision_that_does_not_follow_is_named(change: dict[str, Any], text: str) -> None:
    assert text in found(short(**change))


def test_more_capacity_that_gets_a_higher_level_is_named() -> None:
    fleet = ShortFleet()
    for level, share in ((1, 600), (0, 2000), (2, 700)):
        decision = v.DegradationDecided(
            model=MODEL, level=level, was=fleet.demand().level, since=fleet.fleet.tick,
            due_ticks=9, share=share, workers=4, usable_per_ks=share, requests_per_ks=share,
            demand_per_ks=1000,
        )  # fmt: skip
        fleet.tell("fleet", decision)
    text = "level 0 -> 2 with 700 thousandths of the demand served, and -> 1 with 600"
    assert text in found(fleet)


def test_a_fall_by_more_than_one_level_is_named() -> None:
    fleet = short()
    fleet.change = {"level": 1}
    fleet.ticks(3, fleet.rate() // 2)
    assert "it fell by more than one" in found(fleet)


def test_a_refusal_that_no_level_explains_is_named() -> None:
    fleet = short()
    before = next(g.revision for g in fleet.groups if any(s.stream == "fleet" for s in g.segments))
    shed(fleet, "batch")
    assert found(fleet) == ""
    shed(fleet, "standard")
    assert "refused for its level, which was 3 (tier standard)" in found(fleet)
    shed(other := short(), "batch", before)
    assert "refused for its level, which was 0 (tier batch)" in found(other)


def test_a_refusal_while_levels_are_only_observed_is_named() -> None:
    fleet = short()
    fleet.tell("fleet", v.ConfigChanged("degradation.mode", "observe"))
    shed(fleet, "batch")
    assert "refused for its level" in found(fleet)


def test_a_request_that_is_served_although_its_level_refuses_it_is_named() -> None:
    fleet = short()
    fleet.lose("w0")
    fleet.tell("fleet", v.DegradationDecided(model=MODEL, level=4, was=3, since=0, due_ticks=3))
    sent = decided("late", basis=v.Basis(fleet.revision, 1))
    fleet.tell("r.r0", arrived("late"), sent)
    assert "sent to a worker, although level 4 refuses tier standard" in found(fleet)


def test_an_output_that_is_limited_without_a_level_is_named() -> None:
    fleet = ShortFleet()
    limited = v.RequestArrived(
        request="late", model=MODEL, route="completions", stream=True, prompt_tokens=9,
        max_tokens=9, verdict="exact", output_limit=9,
    )  # fmt: skip
    fleet.tell("r.r0", limited)
    assert "its output was limited, and no level was decided" in found(fleet)
