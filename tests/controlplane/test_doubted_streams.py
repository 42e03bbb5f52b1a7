"""Requests that a quarantined worker served: which of them are compared, and which end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from relume.controlplane.replica.migration_watch import MigrationWatch, Move
from relume.controlplane.replica.scheduler import Scheduler
from relume.controlplane.replica.stall_watch import StallWatch
from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected
from relume.controlplane.stream.error_codes import NOT_COMPARED
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    FailureClass,
    HealthState,
    MigrationCause,
    RouteCause,
    TransportKind,
)
from relume.policies.state.overlay.view import View
from tests.policies.story import Story, ready, replica_started, started


def in_domain(worker: str) -> v.WorkerRegistered:
    return v.WorkerRegistered(worker=worker, domain=f"host-{worker}", agent_pid=7)


class TalkingWriter:
    """Writes into the story, so that the fold follows at once."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.stream = "r.r0"
        self.written: list[Any] = []

    @property
    def position(self) -> int:
        return self.story.fleet.streams["r.r0"].position

    def append(self, event: Any, beyond_limit: bool = False) -> int:
        self.written.append(event)
        self.story.tell("r.r0", event)
        return self.position

    def hurry(self, within_s: float = 0.0) -> None:
        pass


class Fleet:
    """Three workers, and the scheduler of one replica."""

    def __init__(self, holders: bool = False) -> None:
        """`holders`: their state daemons hold blocks."""
        self.story = Story()
        self.story.tell("r.r0", replica_started())
        for number in range(3):
            name = f"w{number}"
            if not holders:
                self.story.worker(name)
            else:
                with_blocks = msgspec.structs.replace(ready(name), family="f", block_bytes=1000)
                daemon = v.StateDaemonStarted(
                    worker=name, boot="b1", epoch=1, address=f"tcp://{name}:1",
                    budget_bytes=1 << 20, family="f",
                )  # fmt: skip
                self.story.tell(f"w.{name}", in_domain(name), started(name), with_blocks, daemon)
        self.writer = TalkingWriter(self.story)
        view = View("r.r0", self.story.fleet)
        writer: Any = self.writer
        self.scheduler = Scheduler(view, writer, "b1", "least_load", lambda: 0)
        self.scheduler.advanced()

    def arrive(self, request: str, verdict: str = "exact", **given: Any) -> Assignment:
        self.scheduler.arrived(
            Arrival(
                request=request, model="m", route="/v1/completions", verdict=verdict,
                **{"stream": True, "prompt_tokens": 5, "max_tokens": 9, "fallback": "restart", **given},
            )
        )  # fmt: skip
        found = self.assign(request, RouteCause.ARRIVAL, 0)
        assert isinstance(found, Assignment)
        return found

    def assign(
        self, request: str, cause: RouteCause, delivered: int
    ) -> Assignment | Rejected | None:
        return self.scheduler.assign(request, cause, delivered)

    def written(self, to: Assignment) -> None:
        """The first holder has 32 tokens of the attempt."""
        (holder,) = self.story.fleet.placed[to.request].holders
        held = v.CheckpointAcknowledged(
            holder=holder, boot="b1", request=to.request, child=0, attempt=to.attempt, blocks=2,
            tokens=32, bytes=320,
        )  # fmt: skip
        self.story.tell(f"w.{holder}", held)

    def quarantine(self, to: Assignment) -> None:
        self.decide(to, HealthState.QUARANTINED)

    def decide(self, to: Assignment, state: HealthState) -> None:
        decided = v.HealthDecided(
            worker=to.worker, incarnation=to.incarnation, state=state,
            failure=FailureClass.CORRUPTION, evidence="wrong", since=1,
        )  # fmt: skip
        self.story.tell("fleet", decided)
        self.scheduler.seen("fleet", 1, decided)

    def lost(
        self, to: Assignment, delivered: int, kind: TransportKind = TransportKind.CORRUPT
    ) -> None:
        self.scheduler.observed(to.request, to.attempt, kind, delivered)

    @property
    def route(self) -> v.RouteDecided:
        return [e for e in self.writer.written if type(e) is v.RouteDecided][-1]


def moved(fleet: Fleet, to: Assignment, delivered: int) -> Assignment | Rejected | None:
    fleet.quarantine(to)
    fleet.lost(to, delivered)
    return fleet.assign(to.request, RouteCause.CORRUPT, delivered)


def test_a_stream_with_tokens_of_the_worker_is_generated_again_and_compared() -> None:
    fleet = Fleet()
    found = moved(fleet, fleet.arrive("q"), 4)
    assert isinstance(found, Assignment)
    assert (found.mode, found.doubted) == ("replay", True)
    assert (fleet.route.mode, fleet.route.doubted, fleet.route.delivered) == ("replay", True, 4)
    fleet.lost(found, 4, TransportKind.RESET)
    again = fleet.assign("q", RouteCause.RESET, 4)
    assert isinstance(again, Assignment) and again.mode == "replay", "nothing was compared yet"


def test_one_without_tokens_of_the_worker_continues() -> None:
    fleet = Fleet()
    first = fleet.arrive("q")
    fleet.lost(first, 4, TransportKind.RESET)
    second = fleet.assign("q", RouteCause.RESET, 4)
    assert isinstance(second, Assignment) and second.mode == "continue"
    found = moved(fleet, second, 4)
    assert isinstance(found, Assignment) and (found.mode, found.doubted) == ("continue", False)


def test_one_that_the_worker_lost_before_the_verdict_is_compared_too() -> None:
    fleet = Fleet()
    first = fleet.arrive("q")
    fleet.lost(first, 4, TransportKind.RESET)
    second = fleet.assign("q", RouteCause.RESET, 4)
    assert isinstance(second, Assignment) and second.mode == "continue"
    assert fleet.scheduler.served_before(first.worker, 1) == [fleet.scheduler.live["q"]]
    assert fleet.scheduler.served_before(second.worker, 1) == []
    fleet.quarantine(first)
    fleet.lost(second, 6, TransportKind.MOVED)
    third = fleet.assign("q", RouteCause.CORRUPT, 6)
    assert isinstance(third, Assignment) and (third.mode, third.doubted) == ("replay", True)


@pytest.mark.parametrize(
    "given", [{"verdict": "sampled"}, {"needs": ("choices",)}, {"needs": ("parsers",)}]
)
def test_what_cannot_be_compared_ends_with_an_error_that_says_so(given: dict[str, Any]) -> None:
    fleet = Fleet()
    first = fleet.arrive("q", **given)
    assert moved(fleet, first, 4) == Rejected(502, NOT_COMPARED)


def test_a_client_that_waits_for_the_whole_gets_a_new_answer() -> None:
    fleet = Fleet()
    found = moved(fleet, fleet.arrive("q", verdict="sampled", stream=False), 4)
    assert isinstance(found, Assignment) and (found.mode, found.doubted) == ("new", False)
    fleet.lost(found, 2, TransportKind.RESET)
    again = fleet.assign("q", RouteCause.RESET, 2)
    assert isinstance(again, Assignment) and (again.mode, again.doubted) == ("continue", False)


def test_one_that_restored_blocks_of_the_worker_is_compared_though_it_got_no_token_there() -> None:
    fleet = Fleet(holders=True)
    first = fleet.arrive("q")
    fleet.written(first)
    fleet.lost(first, 0, TransportKind.RESET)
    second = fleet.assign("q", RouteCause.RESET, 0)
    assert isinstance(second, Assignment) and (second.mode, bool(second.restore)) == ("new", True)
    fleet.quarantine(first)
    assert fleet.scheduler.served_before(first.worker, 1) == [fleet.scheduler.live["q"]]
    fleet.lost(second, 3, TransportKind.MOVED)
    third = fleet.assign("q", RouteCause.CORRUPT, 3)
    assert isinstance(third, Assignment) and (third.mode, third.restore) == ("replay", ())
    fleet.lost(third, 3, TransportKind.RESET)
    fourth = fleet.assign("q", RouteCause.RESET, 3)
    assert isinstance(fourth, Assignment) and fourth.mode == "replay", "nothing was compared yet"


def test_an_adopted_stream_is_compared_if_a_worker_of_before_is_found_corrupt_later() -> None:
    """Its former owner knows which workers it had; here only the log says so."""
    fleet = Fleet()
    first = fleet.arrive("q")
    fleet.lost(first, 4, TransportKind.RESET)
    second = fleet.assign("q", RouteCause.RESET, 4)
    assert isinstance(second, Assignment)
    arrival = fleet.scheduler.live.pop("q").arrival
    fleet.scheduler.returns.adopt(arrival, 4, 0)
    assert fleet.scheduler.served_before(first.worker, 1) == [fleet.scheduler.live["q"]]
    assert fleet.scheduler.served_before(second.worker, 1) == [], "it runs there"
    fleet.quarantine(first)
    fleet.lost(second, 6, TransportKind.MOVED)
    third = fleet.assign("q", RouteCause.CORRUPT, 6)
    assert isinstance(third, Assignment) and (third.mode, third.doubted) == ("replay", True)


@pytest.mark.parametrize("is_corrupt", [False, True])
async def test_an_adopted_stream_in_doubt_is_ended_where_it_runs(is_corrupt: bool) -> None:
    """Its worker is blamed only if it is the corrupt one."""
    fleet = Fleet()
    first = fleet.arrive("q")
    fleet.lost(first, 4, TransportKind.RESET)
    second = fleet.assign("q", RouteCause.RESET, 4)
    assert isinstance(second, Assignment)
    fleet.quarantine(second if is_corrupt else first)
    arrival = fleet.scheduler.live.pop("q").arrival
    fleet.scheduler.returns.adopt(arrival, 4, 0)
    owned = await fleet.scheduler.returns.owned("q", 1.0)
    assert (owned.ours, owned.doubted) == (True, True)
    assert owned.left is not None and owned.left.worker == second.worker
    seen = [e for e in fleet.writer.written if type(e) is v.TransportObserved][-1]
    assert (seen.kind, seen.worker) == ("corrupt" if is_corrupt else "moved", second.worker)
    avoided = fleet.scheduler.live["q"].avoid
    assert avoided == ((f"{second.worker}:1",) if is_corrupt else ())
    third = fleet.assign("q", RouteCause.RETURNED, 4)
    assert isinstance(third, Assignment) and (third.mode, third.doubted) == ("replay", True)


def test_tokens_of_an_engine_that_an_operator_trusts_are_continued() -> None:
    fleet = Fleet()
    first = fleet.arrive("q", verdict="sampled")
    fleet.quarantine(first)
    fleet.decide(first, HealthState.PROBING)
    fleet.lost(first, 4, TransportKind.RESET)
    found = fleet.assign("q", RouteCause.RESET, 4)
    assert isinstance(found, Assignment) and (found.mode, found.doubted) == ("continue", False)


async def test_a_stream_that_leaves_the_corrupt_engine_moves_once() -> None:
    """Composed seed 4: where it went it was taken for one that had left before."""
    fleet = Fleet()
    first = fleet.arrive("q")
    doubted: list[str] = []

    def break_streams(*given: Any) -> int:
        fleet.lost(first, 4)
        assert fleet.assign("q", RouteCause.CORRUPT, 4)
        return 1

    gateway: Any = SimpleNamespace(
        activity={}, break_streams=break_streams, doubt_stream=lambda *given: doubted.append(given)
    )
    watch = StallWatch(fleet.scheduler, gateway, lambda: 0.0)
    fleet.quarantine(first)
    watch.seen("fleet", 1, fleet.story.seen[-1])
    watch.folded(fleet.story.groups[-1])
    assert fleet.scheduler.live["q"].attempt == 2 and doubted == []


@pytest.mark.parametrize("is_corrupt", [True, False])
async def test_a_drain_does_not_move_one_that_is_generated_again(is_corrupt: bool) -> None:
    """Composed 140377: two workers drained in turn, each before a replay was done: it began anew on the
    other one, without end."""
    fleet = Fleet()
    first = fleet.arrive("q")
    if is_corrupt:
        fleet.quarantine(first)
    fleet.lost(first, 4, TransportKind.MOVED)
    second = fleet.assign("q", RouteCause.MOVED, 4)
    assert isinstance(second, Assignment)
    fleet.scheduler.live["q"].running = True
    gateway: Any = SimpleNamespace(movable_on=lambda *_: {"q": 4}, away_on=lambda *_: {})
    watch = MigrationWatch(fleet.scheduler, gateway)
    leaving = watch._running(second.worker, second.incarnation, MigrationCause.DRAIN)
    assert [one.request for one in leaving] == ["q"] * (not is_corrupt)
    move = Move(request="q", attempt=2, worker=second.worker, incarnation=1, target=free(fleet))
    assert bool(watch._obstacle(move, 4)) is is_corrupt


def free(fleet: Fleet) -> str:
    """A worker that had no attempt of "q"."""
    ran_on = {e.worker for e in fleet.writer.written if type(e) is v.RouteDecided}
    return next(name for name in fleet.story.fleet.workers if name not in ran_on)


@pytest.mark.parametrize("state", [HealthState.DEAD, HealthState.SUSPECT])
def test_the_death_of_an_engine_does_not_make_its_tokens_right(state: HealthState) -> None:
    """Composed seed 609: the leader had both to write."""
    fleet = Fleet()
    first = fleet.arrive("q")
    fleet.quarantine(first)
    fleet.decide(first, state)
    fleet.lost(first, 4, TransportKind.RESET)
    found = fleet.assign("q", RouteCause.RESET, 4)
    assert isinstance(found, Assignment) and (found.mode, found.doubted) == ("replay", True)


def test_the_fold_knows_which_live_requests_were_sent_to_a_corrupt_worker() -> None:
    fleet = Fleet()
    first, other = fleet.arrive("q"), fleet.arrive("p")
    assert first.worker != other.worker
    fleet.quarantine(first)
    requests = fleet.story.fleet.requests
    assert (requests["q"].doubted, bool(requests["p"].doubted)) == (True, False)
