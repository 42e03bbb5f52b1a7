"""Policies over kept boards: they choose what a look at every worker would choose."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.events import vocabulary as v
from relume.policies.routing import estimate_index, selection
from relume.policies.routing.choose_worker import decide
from relume.policies.routing.eligibility import excluded_at
from relume.policies.routing.prefix_hits import Hits
from relume.policies.routing.route_query import RouteQuery
from relume.policies.routing.worker_estimate import WorkerEstimate, coarse, estimate_of
from relume.policies.state.overlay import receive_clock
from relume.policies.state.overlay.view import View
from tests.policies.routing.test_ranking import Life, fleet_of, view_of
from tests.policies.story import MODEL, arrived, decided, ended, engine_step, finished, queued


class Held(Hits):
    """Told outright."""

    def __init__(self, tokens: dict[str, int]) -> None:
        self.tokens = tokens

    def __bool__(self) -> bool:
        return bool(self.tokens)

    def of(self, worker: str) -> int:
        return self.tokens.get(worker, 0)

    def longest(self) -> Iterator[tuple[str, int]]:
        return iter(sorted(self.tokens.items(), key=lambda item: -item[1]))


def asking(tokens: int, begun: bool = False, **more: Any) -> RouteQuery:
    """A request with so many tokens to compute where nothing of it is held."""
    return RouteQuery(
        request="q", model=MODEL, prompt_tokens=tokens - begun, delivered=int(begun), **more
    )


def stepped(draw: random.Random, incarnation: int, number: int) -> v.EngineStep:
    """A step that computed prompts, decoded, or both; at a pace of its own."""
    tokens, batch = draw.choice(((0, 3), (200, 0), (400, 7), (0, 40))), draw.randint(1, 9)
    took = 500 * draw.randint(1, 40)
    return v.EngineStep(
        incarnation=incarnation,
        step=number,
        duration_us=took,
        batch=tokens[1],
        sum_context=300 * batch,
        prefill_tokens=tokens[0],
        waiting=0,
        kv_used=draw.randint(0, 500),
    )


class Busy(Life):
    """A life in which engines step, so that workers differ in pace."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.told_us = 0

    def one(self) -> None:
        super().one()
        if self.draw.random() < 0.5:
            name = self.draw.choice(self.names)
            worker = self.story.fleet.workers[name]
            steps = [stepped(self.draw, worker.incarnation, worker.step + 1)]
            if self.draw.random() < 0.3:  # gathered
                steps.append(stepped(self.draw, worker.incarnation, worker.step + 2))
            self.story.tell(f"w.{name}", *steps)
        if self.draw.random() < 0.1:
            name, number = self.draw.choice(self.names), self.story.revision
            worker = self.story.fleet.workers[name]
            sent = decided(f"r{number}", worker=name, incarnation=worker.incarnation, prompt=400)
            self.story.tell("r.r1", arrived(f"r{number}"), sent)
        if self.draw.random() < 0.1:
            self.receive()
            estimate_index.keep_up(self.view)

    def receive(self) -> None:
        """As before a decision: the replica says when the latest revisions came."""
        since = self.draw.randint(0, 30_000)
        self.own(v.GroupsReceived(self.story.revision, (0, since)))
        self.told_us += since
        self.view.now_us = self.told_us + self.draw.choice((0, 900, 4_000_000))

    def asked(self) -> RouteQuery:
        draw = self.draw
        held = {}
        if draw.random() < 0.7:
            holding = draw.sample(self.names, draw.randint(0, len(self.names)))
            held = {name: 16 * draw.randint(1, 60) for name in [*holding, "gone"]}
        return asking(
            tokens=draw.randint(1, 900), at_us=self.view.now_us,
            session=draw.choice(("", "s1", "s2")), avoid=draw.choice(((), ("w3:1", "w4:1"))), hits=Held(held),
            slo_us=draw.choice((0, 0, 20_000)), shed=draw.random() < 0.5,
        )  # fmt: skip

    def board(self, policy: str, view: View) -> estimate_index.EstimateIndex:
        return selection.index_of(view, MODEL, policy)


def expected_us(of: WorkerEstimate, asked: RouteQuery, name: str) -> int:
    """The cost in the words of the policy: what waits there, and what is not held there."""
    left = asked.tokens - min(asked.hits.of(name), asked.tokens)
    return max(of.free_at_us - asked.at_us, 0) + left * of.token_ns // 1000 + of.fixed_us


def all_by_ttft(view: View, asked: RouteQuery) -> list[tuple[str, int]]:
    """(worker, expected TTFT) of all open workers, by a look at each."""
    count = len(view.fleet.workers)
    turn = view.turn % count
    ranked = []
    for at, worker in enumerate(view.fleet.workers.values()):
        if not excluded_at(view, worker, MODEL):
            of = estimate_of(view, worker)
            cost = expected_us(of, asked, worker.name)
            ranked.append((cost, estimate_index.turn_of(of), (at - turn) % count, worker.name))
    return [(name, cost) for cost, _, _, name in sorted(ranked)]


@pytest.mark.parametrize("seed", range(10))
def test_order_of_predicted_ttft_is_that_of_a_pass_over_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happened since the last decision, whoever holds whatever of the prompt."""
    monkeypatch.setattr(selection, "HITS", 3)
    monkeypatch.setattr(receive_clock, "MAX_TIMES", 40)
    life = Busy(seed)
    for _ in range(200):
        life.one()
        if life.draw.random() < 0.5:
            life.receive()
            asked = life.asked()
            kept = life.board("predicted_ttft", life.view)
            found = selection.predicted_ttft(life.view, kept, asked)
            names = [(kept.workers[at].name, cost) for cost, *_, at in found]
            assert names == all_by_ttft(life.view, asked), f"seed {seed}"


def test_a_first_token_counts_though_the_engine_told_of_the_end_before_the_dispatch() -> None:
    """Found by composed 425: the index knew nothing of it."""
    story = fleet_of(20)
    view = view_of(story)
    sent = msgspec.structs.replace(decided("q1", worker="w4", prompt=64), ttft_us=1_000)
    story.tell("w.w4", engine_step(queued("q1"), finished("q1")))
    kept = selection.index_of(view, MODEL, "predicted_ttft")
    before = kept.estimates[kept.number_of["w4"]]
    story.tell("r.r1", arrived("q1", prompt=64), sent)
    estimate_index.keep_up(view)
    story.tell("r.r1", msgspec.structs.replace(ended("q1"), ttft_us=400_000))
    kept = selection.index_of(view, MODEL, "predicted_ttft")
    now = kept.estimates[kept.number_of["w4"]]
    assert now == estimate_of(view, story.fleet.workers["w4"])
    assert now.fixed_us > before.fixed_us


@pytest.mark.parametrize("policy", selection.POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_kept_boards_choose_as_new_ones(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What replay finds on a view of its own is what life recorded."""
    monkeypatch.setattr(receive_clock, "MAX_TIMES", 40)
    life = Busy(seed)
    for _ in range(150):
        life.one()
        if life.draw.random() < 0.5:
            life.receive()
            query = RouteQuery(
                request="q9",
                model=MODEL,
                prompt_tokens=life.draw.randint(1, 900),
                delivered=0,
                session="s1",
            )
            choice = decide(life.view, query, policy)
            fresh = View("r.r0", life.story.fleet)
            fresh.landed()
            for number, event in enumerate(life.pending):
                fresh.own(life.head + number + 1, event)
            fresh.now_us = life.view.now_us
            assert decide(fresh, query, policy) == choice, f"seed {seed}"
            assert len(choice.candidates) + sum(n for _, n in choice.others) == len(life.names)


def chosen(view: View, policy: str, asked: RouteQuery) -> tuple[str, dict[str, v.Candidate], bool]:
    """Name of the chosen, whom was looked at, and whether it is refused."""
    kept = selection.index_of(view, MODEL, policy)
    best, looked, late = selection.select(
        view,
        kept,
        policy,
        asked,
        8,
        lambda: estimate_index.of(view, MODEL, estimate_index.by_queue),
    )
    shown = {x.worker: x for x in looked}
    return best.worker if best is not None else "", shown, late


def loaded(*prompts: int, count: int = 0) -> View:
    """Workers with so many prompt tokens to compute each."""
    story = fleet_of(count or len(prompts))
    for index, tokens in enumerate(prompts):
        if tokens:
            story.tell(f"w.w{index}", engine_step(queued(f"a{index}", prompt=tokens)))
    return view_of(story)


def test_a_hit_is_weighed_against_the_queue_before_it() -> None:
    view = loaded(600, 0)
    near, far = Held({"w0": 500}), Held({"w0": 1800})
    assert chosen(view, "predicted_ttft", asking(tokens=2000, hits=near))[0] == "w1"
    assert chosen(view, "predicted_ttft", asking(tokens=2000, hits=far))[0] == "w0"
    assert chosen(view, "prefix_first", asking(tokens=900, hits=near))[0] == "w0", "however long"


def test_fewest_requests_though_they_are_long() -> None:
    story = fleet_of(2)
    story.tell("w.w0", engine_step(queued("a", prompt=4000)))
    story.tell("w.w1", engine_step(queued("b", prompt=9), queued("c", prompt=9)))
    assert chosen(view_of(story), "jsq", asking(tokens=50))[0] == "w0"
    assert chosen(view_of(story), "predicted_ttft", asking(tokens=50))[0] == "w1"


def test_two_are_drawn_and_the_better_taken() -> None:
    view = loaded(0, 300, 600, 900)
    used: Counter[str] = Counter()
    for number in range(300):
        name, looked, _ = chosen(view, "power_of_two", asking(tokens=50))
        assert len(looked) == 2
        assert looked[name].cost == min(x.cost for x in looked.values())
        used[name] += 1
        view.own(view.position + 1, decided(f"q{number}", worker="elsewhere"))
    assert used["w0"] > used["w1"] > used["w2"] > used["w3"] == 0


def test_sessions_stay_and_move_only_with_their_worker() -> None:
    story = fleet_of(12)
    view = view_of(story)
    names = [f"s{n}" for n in range(60)]
    homes = {s: chosen(view, "session_affinity", asking(tokens=50, session=s))[0] for s in names}
    assert len(set(homes.values())) > 6
    story.tell("r.r0", v.WorkerSuspected("w5", 1, "silent"))
    view.landed()
    for session, home in homes.items():
        now = chosen(view, "session_affinity", asking(tokens=50, session=session))[0]
        assert now != "w5" and (now == home or home == "w5")


def test_a_session_leaves_a_crowded_worker() -> None:
    story = fleet_of(4)
    home = chosen(view_of(story), "session_affinity", asking(tokens=9, session="s"))[0]
    story.tell(f"w.{home}", engine_step(*(queued(f"a{n}", prompt=9) for n in range(9))))
    assert chosen(view_of(story), "session_affinity", asking(tokens=9, session="s"))[0] != home


def test_what_comes_too_late_is_shed_only_if_it_may_be() -> None:
    view = loaded(2000, 3000)
    late = asking(tokens=100, slo_us=50_000)
    name, looked, refused = chosen(view, "predicted_ttft", late)
    assert (name, refused) == ("w0", False)
    assert {x.excluded for x in looked.values()} == {"too late"}
    assert chosen(view, "predicted_ttft", asking(tokens=100, slo_us=50_000, shed=True))[2]
    assert chosen(view, "predicted_ttft", asking(tokens=100, slo_us=900_000, shed=True))[0] == "w0"


def test_a_worker_without_room_is_passed_over_and_is_better_than_none() -> None:
    story = fleet_of(2)  # of 512 blocks of 16 tokens
    story.tell(
        "w.w0",
        v.EngineStep(
            incarnation=1,
            step=1,
            duration_us=900,
            batch=1,
            sum_context=100,
            prefill_tokens=0,
            waiting=0,
            kv_used=505,
            changes=(queued("a", prompt=16),),
        ),
    )
    story.tell("w.w1", engine_step(queued("b", prompt=3000)))
    assert chosen(view_of(story), "predicted_ttft", asking(tokens=200))[0] == "w1"
    story.tell(
        "w.w1",
        v.EngineStep(
            incarnation=1,
            step=2,
            duration_us=900,
            batch=1,
            sum_context=100,
            prefill_tokens=0,
            waiting=0,
            kv_used=505,
        ),
    )
    name, looked, _ = chosen(view_of(story), "predicted_ttft", asking(tokens=200))
    assert name == "w0" and {x.excluded for x in looked.values()} == {"no KV room"}


def test_an_engine_that_is_silent_with_work_is_passed_over() -> None:
    """It would seem to have worked off all it has."""
    story = fleet_of(2)
    story.tell("w.w0", engine_step(queued("a", prompt=400)))
    story.tell("w.w1", engine_step(queued("b", prompt=2000)))
    view = view_of(story)
    view.own(view.position + 1, v.GroupsReceived(1, (0, 0, story.revision - 1, 1000)))
    view.now_us = 900_000
    assert chosen(view, "predicted_ttft", asking(tokens=50, at_us=view.now_us))[0] == "w0"
    view.now_us = 3_000_000
    story.tell("w.w1", engine_step())
    later = v.GroupsReceived(story.revision, (0, 2_990_000))
    view.own(view.position + 1, later)
    name, looked, _ = chosen(view, "predicted_ttft", asking(tokens=50, at_us=view.now_us))
    assert name == "w1" and looked["w0"].excluded == "silent"


def test_a_plain_server_never_gets_a_resumption() -> None:
    story = fleet_of(3)
    story.tell("w.w2", engine_step(queued("b", prompt=3000)))
    for name in ("w0", "w1"):
        story.fleet.workers[name].plain = True
    view = view_of(story)
    assert chosen(view, "predicted_ttft", asking(tokens=50, begun=True))[0] == "w2"
    assert chosen(view, "predicted_ttft", asking(tokens=50))[0] in ("w0", "w1")
    again = asking(tokens=50, avoid=("w2:1",), begun=True)
    assert chosen(view, "predicted_ttft", again)[0] == "w2"
    story.fleet.workers["w2"].plain = True
    assert chosen(view, "predicted_ttft", asking(tokens=50, begun=True))[0] == ""


def test_health_is_never_traded_for_limits() -> None:
    story = fleet_of(2)
    story.tell("w.w1", engine_step(queued("b", prompt=3000)))
    story.tell("r.r0", v.WorkerSuspected("w0", 1, "silent"))
    assert chosen(view_of(story), "predicted_ttft", asking(tokens=200, slo_us=1))[0] == "w1"


def test_among_workers_alike_the_one_with_fewest_requests_is_taken() -> None:
    """What they decode differs by less than can be measured in time."""
    story = fleet_of(3)
    for worker, count in (("w0", 3), ("w1", 1), ("w2", 2)):
        told = [queued(f"{worker}{n}", prompt=0) for n in range(count)]
        story.tell(f"w.{worker}", engine_step(*told))
    view = view_of(story)
    for number in range(3):
        view.own(view.position + 1, decided(f"x{number}", worker=""))  # another turn
        assert chosen(view, "predicted_ttft", asking(tokens=200))[0] == "w1"


def test_a_worker_a_little_quicker_does_not_get_every_short_request() -> None:
    story = fleet_of(2)
    story.fleet.workers["w0"].overhead_us = 0
    story.fleet.workers["w1"].overhead_us = 900
    view, sent = view_of(story), Counter[str]()
    for number in range(8):
        choice = decide(
            view,
            RouteQuery(request=f"q{number}", model=MODEL, prompt_tokens=2, delivered=0),
            "predicted_ttft",
        )
        event = decided(f"q{number}", worker=choice.worker, prompt=2)
        view.own(view.position + 1, event)
        sent[choice.worker] += 1
    assert sent == {"w0": 4, "w1": 4}


def test_drawn_numbers_depend_on_replica_seed_and_state() -> None:
    story = fleet_of(2)
    story.replica("r1")
    one, other = view_of(story), View("r.r1", story.fleet)
    assert selection.draw(one, "a") == selection.draw(view_of(story), "a")
    numbers = {selection.draw(one, "a"), selection.draw(other, "a"), selection.draw(one, "b")}
    story.tell("w.w0", engine_step())
    numbers.add(selection.draw(one, "a"))
    assert len(numbers) == 4


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("policy", ["predicted_ttft", "jsq"])
def test_replicas_that_decide_at_once_do_not_herd(policy: str, replicas: int) -> None:
    """Each sends requests that no other sees yet. Where all took the best they know of, each
    of the best workers would get one from every replica."""
    herd = 0
    for round_ in range(30):
        story = fleet_of(24)
        for number in range(1, replicas):
            story.replica(f"r{number}")
        for index in range(24):
            prompt = 10 + (7 * index + 11 * round_) % 40
            story.tell(f"w.w{index}", engine_step(queued(f"a{index}", prompt=prompt)))
        views = [View(f"r.r{number}", story.fleet) for number in range(replicas)]
        sent: Counter[str] = Counter()
        for view in views:
            view.landed()
            choice = decide(
                view, RouteQuery(request="q", model=MODEL, prompt_tokens=400, delivered=0), policy
            )
            sent[choice.worker] += 1
        herd += max(sent.values())
    assert herd / 30 < 1 + 0.2 * replicas, "of one worker, in the mean"


@given(st.integers(0, 1 << 40), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_rounding_keeps_order_and_loses_little(number: int, digits: int) -> None:
    rounded = coarse(number, digits)
    assert rounded <= number <= rounded + (number >> (digits - 1))
    assert coarse(number + 1, digits) >= rounded


def test_old_records_read_as_they_were_written() -> None:
    """A candidate and a decision without the fields that came later."""
    import msgspec

    from relume.events.log.codec import decode, encode

    whole = msgspec.msgpack.decode(encode(decided()))
    again: Any = decode(msgspec.msgpack.encode(whole[:16]))
    assert again == decided()
    assert msgspec.convert(["w0", 1, 5, 5, 0, ""], v.Candidate).ttft_us == -1


def test_a_dispatch_of_another_replica_is_forgotten_with_its_receipt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though nothing more is heard of the worker it went to."""
    monkeypatch.setattr(receive_clock, "MAX_TIMES", 8)
    story = fleet_of(20)
    view = view_of(story)
    own: list[v.GroupsReceived] = []

    def receive() -> None:
        own.append(v.GroupsReceived(story.revision, (0, 9_000)))
        view.own(view.position + 1, own[-1])
        view.now_us = 9_000 * len(own)

    def told(stream: str, *events: v.Event) -> None:
        story.tell(stream, *events)
        receive()

    steps = [
        v.EngineStep(
            incarnation=1,
            step=number,
            duration_us=4000,
            batch=2,
            sum_context=50,
            prefill_tokens=0,
            waiting=0,
            kv_used=9,
        )
        for number in (1, 2, 3, 4)
    ]
    told("w.w0", *steps[:2])
    told("r.r1", arrived("b"), decided("b", worker="w0", prompt=500))
    told("w.w0", *steps[2:])
    of = selection.index_of(view, MODEL, "predicted_ttft").estimates[0]
    assert of.free_at_us > 0
    for number in range(7):
        told(f"w.w{number + 1}", engine_step())
        kept = selection.index_of(view, MODEL, "predicted_ttft").estimates[0]
        fresh = View("r.r0", story.fleet)
        for position, event in enumerate(own):
            fresh.own(position + 1, event)
        assert kept == estimate_of(fresh, story.fleet.workers["w0"]), number
    assert kept != of
