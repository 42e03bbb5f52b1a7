"""The waiting room at work: who comes through, who is called when, and what is on record."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from relume.controlplane.admin.request_book import RequestBook, decisions_of
from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.controlplane.replica.live_requests import HEAD_START_US
from relume.controlplane.replica.scheduler import Scheduler
from relume.controlplane.stream.arrival import Arrival, Rejected
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.codec import encode
from relume.events.log.entries import entries
from relume.events.log.memory import MemoryLog
from relume.policies import decision_versions
from relume.policies.admission.admission_settings import WaitingConfig, settings_of
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View
from tests.replay.tamper import places, replaced

USUAL = WaitingConfig(queued=2, requests=6, mb=1, tenant_percent=100)


class Caller:
    """An exchange without a client."""

    def __init__(self, plane: Plane, name: str) -> None:
        self.plane = plane
        self.name = name
        self.why: Rejected | None = None

    def called(self) -> bool:
        given = self.plane.scheduler.assign(self.name, "wait_over", 0)
        if isinstance(given, Rejected):
            self.refused(given)
        elif given is not None:
            self.plane.sent.append(self.name)
        return given is not None

    def refused(self, why: Rejected) -> None:
        self.why = why
        self.plane.refused.append(self.name)
        self.plane.scheduler.ended(self.name, "rejected", why.status, 0, "-")


class Plane:
    """A scheduler on a log in memory, one worker, and a clock that is set."""

    def __init__(self) -> None:
        self.log, self.fleet, self.now_us = MemoryLog(), Fleet(), 0
        self.sent: list[str] = []
        self.refused: list[str] = []
        self.callers: dict[str, Caller] = {}
        self.steps = 0
        self.running: list[str] = []
        self._folded = 0

    def follow(self) -> None:
        for group in self.log.groups[self._folded :]:
            self._folded += 1
            self.scheduler.decisions.received(group.revision)
            apply_group(self.fleet, group)
        self.scheduler.advanced()

    def ask(self, name: str, size: int = 10, nobody: bool = False, **more: Any) -> Caller:
        """A request comes, as the gateway has it."""
        arrival = Arrival(
            request=name,
            model="m",
            route="completions",
            stream=True,
            prompt_tokens=100,
            max_tokens=50,
            verdict="exact",
            **more,
        )
        caller = self.callers[name] = Caller(self, name)
        scheduler = self.scheduler
        scheduler.arrived(arrival)
        held = scheduler.waiting.admit(arrival, caller, size, 9.0, nobody)
        if isinstance(held, Rejected):
            caller.refused(held)
        elif not held:
            given = scheduler.assign(name, "arrival", 0)
            if given is None and not nobody:
                assert scheduler.waiting.admit(arrival, caller, size, 9.0, True) is True
            elif given is not None:
                self.sent.append(name)
        return caller

    def decodes(self, *names: str) -> None:
        """The engine has these in its batch from the end of this step on."""
        self.steps += 1
        batch = len(self.running)
        new = [name for name in names if name not in self.running]
        self.running += new
        changes: list[Any] = []
        for name in new:
            changes += [v.RequestQueued(name, 1, 100), v.FirstToken(name, 1)]
        self.worker.append(
            v.EngineStep(
                incarnation=1,
                step=self.steps,
                duration_us=5000,
                batch=batch,
                sum_context=100 * batch,
                prefill_tokens=0,
                waiting=0,
                kv_used=9,
                changes=tuple(changes),
            )
        )
        self.follow()

    async def settle(self) -> None:
        """Whoever is called has been called."""
        for _ in range(20):
            await asyncio.sleep(0)

    def own(self, *kinds: type) -> list[Any]:
        found = []
        for group in self.log.groups:
            for segment in group.segments:
                if segment.stream == "r.r0":
                    found += codec.decode_all(segment.records)
        return [event for event in found if type(event) in kinds]


@asynccontextmanager
async def plane(config: WaitingConfig = USUAL, up: bool = True) -> AsyncIterator[Plane]:
    p = Plane()
    async with p.log.writer("r.r0") as writer, p.log.writer("w.w0") as worker:
        p.worker = worker
        p.scheduler = Scheduler(View("r.r0", p.fleet), writer, "b", "least_load", lambda: p.now_us)
        p.scheduler.emit(
            v.ReplicaStarted(
                replica="r0",
                boot="b",
                host="127.0.0.1",
                port=1,
                pid=1,
                settings=settings_of(config) + decision_versions.settings(),
            )
        )
        worker.append(
            v.WorkerRegistered(worker="w0", domain="host", agent_pid=1),
            v.EngineStarted("w0", 1, 2, 3),
        )
        if up:
            worker.append(
                v.EngineReady(
                    worker="w0",
                    incarnation=1,
                    host="127.0.0.1",
                    port=9,
                    model="m",
                    max_model_len=4096,
                    block_size=16,
                    kv_blocks=512,
                )
            )
        p.follow()
        yield p
        assert not p.scheduler.waiting.queue.entries.keys() - p.scheduler.live.keys()
        assert p.scheduler.waiting._held.keys() == p.scheduler.waiting.queue.entries.keys()
        for name in list(p.scheduler.live):
            p.scheduler.ended(name, "cancelled", 499, 0, "-")
        room = p.scheduler.waiting.queue
        assert not room.entries
        assert room.size == 0
        p.follow()
        verdict = verify(p.log.groups)
        assert not verdict.divergences, verdict.divergences


async def test_no_request_is_queued_or_recorded_while_a_worker_has_room() -> None:
    async with plane() as p:
        p.ask("a")
        p.decodes("a")
        p.ask("b")
        p.ask("c")
        assert p.sent == ["a", "b", "c"]
        assert not p.own(v.RequestHeld)


async def test_who_waits_is_called_by_tier_and_tenant_when_the_engine_has_begun_others() -> None:
    async with plane() as p:
        for name, tier, share in (
            ("a", "", ""), ("b", "", ""), ("s", "", "t"), ("low", "batch", ""),
            ("s2", "", "t"), ("u", "", "u"), ("high", "interactive", ""),
        ):  # fmt: skip
            p.ask(name, tier=tier, share=share)
        assert p.sent == ["a", "b"]
        await p.settle()
        assert p.sent == ["a", "b"]
        running = ["a", "b"]
        for _ in range(5):
            p.now_us += 100_000
            p.decodes(*running)
            await p.settle()
            running = list(p.sent)
        assert p.sent == ["a", "b", "high", "s", "s2", "u", "low"]
        held = p.own(v.RequestHeld)
        assert [e.cause for e in held] == ["saturated", "behind", "behind", "behind", "behind"]
    verdict = verify(p.log.groups)
    assert verdict.waits >= 10
    chain = why(p.log.groups, "low")
    assert chain is not None
    story = "\n".join(lines_of(chain))
    assert "queued: other requests wait already" in story
    assert f"time in the admission queue: {chain.waited_us / 1000:.1f} ms" in story


async def test_a_replay_finds_another_order_than_the_recorded_one() -> None:
    async with plane() as p:
        for name in ("a", "b", "x", "y"):
            p.ask(name)
        p.decodes("a", "b")
        await p.settle()
        assert p.sent == ["a", "b", "x", "y"]
    groups = p.log.groups
    for place, segment in places(groups, "r.r0"):
        event = codec.decode(segment.records[place[2]])
        if type(event) is v.RequestHeld and event.request == "x":
            other = msgspec.structs.replace(event, tier="batch")
            changed = verify(replaced(groups, place, encode(other)))
            assert "y" in [d.actual for d in changed.divergences], "whose turn it was then"
            return
    pytest.fail("nobody was held")


async def test_a_full_room_sheds_the_least_and_says_so() -> None:
    async with plane() as p:
        for name in ("a", "b", *(f"low{n}" for n in range(6))):
            p.ask(name, tier="batch")
        late = p.ask("low9", tier="batch")
        assert late.why is not None
        assert (late.why.status, late.why.code) == (429, "overloaded")
        assert "too many requests wait" in late.why.message
        assert late.why.retry_after_s >= 1
        high = p.ask("high", tier="interactive")
        assert high.why is None
        displaced = p.callers["low5"].why
        assert displaced is not None
        assert displaced.status == 429
        sheds = p.own(v.RequestShed)
        assert [(e.request, e.reason, e.behalf) for e in sheds] == [
            ("low9", "room full", ""), ("low5", "displaced", "high"),
        ]  # fmt: skip
    book = RequestBook()
    for entry in entries(p.log.groups):
        book.note(entry)
    shown = decisions_of(book.courses["low5"], "r.r0")
    assert [d.decision["type"] for d in shown] == ["request_held", "request_shed"]


async def test_waits_end_by_the_clock_and_late_clients_get_an_answer() -> None:
    async with plane() as p:
        p.ask("a")
        p.ask("b")
        due = p.ask("due", ttft_ms=2000)
        longest = p.ask("longest")
        p.now_us = 2_000_000
        p.follow()
        await p.settle()
        assert due.why is not None
        assert (due.why.status, due.why.code) == (429, "deadline_exceeded")
        assert longest.why is None
        p.now_us = 30_000_000
        p.follow()
        await p.settle()
        assert longest.why is not None
        assert (longest.why.status, longest.why.code) == (429, "overloaded")
        assert [e.reason for e in p.own(v.RequestShed)] == ["expired", "too long"]


async def test_who_leaves_leaves_nothing_and_the_next_is_called() -> None:
    async with plane() as p:
        for name in ("a", "b", "x", "y"):
            p.ask(name, size=1000)
        assert p.scheduler.waiting.queue.size == 2000
        p.scheduler.ended("x", "cancelled", 499, 0, "-")
        p.scheduler.ended("a", "cancelled", 499, 0, "-")
        await p.settle()
        assert p.sent == ["a", "b", "y"]
        assert p.scheduler.waiting.queue.size == 0


async def test_who_is_called_and_fails_is_not_called_again() -> None:
    async with plane() as p:
        for name in ("a", "b", "x"):
            p.ask(name)
        called: list[str] = []
        p.callers["x"].called = lambda: not called.append("x")
        p.decodes("a", "b")
        await p.settle()
        assert called == ["x"]
        assert not p.scheduler.waiting.queue.entries


async def test_with_no_worker_open_they_wait_and_go_when_one_comes() -> None:
    async with plane(up=False) as p:
        first = p.ask("a", tier="batch")
        p.ask("b", tier="interactive")
        p.worker.append(
            v.EngineReady(
                worker="w0",
                incarnation=1,
                host="127.0.0.1",
                port=9,
                model="m",
                max_model_len=4096,
                block_size=16,
                kv_blocks=512,
            )
        )
        p.follow()
        await p.settle()
        assert p.sent == ["b", "a"]
        assert first.why is None
        assert {e.cause for e in p.own(v.RequestHeld)} == {"no worker"}


async def test_a_request_after_a_failure_comes_before_the_queue_and_is_never_queued() -> None:
    async with plane(WaitingConfig(queued=1)) as p:
        p.ask("a")
        p.decodes("a")
        p.ask("b")
        p.ask("new", tier="interactive")
        assert p.sent == ["a", "b"]
        assert p.scheduler.assign("a", "reset", 3) is not None, "the bound is not for it"
        p.worker.append(v.EngineDied("w0", 1, "killed"))
        p.follow()
        for name in ("a", "b"):
            p.scheduler.observed(name, p.scheduler.live[name].attempt, "engine_dead", 3)

        async def goes_on(name: str) -> None:
            assert await p.scheduler.capacity(name, 20)
            assert p.scheduler.assign(name, "wait_over", 3) is not None

        waiting = [asyncio.create_task(goes_on(name)) for name in ("a", "b")]
        await p.settle()
        p.worker.append(v.EngineStarted("w0", 2, 4, 5))
        p.worker.append(
            v.EngineReady(
                worker="w0",
                incarnation=2,
                host="127.0.0.1",
                port=9,
                model="m",
                max_model_len=4096,
                block_size=16,
                kv_blocks=512,
            )
        )
        p.follow()
        await p.settle()
        await asyncio.gather(*waiting)
        routed = [e.request for e in p.own(v.RouteDecided) if e.incarnation == 2]
        assert routed[:2] == ["a", "b"]
        assert not [e for e in p.own(v.RequestHeld, v.RequestShed) if e.request in ("a", "b")]


def _ready(incarnation: int) -> v.EngineReady:
    return v.EngineReady(
        worker="w0",
        incarnation=incarnation,
        host="127.0.0.1",
        port=9,
        model="m",
        max_model_len=4096,
        block_size=16,
        kv_blocks=512,
    )


@asynccontextmanager
async def engine_lost(config: WaitingConfig = USUAL) -> AsyncIterator[Plane]:
    """Request "a" waits for a worker after a failure, "x" and "y" wait in the queue: the only engine
    died."""
    async with plane(config) as p:
        p.ask("a")
        p.decodes("a")
        p.worker.append(v.EngineDied("w0", 1, "killed"))
        p.follow()
        p.scheduler.observed("a", 1, "engine_dead", 3)
        assert p.scheduler.assign("a", "engine_dead", 3) is None
        for name in ("x", "y"):
            p.ask(name)

        async def goes_on() -> None:
            assert await p.scheduler.capacity("a", 20)
            assert p.scheduler.assign("a", "wait_over", 3) is not None
            p.sent.append("a again")

        waiting = asyncio.create_task(goes_on())
        await p.settle()
        p.sent.clear()
        yield p
        await waiting


def _returns(p: Plane) -> None:
    """The worker has another engine."""
    p.worker.append(v.EngineStarted("w0", 2, 4, 5), _ready(2))
    p.follow()


async def test_the_queue_stays_back_until_the_engine_has_what_follows_a_failure() -> None:
    """Requests that are sent at once come to an engine in any order."""
    async with engine_lost() as p:
        _returns(p)
        await p.settle()
        assert p.sent == ["a again"]
        p.now_us += 1000
        p.follow()
        await p.settle()
        assert p.sent == ["a again"], "its engine has not reported it"
        p.worker.append(
            v.EngineStep(
                incarnation=2,
                step=1,
                duration_us=0,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=1,
                kv_used=0,
                changes=(v.RequestQueued("a", 2, 103),),
            )
        )
        p.follow()
        await p.settle()
        assert p.sent == ["a again", "x"], "the bound has room for one more"


async def test_the_queue_stays_back_for_a_bounded_time() -> None:
    """Reports may not come. Further attempts after failures do not extend the time."""
    async with engine_lost() as p:
        _returns(p)
        await p.settle()
        p.now_us += HEAD_START_US - 1
        p.scheduler.waiting.continues(p.scheduler.live["a"])
        p.follow()
        await p.settle()
        assert p.sent == ["a again"]
        p.now_us += 1
        p.scheduler.waiting._due()
        assert p.sent == ["a again", "x"]


@pytest.mark.parametrize("how", ["lost", "ended", "engine died", "log away"])
async def test_the_queue_does_not_wait_for_an_attempt_that_is_over(how: str) -> None:
    async with engine_lost() as p:
        _returns(p)
        await p.settle()
        assert p.sent == ["a again"]
        if how == "lost":
            p.scheduler.observed("a", 2, "engine_error", 3, "answered 500", 500)
        elif how == "ended":
            p.scheduler.ended("a", "cancelled", 499, 3, "-")
        elif how == "log away":
            p.log.pause()  # nothing would report it
        else:
            p.worker.append(v.EngineDied("w0", 2, "killed"), v.EngineStarted("w0", 3, 6, 7))
            p.worker.append(_ready(3))
        p.follow()
        await p.settle()
        assert "x" in p.sent
        p.log.resume()


async def test_what_follows_a_failure_goes_first_although_the_queue_was_woken_before() -> None:
    """A request ends in the turn of the loop in which an engine becomes ready."""
    async with engine_lost() as p:
        p.ask("z")
        p.scheduler.ended("z", "cancelled", 499, 0, "-")
        _returns(p)
        await p.settle()
        assert p.sent == ["a again"]
        p.scheduler.ended("a", "cancelled", 499, 3, "-")
        await p.settle()
        assert p.sent == ["a again", "x", "y"]


async def test_a_queued_request_whose_workers_die_waits_like_one_that_found_none() -> None:
    async with plane(
        WaitingConfig(queued=2, requests=6, mb=1, tenant_percent=100, most_ms=500)
    ) as p:
        p.ask("a")
        p.ask("b")
        patient = p.ask("x")
        due = p.ask("due", ttft_ms=2000)
        p.worker.append(v.EngineDied("w0", 1, "killed"))
        for now_us in (400_000, 600_000, 2_000_000):
            p.now_us = now_us
            p.follow()
            await p.settle()
        assert patient.why is None
        assert due.why is not None and due.why.code == "deadline_exceeded"
        p.now_us = 9_000_000
        p.follow()
        await p.settle()
        assert patient.why is not None
        assert (patient.why.status, patient.why.code) == (503, "no_worker")


async def test_with_no_worker_in_time_they_get_503() -> None:
    async with plane(up=False) as p:
        one = p.ask("a")
        p.now_us = 9_000_000
        p.follow()
        await p.settle()
        assert one.why is not None
        assert (one.why.status, one.why.code) == (503, "no_worker")


async def test_a_stopping_gateway_answers_everybody() -> None:
    async with plane() as p:
        for name in ("a", "b", "x"):
            p.ask(name)
        p.scheduler.waiting.close()
        late = p.ask("y")
        for caller in (p.callers["x"], late):
            assert caller.why is not None
            assert (caller.why.status, caller.why.code) == (503, "stopping")
            assert caller.why.retry_after_s == 1


async def test_no_request_is_queued_while_the_log_is_unavailable() -> None:
    """Nobody would hear that a worker is free again."""
    async with plane() as p:
        for name in ("a", "b", "x"):
            p.ask(name)
        p.log.pause()
        p.ask("y")
        p.scheduler.wake()
        await p.settle()
        assert sorted(p.sent) == ["a", "b", "x", "y"]
        p.log.resume()


async def test_a_bound_on_prompts_ahead_is_kept_by_the_clock_alone() -> None:
    """No event comes; the worker's prompts are through at the time that is foretold."""
    async with plane(WaitingConfig(queued=0, ahead_ms=50)) as p:
        for number in range(40):
            p.ask(f"q{number}")
        p.steps += 1
        queued = tuple(v.RequestQueued(name, 1, 100) for name in p.sent)
        p.worker.append(
            v.EngineStep(
                incarnation=1,
                step=p.steps,
                duration_us=5000,
                batch=0,
                sum_context=0,
                prefill_tokens=50,
                waiting=len(queued),
                kv_used=9,
                changes=queued,
            )
        )
        p.follow()
        before = len(p.sent)
        one = p.ask("late")
        if one.name in p.sent:
            pytest.fail("the worker is not busy")
        p.now_us += 30_000_000 - 1
        async with asyncio.timeout(20):
            while "late" not in p.sent and one.why is None:
                await asyncio.sleep(0.01)
        assert "late" in p.sent
        assert before
