"""The fold's invariants hold in random logs, and a fold that breaks one is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase
from relume.events.wire.prefix import pack
from relume.policies.state.fleet import Fleet, Placed, Planned, Unheard
from relume.policies.state.invariants import check
from relume.policies.state.prefix_cache import index_of
from tests.policies.story import Story, arrived, decided, died, ended, engine_step, queued

HOLDERS = ("w0", "w1", "w2")
REQUESTS = ("q0", "q1", "q2", "q3")
WHAT = (
    "arrive", "place", "acknowledge", "acknowledge", "acknowledge both", "evict", "drop", "end",
    "void", "daemon again", "daemon lost", "worker lost", "release", "tick", "prefix",
)  # fmt: skip


class Checkpoints:
    """Random records of holders and of the requests that they hold, in any order."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.story = Story()
        self.boots = dict.fromkeys(HOLDERS, 1)
        for name in HOLDERS:
            self.story.worker(name)
            self.begin(name)
        self.story.replica()
        self.story.leader()

    def begin(self, name: str) -> None:
        told = v.StateDaemonStarted(
            worker=name, boot=f"b{self.boots[name]}", epoch=1, address=name, budget_bytes=10_000
        )
        self.story.tell(f"w.{name}", told)

    def any(self, of: Any) -> Any:
        return self.draw(st.sampled_from(of))

    def held(self, request: str) -> dict[str, Any]:
        blocks = self.draw(st.integers(0, 9))
        return {
            "request": request, "child": self.draw(st.integers(0, 1)), "attempt": 1,
            "blocks": blocks, "tokens": 16 * blocks, "bytes": 160 * blocks + 7,
        }  # fmt: skip

    def act(self, what: str) -> None:
        holder, request = self.any(HOLDERS), self.any(REQUESTS)
        of = {"holder": holder, "boot": f"b{self.boots[holder] - self.draw(st.integers(0, 1))}"}
        if what in ("acknowledge", "acknowledge both", "evict", "drop"):
            self.story.tell(f"w.{holder}", self.of_blocks(what, of, self.held(request)))
        elif what in ("arrive", "place", "end"):
            self.of_request(what, request, holder)
        else:
            self.of_fleet(what, request, of)

    def of_blocks(self, what: str, of: dict[str, str], held: dict[str, Any]) -> v.Event:
        if what == "acknowledge":
            return v.CheckpointAcknowledged(**of, **held)
        if what == "acknowledge both":
            both = v.HeldPrefix(**held), v.HeldPrefix(**self.held(self.any(REQUESTS)))
            return v.CheckpointsAcknowledged(**of, held=both)
        if what == "evict":
            left = {name: held[name] for name in ("request", "child", "tokens", "bytes")}
            return v.CheckpointEvicted(**of, **left)
        gone = {"request": held["request"], "child": held["child"], "reason": "finished"}
        return v.CheckpointDropped(**of, **gone)

    def of_request(self, what: str, request: str, holder: str) -> None:
        live = request in self.story.fleet.requests
        if what == "arrive" and not live:
            self.story.tell("r.r0", arrived(request), decided(request))
        elif what == "place" and live:
            self.story.tell("r.r0", placed(request, (holder,)))
        elif what == "end" and live:
            self.story.tell("r.r0", ended(request))

    def of_fleet(self, what: str, request: str, of: dict[str, str]) -> None:
        story, holder = self.story, of["holder"]
        stream = f"w.{holder}"
        if what == "void":
            story.tell("fleet", v.CheckpointsVoided(holder, 1, ((request, 1),)))
        elif what == "daemon again":
            self.boots[holder] += 1
            self.begin(holder)
        elif what == "daemon lost":
            story.tell(stream, v.StateDaemonLost(holder, of["boot"], "killed"))
        elif what == "worker lost":
            story.tell("fleet", v.WorkerLost(holder, story.epochs[stream], "lease lapsed"))
        elif what == "release":
            story.tell("fleet", v.CheckpointsReleased(requests=(request,)))
        elif what == "tick":
            story.healthy_ticks(self.draw(st.integers(1, 20)))
        elif what == "prefix":
            stored = pack([self.draw(st.integers(1, 5)), self.draw(st.integers(6, 9))])
            reset = self.draw(st.booleans())
            told = v.PrefixBlocksChanged(
                incarnation=1, stored=stored, removed=b"", reset=reset, block_tokens=16
            )
            story.tell(stream, told)


def placed(request: str, holders: tuple[str, ...]) -> v.HolderChosen:
    return v.HolderChosen(
        decision="d", basis=v.Basis(1, 0), request=request, attempt=1, cause="arrival",
        primary="w0", holders=holders, policy="load_aware", wanted=1, expected_blocks=4,
        expected_bytes=640,
    )  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(st.data(), st.lists(st.sampled_from(WHAT), min_size=5, max_size=60))
def test_they_hold_in_random_logs_of_checkpoints(data: Any, acts: list[str]) -> None:
    world = Checkpoints(data.draw)
    index_of(world.story.fleet)
    for what in acts:
        world.act(what)
        assert [*check(world.story.fleet)] == []


def sound() -> Fleet:
    """One request runs on w0 with a holder, another is on its way."""
    story = Story()
    for name in ("w0", "w1"):
        story.worker(name)
    daemon = v.StateDaemonStarted(
        worker="w1", boot="b", epoch=1, address="w1", budget_bytes=10_000
    )  # fmt: skip
    story.tell("w.w1", daemon)
    story.replica()
    story.tell("r.r0", arrived("q1"), decided("q1"), placed("q1", ("w1",)))
    story.tell("r.r0", arrived("q2"), decided("q2"))
    story.tell("w.w0", engine_step(queued("q1")))
    held = v.CheckpointAcknowledged(
        holder="w1", boot="b", request="q1", child=0, attempt=1, blocks=2, tokens=32, bytes=320
    )
    story.tell("w.w1", held)
    index_of(story.fleet)
    return story.fleet


def broken_load(fleet: Fleet) -> None:
    fleet.workers["w0"].prefill_left += 1


def broken_flights(fleet: Fleet) -> None:
    fleet.workers["w0"].flights -= 1


def broken_death(fleet: Fleet) -> None:
    fleet.workers["w0"].engine = EnginePhase.DEAD


def broken_context(fleet: Fleet) -> None:
    fleet.workers["w0"].context = -1


def broken_bytes(fleet: Fleet) -> None:
    fleet.holders["w1"].held_bytes += 16


def broken_share(fleet: Fleet) -> None:
    fleet.holders["w1"].promised_bytes += 1


def broken_holder(fleet: Fleet) -> None:
    fleet.holders["w1"].alive = False


def broken_place(fleet: Fleet) -> None:
    fleet.requests["q1"].places.clear()


def broken_plan(fleet: Fleet) -> None:
    fleet.planned["gone"] = Planned(attempt=1, worker="w0")


def broken_placement(fleet: Fleet) -> None:
    fleet.placed["gone"] = Placed(primary="w0", attempt=1, holders=(), blocks=1, bytes=1)


def broken_count(fleet: Fleet) -> None:
    fleet.ended += 1


def broken_acknowledgement(fleet: Fleet) -> None:
    fleet.unacknowledged["q1"] = Unheard(replica="r0", boot="b1", attempt=1, tick=0)


def broken_prefix(fleet: Fleet) -> None:
    fleet.workers["w0"].cached.expected["gone/1"] = pack([1])


def broken_marks(fleet: Fleet) -> None:
    fleet.workers["w0"].cached.marks[7] = None


def broken_owner(fleet: Fleet) -> None:
    fleet.gone["w.w0"] = 1


@pytest.mark.parametrize("break_it", [f for n, f in globals().items() if n.startswith("broken_")])
def test_a_broken_one_is_found(break_it: Callable[[Fleet], None]) -> None:
    fleet = sound()
    assert [*check(fleet)] == []
    break_it(fleet)
    assert [*check(fleet)] != []


def test_an_engine_that_died_holds_nothing() -> None:
    story = Story()
    story.worker()
    story.replica()
    story.tell("r.r0", arrived(), decided())
    story.tell("w.w0", engine_step(queued()), died())
    assert [*check(story.fleet)] == []
