"""Who leaves a worker that drains: estimates decide, and several targets share what leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState, Tier
from relume.policies.checkpoints.checkpoint_settings import settings_of as checkpoint_settings
from relume.policies.health.health_state import WorkerHealth
from relume.policies.leader.duties import step
from relume.policies.migration import moves
from relume.policies.migration.migration_settings import (
    MigrationConfig,
    settings_of,
)
from relume.policies.migration.moves import Running
from relume.policies.routing import choose_worker
from relume.policies.routing.eligibility import UNJUDGED
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.fleet import Fleet, UnreadableRecords
from relume.policies.state.overlay.view import View
from tests.policies.checkpoints.test_checkpoints import CheckpointConfig, daemon, held
from tests.policies.story import (
    MODEL,
    Story,
    arrived,
    decided,
    engine_step,
    queued,
    replica_started,
)

BASIS = v.Basis(1, 0)


def fleet_of(*names: str, config: MigrationConfig | None = None, **checkpoints: Any) -> Story:
    story = Story()
    for name in names or ("w0", "w1", "w2"):
        story.tell(
            f"w.{name}",
            v.WorkerRegistered(worker=name, domain=f"host-{name}", agent_pid=7),
            v.EngineStarted(name, 1, 101, 1),
            v.EngineReady(
                worker=name,
                incarnation=1,
                host="127.0.0.1",
                port=9000,
                model=MODEL,
                max_model_len=4096,
                block_size=16,
                kv_blocks=512,
                family="f",
                block_bytes=1000,
            ),
            daemon(name),
        )
    settings = settings_of(config or MigrationConfig())
    settings += checkpoint_settings(CheckpointConfig(**checkpoints))
    story.replica_settings = settings
    story.tell("r.r0", replica_started(settings=settings))
    story.leader()
    story.healthy_ticks(2)
    return story


def running(story: Story, request: str, worker: str = "w0", blocks: int = 20, **more: Any) -> None:
    """A request that decodes on `worker`, of which w1's daemon has `blocks` of 20."""
    replica = more.get("replica", "r0")
    attempt = more.get("attempt", 1)
    if attempt == 1:
        story.tell(f"r.{replica}", arrived(request, 300))
    story.tell(f"r.{replica}", decided(request, attempt, worker, prompt=300))
    story.tell(
        f"w.{worker}",
        v.EngineStep(
            incarnation=1, step=1, duration_us=0, batch=0, sum_context=0, prefill_tokens=0, waiting=0, kv_used=8,
            changes=(
                queued(request, attempt, 300), v.RequestAdmitted(request, attempt, 0, 20),
                v.FirstToken(request, attempt), v.KvBlocksFilled(request, attempt, 20),
            ),
        ),
    )  # fmt: skip
    if blocks:
        story.tell("w.w1", held("w1", request, blocks))


def drain(story: Story, worker: str = "w0") -> None:
    effect = (v.Effect("drain", worker),)
    story.tell(
        "fleet",
        v.EffectsDecided(
            decision=f"c-{worker}-{story.revision}", basis=BASIS, cause="", effects=effect
        ),
    )


def view_of(story: Story, replica: str = "r0") -> View:
    view = View(f"r.{replica}", story.fleet)
    view.landed()
    return view


def asked(*requests: str, tokens: int = 321, left: int = 50) -> list[Running]:
    return [Running(request=name, attempt=1, tokens=tokens, left=left) for name in requests]


# --- draining --------------------------------------------------------------------------


def test_a_drain_moves_what_is_held_to_where_it_ends_first_and_shares_it_out() -> None:
    story = fleet_of("w0", "w1", "w2", "w3")
    names = [f"q{n}" for n in range(6)]
    for name in names:
        running(story, name)
    assert moves.sources(view_of(story)) == []
    drain(story)
    view = view_of(story)
    assert moves.sources(view) == [("w0", "drain")]
    choices = moves.plan(view, "drain", "w0", 1, asked(*names))
    assert [c.request for c in choices] == names
    options = [c.options[c.chosen] for c in choices]
    assert all(o.kind == "restore" and o.holder == "w1" for o in options)
    targets = [o.worker for o in options]
    assert {targets.count(w) for w in ("w1", "w2", "w3")} == {2}, "no target is flooded"
    assert all(o.excluded for c in choices for o in c.options if o.worker == "w0")


def test_a_holder_that_lags_is_waited_for_but_not_for_ever() -> None:
    story = fleet_of()
    running(story, "q1", blocks=15)
    running(story, "q2", blocks=16)
    drain(story)
    behind, near = moves.plan(view_of(story), "drain", "w0", 1, asked("q1", "q2"))
    assert (behind.chosen, behind.reason) == (-1, "catching up")
    assert near.chosen >= 0 and not near.reason
    story.healthy_ticks(5)
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    assert choice.chosen >= 0 and choice.options[choice.chosen].restored == 240


def test_a_pause_that_is_too_long_is_not_made() -> None:
    story = fleet_of(prefill_ns=100_000_000)
    running(story, "q1", blocks=0)
    drain(story)
    story.healthy_ticks(5)
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    assert (choice.chosen, choice.reason) == (-1, "too long a pause")
    story.tell("fleet", v.ConfigChanged("migration.pause_ms", "60000", "c"))
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    assert choice.options[choice.chosen].kind == "recompute"


def ordered_drain(story: Story, deadline_ticks: int) -> None:
    command = v.AdminCommanded(
        command_id="ann:1",
        principal="ann",
        command="drain",
        target="w0",
        reason="new driver",
        deadline_ticks=deadline_ticks,
    )
    story.tell("r.r0", command)
    story.tell("fleet", *step(story.fleet, command))
    assert story.fleet.workers["w0"].draining


def test_after_the_operators_deadline_what_can_move_does_at_any_pause() -> None:
    story = fleet_of(prefill_ns=100_000_000)
    running(story, "lags", blocks=5)
    running(story, "unheld", blocks=0)
    ordered_drain(story, 8)
    for ticks, reasons in ((0, ["catching up"] * 2), (7, ["too long a pause"] * 2), (1, ["", ""])):
        story.healthy_ticks(ticks)
        choices = moves.plan(view_of(story), "drain", "w0", 1, asked("lags", "unheld"))
        assert [c.reason for c in choices] == reasons
    assert all(c.chosen >= 0 for c in choices)
    undrained = v.Effect("undrain", "w0")
    story.tell(
        "fleet",
        v.EffectsDecided(decision="u", basis=BASIS, cause="", effects=(undrained,)),
    )
    drain(story)
    story.healthy_ticks(20)
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("unheld"))
    assert choice.reason == "too long a pause", "the earlier drain's deadline holds no longer"


def test_without_another_open_worker_all_stays() -> None:
    story = fleet_of("w0", "w1")
    running(story, "q1")
    drain(story, "w1")
    drain(story, "w0")
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    assert (choice.chosen, choice.reason) == (-1, "nobody can take it")


def test_a_drain_moves_to_the_worker_with_kv_room_and_waits_when_none_has() -> None:
    """A request of 321 tokens needs 21 blocks; 5 % of 512 stay free."""
    story = fleet_of()
    running(story, "q1")
    for name, used in (("w1", 470), ("w2", 466)):
        running(story, f"at-{name}", name, blocks=0)
        full = msgspec.structs.replace(engine_step(), kv_used=used)
        story.tell(f"w.{name}", full)
    drain(story)
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    option = choice.options[choice.chosen]
    assert (option.worker, option.kind, option.holder) == ("w2", "restore", "w1"), (
        "not w1, its home"
    )
    assert {o.excluded for o in choice.options if o.worker == "w1"} == {"no KV room"}
    story.tell("w.w2", msgspec.structs.replace(engine_step(), kv_used=467))
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    assert (choice.chosen, choice.reason) == (-1, "no KV room elsewhere")
    story.tell("fleet", v.ConfigChanged("checkpoints.headroom_percent", "0", "c"))
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    assert choice.chosen >= 0, "not checked"


def test_a_drain_gives_room_to_higher_tiers_first() -> None:
    """Only w2 has room, and for one of them."""
    story = fleet_of()
    for name, used in (("w1", 480), ("w2", 466)):
        running(story, f"at-{name}", name, blocks=0)
        story.tell(f"w.{name}", msgspec.structs.replace(engine_step(), kv_used=used))
    running(story, "q1")
    running(story, "q2")
    drain(story)
    moving = [*asked("q1", tokens=330), *asked("q2")]
    before = moves.plan(view_of(story), "drain", "w0", 1, moving)
    assert [c.chosen >= 0 for c in before] == [True, False], "the longer one, without tiers"
    moving = [
        msgspec.structs.replace(one, tier=Tier(tier))
        for one, tier in zip(moving, ("batch", "interactive"), strict=True)
    ]
    choices = moves.plan(view_of(story), "drain", "w0", 1, moving)
    assert [c.tier for c in choices] == ["batch", "interactive"]
    assert [c.chosen >= 0 for c in choices] == [False, True]
    assert choices[0].reason == "no KV room elsewhere"


def test_what_its_engine_has_not_taken_yet_stays_for_now() -> None:
    story = fleet_of()
    story.tell("r.r0", arrived("q1", 300), decided("q1", prompt=300))
    drain(story)
    (choice,) = moves.plan(view_of(story), "drain", "w0", 1, asked("q1"))
    assert (choice.chosen, choice.reason) == (-1, "not begun")


def handed_over(story: Story) -> tuple[View, v.MigrationPlanned, v.TransportObserved, RouteQuery]:
    """A request of w0, which drains: the plan, the move, and what is then asked."""
    running(story, "q1")
    drain(story)
    view = view_of(story)
    (choice,) = moves.plan(view, "drain", "w0", 1, asked("q1"))
    planned = v.MigrationPlanned(
        decision="m1",
        basis=BASIS,
        worker="w0",
        incarnation=1,
        cause="drain",
        tick=2,
        choices=(choice,),
    )
    moved = v.TransportObserved(
        request="q1", attempt=1, worker="w0", incarnation=1, kind="moved", delivered=21
    )
    query = RouteQuery(request="q1", model=MODEL, prompt_tokens=300, delivered=21, lost=1)
    return view, planned, moved, query


def test_a_request_handed_over_returns_only_when_no_other_worker_is_left() -> None:
    story = fleet_of("w0", "w1")
    view, planned, moved, query = handed_over(story)
    for folded in (False, True):
        if folded:
            story.tell("r.r0", planned, moved)
            view.landed()
        else:
            view.own(view.position + 1, planned)
            view.own(view.position + 1, moved)
        assert view.suspect("w0") == 0, "nothing is held against it"
        assert choose_worker.planned(view, query).worker == "w1"
    story.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    assert choose_worker.planned(view, query).worker == "w0"
    failed = RouteQuery(
        request="q1", model=MODEL, prompt_tokens=300, delivered=21, avoid=("w0:1",), lost=1
    )
    assert choose_worker.planned(view, failed).worker == ""
    view.own(view.position + 1, v.WorkerSuspected("w0", 1, "silent"))
    assert choose_worker.planned(view, query).worker == ""


def unhealthy(fleet: Fleet) -> None:
    fleet.workers["w0"].health = WorkerHealth(state=HealthState.UNHEALTHY)


def unreadable(fleet: Fleet) -> None:
    fleet.unreadable = {"w.w0": UnreadableRecords(count=1)}


def failing(fleet: Fleet) -> None:
    """As the leader has it of a worker that failed requests, and drains."""
    fleet.replicas["r0"].settings[UNJUDGED] = "2"
    failures = {"f1": 1, "f2": 1}
    fleet.workers["w0"].health = WorkerHealth(state=HealthState.DRAINING, failures=failures)


@pytest.mark.parametrize("spoil", [unhealthy, unreadable, failing])
def test_nor_does_it_return_to_a_worker_that_more_than_its_drain_excludes(
    spoil: Callable[[Fleet], None],
) -> None:
    """Version 1 of the decision looked at the drain alone."""
    story = fleet_of("w0", "w1")
    view, planned, moved, query = handed_over(story)
    story.tell("r.r0", planned, moved)
    view.landed()
    story.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    assert choose_worker.decide(view, query, "planned").worker == "w0"
    spoil(story.fleet)
    assert choose_worker.decide(view, query, "planned").worker == ""
    assert choose_worker.decide(view, query, "planned", 1).worker == "w0"
