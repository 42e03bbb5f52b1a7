"""Any moment of a stored log is what the live page showed then."""

from __future__ import annotations

import random

import msgspec
import pytest

from relume.controlplane.admin.events_api import Filter
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.incidents.sentences import info
from relume.controlplane.replay.recorded_log import History, from_file
from relume.controlplane.ui.live_moments import LiveMoments
from relume.controlplane.ui.moment import ROW_NAMES, SHOWN_INCIDENTS, lanes_of
from relume.controlplane.ui.recorded_fleet import FREQUENT, STEPS, RecordedFleet
from relume.events import vocabulary as v
from relume.events.log.entries import entries
from relume.policies.state.fleet import Fleet, dump, load
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View
from tests.admin.scene import Scene
from tests.admin.test_checkpoints import checkpointed
from tests.replay.frozen import FOLDER

LOGS = ("engine-killed", "churn", "restores", "degradation", "gateway-restarted")


def stored(name: str) -> History:
    return from_file(FOLDER / f"{name}.rlog")


async def test_the_end_of_a_log_looks_as_the_live_page_did():
    async with Scene() as scene:
        await checkpointed(scene)
        await scene.serve_request("req-1")
        scene.worker_writers["w1"].append(v.EngineDied("w1", 1, "killed"))
        await scene.until(lambda: scene.replica.incidents.incidents)
        scene.log.pause()
        revision = scene.replica.fleet.revision
        await scene.until(lambda: scene.replica.writer.durable == scene.replica.writer.position)
        live = LiveMoments(scene.replica, scene.admin.book).moment()
        groups = [group for group in scene.log.groups if group.revision <= revision]
        past = RecordedFleet(History(groups=groups, origin="here")).moment(len(groups))
        scene.log.resume()
        for part in ROW_NAMES:
            assert getattr(past, part) == getattr(live, part), part
            assert getattr(past, part) or part == "models"
        for field in ("leader", "revision", "serving", "live_requests", "arrived", "ended"):
            assert getattr(past.head, field) == getattr(live.head, field), field
        assert live.head.recorded is None and past.head.recorded is not None


@pytest.mark.parametrize("name", LOGS)
def test_a_moment_is_the_fold_of_the_log_up_to_it_in_whatever_order_one_looks(name: str):
    history = stored(name)
    recorded = RecordedFleet(history)
    rng = random.Random(name)
    places = sorted(rng.sample(range(len(history.groups) + 1), 12))
    forward = {place: recorded.moment(place) for place in places}
    rng.shuffle(places)
    fleet, folded = load(dump(history.base)) if history.base else Fleet(), 0
    for place in sorted(places):
        for group in history.groups[folded:place]:
            apply_group(fleet, group)
        folded = place
        moment = forward[place]
        assert moment.lanes == lanes_of(View(f"r.{fleet.leader}", fleet)), place
        assert moment.head.live_requests == len(fleet.requests)
        live = {row.request for row in moment.requests if row.state == "live"}
        assert live <= set(fleet.requests)
        assert len(live) == min(len(fleet.requests), len(live)) and moment.head.ended == fleet.ended
        known = incidents_of(history.groups[:place])[-SHOWN_INCIDENTS:]
        assert moment.incidents == [info(record) for record in known], place
    for place in places:
        again = RecordedFleet(history).moment(place) if place % 3 == 0 else recorded.moment(place)
        assert msgspec.json.encode(again) == msgspec.json.encode(forward[place]), place


def test_a_request_is_live_before_its_end_and_unknown_before_its_arrival():
    history = stored("engine-killed")
    recorded = RecordedFleet(history)
    ended = next(e for e in entries(history.groups) if type(e.event) is v.RequestEnded)
    name, place = ended.event.request, recorded.timeline.place(ended.revision)
    arrived = next(
        e
        for e in entries(history.groups)
        if type(e.event) is v.RequestArrived and e.event.request == name
    )

    def state(at: int) -> str:
        recorded.timeline.seek(at)
        return next((str(r.state) for r in recorded.requests(name) if r.request == name), "")

    assert state(place) == ended.event.outcome
    assert state(place - 1) == "live"
    assert state(recorded.timeline.place(arrived.revision - 1)) == ""


@pytest.mark.parametrize("name", LOGS)
def test_steps_visit_every_decision_in_both_directions(name: str):
    history = stored(name)
    recorded = RecordedFleet(history)
    wanted = {e.revision for e in entries(history.groups) if type(e.event) in STEPS}
    end = len(history.groups)
    there = [recorded.step(0, forward=True)] if wanted else []
    while len(there) < len(wanted):
        there.append(recorded.step(there[-1], forward=True))
    assert recorded.step(there[-1] if there else 0, forward=True) == end
    assert [recorded.timeline.revision_at(at) for at in there] == sorted(wanted)
    back, place = [], end + 1
    while place := recorded.step(place, forward=False):
        back.append(place)
        assert len(back) <= len(there), "a step stayed where it was"
    assert back[::-1] == there
    recording = recorded.recording()
    assert recording.decisions == len(there) == sum(recording.density)
    for number, place in enumerate(there[:20], 1):
        found = recorded.moment(place).head.recorded
        assert found is not None and (found.place, found.decision) == (place, number)


def test_the_scale_has_each_incident_where_it_begins():
    history = stored("churn")
    recorded = RecordedFleet(history)
    marks = recorded.recording().incidents
    assert marks and len(marks) == len(incidents_of(history.groups))
    for mark in marks:
        before, there = recorded.moment(mark.place - 1), recorded.moment(mark.place)
        assert mark.id not in {i.id for i in before.incidents}
        assert mark.id in {i.id for i in there.incidents}


def test_events_are_those_up_to_the_moment():
    history = stored("churn")
    recorded = RecordedFleet(history)
    place = len(history.groups) // 2
    revision = recorded.timeline.revision_at(place)
    recorded.timeline.seek(place)
    every = [e for e in entries(history.groups) if e.revision <= revision]
    seldom = [e for e in every if type(e.event) not in FREQUENT]
    without = Filter(exclude=tuple(FREQUENT))
    assert recorded.events(7, without, seldom=True) == seldom[-7:]
    steps = Filter(kinds=(v.EngineStep,))
    wanted = [e for e in every if type(e.event) is v.EngineStep]
    assert recorded.events(5, steps, seldom=False) == wanted[-5:] and len(wanted) > 5
    assert recorded.events(10_000, Filter(), seldom=False) == every[-10_000:]
    recorded.timeline.seek(0)
    assert recorded.events(5, Filter(), seldom=False) == []


def test_a_place_shows_its_own_events():
    history = stored("engine-killed")
    recorded = RecordedFleet(history)
    died = next(e for e in entries(history.groups) if type(e.event) is v.EngineDied)
    found = recorded.moment(recorded.timeline.place(died.revision)).head.recorded
    assert found is not None
    assert any(e.event["type"] == "engine_died" and "died" in e.text for e in found.events)
