"""Least load over the view."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from relume.events import vocabulary as v
from relume.policies.routing import choose_worker
from relume.policies.routing.choose_worker import least_load, round_robin
from relume.policies.routing.eligibility import excluded_at, excluded_for
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.overlay.view import View
from tests.policies.story import Story, arrived, decided, died, engine_step, queued, ready, started

QUERY = RouteQuery(request="q9", model="m", prompt_tokens=50, delivered=0)


def fleet_of(count: int) -> Story:
    story = Story()
    for index in range(count):
        story.worker(f"w{index}")
    story.replica()
    return story


def view_of(story: Story, replica: str = "r0") -> View:
    view = View(f"r.{replica}", story.fleet)
    view.landed()
    return view


def excluded(view: View, query: RouteQuery = QUERY) -> dict[str, str]:
    return {c.worker: c.excluded for c in least_load(view, query).candidates}


def test_least_loaded_worker_is_chosen() -> None:
    story = fleet_of(3)
    story.tell("w.w0", engine_step(queued("a", prompt=10)))
    story.tell("w.w2", engine_step(queued("b", prompt=90)))
    choice = least_load(view_of(story), QUERY)
    assert (choice.worker, choice.incarnation) == ("w1", 1)
    assert [(c.worker, c.cost) for c in choice.candidates] == [("w0", 42), ("w1", 0), ("w2", 122)]


def test_prefill_and_held_requests_both_weigh() -> None:
    """A decoding request costs a step's share, not its prompt (Llumnix Ial)."""
    story = fleet_of(2)
    story.tell("w.w0", engine_step(queued("a", prompt=4000), v.FirstToken("a", 1)))
    story.tell("w.w1", engine_step(queued("b", prompt=choose_worker.REQUEST_TOKENS)))
    assert least_load(view_of(story), QUERY).worker == "w0"


def test_own_dispatches_spread_before_any_of_them_lands() -> None:
    story = fleet_of(3)
    view = view_of(story)
    for number in range(9):
        choice = least_load(
            view, RouteQuery(request=f"q{number}", model="m", prompt_tokens=100, delivered=0)
        )
        event = decided(f"q{number}", worker=choice.worker)
        view.own(view.position + 1, event)
    assert [view.load(w)[1] for w in story.fleet.workers.values()] == [3, 3, 3]


@pytest.mark.parametrize("policy", sorted({*choose_worker.POLICIES} - {"power_of_two"}))
@pytest.mark.parametrize("events_between", [1, 2, 3, 4])
def test_idle_fleet_is_used_evenly(policy: str, events_between: int) -> None:
    """Whatever else the replica writes between two decisions."""
    story = fleet_of(3)
    view = view_of(story)
    used: Counter[str] = Counter()
    for number in range(9):
        name = f"q{number}"
        used[choose_worker.POLICIES[policy](view, QUERY).worker] += 1
        written: list[Any] = [decided(name, worker="elsewhere"), *[arrived(name)] * events_between]
        for event in written:
            view.own(view.position + 1, event)
    assert used == {"w0": 3, "w1": 3, "w2": 3}


def test_two_replicas_do_not_herd() -> None:
    story = fleet_of(3)
    story.replica("r1")
    first = {least_load(view_of(story, replica), QUERY).worker for replica in ("r0", "r1")}
    assert len(first) == 2


def test_what_cannot_take_it_is_excluded_with_the_reason() -> None:
    story = fleet_of(7)
    story.tell("w.w0", died("w0"))
    story.tell("w.w1", died("w1"), started("w1", 2))
    story.tell("w.w2", died("w2"), started("w2", 2), ready("w2", 2, model="other"))
    story.tell("fleet", v.WorkerLost("w3", story.fleet.workers["w3"].epoch, "lease lapsed"))
    effects = (v.Effect("drain", "w4"),)
    story.tell(
        "fleet", v.EffectsDecided(decision="c", basis=v.Basis(1, 0), cause="op", effects=effects)
    )
    story.tell("r.r0", v.WorkerSuspected("w5", 1, "silent"))
    view = view_of(story)
    assert excluded(view) == {
        "w0": "engine dead",
        "w1": "engine starting",
        "w2": "other model",
        "w3": "lost",
        "w4": "draining",
        "w5": "suspected",
        "w6": "",
    }
    assert least_load(view, QUERY).worker == "w6"


def test_suspicion_of_an_old_incarnation_does_not_exclude_the_new() -> None:
    story = fleet_of(1)
    story.tell("r.r0", v.WorkerSuspected("w0", 1, "silent"))
    assert least_load(view_of(story), QUERY).worker == ""
    story.tell("w.w0", died(), started(incarnation=2), ready(incarnation=2))
    assert least_load(view_of(story), QUERY).worker == "w0"


def test_suspicion_is_each_replicas_own() -> None:
    story = fleet_of(1)
    story.replica("r1")
    story.tell("r.r0", v.WorkerSuspected("w0", 1, "silent"))
    assert least_load(view_of(story, "r0"), QUERY).worker == ""
    assert least_load(view_of(story, "r1"), QUERY).worker == "w0"


@pytest.mark.parametrize("policy", sorted(choose_worker.POLICIES))
def test_worker_it_failed_on_is_the_last_resort(policy: str) -> None:
    story = fleet_of(2)
    story.tell("w.w1", engine_step(queued("a", prompt=4000)))
    again = RouteQuery(request="q9", model="m", prompt_tokens=50, delivered=10, avoid=("w0:1",))
    assert choose_worker.POLICIES[policy](view_of(story), again).worker == "w1"
    story.tell("w.w1", died("w1"))
    assert choose_worker.POLICIES[policy](view_of(story), again).worker == "w0"
    story.tell("r.r0", v.WorkerSuspected("w0", 1, "silent"))
    assert choose_worker.POLICIES[policy](view_of(story), again).worker == "", (
        "health is never traded"
    )


def test_restarted_worker_may_take_what_its_last_life_failed() -> None:
    story = fleet_of(1)
    story.tell("w.w0", died(), started(incarnation=2), ready(incarnation=2))
    assert excluded(
        view_of(story),
        RouteQuery(request="q9", model="m", prompt_tokens=50, delivered=0, avoid=("w0:1",)),
    ) == {"w0": ""}


def test_no_worker_up_is_an_answer_with_candidates() -> None:
    story = fleet_of(2)
    story.tell("w.w0", died("w0"))
    story.tell("w.w1", died("w1"))
    choice = least_load(view_of(story), QUERY)
    assert (choice.worker, choice.incarnation) == ("", 0)
    assert [c.excluded for c in choice.candidates] == ["engine dead", "engine dead"]
    assert round_robin(view_of(story), QUERY) == choice
    assert least_load(View("r.r0", Story().fleet), QUERY).candidates == ()


def plainly(view: View, query: RouteQuery) -> tuple[str, list[tuple[str, int, str]]]:
    """The choice and (worker, cost, exclusion) of all, by what is said of each alone."""
    workers = list(view.fleet.workers.values())
    no_failure = replace(query, avoid=())
    shown, open_, avoided = [], [], []
    for index, worker in enumerate(workers):
        prefill, requests = view.load(worker)
        cost = prefill + choose_worker.REQUEST_TOKENS * requests
        why = excluded_at(view, worker, query.model) or excluded_for(worker, no_failure)
        if not why:
            rank = cost, (index - view.turn) % len(workers), worker.name
            if f"{worker.name}:{worker.incarnation}" in query.avoid:
                why = "failed it before"
                avoided.append(rank)
            else:
                open_.append(rank)
        shown.append((worker.name, cost, why))
    ranked = open_ or avoided
    return (min(ranked)[2] if ranked else ""), shown


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_least_of_what_is_said_of_each(seed: int) -> None:
    draw = random.Random(seed)
    story = fleet_of(draw.randint(1, 9))
    names = list(story.fleet.workers)
    for number in range(draw.randint(0, 30)):
        worker = draw.choice(names)
        story.tell(f"w.{worker}", engine_step(queued(f"q{number}", prompt=draw.randint(1, 99))))
    if draw.random() < 0.5:
        story.tell(f"w.{names[0]}", died(names[0]))
    view = view_of(story)
    for number in range(draw.randint(0, 12)):
        worker = draw.choice(names)
        own = draw.choice(
            (
                decided(f"o{number}", worker=worker, prompt=draw.randint(1, 99)),
                v.WorkerSuspected(worker, 1, "told"),
                v.WorkerCleared(worker, 1, "told"),
            )
        )
        view.own(view.position + 1, own)
    avoid = tuple(f"{n}:1" for n in names if draw.random() < 0.3)
    query = RouteQuery(request="q9", model="m", prompt_tokens=50, delivered=0, avoid=avoid)
    choice = least_load(view, query)
    shown = [(c.worker, c.cost, c.excluded) for c in choice.candidates]
    assert (choice.worker, shown) == plainly(view, query)
