"""Engines that restored blocks of a corrupt worker empty their prefix caches."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import UNSET

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, HealthState
from relume.policies.health.prefix_caches import LATE_TICKS
from relume.policies.leader.duties import step
from relume.policies.state.fleet import state_hash
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.health.test_canaries import ALMOST, all_report, reports
from tests.policies.story import died, ready, started


class Fleet(LedFleet):
    """What the leader has caches emptied for is in the log, and in `resets`."""

    def __init__(self, **more: Any) -> None:
        self.resets: list[v.EffectsDecided] = []
        super().__init__(**more)

    def tell(self, stream: str, *events: Any) -> Any:
        group = super().tell(stream, *events)
        self.decide(*events)
        return group

    def decide(self, *events: Any) -> None:
        owed = [e for event in events for e in step(self.fleet, event)]
        for decision in (e for e in owed if type(e) is v.EffectsDecided):
            if {effect.kind for effect in decision.effects} == {EffectKind.RESET_PREFIX_CACHE}:
                self.resets.append(decision)
                super().tell("fleet", decision)

    def restores(self, worker: str) -> None:
        restored = v.RestoreStarted(
            incarnation=self.fleet.workers[worker].incarnation,
            request="q", child=0, attempt=2, holder="h", tokens=64,
        )  # fmt: skip
        self.tell(f"w.{worker}", restored)

    def convicts(self, worker: str) -> None:
        reports(self, worker, 0, logprobs=ALMOST)
        reports(self, worker, 1, tokens=(8, 9, 9), confirms=True)
        assert self.state(worker) == HealthState.QUARANTINED

    def emptied(self) -> list[tuple[str, int]]:
        return [(x.worker, x.incarnation) for e in self.resets for x in e.effects]


def test_who_restored_since_the_last_right_answers_empties_its_cache() -> None:
    fleet = Fleet(workers=5)
    fleet.restores("w4")
    fleet.ticks(5)
    all_report(fleet)
    fleet.ticks(5)
    for worker in ("w1", "w2"):
        fleet.restores(worker)
    fleet.convicts("w0")
    assert fleet.emptied() == [("w1", 1), ("w2", 1)]
    (decision,) = fleet.resets
    assert decision.cause == "they may hold blocks of w0, whose results are wrong"
    fleet.ticks(LATE_TICKS - 1)
    fleet.restores("w3")
    fleet.ticks(1)
    first = [("w1", 1), ("w2", 1)]
    assert fleet.emptied() == [*first, *first, ("w3", 1)], "some may have been under way"
    fleet.ticks(1)
    fleet.restores("w2")
    fleet.ticks(3 * LATE_TICKS)
    assert len(fleet.emptied()) == 5
    for _ in range(2):
        fleet.tell("fleet", v.LeaderElected("r0", "b2"))
        assert fleet.emptied()[5:] == [("w4", 1)], "w2 restored long after the verdict"
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_a_worker_that_was_never_right_may_have_spoilt_all_restores() -> None:
    fleet = Fleet(workers=4)
    fleet.restores("w1")
    fleet.ticks(50)
    all_report(fleet, "w1", "w2", "w3")
    fleet.convicts("w0")
    assert fleet.emptied() == [("w1", 1)]


@pytest.mark.parametrize("by", ["restart", "nothing"])
def test_the_next_engine_has_an_empty_cache(by: str) -> None:
    fleet = Fleet(workers=3)
    all_report(fleet)
    fleet.restores("w1")
    if by == "restart":
        fleet.tell("w.w1", died("w1", 1), started("w1", 2), ready("w1", 2))
        all_report(fleet, "w1")
    fleet.convicts("w0")
    assert fleet.emptied() == ([] if by == "restart" else [("w1", 1)])


def test_the_engine_of_a_worker_that_is_away_may_serve_on() -> None:
    fleet = Fleet(workers=3)
    all_report(fleet)
    fleet.restores("w1")
    fleet.tell("fleet", v.WorkerLost("w1", fleet.fleet.workers["w1"].epoch, "lease lapsed"))
    assert not fleet.fleet.workers["w1"].present
    fleet.convicts("w0")
    assert fleet.emptied() == [("w1", 1)]
    (pending,) = [p.effect.worker for p in fleet.fleet.pending_effects.values()]
    assert pending == "w1", "it is stated again when its agent returns"


def test_a_new_leader_does_what_the_former_one_left_undone() -> None:
    fleet = Fleet(workers=3, replicas=2)
    all_report(fleet)
    fleet.restores("w1")
    fleet.decide = lambda *_: None  # type: ignore[method-assign]
    fleet.convicts("w0")
    assert fleet.emptied() == []
    del fleet.decide
    fleet.tell("fleet", v.LeaderElected("r1", "b1"))
    assert fleet.emptied() == [("w1", 1)]


def test_nothing_is_noted_while_no_replica_lives() -> None:
    fleet = Fleet(workers=3, version=10)
    fleet.tell("fleet", v.ReplicaLost("r0", 1))
    fleet.restores("w1")
    assert fleet.fleet.workers["w1"].restored is UNSET


def test_replicas_that_decide_by_version_10_empty_none() -> None:
    fleet = Fleet(workers=3, version=10)
    all_report(fleet)
    fleet.restores("w1")
    fleet.convicts("w0")
    fleet.ticks(2 * LATE_TICKS)
    assert fleet.resets == [] and fleet.fleet.workers["w1"].restored is UNSET
