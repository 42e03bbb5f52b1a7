"""Large fleets: the best are named, the rest counted, without a look at all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from relume.events import vocabulary as v
from relume.policies.recovery.resume_mode import grounded
from relume.policies.routing import choose_worker
from relume.policies.routing.choose_worker import decide
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.overlay.view import View
from tests.policies.story import (
    MODEL,
    Story,
    decided,
    died,
    engine_step,
    finished,
    queued,
    ready,
    started,
)

POLICIES = sorted(choose_worker.RECORDED)


def fleet_of(count: int) -> Story:
    story = Story()
    for index in range(count):
        story.worker(f"w{index}")
    story.replica()
    return story


def view_of(story: Story) -> View:
    view = View("r.r0", story.fleet)
    view.landed()
    return view


def whole(view: View, query: RouteQuery, policy: str = "least_load") -> choose_worker.Choice:
    """The same by a pass over all workers."""
    return choose_worker._shortened(
        view, query, policy, choose_worker.RECORDED[policy](view, query)
    )


def test_small_fleets_name_everybody() -> None:
    view = view_of(fleet_of(choose_worker.WHOLE))
    choice = decide(
        view, RouteQuery(request="q9", model=MODEL, prompt_tokens=50, delivered=0), "least_load"
    )
    assert len(choice.candidates) == choose_worker.WHOLE
    assert choice.others == ()


def test_large_fleets_name_the_best_and_count_the_rest() -> None:
    story = fleet_of(20)
    for index in range(12):
        story.tell(f"w.w{index}", engine_step(queued(f"q{index}", prompt=100 + index)))
    story.tell("w.w19", died("w19"))
    choice = decide(
        view_of(story),
        RouteQuery(request="q9", model=MODEL, prompt_tokens=50, delivered=0),
        "least_load",
    )
    assert {c.worker for c in choice.candidates} == {"w0", *(f"w{n}" for n in range(12, 19))}
    assert [c.cost for c in choice.candidates] == [0] * 7 + [132]
    assert choice.worker == choice.candidates[0].worker
    assert choice.others == (("", 11), ("engine dead", 1))


def test_no_worker_up_is_counted_by_reason() -> None:
    story = fleet_of(20)
    for index in range(20):
        story.tell(f"w.w{index}", died(f"w{index}"))
    choice = decide(
        view_of(story),
        RouteQuery(request="q9", model=MODEL, prompt_tokens=50, delivered=0),
        "least_load",
    )
    assert choice == choose_worker.Choice(
        worker="", incarnation=0, candidates=(), others=(("engine dead", 20),)
    )


def test_workers_that_failed_it_are_named() -> None:
    choice = decide(
        view_of(fleet_of(30)),
        RouteQuery(
            request="q9", model=MODEL, prompt_tokens=50, delivered=0, avoid=("w7:1",), lost=1
        ),
        "least_load",
    )
    assert choice.candidates[-1] == v.Candidate(
        worker="w7",
        incarnation=1,
        cost=0,
        prefill_tokens=0,
        requests=0,
        excluded="failed it before",
    )
    assert choice.others == (("", 21),)


class Life:
    """A random life of a fleet and of a replica whose own events land late."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.story = fleet_of(self.draw.randint(17, 26))
        self.names = list(self.story.fleet.workers)
        self.view = view_of(self.story)
        self.head = self.story.fleet.streams["r.r0"].position
        self.pending: list[Any] = []
        self.attempts: list[tuple[str, str]] = []
        self.ticks = 0

    def own(self, event: Any) -> None:
        self.pending.append(event)
        self.view.own(self.head + len(self.pending), event)

    def one(self) -> None:
        """Something happens."""
        draw, story = self.draw, self.story
        name, what = draw.choice(self.names), draw.random()
        worker = story.fleet.workers[name]
        if what < 0.3:
            request = f"o{len(self.attempts)}"
            self.attempts.append((request, name))
            event = decided(request, worker=name, incarnation=worker.incarnation, prompt=9)
            self.own(event)
        elif what < 0.45 and self.attempts:
            request, name = draw.choice(self.attempts)
            story.tell(f"w.{name}", engine_step(queued(request, prompt=draw.randint(1, 99))))
        elif what < 0.55 and self.attempts:
            request, name = draw.choice(self.attempts)
            story.tell(f"w.{name}", engine_step(finished(request)))
        elif what < 0.65 and self.attempts:
            request, name = draw.choice(self.attempts)
            self.own(
                v.RequestEnded(
                    request=request,
                    outcome="completed",
                    status=200,
                    tokens=1,
                    finish="stop",
                    attempts=1,
                    verdict="exact",
                )
            )
        elif what < 0.85:
            landing = self.pending[: draw.randint(0, len(self.pending))]
            if landing:
                story.tell("r.r0", *landing)
                self.pending, self.head = self.pending[len(landing) :], self.head + len(landing)
                self.view.landed()
        elif what < 0.88:
            story.tell(f"w.{name}", died(name, worker.incarnation))
        elif what < 0.91:
            number = worker.incarnation + 1
            story.tell(f"w.{name}", started(name, number), ready(name, number))
        elif what < 0.94:
            told = draw.choice((v.WorkerSuspected, v.WorkerCleared))
            self.own(told(name, worker.incarnation, "told"))
        elif what < 0.96:
            effect = v.Effect(draw.choice(("drain", "undrain")), name)
            story.tell(
                "fleet",
                v.EffectsDecided(
                    decision=f"c{self.ticks}", basis=v.Basis(1, 0), cause="op", effects=(effect,)
                ),
            )
        else:
            self.ticks += draw.choice((1, 70))
            story.tell("fleet", v.Tick(self.ticks, self.ticks * 1000))
            self.view.landed()


@pytest.mark.parametrize("seed", range(30))
def test_what_is_kept_gives_what_a_pass_over_all_gives(seed: int) -> None:
    """Whatever happened since the last decision."""
    life = Life(seed)
    query = RouteQuery(request="q9", model=MODEL, prompt_tokens=50, delivered=0)
    for _ in range(250):
        life.one()
        if life.draw.random() < 0.5:
            assert decide(life.view, query, "least_load") == whole(life.view, query)
            fresh = View("r.r0", life.story.fleet)
            fresh.landed()
            for number, event in enumerate(life.pending):
                fresh.own(life.head + number + 1, event)
            assert decide(fresh, query, "least_load") == whole(life.view, query)


def test_a_stream_with_tokens_leaves_out_servers_without_the_plugin() -> None:
    """Large fleets too, and whether the request failed somewhere or not."""
    story = fleet_of(20)
    for worker in list(story.fleet.workers.values())[:19]:
        worker.plain = True
    query = RouteQuery(request="q9", model=MODEL, prompt_tokens=50, delivered=3)
    choice = decide(view_of(story), query, "least_load")
    assert choice.worker == "w19"
    assert choice.others == (("tells no token ids", 19),)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_chooses_as_it_does_with_all_named(policy: str) -> None:
    life = Life(7)
    for _ in range(100):
        life.one()
        query = RouteQuery(
            request="q9",
            model=MODEL,
            prompt_tokens=50,
            delivered=0,
            avoid=life.draw.choice(((), ("w3:1",))),
            lost=1,
        )
        choice, plain = (
            decide(life.view, query, policy),
            choose_worker.RECORDED[policy](life.view, query),
        )
        assert (choice.worker, choice.incarnation) == (plain.worker, plain.incarnation)
        assert len(choice.candidates) + sum(n for _, n in choice.others) == len(life.names)
        assert not choice.worker or choice.worker in {c.worker for c in choice.candidates}


def test_another_weight_is_another_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(3)
    for _ in range(100):
        life.one()
    query = RouteQuery(request="q9", model=MODEL, prompt_tokens=50, delivered=0)
    decide(life.view, query, "least_load")
    monkeypatch.setattr(choose_worker, "REQUEST_TOKENS", 1)
    assert decide(life.view, query, "least_load") == whole(life.view, query)


def test_what_engines_can_is_asked_again_when_one_comes() -> None:
    story = Story()

    def comes(name: str, exact: tuple[str, ...]) -> None:
        engine = v.EngineReady(
            worker=name,
            incarnation=1,
            host="h",
            port=1,
            model=MODEL,
            max_model_len=100,
            block_size=16,
            kv_blocks=10,
            exact=exact,
        )
        story.tell(
            f"w.{name}",
            v.WorkerRegistered(worker=name, domain="host", agent_pid=7),
            started(name, 1),
            engine,
        )

    comes("w0", ("greedy", "seeded"))
    view = View("r.r0", story.fleet)
    assert grounded(view, MODEL, "exact", ("seeded",), "replay") == ("exact", "")
    comes("w1", ("greedy",))
    assert grounded(view, MODEL, "exact", ("seeded",), "replay")[0] == "replay"
    story.tell("w.w1", died("w1"))
    assert grounded(view, MODEL, "exact", ("seeded",), "replay") == ("exact", "")
