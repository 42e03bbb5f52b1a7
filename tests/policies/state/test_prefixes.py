"""The index of cached prefixes says what a naive model of the same log says."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from relume.events import vocabulary as v
from relume.events.wire import prefix
from relume.policies.routing.prefix_hits import Hits
from relume.policies.state import prefix_cache, prefix_index
from relume.policies.state.fleet import Fleet, dump, load, state_hash
from relume.policies.state.overlay import own_prefixes
from relume.policies.state.overlay.view import View
from tests.policies.story import (
    Story,
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

BLOCK = 16


def reset(incarnation: int = 1) -> v.PrefixBlocksChanged:
    return v.PrefixBlocksChanged(incarnation=incarnation, reset=True, block_tokens=BLOCK)


def stored(*hashes: int, incarnation: int = 1) -> v.PrefixBlocksChanged:
    return v.PrefixBlocksChanged(incarnation=incarnation, stored=prefix.pack(hashes))


def removed(*hashes: int, incarnation: int = 1) -> v.PrefixBlocksChanged:
    return v.PrefixBlocksChanged(incarnation=incarnation, removed=prefix.pack(hashes))


def dispatch(request: str, worker: str, hashes: tuple[int, ...], incarnation: int = 1):
    event = decided(request, worker=worker, incarnation=incarnation)
    return msgspec.structs.replace(event, prefix=prefix.pack(hashes))


def view_of(story: Story) -> View:
    view = View("r.r0", story.fleet)
    view.landed()
    return view


def two_workers() -> Story:
    story = Story()
    for name in ("w0", "w1"):
        story.worker(name)
        story.tell(f"w.{name}", reset())
    story.replica()
    return story


def hits(view: View, *hashes: int) -> dict[str, int]:
    """Blocks by worker, asked in all ways, which must agree."""
    data = prefix.pack(hashes)
    held = Hits(view, "m", data)
    found = {name: tokens // BLOCK for name, tokens in held.longest()}
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert bool(held) == bool(found)
    for worker in view.fleet.workers.values():
        blocks = found.get(worker.name, 0)
        assert held.of(worker.name) == BLOCK * blocks
        assert prefix_index.hit_blocks(view, worker, data) == blocks
    return found


# --- marks ---------------------------------------------------------------------------


def test_marks_are_counted_as_they_are_chosen() -> None:
    marks = [blocks for blocks in range(1, 20_000) if prefix.is_mark(blocks)]
    assert [prefix.blocks_at(n + 1) for n in range(len(marks))] == marks
    assert prefix.marks_in(19_999) == len(marks) <= prefix.MAX_MARKS
    gaps = [(b - a) / a for a, b in pairwise(marks) if a >= prefix.DENSE]
    assert max(gaps) <= 1 / prefix.PER_OCTAVE


def test_common_marks_are_those_in_front() -> None:
    one, other = prefix.pack((1, 2, 2**64 - 1, 4)), prefix.pack((1, 2, 2**63 - 1, 4, 5))
    assert prefix.common(one, other) == prefix.common(other, one) == 2
    assert prefix.common(one, one[:24]) == 3 and prefix.common(one, one + b"ragged") == 4
    assert prefix.common(one, other[8:]) == prefix.common(one, b"") == 0
    assert prefix.common(one, prefix.pack((1 | 1 << 63,))) == 0


def test_marks_name_the_whole_prefix_and_its_salt() -> None:
    tokens = list(range(1000))
    marks = prefix.unpack(prefix.of_tokens(tokens, BLOCK))
    assert len(marks) == prefix.marks_in(999 // BLOCK)
    assert prefix.unpack(prefix.of_tokens(tokens[:500], BLOCK)) == marks[: prefix.marks_in(31)]
    other = prefix.unpack(prefix.of_tokens([7, *tokens[1:]], BLOCK))
    assert not set(other) & set(marks)
    assert not set(prefix.unpack(prefix.of_tokens(tokens, BLOCK, "tenant"))) & set(marks)


def test_the_last_token_is_always_computed() -> None:
    assert prefix.of_tokens(list(range(BLOCK)), BLOCK) == b""
    assert len(prefix.of_tokens(list(range(BLOCK + 1)), BLOCK)) == prefix.HASH_BYTES


def test_a_very_long_prompt_has_bounded_marks() -> None:
    marks = prefix.of_tokens(list(range(300_000)), 1)
    assert prefix.MAX_MARKS // 2 < len(marks) // prefix.HASH_BYTES <= prefix.MAX_MARKS


# --- what engines tell ----------------------------------------------------------------


def test_the_longest_leading_run_counts() -> None:
    story = two_workers()
    story.tell("w.w0", stored(1, 2, 3, 5))
    story.tell("w.w1", stored(2, 3))
    view = view_of(story)
    assert hits(view, 1, 2, 3, 4, 5) == {"w0": 3}
    assert hits(view, 2, 3, 5) == {"w0": 3, "w1": 2}
    assert hits(view, 9) == hits(view) == {}


def test_what_an_engine_lost_counts_no_more() -> None:
    story = two_workers()
    view = view_of(story)
    assert hits(view, 1) == {}  # from here on the index is kept up
    story.tell("w.w0", stored(1, 2, 3), removed(2))
    assert hits(view, 1, 2, 3) == {"w0": 1}
    story.tell("w.w0", reset())
    assert hits(view, 1, 2, 3) == {}


@pytest.mark.parametrize("end", [died(), started(incarnation=2), v.WorkerDeregistered("w0", "x")])
def test_the_cache_goes_with_its_engine(end: v.Event) -> None:
    story = two_workers()
    story.replica()
    story.tell("w.w0", stored(1, 2))
    story.tell("r.r0", dispatch("q1", "w0", (1, 2, 3)))
    view = view_of(story)
    assert hits(view, 1, 2, 3) == {"w0": 3}
    story.tell("w.w0", end, stored(1))
    assert hits(view, 1, 2, 3) == {}
    assert story.fleet.workers["w0"].cached.marks == {}
    assert story.fleet.workers["w0"].prefix_marks == 0
    assert prefix_cache.index_of(story.fleet).masks == {}


def test_an_older_incarnation_is_not_heard() -> None:
    story = two_workers()
    story.tell("w.w0", died(), started(incarnation=2), ready(incarnation=2), reset(2))
    story.tell("w.w0", stored(1), stored(2, incarnation=2))
    assert list(story.fleet.workers["w0"].cached.marks) == [2]


def test_an_engine_that_never_said_it_tells_is_not_expected_to() -> None:
    story = Story()
    story.worker()
    story.replica()
    story.tell("r.r0", dispatch("q1", "w0", (1,)))
    view = view_of(story)
    view.own(99, dispatch("q2", "w0", (1,)))
    assert hits(view, 1) == {}
    assert prefix_index.block_tokens(view, "m") == 0


def test_ragged_bytes_are_read_as_far_as_they_go() -> None:
    story = two_workers()
    story.tell("w.w0", v.PrefixBlocksChanged(incarnation=1, stored=prefix.pack((1, 2)) + b"xyz"))
    assert list(story.fleet.workers["w0"].cached.marks) == [1, 2]


# --- what dispatches expect --------------------------------------------------------------


def test_a_burst_knows_where_its_first_request_went() -> None:
    story = two_workers()
    view = view_of(story)
    view.own(2, dispatch("q1", "w1", (1, 2)))
    assert hits(view, 1, 2, 3) == {"w1": 2}
    story.tell("r.r0", dispatch("q1", "w1", (1, 2)))
    view.landed()
    assert not view.expected
    assert hits(view, 1, 2, 3) == {"w1": 2}
    story.tell("w.w1", stored(1), engine_step(queued(), v.FirstToken("q1", 1)))
    assert hits(view, 1, 2, 3) == {"w1": 1}  # the engine's word


def test_an_own_dispatch_to_an_engine_that_died_is_not_expected() -> None:
    story = two_workers()
    view = view_of(story)
    view.own(2, dispatch("q1", "w1", (1, 2)))
    story.tell("w.w1", died("w1"))
    assert hits(view, 1, 2) == {}


@pytest.mark.parametrize("how", ["observed", "ended", "finished", "lost"])
def test_what_will_never_be_made_is_not_expected(how: str) -> None:
    story = two_workers()
    story.tell(
        "r.r0",
        v.RequestArrived(
            request="q1",
            model="m",
            route="c",
            stream=True,
            prompt_tokens=100,
            max_tokens=64,
            verdict="exact",
        ),
    )
    story.tell("r.r0", dispatch("q1", "w0", (1, 2)))
    view = view_of(story)
    assert hits(view, 1, 2) == {"w0": 2}
    if how == "observed":
        story.tell("r.r0", observed())
    elif how == "ended":
        story.tell("r.r0", ended())
    elif how == "finished":
        story.tell("w.w0", engine_step(queued(), finished()))
    else:
        story.tell("w.w0", engine_step(queued()))
        story.tell("r.r0", ended())
        story.tell("w.w0", engine_step(lost=1))
    assert hits(view, 1, 2) == {}
    assert story.fleet.workers["w0"].cached.expected == {}


def test_several_who_expect_the_same_are_counted() -> None:
    story = two_workers()
    story.tell("r.r0", dispatch("q1", "w0", (1, 2)), dispatch("q2", "w0", (1, 3)))
    view = view_of(story)
    story.tell("w.w0", engine_step(queued(), finished()))
    assert hits(view, 1, 2) == {"w0": 1}
    story.tell("w.w0", engine_step(queued("q2"), finished("q2")))
    assert hits(view, 1) == {}


# --- bounds, snapshots, hashes ---------------------------------------------------------


def test_memory_is_bounded() -> None:
    story = two_workers()
    view = view_of(story)
    assert hits(view, 0) == {}
    most = prefix.MAX_REPORTED
    for first in range(0, most + 1000, 500):
        story.tell("w.w0", stored(*range(first, first + 500)))
    worker = story.fleet.workers["w0"]
    assert worker.prefix_marks == len(worker.cached.marks) == most
    assert len(prefix_cache.index_of(story.fleet).masks) == most
    assert hits(view, most + 999) == {}
    story.tell("w.w0", removed(5, 6), stored(most + 999))
    assert hits(view, most + 999) == {"w0": 1}
    assert worker.prefix_marks == most - 1


def test_a_large_fleet_shares_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "TOTAL", 64)
    monkeypatch.setattr(prefix_cache, "SHARE", 8)
    story = Story()
    for n in range(16):
        story.worker(f"w{n}")
        story.tell(f"w.w{n}", reset(), stored(*range(100)))
    story.tell("w.w0", stored(500))  # its share is smaller by now
    kept = [worker.prefix_marks for worker in story.fleet.workers.values()]
    assert kept[:9] == [64, 32, 21, 16, 12, 10, 9, 8, 8]


def test_a_snapshot_holds_it_all_and_the_hash_its_number() -> None:
    story = two_workers()
    story.tell("w.w0", stored(1, 2, 2**64 - 1))
    story.tell("r.r0", dispatch("q1", "w1", (1, 7)))
    again = load(dump(story.fleet))
    assert again == story.fleet
    assert hits(View("r.r0", again), 1, 7) == {"w0": 1, "w1": 2}
    before = state_hash(story.fleet)
    assert state_hash(again) == before
    assert list(again.workers["w0"].cached.marks) == [1, 2, 2**64 - 1]  # put back
    story.tell("w.w0", removed(2))
    same = load(dump(again))
    same.revision, same.order, same.streams = (
        story.fleet.revision,
        story.fleet.order,
        story.fleet.streams,
    )
    assert state_hash(story.fleet) != state_hash(same)


# --- against a naive model ---------------------------------------------------------------


class Naive:
    """What `Life` does, kept as sets and scanned."""

    def __init__(self, names: list[str]) -> None:
        self.held: dict[str, set[int]] = {name: set() for name in names}
        self.expected: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in names}

    def hits(self, asked: tuple[int, ...]) -> dict[str, int]:
        found = {}
        for name, held in self.held.items():
            all_ = held.union(*self.expected[name].values())
            run = next((n for n, one in enumerate(asked) if one not in all_), len(asked))
            if run:
                found[name] = prefix.blocks_at(run)
        return found


class Life:
    """A random history of a fleet, told to the fold and to the model."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.names = [f"w{n}" for n in range(5)]
        self.story = Story()
        self.incarnations = dict.fromkeys(self.names, 1)
        for name in self.names:
            self.story.worker(name)
            self.story.tell(f"w.{name}", reset())
        self.story.replica()
        self.view = view_of(self.story)
        self.naive = Naive(self.names)
        self.number = 0
        self.unsent: list[v.RouteDecided] = []

    def prompt(self) -> tuple[int, ...]:
        """Prefixes of a few trees, so that they meet."""
        tree, length = self.draw.randrange(3), self.draw.randrange(1, 12)
        fork = self.draw.randrange(length + 1)
        own = self.draw.randrange(4)
        return tuple(
            100_000 * tree + (n if n < fork else 5000 * (fork + 1) + 1000 * (own + 1) + n)
            for n in range(length)
        )

    def step(self) -> None:
        draw, name = self.draw, self.draw.choice(self.names)
        incarnation, held = self.incarnations[name], self.naive.held[name]
        what = draw.randrange(12)
        if what < 3:
            one = self.prompt()
            self.story.tell(f"w.{name}", stored(*one, incarnation=incarnation))
            held.update(one)
        elif what < 5 and held:
            some = draw.sample(sorted(held), draw.randrange(1, len(held) + 1))
            self.story.tell(f"w.{name}", removed(*some, 424242, incarnation=incarnation))
            held.difference_update(some)
        elif what < 8:
            self.number += 1
            request = f"q{self.number}"
            event = dispatch(request, name, self.prompt(), incarnation)
            self.view.own(self.view.position + 1, event)
            self.unsent.append(event)
            self.naive.expected[name][request] = prefix.unpack(event.prefix)
        elif what == 8:
            self.flush()
        elif what < 11 and self.naive.expected[name]:
            self.flush()
            request = draw.choice(sorted(self.naive.expected[name]))
            del self.naive.expected[name][request]
            last = v.FirstToken(request, 1) if draw.random() < 0.5 else finished(request)
            self.story.tell(
                f"w.{name}", engine_step(queued(request), last, incarnation=incarnation)
            )
        elif what == 11 and draw.random() < 0.3:
            self.flush()
            self.incarnations[name] += 1
            held.clear()
            self.naive.expected[name].clear()
            new = self.incarnations[name]
            self.story.tell(f"w.{name}", died(name, new - 1), started(name, new))
            self.story.tell(f"w.{name}", ready(name, new), reset(new))

    def flush(self) -> None:
        if self.unsent:
            unsent, self.unsent = self.unsent, []
            self.story.tell("r.r0", *unsent)
        self.view.landed()


@pytest.mark.parametrize("few", [1, 3, 64])
@pytest.mark.parametrize("seed", range(3))
def test_index_equals_a_naive_model(seed: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are compared whole, and how many mark by mark."""
    monkeypatch.setattr(prefix_index, "FEW", few)
    monkeypatch.setattr(own_prefixes, "FEW", few)
    life = Life(seed)
    some = 0
    for _ in range(300):
        life.step()
        asked = life.prompt()
        found = hits(life.view, *asked)
        assert found == life.naive.hits(asked), f"seed {seed}"
        some += len(found)
    assert some > 100
    life.flush()
    built: Fleet = load(dump(life.story.fleet))  # its index is made anew
    kept, made = prefix_cache.index_of(life.story.fleet), prefix_cache.index_of(built)
    assert kept.masks == made.masks
    for worker in built.workers.values():
        assert worker.prefix_marks == len(worker.cached.marks)


def test_runs_part_the_workers() -> None:
    life = Life(7)
    for _ in range(200):
        life.step()
        runs = prefix_index.runs(life.view, prefix.pack(life.prompt()))
        assert [blocks for blocks, _ in runs] == sorted({b for b, _ in runs}, reverse=True)
        union = 0
        for _, mask in runs:
            assert mask and not union & mask
            union |= mask
        assert union < 1 << len(life.names)


PROGRAM = """
from tests.policies.state.test_prefixes import *
life = Life(11)
answers = []
for _ in range(300):
    life.step()
    answers.append(sorted(hits(life.view, *life.prompt()).items()))
print(dump(life.story.fleet).hex(), state_hash(life.story.fleet).hex(), answers)
"""


def test_it_is_the_same_in_every_process() -> None:
    answers = set()
    for seed in ("0", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        answers.add(done.stdout)
    assert len(answers) == 1
