"""How long a request waits for an engine that restarts: as long as restarts took."""

from __future__ import annotations

import pytest

from relume.events import vocabulary as v
from relume.policies.recovery.restart_times import MARGIN, MOST_S, RestartTimes
from relume.policies.state.overlay.view import View
from tests.policies.story import MODEL, Story, died, ready, started


class Watched:
    """A story of workers `w0` and `w1` of one model, and a clock that is set."""

    def __init__(self) -> None:
        self.story = Story()
        self.now_us = 1_000_000_000
        self.view = View("r.r0", self.story.fleet)
        self.times = RestartTimes()
        for worker in ("w0", "w1"):
            self.tell(v.WorkerRegistered(worker=worker, domain=worker, agent_pid=7))
            self.start(worker, 1, 40.0)

    def tell(self, event: object) -> None:
        stream = f"w.{event.worker}"  # type: ignore[attr-defined]
        self.story.tell(stream, event)
        self.times.seen(event, self.now_us)

    def left_s(self, model: str = MODEL) -> float:
        return self.times.left_s(self.view, model, self.now_us)

    def start(self, worker: str, incarnation: int, took_s: float) -> None:
        self.tell(started(worker, incarnation))
        self.now_us += int(took_s * 1e6)
        self.tell(ready(worker, incarnation))

    def operator(self, kind: str) -> None:
        effects = (v.Effect(kind, "w0"),)
        decided = v.EffectsDecided(decision="c", basis=v.Basis(1, 0), cause="", effects=effects)
        self.story.tell("fleet", decided)
        self.times.seen(decided, self.now_us)

    def die(self, worker: str, incarnation: int) -> None:
        self.tell(died(worker, incarnation))


def test_a_wait_lasts_as_long_as_restarts_do() -> None:
    w = Watched()
    assert w.left_s() == 0, "all serve"
    w.die("w0", 1)
    assert w.left_s() == pytest.approx(40 * MARGIN)
    w.now_us += 30_000_000
    w.tell(started("w0", 2))
    assert w.left_s() == pytest.approx(40 * MARGIN - 30), "since its death"
    assert w.left_s("other") == 0
    w.die("w1", 1)
    assert w.left_s() == pytest.approx(40 * MARGIN), "the last of them"
    w.now_us += 20_000_000
    w.tell(ready("w0", 2))
    w.start("w1", 2, 5.0)
    assert w.left_s() == 0
    w.die("w0", 2)
    assert w.left_s() == pytest.approx(50 * MARGIN), "the longest: from death to ready"


def test_an_engine_that_never_becomes_ready_is_not_waited_for_for_ever() -> None:
    w = Watched()
    w.die("w0", 1)
    for incarnation in range(2, 6):
        w.now_us += 20_000_000
        w.tell(started("w0", incarnation))
        w.die("w0", incarnation)
    assert w.left_s() == 0


def test_what_is_not_to_come_back_is_not_waited_for() -> None:
    w = Watched()
    w.die("w0", 1)
    w.operator("hold")
    assert w.story.fleet.workers["w0"].held and w.left_s() == 0
    w.die("w1", 1)
    assert w.left_s() > 0
    w.tell(v.WorkerDeregistered("w1", "stopped"))
    assert w.left_s() == 0


@pytest.mark.parametrize("held_first", [False, True])
def test_the_time_that_an_operator_holds_an_engine_is_not_learnt(held_first: bool) -> None:
    w = Watched()
    if held_first:  # it runs on, and dies later
        w.operator("hold")
    w.die("w0", 1)
    if not held_first:
        w.operator("hold")
    w.now_us += 300_000_000
    w.operator("release")
    w.start("w0", 2, 20.0)
    w.die("w0", 2)
    assert w.left_s() == pytest.approx(40 * MARGIN)


def test_a_restart_without_a_bound_is_not_learnt() -> None:
    w = Watched()
    w.die("w0", 1)
    w.now_us += int(10 * MOST_S * 1e6)
    w.start("w0", 2, 1.0)
    w.die("w0", 2)
    assert w.left_s() == pytest.approx(40 * MARGIN)
    w.start("w0", 3, MOST_S)
    w.die("w0", 3)
    assert w.left_s() == MOST_S


def test_an_engine_that_is_suspected_may_be_about_to_restart() -> None:
    """A connection breaks before the log has the death. One that only hangs is not waited for
    longer than a restart takes."""
    w = Watched()
    w.view.own(1, v.WorkerSuspected("w0", 1, "silent"))
    assert w.left_s() == pytest.approx(40 * MARGIN)
    w.now_us += 30_000_000
    assert w.left_s() == pytest.approx(40 * MARGIN - 30)
    w.now_us += 30_000_000
    assert w.left_s() == 0


def test_after_missed_events_no_restart_is_known() -> None:
    w = Watched()
    w.die("w0", 1)
    w.times.forget_begun()
    assert w.left_s() == 0
    w.start("w0", 2, 5.0)
    w.die("w0", 2)
    assert w.left_s() == pytest.approx(40 * MARGIN)
