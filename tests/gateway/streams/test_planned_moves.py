"""A request that is planned to leave its worker is planned for once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from relume.controlplane.replica import migration_watch
from relume.controlplane.replica.migration_watch import MigrationWatch
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EffectKind
from tests.controlplane.test_doubted_streams import Fleet
from tests.policies.story import engine_step, queued

GROUP: Any = RevisionGroup(0)


def drained(fleet: Fleet, worker: str) -> v.EffectsDecided:
    effect = v.Effect(EffectKind.DRAIN, worker, 0, "")
    return v.EffectsDecided(
        decision="c", basis=v.Basis(1, 0), cause=f"ops: drain {worker}", effects=(effect,)
    )


async def test_ticks_do_not_plan_again_what_is_under_way(monkeypatch: Any) -> None:
    """Each plan loads another worker. What did not leave in time is planned again."""
    now = 100.0
    monkeypatch.setattr(migration_watch, "_now", lambda: now)
    fleet = Fleet(holders=True)
    first = fleet.arrive("q")
    begun = engine_step(queued("q"), v.FirstToken("q", 1))
    fleet.story.tell(f"w.{first.worker}", begun)
    fleet.scheduler.live["q"].running = True
    gateway: Any = SimpleNamespace(movable_on=lambda *_: {"q": 4}, away_on=lambda *_: {})
    watch = MigrationWatch(fleet.scheduler, gateway)
    fleet.story.tell("fleet", drained(fleet, first.worker))

    def plans() -> int:
        watch.seen("fleet", 1, v.Tick(1, 0))
        watch.folded(GROUP)
        planned = [e for e in fleet.writer.written if type(e) is v.MigrationPlanned]
        return sum(choice.chosen >= 0 for plan in planned for choice in plan.choices)

    assert [plans() for _ in range(4)] == [1, 1, 1, 1]
    now += migration_watch.LEAVING_S + 1
    assert plans() == 2
