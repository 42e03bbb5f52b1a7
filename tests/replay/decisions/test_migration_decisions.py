"""Moves of running requests are decided again in replay, made by handovers, and told."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from relume.chaos.validators import check_all
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.controlplane.replica import migration_watch
from relume.controlplane.replica.migration_watch import goes_on
from relume.controlplane.stream.arrival import Arrival
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.events.log.interface import RevisionGroup
from relume.policies.migration.migration_settings import MigrationConfig
from tests.replay.decisions.test_checkpoint_decisions import divergence, recorded
from tests.replay.scene import Scene
from tests.replay.tamper import replaced

LONG = (300, 400)


async def commanded(scene: Scene, command: str, worker: str) -> None:
    scheduler = next(iter(scene.replicas.values())).scheduler
    scheduler.emit(
        v.AdminCommanded(
            command_id=f"{command}-{worker}-{scheduler.decisions.decision_id()}",
            principal="olga",
            command=command,
            target=worker,
            reason="new driver" if command == "drain" else "",
            force=command == "drain",
        )
    )
    fleet = next(iter(scene.replicas.values())).fleet
    await scene.until(lambda: fleet.workers[worker].draining == (command == "drain"))


def running_on(scene: Scene, worker: str) -> int:
    """Streams of all replicas that are there now and can be taken up."""
    places = (
        (c, o) for c in scene.clients.values() for (n, _), o in c._open.items() if n == worker
    )
    live = [c._scheduler.live.get(request) for c, open_ in places for request in open_]
    return sum(one is not None and one.arrival.verdict != "restart" for one in live)


async def drained(**more: Any) -> list[RevisionGroup]:
    """A log in which w0 is drained while each of two replicas has requests there."""
    async with Scene(7, tokens=LONG, **more) as scene:
        traffic = asyncio.create_task(scene.traffic(12))
        await scene.until(lambda: all(c.running_covered("w0") for c in scene.clients.values()))
        await commanded(scene, "drain", "w0")
        await scene.until(lambda: not running_on(scene, "w0") or traffic.done(), 10.0)
        assert not traffic.done(), "they just ended"
        await traffic
        await scene.settled()
    return scene.log.groups


@pytest.fixture(scope="module")
def groups() -> list[RevisionGroup]:
    return asyncio.run(drained())


def moved(groups: list[RevisionGroup]) -> list[v.TransportObserved]:
    return [e for _, e in recorded(groups, v.TransportObserved) if e.kind == "moved"]


def test_all_that_may_leave_a_draining_worker_goes_where_it_was_planned(
    groups: list[RevisionGroup],
) -> None:
    plans = [e for _, e in recorded(groups, v.MigrationPlanned)]
    assert {p.cause for p in plans} == {"drain"} and {p.worker for p in plans} == {"w0"}
    goes = {(c.request, c.attempt): c for p in plans for c in p.choices if c.chosen >= 0}
    left = moved(groups)
    assert len(left) >= 2
    routes = {(e.request, e.attempt): e for _, e in recorded(groups, v.RouteDecided)}
    for event in left:
        choice = goes[event.request, event.attempt]
        route = routes[event.request, event.attempt + 1]
        assert (route.cause, route.policy) == ("moved", "planned")
        prompt = 40 + len(event.request)  # as the engines here count; arrivals say anything
        assert prompt <= choice.tokens <= prompt + event.delivered
        assert route.worker == choice.options[choice.chosen].worker != "w0"
        assert not any(place.startswith("w0") for place in route.avoid), "no failure"
    holders = {(e.request, e.attempt): e for _, e in recorded(groups, v.HolderChosen)}
    assert {holders[e.request, e.attempt + 1].cause for e in left} == {"moved"}
    assert not recorded(groups, v.WorkerSuspected)
    verdicts = {e.request: e.verdict for _, e in recorded(groups, v.RequestArrived)}
    assert "restart" not in {verdicts[e.request] for e in left}, "it would begin anew"


def test_migrations_replay_and_promises_hold(groups: list[RevisionGroup]) -> None:
    verdict = verify(groups)
    assert verdict.divergences == [] and verdict.migrations >= 1
    found = check_all(groups, [], ["I1", "I3", "I4", "I10"])
    assert found == []


def test_another_target_estimate_or_source_is_found(groups: list[RevisionGroup]) -> None:
    place, event = recorded(groups, v.MigrationPlanned)[0]
    at = next(n for n, c in enumerate(event.choices) if c.chosen >= 0)
    choice = event.choices[at]
    other = next(n for n in range(len(choice.options)) if n != choice.chosen)
    for lie in (
        msgspec.structs.replace(choice, chosen=other),
        msgspec.structs.replace(choice, chosen=-1, reason="nobody can take it"),
        msgspec.structs.replace(choice, stay_us=choice.stay_us + 1),
    ):
        choices = (*event.choices[:at], lie, *event.choices[at + 1 :])
        divergence(groups, place, msgspec.structs.replace(event, choices=choices))
    divergence(groups, place, msgspec.structs.replace(event, cause="imbalance"))
    divergence(groups, place, msgspec.structs.replace(event, tick=event.tick + 1))


@pytest.mark.parametrize("name, value", [("moves", "off"), ("pause_ms", "0")])
def test_a_changed_setting_is_found(groups: list[RevisionGroup], name: str, value: str) -> None:
    starts = recorded(groups, v.ReplicaStarted)
    altered = groups
    for place, event in starts:
        settings = tuple(
            (n, value if n == f"migration.{name}" else old) for n, old in event.settings
        )
        assert settings != event.settings
        lie = msgspec.structs.replace(event, settings=settings)
        altered = replaced(altered, place, encode(lie))
    found = verify(altered, limit=10_000).divergences
    assert [d for d in found if d.what == "decision" and d.stream.startswith("r.")]


def test_why_tells_of_a_move(groups: list[RevisionGroup]) -> None:
    found = why(groups, moved(groups)[0].request)
    assert found is not None
    text = "\n".join(lines_of(found))
    assert "olga: drain w0 (new driver)" in text and text.count("new driver") == 1
    assert "drains: " in text and "tokens to migrate to w" in text
    assert "handed it over after" in text and "because of moved (mode continue" in text
    plans = [s.event for s in found.steps if type(s.event) is v.MigrationPlanned]
    assert {c.request for p in plans for c in p.choices} == {found.request}


@pytest.mark.parametrize(
    "verdict, delivered, goes",
    [
        ("exact", 9, True), ("sampled", 9, True), ("best_effort", 9, True), ("replay", 9, False),
        ("restart", 9, False), ("replay", 0, True), ("restart", 0, True),
    ],
)  # fmt: skip
def test_what_would_be_generated_again_does_not_leave(
    verdict: str, delivered: int, goes: bool
) -> None:
    for stream in (True, False):
        arrival = Arrival(
            request="q",
            model="m",
            route="completions",
            stream=stream,
            prompt_tokens=9,
            max_tokens=9,
            verdict=verdict,
        )
        assert goes_on(arrival, delivered, False) is goes
        assert goes_on(arrival, delivered, True) is (not delivered)
        unprotected = msgspec.structs.replace(arrival, protected=False)
        assert not goes_on(unprotected, delivered, False)


async def test_nothing_moves_when_it_is_off() -> None:
    async with Scene(7, tokens=(40, 60), migration=MigrationConfig(moves="off")) as scene:
        traffic = asyncio.create_task(scene.traffic(12))
        await scene.until(lambda: all(c.running_covered("w0") for c in scene.clients.values()))
        await commanded(scene, "drain", "w0")
        await traffic
        await scene.settled()
    assert not recorded(scene.log.groups, v.MigrationPlanned) and not moved(scene.log.groups)
    assert verify(scene.log.groups).divergences == []


@pytest.mark.full
async def test_a_worker_that_cannot_be_asked_keeps_its_requests_after_some_tries() -> None:
    async with Scene(7, replicas=1, tokens=LONG) as scene:
        scene.refuses_handover = 1 << 30
        traffic = asyncio.create_task(scene.traffic(6))
        held = scene.clients["r0"]
        await scene.until(lambda: held.running_covered("w0"))
        await commanded(scene, "drain", "w0")
        await traffic
        await scene.settled()
    groups = scene.log.groups
    assert not moved(groups)
    tries: dict[tuple[str, int], int] = {}
    for _, event in recorded(groups, v.MigrationAbandoned):
        key = event.request, event.attempt
        tries[key] = tries.get(key, 0) + 1
        assert event.reason == "answered 500"
    assert tries and max(tries.values()) <= 3
    assert {o for o, _ in held.outcomes.values()} <= {"completed", "cancelled"}
    assert verify(groups).divergences == []


@pytest.mark.full
async def test_a_move_refused_once_is_made_at_a_later_tick() -> None:
    async with Scene(7, replicas=1, tokens=LONG) as scene:
        scene.refuses_handover = 1
        traffic = asyncio.create_task(scene.traffic(6))
        await scene.until(lambda: scene.clients["r0"].running_covered("w0"))
        await commanded(scene, "drain", "w0")
        await scene.until(lambda: not running_on(scene, "w0") or traffic.done(), 10.0)
        assert not traffic.done()
        await traffic
        await scene.settled()
    groups = scene.log.groups
    (_, abandoned), *more = recorded(groups, v.MigrationAbandoned)
    assert not more
    assert (abandoned.request, abandoned.attempt) in {(e.request, e.attempt) for e in moved(groups)}


@pytest.mark.parametrize(("now", "reason"), [(0, "answered 409"), (None, "no other worker can")])
async def test_what_has_begun_since_the_plan_stays_if_it_cannot_continue(
    now: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Composed 120312: the first token came between the plan and the call; the client got 502."""
    monkeypatch.setattr(migration_watch, "goes_on", lambda arrival, delivered, _: not delivered)
    scene, groups = await drained_before_any_token(now, monkeypatch)
    left = [e.reason for _, e in recorded(groups, v.MigrationAbandoned)]
    assert left and all(why.startswith(reason) for why in left), left
    assert not moved(groups)
    assert set(scene.unbegun) == ({True} if now == 0 else set())


async def test_what_can_continue_leaves_also_if_it_has_begun_since_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene, groups = await drained_before_any_token(0, monkeypatch)
    assert moved(groups) and not recorded(groups, v.MigrationAbandoned)
    assert set(scene.unbegun) == {False}


async def drained_before_any_token(
    now: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[Scene, list[RevisionGroup]]:
    """No request has a token when a drain is planned, and `now` when the engine is called."""
    async with Scene(7, replicas=1, tokens=LONG) as scene:
        held = scene.clients["r0"]
        running = held.movable_on
        monkeypatch.setattr(held, "movable_on", lambda *place: dict.fromkeys(running(*place), 0))
        monkeypatch.setattr(held, "movable_tokens", lambda *_: now)
        traffic = asyncio.create_task(scene.traffic(6))
        await scene.until(lambda: held.running_covered("w0"))
        await commanded(scene, "drain", "w0")
        await traffic
        await scene.settled()
    return scene, scene.log.groups


@pytest.mark.full
async def test_an_engine_that_hands_over_too_late_is_obeyed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its move was given up; the stream ends with the handover, and goes where it was planned."""
    monkeypatch.setattr("relume.controlplane.replica.engine_calls.TIMEOUT_S", 0.05)
    async with Scene(7, replicas=1, tokens=LONG) as scene:
        scene.handover_s = 0.15
        traffic = asyncio.create_task(scene.traffic(6))
        await scene.until(lambda: scene.clients["r0"].running_covered("w0"))
        await commanded(scene, "drain", "w0")
        await traffic
        await scene.settled()
    groups = scene.log.groups
    late = {(e.request, e.attempt) for _, e in recorded(groups, v.MigrationAbandoned)}
    gone = {(e.request, e.attempt) for e in moved(groups)}
    assert late & gone
    routes = [e for _, e in recorded(groups, v.RouteDecided) if e.cause == "moved"]
    assert {e.policy for e in routes} == {"planned"}
    assert verify(groups).divergences == [] and not check_all(groups, [], ["I1", "I3", "I4"])


async def test_the_last_worker_keeps_its_requests() -> None:
    async with Scene(7, workers=2, replicas=1, tokens=(40, 60)) as scene:
        await commanded(scene, "drain", "w1")
        traffic = asyncio.create_task(scene.traffic(4))
        await scene.until(lambda: running_on(scene, "w0"))
        await commanded(scene, "drain", "w0")
        await scene.until(lambda: recorded(scene.log.groups, v.MigrationPlanned) or traffic.done())
        await commanded(scene, "undrain", "w1")
        await traffic
        await scene.settled()
    groups = scene.log.groups
    (_, first), *_ = recorded(groups, v.MigrationPlanned)
    assert {c.reason for c in first.choices} == {"nobody can take it"}
    assert verify(groups).divergences == []


async def test_a_crowded_worker_gives_some_away_once_and_that_replays_too() -> None:
    config = MigrationConfig(moves="all", gap=4, ticks=3, cool_ticks=1000, at_once=8)
    async with Scene(11, migration=config, tokens=LONG) as scene:
        short = [scene.clients[r]._tokens for r in ("r0", "r1")]
        for clients in scene.clients.values():
            clients._tokens = (5, 9)
        await scene.traffic(12, "first")  # all show their pace
        for clients, tokens in zip(scene.clients.values(), short, strict=True):
            clients._tokens = tokens
        for worker in ("w1", "w2"):
            await commanded(scene, "drain", worker)
        traffic = asyncio.create_task(scene.traffic(10))
        await scene.until(lambda: running_on(scene, "w0") >= 8)
        for worker in ("w1", "w2"):
            await commanded(scene, "undrain", worker)
        await scene.until(lambda: moved(scene.log.groups) or traffic.done(), 10.0)
        assert not traffic.done(), "they just ended"
        await traffic
        await scene.settled()
    groups = scene.log.groups
    plans = [e for _, e in recorded(groups, v.MigrationPlanned)]
    assert {(p.worker, p.cause) for p in plans} == {("w0", "imbalance")}
    assert len({p.tick for p in plans}) == 1 and len(plans) <= 2, "one for a replica"
    goes = [c for p in plans for c in p.choices if c.chosen >= 0]
    assert 1 <= len(goes) <= 5 and all(c.go_us < c.stay_us for c in goes)
    assert len(moved(groups)) <= len(goes)
    verdict = verify(groups)
    assert verdict.divergences == [] and verdict.migrations == len(plans)
