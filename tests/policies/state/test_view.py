"""The view: what folding the replica's own tail would show, as a function of (R, p)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.events import vocabulary as v
from relume.policies.liveness.stall import StallConfig, config_of, settings_of
from relume.policies.state import fold
from relume.policies.state.fleet import Fleet, dump, load
from relume.policies.state.overlay.view import View
from tests.policies.story import (
    Story,
    arrived,
    decided,
    died,
    ended,
    engine_step,
    finished,
    observed,
    queued,
    ready,
    replica_started,
    started,
)


def shown(view: View) -> Any:
    """All that a policy can see of a view."""
    workers = view.fleet.workers.values()
    return (
        view.position,
        view.turn,
        view.suspects(),
        config_of(view),
        [(w.name, w.engine, w.incarnation, view.load(w)) for w in workers],
    )


def viewed(story: Story, pending: list[Any]) -> View:
    """The view of r0 on the story, with own events that are not in the log yet."""
    view = View("r.r0", story.fleet)
    view.landed()
    for event in pending:
        view.own(view.position + 1, event)
    return view


def two_workers() -> Story:
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    return story


def test_own_dispatch_counts_before_it_lands() -> None:
    story = two_workers()
    view = viewed(story, [arrived(), decided()])
    w0, w1 = story.fleet.workers.values()
    assert view.load(w0) == (100, 1)
    assert view.load(w1) == (0, 0)


def test_own_dispatch_counts_once_when_it_landed() -> None:
    story = two_workers()
    view = viewed(story, [arrived(), decided()])
    story.tell("r.r0", arrived(), decided())
    view.landed()
    assert view.load(story.fleet.workers["w0"]) == (100, 1)
    assert view.position == 3


def test_engine_that_reports_before_the_dispatch_lands_counts_once() -> None:
    story = two_workers()
    view = viewed(story, [arrived(), decided()])
    story.tell("w.w0", engine_step(queued(prompt=130)))
    assert view.load(story.fleet.workers["w0"]) == (130, 1)


def test_engine_that_finished_before_the_dispatch_lands_holds_nothing() -> None:
    story = two_workers()
    view = viewed(story, [arrived(), decided()])
    story.tell("w.w0", engine_step(queued()), engine_step(finished()))
    assert view.load(story.fleet.workers["w0"]) == (0, 0)


def test_own_dispatch_to_a_dead_incarnation_is_no_load() -> None:
    story = two_workers()
    view = viewed(story, [arrived(), decided()])
    story.tell("w.w0", died(), started(incarnation=2), ready(incarnation=2))
    assert view.load(story.fleet.workers["w0"]) == (0, 0)


def test_own_failure_is_seen_before_it_lands() -> None:
    story = two_workers()
    story.tell("r.r0", arrived(), decided())
    view = viewed(story, [observed(kind="refused")])
    assert view.load(story.fleet.workers["w0"]) == (0, 0)
    assert view.suspects() == [("w0", 1)]
    assert view.suspect("w1") == 0


def test_own_end_closes_only_what_the_engine_never_took() -> None:
    for taken in (False, True):
        story = two_workers()
        story.tell("r.r0", arrived(), decided())
        if taken:
            story.tell("w.w0", engine_step(queued()))
        view = viewed(story, [ended()])
        assert view.load(story.fleet.workers["w0"]) == ((100, 1) if taken else (0, 0))


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("is_known", [False, True])
def test_own_end_closes_what_another_replica_sent_whenever_it_came_in(
    is_early: bool, is_known: bool
) -> None:
    """A stream of another replica ends here. Replay brings the end directly after the decision
    before it, and life brings it later: the dispatch may be folded in between."""
    story = two_workers()
    story.replica("r1", "b2")
    story.tell("r.r1", arrived())
    claim = v.ClientReturned(request="q1", claim="c1", attempt=2, tokens=5, events=0)
    view = viewed(story, [claim, ended(attempts=2)] if is_early else [])
    if not is_known:
        story.leader("r1", "b2")
        story.tell("fleet", ended(outcome="failed"))
    story.tell("r.r1", decided(attempt=2), decided(request="q2"))
    if not is_early:
        view.own(view.position + 1, claim)
        view.own(view.position + 1, ended(attempts=2))
    assert view.load(story.fleet.workers["w0"]) == (100, 1)  # that of q2
    story.tell("r.r0", claim, ended(attempts=2))
    view.landed()
    assert view.load(story.fleet.workers["w0"]) == (100, 1)
    assert not view._ended


def test_a_pending_end_leaves_later_attempts_of_a_request_that_is_over() -> None:
    story = two_workers()
    view = viewed(story, [ended()])
    story.tell("r.r1", decided(attempt=2))
    assert view.load(story.fleet.workers["w0"]) == (100, 1)
    story.tell("r.r0", ended())
    view.landed()
    assert view.load(story.fleet.workers["w0"]) == (100, 1)


def test_own_end_is_pending_until_it_lands_and_nothing_of_it_stays() -> None:
    story = two_workers()
    own = [arrived(), decided(), decided(attempt=2, worker="w1"), ended(attempts=2)]
    view = viewed(story, own)
    story.tell("r.r0", *own[:3])
    view.landed()
    assert [view.load(w) for w in story.fleet.workers.values()] == [(0, 0), (0, 0)]
    story.tell("r.r0", own[3])
    view.landed()
    assert not (view._own or view._places or view._ended or view._pending)


def test_clearing_is_seen_before_it_lands() -> None:
    story = two_workers()
    story.tell("r.r0", observed(kind="reset"))
    view = viewed(story, [v.WorkerCleared("w0", 1, "steps")])
    assert view.suspects() == []


def test_new_life_does_not_inherit_suspicion() -> None:
    story = two_workers()
    story.tell("r.r0", observed(kind="reset"))
    view = viewed(story, [replica_started(boot="b2")])
    assert view.suspects() == []


def test_settings_come_from_the_operator_then_the_start_then_the_default() -> None:
    story = two_workers()
    mine = StallConfig(floor_us=5, cap_us=6, factor=7)
    view = viewed(story, [replica_started(boot="b2", settings=settings_of(mine))])
    assert config_of(view) == mine
    story.tell("fleet", v.ConfigChanged("stall.cap_us", "99"))
    assert config_of(view) == StallConfig(floor_us=5, cap_us=99, factor=7)
    assert config_of(View("r.r9", Fleet())) == StallConfig()


# --- properties ------------------------------------------------------------------------

REQUESTS = ("q1", "q2", "q3")
OWN_KINDS = ["dispatch", "dispatch", "observe", "observe", "end", "suspect", "clear", "restart"]


class Play:
    """Draws a plausible log: own events and worker events, in transactions."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self.attempt: dict[str, int] = {}
        self.open: dict[str, tuple[str, int]] = {}

    def own_event(self) -> Any:
        kind = self._draw(st.sampled_from(OWN_KINDS))
        request = self._draw(st.sampled_from(REQUESTS))
        worker = self._draw(st.sampled_from(["w0", "w1"]))
        incarnation = self._draw(st.sampled_from([1, 1, 2]))
        if kind == "dispatch":
            attempt = self.attempt[request] = self.attempt.get(request, 0) + 1
            self.open[request] = (worker, incarnation)
            return decided(request, attempt, worker, incarnation)
        if kind == "observe" and request in self.open:
            worker, incarnation = self.open[request]
            how = self._draw(st.sampled_from(["reset", "stall", "timeout", "stale"]))
            return observed(request, self.attempt[request], worker, incarnation, how)
        if kind == "end" and request in self.open:
            del self.open[request]
            return ended(request, attempts=self.attempt[request])
        if kind == "restart":
            self.open.clear()
            return replica_started(boot="b2")
        if kind == "suspect":
            return v.WorkerSuspected(worker, incarnation, "silent")
        return v.WorkerCleared(worker, incarnation, "steps")

    def other_event(self) -> Any:
        """Another replica sent an attempt before it lost the stream."""
        request = self._draw(st.sampled_from(REQUESTS))
        attempt = self._draw(st.integers(11, 13))
        worker = self._draw(st.sampled_from(["w0", "w1"]))
        return decided(request, attempt, worker)

    def worker_event(self, worker: str) -> Any:
        request = self._draw(st.sampled_from(REQUESTS))
        attempt = max(self.attempt.get(request, 1), 1)
        kind = self._draw(st.sampled_from(["queue", "first", "finish", "lose", "die", "back"]))
        if kind == "die":
            return died(worker, 1)
        if kind == "back":
            return [started(worker, 2), ready(worker, 2)]
        change = {
            "queue": (queued(request, attempt, 70),),
            "first": (v.FirstToken(request, attempt),),
            "finish": (finished(request, attempt),),
            "lose": (),
        }[kind]
        incarnation = self._draw(st.sampled_from([1, 1, 1, 2]))
        return engine_step(*change, incarnation=incarnation, lost=int(kind == "lose"))


@st.composite
def histories(draw: Any) -> tuple[list[Any], list[tuple[str, int, Any]]]:
    """(own events, steps). A step is ("land", how many own events, None) or
    ("tell", 0, (stream, events))."""
    play = Play(draw)
    own = [arrived(r) for r in REQUESTS] + [
        play.own_event() for _ in range(draw(st.integers(1, 8)))
    ]
    steps: list[tuple[str, int, Any]] = []
    left = len(own)
    for land in draw(st.lists(st.integers(0, 3), max_size=8)):
        if land and left:
            count = min(land, left)
            left -= count
            steps.append(("land", count, None))
        elif len(own) - left >= len(REQUESTS) and draw(st.booleans()):
            steps.append(("tell", 0, ("r.r1", [play.other_event()])))
        else:
            name = draw(st.sampled_from(["w0", "w1"]))
            event = play.worker_event(name)
            events = event if isinstance(event, list) else [event]
            steps.append(("tell", 0, (f"w.{name}", events)))
    if left:
        steps.append(("land", left, None))
    return own, steps


def perform(story: Story, own: list[Any], landed: int, step: tuple[str, int, Any]) -> int:
    """Write one step; returns how many own events have landed."""
    kind, count, telling = step
    if kind == "land":
        story.tell("r.r0", *own[landed : landed + count])
        return landed + count
    story.tell(telling[0], *telling[1])
    return landed


def folded_on_top(fleet: Fleet, tail: list[Any]) -> Fleet:
    copy = load(dump(fleet))
    for event in tail:
        fold.fold(copy, "r.r0", 1, event)
    return copy


@settings(max_examples=120, deadline=None)
@given(histories())
def test_view_shows_what_folding_the_own_tail_would_show(history: Any) -> None:
    own, steps = history
    story = two_workers()
    landed = 0
    for step in [("tell", 0, ("w.w0", [])), *steps]:
        landed = perform(story, own, landed, step)
        for p in range(landed, len(own) + 1):
            view = viewed(story, own[landed:p])
            whole = folded_on_top(story.fleet, own[landed:p])
            oracle = View("r.r0", whole)
            assert view.suspects() == oracle.suspects()
            assert view.turn == oracle.turn
            for worker in story.fleet.workers.values():
                assert view.load(worker) == oracle.load(whole.workers[worker.name])


@settings(max_examples=120, deadline=None)
@given(histories(), st.randoms(use_true_random=False))
def test_view_depends_on_its_basis_alone(history: Any, rng: Any) -> None:
    """Live, own events come as early as they can; in replay as late as they may."""
    own, steps = history
    early, late = two_workers(), two_workers()
    live, replay = viewed(early, []), viewed(late, [])
    base = live.position
    landed = given_live = given_replay = 0
    for step in steps:
        upto = max(landed + step[1], rng.randint(given_live, len(own)))
        for index in range(given_live, upto):
            live.own(base + index + 1, own[index])
        given_live = max(given_live, upto)
        for index in range(given_replay, landed + step[1]):
            replay.own(base + index + 1, own[index])
        given_replay = max(given_replay, landed + step[1])
        perform(early, own, landed, step)
        landed = perform(late, own, landed, step)
        live.landed()
        replay.landed()
        # The decision at this basis: replay takes the rest of the own events just now.
        for index in range(given_replay, given_live):
            replay.own(base + index + 1, own[index])
        given_replay = given_live
        assert shown(live) == shown(replay)
    if landed == len(own):
        assert shown(live) == shown(viewed(early, []))
        assert not live._pending
        assert not live._own
        assert not live._places
        assert not live._ended
        assert not live._suspicion
