"""What a decision about holders looks at: only what may have changed, and all of that."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from relume.controlplane.replay.recorded_log import from_file
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Segment
from relume.policies.checkpoints import decisions
from relume.policies.checkpoints.placement import Index, Weights
from relume.policies.state import dirty_set
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View
from tests.policies.checkpoints.test_checkpoints import (
    WORKERS,
    chosen,
    daemon,
    drawn,
    fleet_of,
    held,
)
from tests.policies.story import (
    arrived,
    decided,
    died,
    ended,
    engine_step,
    finished,
    observed,
    queued,
    ready,
    started,
)

LOGS = sorted((Path(__file__).parents[2] / "replay/logs").glob("*.rlog"))
WEIGHTS = Weights()


def as_new(view: View) -> None:
    """The index kept with `view` says what one made now would."""
    kept = {s.worker: s for s in decisions.index_of(view, WEIGHTS).sites}
    assert kept == {s.worker: s for s in decisions.sites(view)}
    tree = Index(decisions.sites(view), WEIGHTS)
    for domain in ("host-w0", "host-w3"):
        avoid = [tree.domain_range(domain)]
        at = decisions.index_of(view, WEIGHTS).least(tree.families(), avoid)
        assert at == tree.least(tree.families(), avoid)


class Play:
    """Own events, some of which land late, and what the workers say."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.story = fleet_of()
        self.view = View("r.r0", self.story.fleet)
        self.view.landed()
        self.open: dict[str, tuple[int, str]] = {}
        self.pending: list[Any] = []

    def turn(self, count: int) -> None:
        rng, kind = self.rng, self.rng.randrange(10)
        name = rng.choice(WORKERS)
        request = rng.choice([*self.open, "q0"])
        attempt, place = self.open.get(request, (1, name))
        if kind < 3:
            self.own(arrived(f"q{count}"), decided(f"q{count}", 1, name))
            self.own(chosen(f"q{count}", tuple(rng.sample(WORKERS, 2)), name))
            self.open[f"q{count}"] = 1, name
        elif kind == 3:
            kinds = ("reset", "stall", "timeout")
            self.own(observed(request, attempt, place, 1, rng.choice(kinds)))
            self.own(decided(request, attempt + 1, name))
            self.open[request] = attempt + 1, name
        elif kind == 4:
            self.own(ended(request, attempts=attempt))
            self.open.pop(request, None)
        elif kind < 8:
            change = rng.choice((queued, finished))(request, attempt)
            self.story.tell(f"w.{place}", engine_step(change, lost=int(rng.random() < 0.1)))
        elif kind == 8:
            self.story.tell(f"w.{name}", held(name, request, rng.randint(0, 20)))
        else:
            self.seldom(name)

    def seldom(self, name: str) -> None:
        worker = self.story.fleet.workers[name]
        last = worker.incarnation
        self.story.tell(
            f"w.{name}",
            *self.rng.choice(
                (
                    (died(name, last), started(name, last + 1), ready(name, last + 1)),
                    (v.StateDaemonLost(name, "b1", "killed"), daemon(name)),
                    (
                        v.WorkerRegistered(
                            worker=name, domain=self.rng.choice(("a", "b")), agent_pid=7
                        ),
                    ),
                    (engine_step(lost=3, incarnation=last),),
                )
            ),
        )

    def own(self, *events: Any) -> None:
        for event in events:
            self.view.own(self.view.position + 1, event)
            self.pending.append(event)

    def land(self, count: int) -> None:
        if count:
            self.story.tell("r.r0", *self.pending[:count])
            del self.pending[:count]
            self.view.landed()


@pytest.mark.parametrize("seed", range(25))
def test_an_index_kept_up_is_what_a_new_one_would_be(seed: int) -> None:
    play = Play(seed)
    for count in range(200):
        play.turn(count)
        if play.rng.random() < 0.4:
            play.land(play.rng.randint(0, len(play.pending)))
        if play.rng.random() < 0.6:
            as_new(play.view)
    as_new(play.view)


@pytest.mark.parametrize("seed", range(10))
def test_the_same_holds_for_any_report_of_checkpoints(seed: int) -> None:
    rng = random.Random(seed)
    story, open_ = fleet_of(), []
    view = View("r.r0", story.fleet)
    for count in range(200):
        story.tell(*drawn(rng, open_, count))
        view.landed()
        if rng.random() < 0.5:
            as_new(view)


@pytest.mark.parametrize("path", LOGS, ids=lambda p: p.stem)
def test_so_it_is_all_along_a_real_log(path: Path) -> None:
    fleet = Fleet()
    views = [View("", fleet), View("", fleet)]
    history = from_file(path)
    assert history.groups
    for number, group in enumerate(history.groups):
        apply_group(fleet, group)
        as_new(views[0])
        if number % 7 == 0:
            as_new(views[1])


def test_a_decision_in_a_large_fleet_looks_at_few(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"w{n}" for n in range(300)]
    story = fleet_of(*names)
    view = View("r.r0", story.fleet)
    view.landed()
    as_new(view)
    looked: list[str] = []
    look = decisions._site

    def counted(view: View, name: str, ahead: Any) -> Any:
        looked.append(name)
        return look(view, name, ahead)

    monkeypatch.setattr(decisions, "_site", counted)
    for count in range(40):
        request, worker = f"q{count}", names[count * 7 % 300]
        for event in (arrived(request), decided(request, 1, worker)):
            view.own(view.position + 1, event)
        placed, _ = decisions.place(view, request, worker, 8)
        assert placed.holders and len(looked) <= 10, looked
        looked.clear()
        own = chosen(request, placed.holders, worker)
        view.own(view.position + 1, own)
        story.tell("r.r0", arrived(request), decided(request, 1, worker), own)
        story.tell(f"w.{worker}", engine_step(queued(request)))
        story.tell("fleet", v.Tick(count, 1000 * count))
        view.landed()


def test_two_views_of_one_fleet_keep_apart() -> None:
    story = fleet_of()
    one, other = View("r.r0", story.fleet), View("r.r1", story.fleet)
    as_new(one)
    story.tell("w.w1", held("w1", "q0", 3))
    as_new(other)
    as_new(one)


@pytest.mark.parametrize("seed", range(4))
def test_all_that_was_touched_since_is_named(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks, however long ago it asked before; and not everybody, after a short time."""
    monkeypatch.setattr(dirty_set, "MAX_MARKS", 10)
    draw, marks = random.Random(seed), dirty_set.DirtySet()
    told: list[str | None] = []
    stood: list[tuple[int, int]] = []
    exact = 0
    for _ in range(600):
        if draw.random() < 0.01:
            marks.everything()
            told.append(None)
        else:
            told.append(f"w{draw.randrange(200)}")
            marks.note(told[-1] or "")
        stood.append((marks.count, len(told)))
        count, number = draw.choice(stood[-30:])
        names, missed = marks.since(count), told[number:]
        assert (names is None) == (None in missed)
        if names is not None:
            assert set(names) >= set(missed)
            exact += 0 < len(missed) == len(names)
    assert exact > 30


def test_a_dirty_set_begins_with_a_query_in_the_middle_of_a_group() -> None:
    story = fleet_of()
    assert dirty_set.in_use(story.fleet) is None, "a log that is only folded has none"
    seen: list[dirty_set.FleetDirtySet] = []

    def first(stream: str, position: int, event: Any) -> None:
        if not seen:
            seen.append(dirty_set.of(story.fleet))

    segment = Segment(
        stream="w.w1",
        epoch=1,
        seq=9,
        first=9,
        at_ms=0,
        previous=b"",
        hash=b"",
        records=tuple(map(encode, (held("w1", "q", 3),) * 3)),
    )
    apply_group(story.fleet, RevisionGroup(story.revision + 1, (segment,)), first)
    assert seen[0].since(0) == ["w1", "w1"]
