"""No policy fills a worker beyond what the waiting room lets it have while another is open."""

from __future__ import annotations

import pytest

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Exclusion
from relume.policies.admission.admission_settings import config_of
from relume.policies.routing import estimate_index, selection
from relume.policies.routing.choose_worker import decide
from relume.policies.routing.eligibility import queue_limit
from relume.policies.routing.route_query import RouteQuery
from relume.policies.routing.saturation import FREE, SATURATED, saturation
from relume.policies.state.overlay.view import View
from tests.policies.routing.test_ranking import fleet_of
from tests.policies.routing.test_selectors import Busy
from tests.policies.story import MODEL, Story, decided, engine_step, queued, replica_started

QUEUED = 3
SETTINGS = (("routing.overfill", "off"), ("waiting.queued", str(QUEUED)))
LOYAL = ("routing.affinity_percent", "10000")
"""A session stays however many requests its worker has."""


def view_of(story: Story, settings: tuple[tuple[str, str], ...] = SETTINGS) -> View:
    story.tell("r.r0", replica_started(settings=settings))
    view = View("r.r0", story.fleet)
    view.landed()
    view.own(view.position + 1, v.GroupsReceived(story.revision, (0, 0)))
    view.now_us = 0
    return view


def fill(story: Story, name: str, count: int = QUEUED) -> None:
    told = [queued(f"{name}.{story.revision}.{n}", prompt=9) for n in range(count)]
    story.tell(
        f"w.{name}",
        v.EngineStep(
            incarnation=1,
            step=0,
            duration_us=0,
            batch=0,
            sum_context=0,
            prefill_tokens=0,
            waiting=0,
            kv_used=8,
            changes=tuple(told),
        ),
    )


def home(story: Story, policy: str, settings: tuple[tuple[str, str], ...] = SETTINGS) -> str:
    """Where a request of session `s`, 40 tokens long, goes."""
    query = RouteQuery(request="q9", model=MODEL, prompt_tokens=40, delivered=0, session="s")
    return decide(view_of(story, settings), query, policy).worker


@pytest.mark.parametrize("workers", [4, 40])
@pytest.mark.parametrize("policy", ["session_affinity", "prefix_first", "predicted_ttft"])
def test_a_full_worker_is_passed_over_and_taken_when_all_are(policy: str, workers: int) -> None:
    """Whatever would be looked at first, all but one are full."""
    story = fleet_of(workers)
    first = home(story, policy)
    others = [name for name in story.fleet.workers if name != first]
    free = others[-1]
    for name in story.fleet.workers:
        if name != free:
            fill(story, name)
    for _ in range(5):  # requests that are decoded fill nobody
        fill(story, free, 1)
        told = [v.FirstToken(a.request, 1) for a in story.fleet.workers[free].attempts.values()]
        story.tell(
            f"w.{free}",
            v.EngineStep(
                incarnation=1,
                step=0,
                duration_us=0,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=0,
                kv_used=8,
                changes=tuple(told),
            ),
        )
    view = view_of(story)
    assert saturation(view, MODEL, config_of(view), 0)[0] == FREE
    assert home(story, policy) == free
    fill(story, free)
    view = view_of(story)
    assert saturation(view, MODEL, config_of(view), 0)[0] == SATURATED
    assert home(story, policy) == home(story, policy, ())


def test_a_session_stays_with_a_full_worker_where_the_log_tells_of_no_bound() -> None:
    story = fleet_of(4)
    first = home(story, "session_affinity", (LOYAL,))
    fill(story, first, 300)
    assert home(story, "session_affinity", (LOYAL,)) == first
    assert home(story, "session_affinity", (LOYAL, *SETTINGS)) != first
    on = ("routing.overfill", "on")
    assert home(story, "session_affinity", (LOYAL, on, *SETTINGS[1:])) == first
    no_room = ("waiting.requests", "0")
    assert home(story, "session_affinity", (LOYAL, *SETTINGS, no_room)) == first


def test_prompts_beyond_the_bound_in_time_fill_a_worker_too() -> None:
    story = fleet_of(3)
    first = home(story, "session_affinity")
    story.tell(f"w.{first}", engine_step(queued("long", prompt=6000)))
    assert home(story, "session_affinity", (LOYAL, *SETTINGS)) == first
    in_time = (LOYAL, *SETTINGS, ("waiting.ahead_ms", "1"))
    assert home(story, "session_affinity", in_time) != first


def test_what_others_may_have_sent_counts_as_in_the_room() -> None:
    story = fleet_of(2)
    first, chosen = home(story, "session_affinity"), []
    for alone in (True, False):
        if not alone:
            story.replica("r1")
            story.replica("r2")
        view = view_of(story, (LOYAL, *SETTINGS))
        view.own(view.position + 1, decided("x1", worker=first))
        query = RouteQuery(request="q9", model=MODEL, prompt_tokens=40, delivered=0, session="s")
        chosen.append(decide(view, query, "session_affinity").worker)
    assert chosen[0] == first
    assert chosen[1] != first, "one that nobody heard of yet, of each of three replicas"


@pytest.mark.parametrize("policy", selection.POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_the_chosen_is_full_only_where_the_room_says_that_all_are(policy: str, seed: int) -> None:
    """And a view of its own, as replay has it, chooses the same."""
    life = Busy(seed)
    life.story.tell("r.r0", replica_started(settings=SETTINGS))
    life.head = life.story.fleet.streams["r.r0"].position
    life.pending.clear()
    life.view = View("r.r0", life.story.fleet)
    life.view.landed()
    for _ in range(150):
        life.one()
        life.receive()
        view, config = life.view, config_of(life.view)
        query = RouteQuery(
            request="q9",
            model=MODEL,
            prompt_tokens=life.draw.randint(1, 900),
            delivered=0,
            session=f"s{life.draw.random()}",
        )
        room, _ = saturation(view, MODEL, config, view.now_us, glance=False)
        choice = decide(view, query, policy)
        fresh = View("r.r0", life.story.fleet)
        fresh.landed()
        for number, event in enumerate(life.pending):
            fresh.own(life.head + number + 1, event)
        fresh.now_us = view.now_us
        assert decide(fresh, query, policy) == choice, f"seed {seed}"
        named = {c.worker: c for c in choice.candidates}
        if room == FREE and named[choice.worker].excluded == Exclusion.SATURATED:
            queues = estimate_index.of(view, MODEL, estimate_index.by_queue)
            of = queues.estimates[queues.soonest(queue_limit(view, config))[1]]
            no_room = query.prompt_tokens // 16 >= of.kv_free
            assert no_room or view.now_us > of.silent_at_us, f"seed {seed}"
