"""Decisions about checkpoints on a view: Eq. 4's sums are what recounting gives, own
decisions count before they land, and lost requests get plans that can be kept."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from relume.events import vocabulary as v
from relume.policies.checkpoints import decisions
from relume.policies.checkpoints.checkpoint_settings import (
    CheckpointConfig,
    config_of,
    settings_of,
)
from relume.policies.checkpoints.decisions import Lost
from relume.policies.recorded_settings import INTEGERS
from relume.policies.routing import choose_worker
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state import coverage
from relume.policies.state.fleet import Fleet
from relume.policies.state.overlay.own_checkpoints import PLACEMENT_VERSION
from relume.policies.state.overlay.view import View
from relume.policies.state.prefill_rate import prefill_ns
from tests.policies.story import MODEL, Story, arrived, decided, ended, engine_step, replica_started

BASIS = v.Basis(1, 0)
WORKERS = ("w0", "w1", "w2", "w3")


def fleet_of(*names: str, budget: int = 1 << 20, config: CheckpointConfig | None = None) -> Story:
    """Workers, each in a domain of its own, with daemons that TCP reaches."""
    story = Story()
    for name in names or WORKERS:
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
            daemon(name, budget=budget),
        )
    settings = settings_of(config or CheckpointConfig())
    story.tell("r.r0", replica_started(settings=settings))
    return story


def daemon(name: str, boot: str = "b1", budget: int = 1 << 20) -> v.StateDaemonStarted:
    return v.StateDaemonStarted(
        worker=name, boot=boot, epoch=1, address=f"tcp://{name}:1", budget_bytes=budget, family="f"
    )


def chosen(request: str, holders: tuple[str, ...], primary: str = "w0", attempt: int = 1) -> Any:
    return v.HolderChosen(
        decision=f"d-{request}",
        basis=BASIS,
        request=request,
        attempt=attempt,
        cause="arrival",
        primary=primary,
        holders=holders,
        policy="load_aware",
        wanted=1,
        expected_blocks=8,
        expected_bytes=8000,
    )


def held(holder: str, request: str, blocks: int, child: int = 0, boot: str = "b1") -> Any:
    return v.CheckpointAcknowledged(
        holder=holder,
        boot=boot,
        request=request,
        child=child,
        attempt=1,
        blocks=blocks,
        tokens=blocks * 16,
        bytes=blocks * 1000,
    )


def recounted(fleet: Fleet) -> dict[str, tuple[int, int]]:
    """Eq. 4's and 5's sums, from the placements and coverage that stand."""
    sums = dict.fromkeys(fleet.holders, (0, 0))
    for request, placed in fleet.placed.items():
        for name in placed.holders:
            site = fleet.holders.get(name)
            if site is not None:
                blocks, promised = coverage.share(placed, site.covered.get(request))
                sums[name] = sums[name][0] + blocks, sums[name][1] + promised
    return sums


def drawn(rng: random.Random, open_: list[str], count: int) -> tuple[str, Any]:
    """An event that touches what is counted, and its stream."""
    name, request = rng.choice(WORKERS), rng.choice([*open_, "q0"])
    boot = rng.choice(("b1", "b1", "b1", "b2"))
    kind = rng.randrange(10)
    if kind < 2:
        open_.append(f"q{count}")
        return "r.r0", arrived(f"q{count}")
    if kind < 4:
        holders = tuple(rng.sample(WORKERS, rng.randrange(3)))
        return "r.r0", chosen(request, holders, attempt=rng.randint(1, 2))
    if kind < 7:
        return f"w.{name}", held(name, request, rng.randint(0, 20), rng.randrange(2), boot)
    if kind == 7:
        left = rng.randint(0, 5)
        return f"w.{name}", v.CheckpointEvicted(
            holder=name, boot=boot, request=request, child=0, tokens=left * 16, bytes=left * 1000
        )
    if kind == 8:
        return "r.r0", ended(request)
    return f"w.{name}", rng.choice(
        (
            daemon(name, boot),
            v.StateDaemonLost(name, boot, "died"),
            v.CheckpointDropped(holder=name, boot=boot, request=request, child=0, reason="expired"),
        )
    )


@pytest.mark.parametrize("seed", range(30))
def test_the_sums_are_what_recounting_gives_and_own_events_count_before_they_land(
    seed: int,
) -> None:
    rng = random.Random(seed)
    story, open_ = fleet_of(), []
    for count in range(120):
        story.tell(*drawn(rng, open_, count))
        fleet = story.fleet
        sums = {n: (h.placed_blocks, h.promised_bytes) for n, h in fleet.holders.items()}
        assert sums == recounted(fleet), f"seed {seed}, event {count}"
    view = View("r.r0", story.fleet)
    view.landed()
    pending: list[Any] = []
    for request in rng.sample(sorted(fleet.requests), len(fleet.requests) // 2):
        for attempt in range(2, 2 + rng.randrange(3)):
            pending.append(chosen(request, tuple(rng.sample(WORKERS, 2)), attempt=attempt))
        if rng.random() < 0.5:
            pending.append(ended(request))
    for event in pending:
        view.own(view.position + 1, event)
    before = decisions.sites(view)
    half = len(pending) // 2
    for part in (pending[:half], pending[half:]):
        for event in part:
            story.tell("r.r0", event)
        view.landed()
        assert decisions.sites(view) == before, f"seed {seed}"
    assert pending


@pytest.mark.parametrize("seed", range(10))
def test_an_index_kept_between_decisions_decides_as_a_new_one(seed: int) -> None:
    rng = random.Random(seed)
    story, open_ = fleet_of(), []
    view = View("r.r0", story.fleet)
    for count in range(150):
        story.tell(*drawn(rng, open_, count))
        if count == 90:
            story.tell("w.w1", v.WorkerRegistered(worker="w1", domain="host-w2", agent_pid=7))
            story.leader()
            story.tell("fleet", v.ConfigChanged("checkpoints.alpha", "3", "c"))
        view.landed()
        new = View("r.r0", story.fleet)
        new.landed()
        assert decisions.place(view, "x", "w0", 9) == decisions.place(new, "x", "w0", 9)


def test_a_burst_of_own_placements_spreads_before_any_is_in_the_log() -> None:
    story = fleet_of()
    view = View("r.r0", story.fleet)
    for n in range(9):
        placed, size = decisions.place(view, f"q{n}", "w0", 8)
        assert size == 8000 and "w0" not in placed.holders
        view.own(n + 3, chosen(f"q{n}", placed.holders))
    names = [h for n in range(9) for h in view.checkpoints.placement(f"q{n}").holders]
    assert {name: names.count(name) for name in WORKERS[1:]} == {"w1": 3, "w2": 3, "w3": 3}


@pytest.mark.parametrize(("version", "placed", "promised"), [("2", ("w1",), 8000), ("1", (), 0)])
def test_an_own_placement_gives_way_to_one_of_a_later_attempt(
    version: str, placed: tuple[str, ...], promised: int
) -> None:
    """Composed 173250: r0 wrote nothing for 8 s, and r1 continued the request meanwhile. The fold ignores
    what r0 decided for the earlier attempt."""
    story = fleet_of()
    started = (*settings_of(CheckpointConfig()), (PLACEMENT_VERSION, version))
    story.tell("r.r0", replica_started(settings=started))
    view = View("r.r0", story.fleet)
    story.tell("r.r1", arrived("q"))
    own = chosen("q", (), attempt=1)
    view.own(view.position + 1, own)
    story.tell("r.r1", chosen("q", ("w1",), attempt=3))
    found = view.checkpoints.placement("q")
    assert found is not None and found.holders == placed
    sums = view.checkpoints.shares()
    assert story.fleet.holders["w1"].promised_bytes + sums.get("w1", (0, 0))[1] == promised
    story.tell("r.r0", own)
    view.landed()
    after = view.checkpoints.placement("q")
    assert after is not None and after.holders == ("w1",)
    view.own(view.position + 1, chosen("q", ("w2",), attempt=3))
    found = view.checkpoints.placement("q")
    assert found is not None and found.holders == ("w2",)


def test_holders_that_are_still_of_use_stay() -> None:
    story = fleet_of(config=CheckpointConfig(holders=2))
    view = View("r.r0", story.fleet)
    story.tell("r.r0", arrived("q"), chosen("q", ("w1", "w2")))
    story.tell("w.w2", v.StateDaemonLost("w2", "b1", "killed"))
    assert decisions.displaced(view, "q", "w0") == "holder_lost"
    placed, _ = decisions.place(view, "q", "w0", 8)
    assert placed.holders == ("w1", "w3")
    placed, _ = decisions.place(view, "q", "w1", 8)
    assert set(placed.holders) == {"w0", "w3"}, "w1 runs it now"


def test_a_holder_that_took_the_request_over_is_replaced() -> None:
    """It would hold the only copy of what it computes itself."""
    story = fleet_of()
    view = View("r.r0", story.fleet)
    story.tell("r.r0", arrived("q"), chosen("q", ("w1",)))
    assert decisions.displaced(view, "q", "w0") is None
    assert decisions.displaced(view, "q", "w1") == "recovered"


def test_a_full_fleet_places_nothing_and_says_so() -> None:
    view = View("r.r0", fleet_of(budget=7_999).fleet)
    placed, _ = decisions.place(view, "q", "w0", 8)
    assert (placed.holders, placed.reason) == ((), "budget")


def lost_two(story: Story) -> list[Lost]:
    """Two requests of w0, of which w1 holds the first 1600 tokens of one."""
    for name in ("q1", "q2"):
        dispatched = decided(name, prompt=2000)
        story.tell("r.r0", arrived(name, 2000), dispatched, chosen(name, ("w1",)))
    story.tell("w.w1", held("w1", "q1", 100))
    return [Lost(name, 1, 2100, ("w0:1",)) for name in ("q1", "q2")]


def test_a_plan_is_made_for_all_and_routing_keeps_it_while_it_can() -> None:
    story = fleet_of()
    lost = lost_two(story)
    view = View("r.r0", story.fleet)
    view.landed()
    view.own(view.position + 1, v.WorkerSuspected("w0", 1, "reset"))
    one, two = decisions.plan(view, "w0", 1, lost)
    restored = one.options[one.chosen]
    assert (restored.kind, restored.holder, restored.worker) == ("restore", "w1", "w1")
    other = two.options[two.chosen]
    assert other.kind == "recompute" and other.worker in ("w2", "w3")
    assert all(o.excluded for o in (*one.options, *two.options) if o.worker == "w0")
    position = view.position + 1
    made = v.RecoveryPlanned(
        decision="p1",
        basis=BASIS,
        worker="w0",
        incarnation=1,
        policy="completion",
        choices=(one, two),
    )
    view.own(position, made)
    query = RouteQuery(
        request="q1", model=MODEL, prompt_tokens=2000, delivered=100, avoid=("w0:1",), lost=1
    )
    assert choose_worker.planned(view, query).worker == "w1"
    assert decisions.sources(view, "q1", "w1", 1) == ("tcp://w1:1",)
    assert decisions.sources(view, "q2", other.worker, 1) == (), "it is computed again"
    later = msgspec.structs.replace(query, lost=2)
    assert choose_worker.planned(view, later) == choose_worker.least_load(view, later), (
        "of another failure"
    )
    story.tell("r.r0", v.WorkerSuspected("w0", 1, "reset"), made)
    view.landed()
    assert choose_worker.planned(view, query).worker == "w1", "the fold holds it now"
    story.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    assert choose_worker.planned(view, query).worker in ("w2", "w3")
    story.tell("r.r0", ended("q1"))
    assert story.fleet.planned.keys() == {"q2"}


def test_without_coverage_there_is_nothing_to_plan() -> None:
    story = fleet_of()
    lost = lost_two(story)
    view = View("r.r0", story.fleet)
    story.tell("w.w1", v.StateDaemonLost("w1", "b1", "killed"))
    assert decisions.plan(view, "w0", 1, lost) == ()
    assert decisions.sources(view, "q1", "w2", 1) == ()


def test_blocks_that_a_quarantined_worker_computed_are_not_restored() -> None:
    story = fleet_of()
    lost = lost_two(story)
    view = View("r.r0", story.fleet)
    assert decisions.sources(view, "q1", "w1", 1) == ("tcp://w1:1",)
    wrong = v.HealthDecided(
        worker="w0", incarnation=1, state="quarantined", failure="corruption", evidence="", since=1
    )
    story.tell("fleet", wrong)
    assert decisions.plan(view, "w0", 1, lost) == ()
    assert decisions.sources(view, "q1", "w1", 1) == ()


def test_nor_those_that_a_later_attempt_has_written_again() -> None:
    """The leader voids them after the verdict, and the replay may begin before."""
    story = fleet_of()
    lost_two(story)
    view = View("r.r0", story.fleet)
    story.tell("r.r0", decided("q1", 2, "w2"), chosen("q1", ("w1",), "w2", 2))
    assert decisions.sources(view, "q1", "w3", 2) == ("tcp://w1:1",)
    wrong = v.HealthDecided(
        worker="w0", incarnation=1, state="quarantined", failure="corruption", evidence="", since=1
    )
    story.tell("fleet", wrong)
    assert decisions.sources(view, "q1", "w3", 2) == ()
    assert decisions.plan(view, "w2", 1, [Lost("q1", 2, 2100, ("w0:1", "w2:1"))]) == ()


def test_recompute_restores_nothing() -> None:
    story = fleet_of(config=CheckpointConfig(recovery="recompute"))
    lost = lost_two(story)
    view = View("r.r0", story.fleet)
    assert decisions.plan(view, "w0", 1, lost) == ()
    assert decisions.sources(view, "q1", "w1", 1) == ()


def test_an_unreachable_holder_is_no_option_to_restore() -> None:
    story = fleet_of()
    lost = lost_two(story)
    far = v.StateDaemonStarted(
        worker="w1",
        boot="b2",
        epoch=1,
        address="",
        budget_bytes=1 << 20,
        family="f",
        local="unix:/run/d",
        machine="other-machine",
    )
    story.tell("w.w1", far, held("w1", "q1", 100, boot="b2"))
    choice, _ = decisions.plan(View("r.r0", story.fleet), "w0", 1, lost)
    said = {o.worker: o.excluded for o in choice.options if o.kind == "restore"}
    assert said["w2"] == "unreachable" and said["w1"] == "", "its own machine reaches it"


def test_measured_links_replace_the_tiers_and_slow_ones_are_not_used() -> None:
    story = fleet_of()
    lost = lost_two(story)
    slow = v.RestoreDone(
        incarnation=1,
        request="q0",
        child=0,
        attempt=2,
        holder="tcp://w1:1",
        tokens=100,
        bytes=1_000,
        duration_us=10_000_000,
    )
    for name in WORKERS:
        story.tell(f"w.{name}", slow)
    choice, _ = decisions.plan(View("r.r0", story.fleet), "w0", 1, lost)
    assert choice.options[choice.chosen].kind == "recompute"


def test_a_link_is_known_by_what_others_measured_of_its_ends() -> None:
    """Nobody restored anything: engines read a few blocks back, and tell."""

    def chosen_after(policy: str, *measured: tuple[str, int]) -> tuple[str, str]:
        story = fleet_of(config=CheckpointConfig(recovery=policy, link_network=1))
        lost = lost_two(story)
        for name, took_us in measured:
            story.tell(f"w.{name}", v.LinkMeasured(1, "tcp://w1:1", 1 << 20, took_us))
        choice, _ = decisions.plan(View("r.r0", story.fleet), "w0", 1, lost)
        option = choice.options[choice.chosen]
        speeds = {o.worker: o.move_us for o in choice.options if o.kind == "restore"}
        return option.kind, "quick" if speeds["w2"] < 100_000 else "slow"

    assert chosen_after("least_total")[1] == "slow"
    assert chosen_after("least_total", ("w2", 1_000))[1] == "quick"
    assert chosen_after("least_total", ("w0", 1_000))[1] == "quick", "as w1 sends to w0"
    assert chosen_after("least_delay", ("w0", 1_000))[1] == "slow", "as such logs were decided"


def test_logs_that_tell_no_recovery_were_decided_by_completion() -> None:
    assert decisions.config_of(View("r.r9", Fleet())).recovery == "completion"
    assert CheckpointConfig().recovery == "least_total"


def test_the_record_of_a_plan_is_bounded() -> None:
    names = tuple(f"w{n}" for n in range(40))
    story = fleet_of(*names)
    many = []
    for n in range(300):
        story.tell("r.r0", arrived(f"q{n}"), decided(f"q{n}"), chosen(f"q{n}", ("w1",)))
        story.tell("w.w1", held("w1", f"q{n}", 5))
        many.append(Lost(f"q{n}", 1, 120, ("w0:1",)))
    view = View("r.r0", story.fleet)
    choices = decisions.plan(view, "w0", 1, many)
    assert sum(len(c.options) for c in choices) <= 4096
    assert all(c.chosen == 0 and not c.options[0].excluded for c in choices)
    assert len({c.options[0].worker for c in choices}) > 10


def test_pace_is_learnt_from_steps_that_compute_prompts() -> None:
    story = fleet_of("w0", "w1")
    w0, w1 = story.fleet.workers["w0"], story.fleet.workers["w1"]
    assert prefill_ns(story.fleet, w0, 50_000) == 50_000
    story.tell("w.w0", engine_step(us=1000))
    story.tell(
        "w.w0",
        v.EngineStep(
            incarnation=1,
            step=2,
            duration_us=21_000,
            batch=1,
            sum_context=100,
            prefill_tokens=1000,
            waiting=0,
            kv_used=8,
        ),
    )
    assert prefill_ns(story.fleet, w0, 1) == 20_000
    assert prefill_ns(story.fleet, w1, 1) == 20_000, "as the others of its model"
    story.tell(
        "w.w0",
        v.EngineStep(
            incarnation=1,
            step=9,
            duration_us=21_000,
            batch=1,
            sum_context=100,
            prefill_tokens=7000,
            waiting=0,
            kv_used=8,
        ),
    )
    assert prefill_ns(story.fleet, w0, 1) == 20_000, "seven steps in one record tell nothing"
    for number in range(10, 200):
        story.tell(
            "w.w0",
            v.EngineStep(
                incarnation=1,
                step=number,
                duration_us=21_000,
                batch=1,
                sum_context=100,
                prefill_tokens=1000,
                waiting=0,
                kv_used=8,
            ),
        )
    assert w0.prefill_tokens <= 1 << 16, "old steps fade"


def test_settings_come_from_the_log() -> None:
    config = CheckpointConfig(placement="neighbour", recovery="eq6", holders=2, alpha=3)
    story = fleet_of(config=config)
    view = View("r.r0", story.fleet)
    assert config_of(view) == config
    story.leader()
    story.tell("fleet", v.ConfigChanged("checkpoints.alpha", "7", "c1"))
    assert config_of(view).alpha == 7
    assert "checkpoints.alpha" in INTEGERS and "checkpoints.placement" not in INTEGERS
