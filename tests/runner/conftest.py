"""A world made of a stored run, for cases, fuzzing, shrinking and commands."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.chaos.outcome import Outcome
from relume.chaos.runner import world
from relume.chaos.runner.cases import Case
from tests.runner.recorded import outcome

GOOD = outcome()


def world_that_breaks(case: Case) -> Outcome:
    """Any case passes, unless an engine is killed and request q00003 is among the requests and
    there are two workers: then a promise is broken."""
    kills = any(planned.what == "engine-kill" for planned in case.schedule.faults)
    named = {request.name for request in case.schedule.requests}
    gaps = [1.0]
    if kills and "q00003" in named and len(case.schedule.workers) >= 2:
        gaps = [99_000.0]
    first = replace(GOOD.histories[0], record=replace(GOOD.histories[0].record, gaps_ms=gaps))
    (kill,) = GOOD.fired  # the death in the log, whatever was planned
    fired = (kill, *(replace(kill, name=p.name) for p in case.schedule.faults))
    return replace(
        GOOD, scenario=replace(case.scenario, expect=()), schedule=case.schedule,
        histories=(first, *GOOD.histories[1:]), fired=fired,
    )  # fmt: skip


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "simulate", world_that_breaks)
