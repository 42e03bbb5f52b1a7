"""Decisions of large fleets name the best workers and count the rest; replay verifies both."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.log.codec import decode, encode
from relume.events.log.interface import RevisionGroup
from relume.policies.decision_versions import DECISION_VERSIONS
from relume.policies.health.health_settings import HealthConfig
from relume.policies.routing import choose_worker
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.overlay.view import View
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import MODEL, arrived, decided
from tests.replay.decisions.test_scheduler_replay import assert_same, eventful_log
from tests.replay.tamper import Place, places, replaced


@pytest.fixture(scope="module")
def groups() -> list[RevisionGroup]:
    return asyncio.run(eventful_log(1, workers=choose_worker.WHOLE + 4))


def routes(groups: list[RevisionGroup]) -> list[tuple[Place, v.RouteDecided]]:
    found = []
    for place, segment in places(groups):
        event = decode(segment.records[place[2]])
        if isinstance(event, v.RouteDecided):
            found.append((place, event))
    return found


def test_eventful_log_of_a_large_fleet_replays(groups: list[RevisionGroup]) -> None:
    assert_same(verify(groups), 1)
    decided = [event for _, event in routes(groups)]
    brief = [event for event in decided if event.others]
    assert len(brief) > 100
    assert {why for event in brief for why, _ in event.others} >= {"", "engine dead", "suspected"}
    assert max(len(event.candidates) for event in brief) < choose_worker.WHOLE


@pytest.mark.parametrize("what", ["counts", "named", "whole"])
def test_what_was_altered_is_found(groups: list[RevisionGroup], what: str) -> None:
    place, event = next((p, e) for p, e in routes(groups)[60:] if e.others and e.worker)
    (reason, count), *rest = event.others
    others = {"counts": ((reason, count + 1), *rest), "named": event.others, "whole": ()}[what]
    candidates = event.candidates[:-1] if what == "named" else event.candidates
    lie = msgspec.structs.replace(event, others=others, candidates=candidates)
    verdict = verify(replaced(groups, place, encode(lie)), limit=1)
    (divergence,) = verdict.divergences
    assert divergence.what == "decision"
    assert divergence.expected != divergence.actual


def test_why_shows_the_number_of_other_workers(groups: list[RevisionGroup]) -> None:
    _, event = next(found for found in routes(groups) if ("engine dead", 1) in found[1].others)
    found = why(groups, event.request)
    assert found is not None
    text = "\n".join(lines_of(found))
    assert "eligible at no lower cost" in text
    assert "and 1 other, not eligible: engine dead" in text


def test_logs_that_name_everybody_verify_as_before(
    groups: list[RevisionGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large fleets wrote them once."""
    monkeypatch.setattr(choose_worker, "WHOLE", 1000)
    whole = asyncio.run(eventful_log(2, workers=choose_worker.NAMED + 12))
    monkeypatch.undo()
    assert not any(event.others for _, event in routes(whole))
    assert_same(verify(whole), 2)


@pytest.mark.parametrize("version", [1, 2])
def test_both_versions_of_least_load_are_taken_again(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures that the fold has count since version 2."""
    monkeypatch.setitem(DECISION_VERSIONS, "route.least_load", version)
    fleet = LedFleet(choose_worker.WHOLE + 4, config=HealthConfig(unjudged=2))
    monkeypatch.undo()
    fleet.fails()
    fleet.fails()
    fleet.tell("r.r0", arrived("q", prompt=50))
    view = View("r.r0", fleet.fleet)
    view.landed()
    query = RouteQuery(request="q", model=MODEL, prompt_tokens=50, delivered=0)
    choice = choose_worker.decide(view, query, "least_load", version)
    assert (("failing", 1) in choice.others) == (version == 2)
    event = decided("q", worker=choice.worker, prompt=50, basis=view.basis)
    others = {"candidates": choice.candidates, "others": choice.others}
    fleet.tell("r.r0", msgspec.structs.replace(event, **others))
    verdict = verify(fleet.groups)
    assert verdict.decisions == 3 and not verdict.untaken
    differing = [d.position for d in verdict.divergences]
    assert len(differing) == 2, "the decisions of `LedFleet.fails` name no candidates"
    assert fleet.fleet.streams["r.r0"].position not in differing
