"""Whether anybody has use for one request more: as a look at every worker would say."""

from __future__ import annotations

from itertools import count

import pytest

from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.routing.eligibility import excluded_at
from relume.policies.routing.saturation import (
    FREE,
    NO_WORKER,
    SATURATED,
    UNKNOWN,
    open_workers,
    saturation,
)
from relume.policies.routing.worker_estimate import estimate_of
from relume.policies.state.overlay import receive_clock
from relume.policies.state.overlay.view import View
from tests.policies.routing.test_ranking import fleet_of, view_of
from tests.policies.routing.test_selectors import Busy
from tests.policies.story import MODEL, Story, decided, died, ended


class Small(Busy):
    """Few workers, which all have something to do at times."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.story = fleet_of(3)
        self.names = list(self.story.fleet.workers)
        self.view = view_of(self.story)
        self.head = self.story.fleet.streams["r.r0"].position


def by_all(view: View, config: WaitingConfig, now_us: int) -> tuple[str, int]:
    """By a look at each worker."""
    there, ends = False, []
    for worker in view.fleet.workers.values():
        if excluded_at(view, worker, MODEL):
            continue
        there = True
        of = estimate_of(view, worker)
        if not config.queued or of.requests - of.batch < config.queued:
            ends.append(of.free_at_us)
    if not there:
        return NO_WORKER, UNKNOWN
    bound_us = config.ahead_ms * 1000
    if not ends:
        return SATURATED, UNKNOWN
    if config.ahead_ms and min(ends) > now_us + bound_us:
        return SATURATED, min(ends) - bound_us
    return FREE, UNKNOWN


@pytest.mark.parametrize("seed", range(8))
def test_it_says_what_a_look_at_every_worker_says(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receive_clock, "MAX_TIMES", 40)
    life, seen = Small(seed), set()
    for _ in range(300):
        life.one()
        if life.draw.random() < 0.5:
            life.receive()
            config = WaitingConfig(
                queued=life.draw.choice((0, 1, 2)), ahead_ms=life.draw.choice((0, 1, 300))
            )
            now_us = max(life.view.now_us, 0)
            told = saturation(life.view, MODEL, config, now_us)
            assert told == by_all(life.view, config, now_us), f"seed {seed}"
            assert told == saturation(life.view, MODEL, config, now_us, glance=False)
            assert (told[0] == NO_WORKER) == (not open_workers(life.view, MODEL))
            seen.add(told[0])
    assert seen >= {FREE, SATURATED}


def test_replicas_that_are_blind_to_each_other_stay_within_the_bound_together() -> None:
    story = Story()
    story.worker()
    for name in ("r0", "r1", "r2"):
        story.replica(name)
    config, sent = WaitingConfig(queued=10), 0
    for name in ("r0", "r1", "r2"):
        view, positions = View(f"r.{name}", story.fleet), count(2)
        view.landed()
        while saturation(view, MODEL, config, 0)[0] == FREE:
            view.own(next(positions), decided(f"{name}.{sent}"))
            sent += 1
    assert config.queued <= sent < config.queued + 3


def test_own_dispatches_fill_a_worker_and_ends_make_room() -> None:
    story = Story()
    story.worker()
    story.replica()
    view, positions = view_of(story), count(2)
    config = WaitingConfig(queued=3)
    for number in range(3):
        assert saturation(view, MODEL, config, 0)[0] == FREE
        view.own(next(positions), decided(f"q{number}"))
    assert saturation(view, MODEL, config, 0) == (SATURATED, UNKNOWN)
    view.own(next(positions), ended("q0"))
    assert saturation(view, MODEL, config, 0) == (FREE, UNKNOWN)
    story.tell("w.w0", died("w0"))
    assert saturation(view, MODEL, config, 0) == (NO_WORKER, UNKNOWN)
    assert saturation(view, "other", config, 0) == (NO_WORKER, UNKNOWN)
