"""The stall watch asks an engine over HTTP; who answers, and a log that takes nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from relume.controlplane.gateway.ports import Activity
from relume.controlplane.replica.scheduler import Scheduler
from relume.controlplane.replica.stall_watch import StallWatch
from relume.events import vocabulary as v
from relume.events.log.errors import LogFull
from relume.events.log.interface import RevisionGroup
from relume.events.log.memory import MemoryLog
from relume.events.vocabulary.enums import FailureClass, HealthState
from relume.policies.liveness import stall
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View
from tests.policies.story import engine_step, found_hung

QUICK = stall.StallConfig(floor_us=50_000, cap_us=100_000, factor=8)


class FullWriter:
    """A writer of stream r.r0 that takes nothing while `full`, as in a long outage."""

    position = 0
    full = False

    def append(self, event: Any, beyond_limit: bool = False) -> int:
        if self.full and not beyond_limit:
            raise LogFull("r.r0", 1)
        self.position += 1
        return self.position

    def hurry(self, within_s: float = 0.0) -> None:
        pass


class OneStream:
    """A gateway that holds one stream on (w0, incarnation 3), silent from the beginning."""

    def __init__(self, now: float) -> None:
        self.activity = {("w0", 3): Activity(now)}
        self.activity["w0", 3].open_streams = 1
        self.broken: list[tuple[str, int, str]] = []

    def break_streams(self, worker: str, incarnation: int, cause: str, detail: str = "") -> int:
        self.broken.append((worker, incarnation, cause))
        self.activity[worker, incarnation].open_streams = 0
        return 1


@asynccontextmanager
async def engine(
    answers_probe: bool = True,
    after_s: float = 0.0,
    changing: Callable[[], dict[str, int]] = dict,
    **state: Any,
) -> AsyncIterator[int]:
    """Port of something that answers `/relume/state` with `state` and what is `changing`, and
    `/relume/probe` if it `answers_probe`; both `after_s`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # who asked has given up
        if b"/relume/probe" in asked and not answers_probe:
            writer.close()
            return
        await asyncio.sleep(after_s)
        body = msgspec.json.encode({**state, **changing()})
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            await asyncio.sleep(min(2 * after_s, 0.2))  # until the last answer is given


async def watched(
    port: int,
    full: bool = False,
    until: type = v.StallJudged,
    told_hung: bool = False,
    config: stall.StallConfig = QUICK,
) -> tuple[OneStream, list[Any]]:
    """What the watch does about w0, whose engine listens at `port` and made a quick step, until it
    judged or wrote an event of the type. `told_hung`: its agent finds it hung, at once."""
    log, fleet = MemoryLog(), Fleet()
    async with log.writer("w.w0") as worker:
        worker.append(
            v.WorkerRegistered(worker="w0", domain="host", agent_pid=1),
            v.EngineStarted("w0", 3, 2, 3),
            v.EngineReady(
                worker="w0",
                incarnation=3,
                host="127.0.0.1",
                port=port,
                model="m",
                max_model_len=4096,
                block_size=16,
                kv_blocks=512,
            ),
            engine_step(incarnation=3),
        )
        for group in log.groups:
            apply_group(fleet, group)
    writer = FullWriter()
    scheduler = Scheduler(View("r.r0", fleet), writer, "b", "least_load", lambda: 0)  # type: ignore[arg-type]
    scheduler.emit(
        v.ReplicaStarted(
            replica="r0",
            boot="b",
            host="",
            port=1,
            pid=1,
            seed=0,
            policy="",
            settings=stall.settings_of(config),
        )
    )
    writer.full = full
    told: list[Any] = []
    scheduler.decisions.observers.append(lambda position, event: told.append(event))
    loop = asyncio.get_running_loop()
    gateway = OneStream(loop.time())
    watch = StallWatch(scheduler, gateway, loop.time, 0.01)  # type: ignore[arg-type]
    if told_hung:
        event = found_hung(incarnation=3)
        watch.seen("w.w0", 4, event)
        assert gateway.broken == [], "the group is not whole yet"
        watch.folded(RevisionGroup(9, ()))
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(60):
        while not any(type(e) is until for e in told) and not (full and gateway.broken):
            assert not task.done(), task
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return gateway, told


async def test_streams_leave_an_engine_that_its_agent_found_hung() -> None:
    """And it is suspected until it is seen to work: here its loop turns."""
    state = {"unfinished": 0, "steps": 7, "turns": 9, "expected_us": 900, "cpu_us": 5, "wait_us": 0}
    async with engine(worker="w0", incarnation=3, **state) as port:
        gateway, told = await watched(port, until=v.WorkerCleared, told_hung=True)
    assert gateway.broken == [("w0", 3, "stall")]
    assert [type(e) for e in told] == [v.WorkerSuspected, v.WorkerCleared]
    assert told[0] == v.WorkerSuspected("w0", 3, "its agent found it hung")
    assert (told[1].evidence, told[1].turns, told[1].held) == ("idle and answering", 1, 0)


async def test_a_server_that_answers_for_a_loop_that_hangs_does_not_clear_it() -> None:
    """As the HTTP server of `vllm serve` does when its engine core is stopped."""
    state = {"unfinished": 0, "steps": 7, "turns": 9, "expected_us": 900, "cpu_us": 5, "wait_us": 0}
    async with engine(answers_probe=False, worker="w0", incarnation=3, **state) as port:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await watched(port, until=v.WorkerCleared, told_hung=True)


async def test_streams_leave_a_quarantined_engine() -> None:
    """It is no suspect: the decision itself keeps requests from it."""
    loop, told = asyncio.get_running_loop(), list[Any]()
    gateway = OneStream(loop.time())
    scheduler = Scheduler(View("r.r0", Fleet()), FullWriter(), "b", "least_load", lambda: 0)  # type: ignore[arg-type]
    scheduler.decisions.observers.append(lambda position, event: told.append(event))
    watch = StallWatch(scheduler, gateway, loop.time)  # type: ignore[arg-type]
    for state in (HealthState.SUSPECT, HealthState.QUARANTINED):
        assert gateway.broken == []
        event = v.HealthDecided(
            worker="w0",
            incarnation=3,
            state=state,
            failure=FailureClass.CORRUPTION,
            evidence="wrong answer",
            since=1,
        )
        watch.seen("fleet", 4, event)
        watch.folded(RevisionGroup(9, ()))
    assert gateway.broken == [("w0", 3, "corrupt")] and told == []


async def test_engine_that_works_is_left_alone() -> None:
    async with engine(worker="w0", incarnation=3, unfinished=0, cpu_us=5) as port:
        gateway, told = await watched(port)
    assert gateway.broken == []
    judged = [e for e in told if type(e) is v.StallJudged]
    assert {(e.probe, e.hung) for e in judged} == {("answered", False)}
    fired = [e for e in told if type(e) is v.TimerFired]
    assert set(fired) == {v.TimerFired("stall", "w0:3")}
    assert len(judged) <= len(fired) <= len(judged) + 1


PATIENT = stall.StallConfig(floor_us=300_000, cap_us=1_200_000, factor=8)


async def test_engine_that_answers_after_its_bound_is_starved_not_hung() -> None:
    """Two busy processes beside it keep it from its CPU for so long."""
    async with engine(worker="w0", incarnation=3, unfinished=0, cpu_us=5, after_s=0.6) as port:
        gateway, told = await watched(port, config=PATIENT)
    assert gateway.broken == []
    (judged,) = [e for e in told if type(e) is v.StallJudged]
    assert (judged.probe, judged.hung, judged.bound_us) == ("answered", False, PATIENT.floor_us)
    assert judged.silent_us > PATIENT.floor_us


async def test_cpu_time_of_a_silent_engine_adds_up_from_look_to_look() -> None:
    """A thread that spins beside busy processes uses little in one interval: here 60 ms a look, of a
    step that may take 200 ms, and waits four times as long."""
    state = {"unfinished": 1, "steps": 7, "turns": 9, "expected_us": 50_000, "step_age_us": 900_000}
    spins = itertools.count()

    def looked() -> dict[str, int]:
        turn = next(spins)
        return {"cpu_us": 60_000 * turn, "wait_us": 240_000 * turn}

    async with engine(worker="w0", incarnation=3, changing=looked, **state) as port:
        gateway, told = await watched(port, until=v.WorkerSuspected, config=PATIENT)
    assert gateway.broken == [("w0", 3, "stall")]
    judged = [(e.cpu_us, e.hung) for e in told if type(e) is v.StallJudged]
    assert judged == [(60_000, False), (120_000, False), (180_000, False), (240_000, True)]


async def test_engine_that_never_answers_is_hung_at_the_cap() -> None:
    async with engine(worker="w0", incarnation=3, after_s=60.0) as port:
        gateway, told = await watched(port, config=PATIENT)
    assert gateway.broken == [("w0", 3, "stall")]
    (judged,) = [e for e in told if type(e) is v.StallJudged]
    assert (judged.probe, judged.hung, judged.bound_us) == ("silent", True, PATIENT.floor_us)
    assert judged.silent_us >= PATIENT.cap_us


@pytest.mark.parametrize(("worker", "incarnation"), [("w0", 4), ("w0", 2), ("w1", 3)])
async def test_answer_of_another_engine_says_nothing_of_the_one_asked(
    worker: str, incarnation: int
) -> None:
    """A successor, or a stranger on the port: idle and well, but it has not our streams."""
    async with engine(worker=worker, incarnation=incarnation, unfinished=0, cpu_us=5) as port:
        gateway, told = await watched(port)
    assert gateway.broken == [("w0", 3, "stall")]
    assert [(e.probe, e.hung) for e in told if type(e) is v.StallJudged] == [("refused", True)]
    assert not [e for e in told if type(e) is v.WorkerCleared]


async def test_full_spool_does_not_keep_streams_on_a_hung_engine() -> None:
    async with engine(worker="w0", incarnation=3, unfinished=1, steps=7, cpu_us=5) as port:
        gateway, told = await watched(port, full=True)
    assert gateway.broken == [("w0", 3, "stall")]
    assert told == []
