"""What hosts' links carry in the simulator, and how engines restore over them."""

from __future__ import annotations

from typing import Any

import pytest

from relume.chaos.papers.lumen.parts.study_runs import Case, Meter, scenario_of, settings_of
from relume.chaos.sim import sim_fleet
from relume.chaos.sim.world.network_card import Links, carried
from relume.events import vocabulary as v


def test_what_is_fetched_shares_a_link_with_what_streams() -> None:
    one, other = Links(100.0, True), Links(100.0, True)
    assert carried(one, other, 100, 0.0, True) == 1.0
    assert carried(one, other, 100, 0.0, True) == 2.0  # the first one has the link
    assert carried(one, other, 1000, 2.0) == 12.0
    assert carried(one, other, 100, 2.0, True) == 4.0  # at half of it, not behind all
    assert carried(one, other, 100, 20.0, True) == 21.0


@pytest.mark.full
def test_an_engine_restores_one_request_after_the_other() -> None:
    told: dict[str, list[tuple[str, str]]] = {}

    class Watching(Meter):
        def _seen(self, worker: str, event: Any) -> None:
            if isinstance(event, v.RestoreStarted | v.RestoreDone | v.RestoreFailed):
                told.setdefault(worker, []).append((type(event).__name__, event.request))
            super()._seen(worker, event)

    case = Case(rules="lumen", workers=4, seed=3, per_s=0.6)
    sim_fleet.run(scenario_of(case), case.seed, settings=settings_of(case, Watching()))
    assert sum(len(of) for of in told.values()) >= 8
    for of in told.values():
        for started, ended in zip(of[::2], of[1::2], strict=True):
            assert started[0] == "RestoreStarted" != ended[0] and started[1] == ended[1]
