"""Requests that a quarantined worker served: which of them are compared, and which end."""

from __future__ import annotations

from typing import Any

import pytest

from relume.controlplane.replica.scheduler import Scheduler
from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected
from relume.controlplane.stream.error_codes import NOT_COMPARED
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState, RouteCause, TransportKind
from relume.policies.state.overlay.view import View
from tests.policies.story import Story, replica_started


class TalkingWriter:
    """Writes into the story, so that the fold follows at once."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.stream = "r.r0"
        self.written: list[Any] = []

    @property
    def position(self) -> int:
        return self.story.fleet.streams["r.r0"].position

    def append(self, event: Any) -> int:
        self.written.append(event)
        self.story.tell("r.r0", event)
        return self.position

    def hurry(self, within_s: float = 0.0) -> None:
        pass


class Fleet:
    """Three workers, and the scheduler of one replica."""

    def __init__(self) -> None:
        self.story = Story()
        self.story.tell("r.r0", replica_started())
        for number in range(3):
            self.story.worker(f"w{number}")
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

    def quarantine(self, to: Assignment) -> None:
        decided = v.HealthDecided(
            worker=to.worker, incarnation=to.incarnation, state=HealthState.QUARANTINED,
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


def test_the_fold_knows_which_live_requests_were_sent_to_a_corrupt_worker() -> None:
    fleet = Fleet()
    first, other = fleet.arrive("q"), fleet.arrive("p")
    assert first.worker != other.worker
    fleet.quarantine(first)
    requests = fleet.story.fleet.requests
    assert (requests["q"].doubted, bool(requests["p"].doubted)) == (True, False)
