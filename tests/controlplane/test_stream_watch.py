"""The stream watch over time: what it notes, when it probes, and when it judges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from relume.controlplane.gateway.ports import Activity
from relume.controlplane.replica.live_requests import LiveRequest
from relume.controlplane.replica.liveness import stream_watch
from relume.controlplane.replica.liveness.stream_watch import StreamWatch
from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.events.log.errors import LogFull
from relume.policies import decision_versions
from relume.policies.liveness import overdue
from relume.policies.state.overlay.view import View
from tests.controlplane.test_stall_watch import FullWriter, engine
from tests.policies.story import (
    Story,
    arrived,
    decided,
    ended,
    engine_step,
    queued,
    replica_started,
)

CONFIG = overdue.OverdueConfig(steps=8)
LOOK_S = 0.25


class Streams:
    """A gateway with two streams on (w0, 1). `heard`: time of each one's last byte."""

    def __init__(self) -> None:
        self.activity = {("w0", 1): Activity(0.0)}
        self.activity["w0", 1].open_streams = 2
        self.heard = {("q1", 1): 0.0, ("q2", 1): 0.0}
        self.delivered: dict[str, int] = {}
        self.withheld: list[tuple[str, int]] = []
        self.broken: list[tuple[Any, ...]] = []

    def silent_on(
        self, worker: str, incarnation: int, before: float
    ) -> dict[tuple[str, int], float]:
        return {of: at for of, at in self.heard.items() if at < before}

    def withheld_on(self, worker: str, incarnation: int) -> list[tuple[str, int]]:
        return self.withheld

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        return self.delivered

    def break_stream(self, *given: Any) -> bool:
        self.broken.append(given)
        self.heard.pop((given[2], given[3]), None)
        self.withheld = [of for of in self.withheld if of != (given[2], given[3])]
        return True


class Fleet(Story):
    """w0 decodes q1 and q2; a watch looks at them on a clock of its own. `reports`: whether the log
    has reports of w0's engine."""

    def __init__(self, port: int, reports: bool = True) -> None:
        super().__init__()
        self.worker()
        self.fleet.workers["w0"].port = port
        settings = overdue.settings_of(CONFIG) + decision_versions.settings()
        self.tell("r.r0", replica_started(settings=settings))
        for request in ("q1", "q2"):
            self.tell("r.r0", arrived(request), decided(request))
            if reports:
                self.tell("w.w0", engine_step(queued(request), v.FirstToken(request, 1)))
        writer: Any = FullWriter()
        writer.position = self.heads["r.r0"][2] - 1
        self.writer = writer
        view = View("r.r0", self.fleet)
        self.scheduler = Scheduler(view, writer, "b", "least_load", lambda: 0)
        self.told: list[v.StreamJudged] = []
        self.scheduler.decisions.observers.append(lambda _, event: self.told.append(event))
        self.now, self.step = 0.0, 1
        self.gateway = Streams()
        gateway: Any = self.gateway
        self.watch = StreamWatch(self.scheduler, gateway, lambda: self.now, LOOK_S)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            self.tell("w.w0", msgspec.structs.replace(engine_step(), step=self.step))
        self.scheduler.view.landed()

    async def look(self, seconds: float = LOOK_S) -> None:
        """Time passes; the watch looks, and a probe that it sends is answered or not."""
        self.now += seconds
        async with asyncio.TaskGroup() as tasks:
            self.watch._look(tasks)

    async def until(self, until: float, steps: int = 10, *hear: tuple[str, int]) -> None:
        """Look until a time; the engine makes steps, and these streams get tokens."""
        while self.now < until:
            for of in hear:
                self.gateway.heard[of] = self.now
            self.steps(steps)
            await self.look()

    async def close(self) -> None:
        if self.watch._session is not None:
            await self.watch._session.close()


Case = Callable[[Fleet], Any]
Q1, Q2 = ("q1", 1), ("q2", 1)
FINISHED = engine_step(v.EngineFinished("q1", 1, "stop", 3))


async def run(case: Case, reports: bool = True, **state: Any) -> Fleet:
    async with engine(**(state or {"worker": "w0", "incarnation": 1})) as port:
        fleet = Fleet(port, reports)
        try:
            await case(fleet)
        finally:
            await fleet.close()
    return fleet


async def test_one_stuck_stream_moves_and_the_log_says_why() -> None:
    fleet = await run(lambda f: f.until(2.5, 10, Q2))
    assert fleet.gateway.broken == [
        ("w0", 1, "q1", 1, "stuck", "its next token is overdue"),
    ]
    (judged,) = fleet.told
    assert (judged.request, judged.stuck, judged.decodes) == ("q1", True, True)
    assert CONFIG.floor_us <= judged.silent_us <= CONFIG.floor_us + 500_000
    assert judged.steps >= CONFIG.steps and judged.probe == "answered"


async def test_streams_that_get_tokens_are_not_even_probed() -> None:
    fleet = await run(lambda f: f.until(10.0, 10, Q1, Q2))
    assert fleet.told == [] and fleet.watch._session is None and not fleet.watch._marks


async def test_a_token_begins_the_silence_again() -> None:
    async def case(fleet: Fleet) -> None:
        for _ in range(6):
            await fleet.until(fleet.now + 1.25, 10, Q2)
            fleet.gateway.heard[Q1] = fleet.now

    assert (await run(case)).told == []


async def test_without_steps_in_the_log_nothing_is_judged() -> None:
    """etcd is away, this replica is cut from it, or the engine hangs."""
    fleet = await run(lambda f: f.until(20.0, 0))
    assert fleet.told == [] and fleet.watch._session is None


async def test_a_burst_of_old_steps_is_judged_only_if_the_silence_lasts() -> None:
    async def case(fleet: Fleet) -> None:
        await fleet.until(0.5, 0)
        fleet.steps(500)  # of the time before
        await fleet.look()
        fleet.gateway.heard = {Q1: fleet.now, Q2: fleet.now}
        await fleet.until(1.5, 0)

    assert (await run(case)).told == []


async def test_a_loop_that_stood_still_judges_nothing_at_once() -> None:
    async def case(fleet: Fleet) -> None:
        await fleet.until(1.25, 10)
        fleet.steps(500)
        await fleet.look(60.0)  # bytes wait in the sockets
        fleet.gateway.heard = {Q1: fleet.now, Q2: fleet.now}
        await fleet.until(fleet.now + 1.25, 10)

    assert (await run(case)).told == []


async def test_a_loop_that_stood_still_after_a_probe_judges_nothing_at_once() -> None:
    """The silence is long enough, and the engine's server has answered."""

    async def case(fleet: Fleet) -> None:
        await fleet.until(1.25, 10)
        assert fleet.watch._answered
        fleet.steps(50)
        await fleet.look(stream_watch.FRESH_S - 0.1)  # bytes wait in the sockets
        fleet.gateway.heard = {Q1: fleet.now, Q2: fleet.now}
        await fleet.until(fleet.now + 1.25, 10)

    assert (await run(case)).told == []


async def test_a_server_that_answers_for_another_engine_is_no_answer() -> None:
    for state in ({"worker": "w0", "incarnation": 2}, {"worker": "w1", "incarnation": 1}):
        fleet = await run(lambda f: f.until(10.0), **state)
        assert fleet.told == [] and fleet.watch._session is not None


async def test_an_answer_from_before_the_silence_does_not_count() -> None:
    async def case(fleet: Fleet) -> None:
        await fleet.until(1.25, 10, Q2)
        assert fleet.watch._answered
        fleet.gateway.heard[Q1] = fleet.now
        first = fleet.watch._answered["w0", 1]
        await fleet.until(fleet.now + 2.5, 10, Q2)
        (judged,) = fleet.told
        assert fleet.watch._answered["w0", 1].sent > first.sent + judged.silent_us / 2e6

    await run(case)


async def test_a_probe_that_is_answered_late_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_watch, "PROBE_TIMEOUT_S", 0.0001)
    assert (await run(lambda f: f.until(3.5))).told == []


async def test_streams_silent_for_a_good_reason_are_not_noted() -> None:
    async def case(fleet: Fleet) -> None:
        fleet.tell("w.w0", engine_step(v.RequestPreempted("q1", 1, 110)))
        fleet.tell("w.w0", engine_step(v.RequestPreempted("q2", 1, 110)))
        await fleet.until(10.0)

    fleet = await run(case)
    assert fleet.told == [] and fleet.watch._session is None


async def test_steps_count_from_where_a_preempted_stream_decodes_again() -> None:
    async def case(fleet: Fleet) -> None:
        fleet.tell("w.w0", engine_step(v.RequestPreempted("q1", 1, 110)))
        await fleet.until(5.0, 10, Q2)
        fleet.tell("w.w0", engine_step(v.PrefillChunkDone("q1", 1, 110, 110)))
        fleet.steps(CONFIG.steps - 1)
        await fleet.until(7.0, 0, Q2)
        assert not fleet.told
        await fleet.until(10.0, 1, Q2)

    (judged,) = (await run(case)).told
    assert CONFIG.steps <= judged.steps < 20


async def test_an_end_that_does_not_come_is_overdue_without_further_steps() -> None:
    async def case(fleet: Fleet) -> None:
        fleet.tell("w.w0", engine_step(v.EngineFinished("q1", 1, "stop", 3)))
        await fleet.until(2.0, 0, Q2)

    (judged,) = (await run(case)).told
    assert judged.finished and not judged.decodes and judged.silent_us < 2_000_000


async def test_a_log_that_takes_nothing_and_older_replicas_mean_no_judgement() -> None:
    async def full(fleet: Fleet) -> None:
        fleet.writer.full = True
        await fleet.until(4.0)

    async def older(fleet: Fleet) -> None:
        fleet.tell("r.r1", replica_started("r1"))
        await fleet.until(4.0)

    for case in (full, older):
        fleet = await run(case)
        assert fleet.told == [] and fleet.gateway.broken == []
    with pytest.raises(LogFull):
        fleet.writer.full = True
        fleet.writer.append(None)


async def test_engines_that_left_are_forgotten() -> None:
    async def case(fleet: Fleet) -> None:
        await fleet.until(1.5)
        assert fleet.watch._due and fleet.watch._marks
        fleet.gateway.activity.clear()
        await fleet.look()

    watch = (await run(case)).watch
    assert not watch._due and not watch._marks and not watch._answered


# --- no path leads to the engine, which makes steps


MUTE = {"worker": "w0", "incarnation": 1, "after_s": 0.05}
LEFT = ("unreachable", "it makes steps and answers no probe")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes have less time than such an engine takes to answer."""
    monkeypatch.setattr(stream_watch, "PROBE_TIMEOUT_S", 0.01)


@pytest.mark.usefixtures("hasty")
async def test_streams_leave_an_engine_that_answers_no_probe() -> None:
    async def case(fleet: Fleet) -> None:
        fleet.gateway.activity["w0", 1].last_byte = 1.0
        await fleet.until(4.5)
        assert fleet.told == []
        await fleet.until(6.0)

    fleet = await run(case, **MUTE)
    assert fleet.gateway.broken == [("w0", 1, "q1", 1, *LEFT), ("w0", 1, "q2", 1, *LEFT)]
    for judged in fleet.told:
        assert (judged.probe, judged.stuck, judged.bound_us) == ("silent", True, 4_000_000)
        assert 4_000_000 <= judged.silent_us < 4_500_000, "since the last byte of the engine"


@pytest.mark.usefixtures("hasty")
async def test_none_leaves_while_another_stream_of_the_engine_gets_tokens() -> None:
    """Its server is too busy for probes."""

    async def case(fleet: Fleet) -> None:
        while fleet.now < 20.0:
            fleet.gateway.activity["w0", 1].last_byte = fleet.now
            await fleet.until(fleet.now + 2.0, 10, Q2)

    fleet = await run(case, **MUTE)
    assert fleet.told == [] and fleet.watch._unanswered


@pytest.mark.usefixtures("hasty")
async def test_one_that_could_answer_before_is_left_once_it_is_out_of_reach() -> None:
    """An earlier probe was too late as well, and bytes came after it."""

    async def case(fleet: Fleet) -> None:
        await fleet.until(2.0)
        assert fleet.watch._unanswered["w0", 1] < 2.0
        fleet.gateway.activity["w0", 1].last_byte = fleet.now
        await fleet.until(5.5)
        assert fleet.told == [] and fleet.watch._unanswered["w0", 1] > 2.0
        await fleet.until(6.5)

    assert len((await run(case, **MUTE)).told) == 2


@pytest.mark.usefixtures("hasty")
async def test_one_whose_reports_do_not_come_is_not_left() -> None:
    fleet = await run(lambda f: f.until(20.0, 0), **MUTE)
    assert fleet.told == []


async def test_a_probe_that_ends_after_this_process_stood_still_proves_nothing() -> None:
    async def case(fleet: Fleet) -> None:
        await fleet.until(1.5)
        sent = fleet.now
        fleet.watch._session = Still(fleet, stream_watch.PROBE_TIMEOUT_S + 1.0)
        await fleet.watch._ask(("w0", 1), fleet.fleet.workers["w0"])
        assert not fleet.watch._unanswered
        fleet.now = sent
        fleet.watch._session = Still(fleet, stream_watch.PROBE_TIMEOUT_S)
        await fleet.watch._ask(("w0", 1), fleet.fleet.workers["w0"])
        assert fleet.watch._unanswered == {("w0", 1): sent}
        await fleet.look(60.0)
        assert not fleet.watch._unanswered
        fleet.watch._session = None

    await run(case)


class Still:
    """A session whose only call ends without an answer, so many seconds later."""

    def __init__(self, fleet: Fleet, seconds: float) -> None:
        self._fleet, self._seconds = fleet, seconds

    def get(self, url: str) -> Still:
        return self

    async def __aenter__(self) -> None:
        self._fleet.now += self._seconds
        raise TimeoutError

    async def __aexit__(self, *_: object) -> None: ...


# --- etcd is away: no report of the engine comes


IDLE = {"worker": "w0", "incarnation": 1, "running": 0, "waiting": 0, "unfinished": 0}


def begun(fleet: Fleet, *requests: str, had: int = 2, delivered: int = 5) -> None:
    """The gateway has tokens of these; `had` of them came before this attempt."""
    nothing: Any = None
    for request in requests:
        live = fleet.scheduler.live[request] = LiveRequest(nothing)
        live.begin_attempt(1, "w0", 1)
        live.lineage.had = had
        fleet.gateway.delivered[request] = delivered


@pytest.mark.parametrize("reports", [True, False])
async def test_a_stream_is_overdue_whose_engine_has_no_request_any_more(reports: bool) -> None:
    """Composed 161275: the agent was cut from etcd before the first step of its engine."""

    async def case(fleet: Fleet) -> None:
        begun(fleet, "q1", "q2")
        await fleet.until(4.0, 0, Q2)

    fleet = await run(case, reports, **IDLE)
    (judged,) = fleet.told
    assert (judged.request, judged.held, judged.stuck) == ("q1", 0, True)
    assert judged.steps == 0 and judged.silent_us < 2_500_000
    assert fleet.gateway.broken == [("w0", 1, "q1", 1, "stuck", "its next token is overdue")]


@pytest.mark.parametrize(
    "state",
    [
        pytest.param({**IDLE, "running": 1}, id="it runs one"),
        pytest.param({**IDLE, "waiting": 1}, id="one waits there"),
        pytest.param({**IDLE, "unfinished": 1}, id="its HTTP side waits for one"),
        pytest.param({"worker": "w0", "incarnation": 1}, id="it does not say"),
        pytest.param({**IDLE, "incarnation": 2}, id="another engine answers"),
    ],
)
@pytest.mark.parametrize("reports", [True, False])
async def test_an_engine_that_may_have_the_request_is_left_alone(
    state: dict[str, Any], reports: bool
) -> None:
    async def case(fleet: Fleet) -> None:
        begun(fleet, "q1", "q2")
        await fleet.until(10.0, 0)

    fleet = await run(case, reports, **state)
    assert fleet.told == [] and fleet.watch._session is not None


@pytest.mark.parametrize("reports", [True, False])
async def test_an_engine_may_not_have_got_a_request_of_which_no_token_came(reports: bool) -> None:
    """It is on its way, or its prompt is read."""

    async def case(fleet: Fleet) -> None:
        begun(fleet, "q1", had=5)
        await fleet.until(10.0, 0)

    fleet = await run(case, reports, **IDLE)
    assert fleet.told == [] and fleet.watch._session is None


# --- attempts that may send nothing before their engine is done


async def test_a_replay_is_overdue_once_its_engine_is_done_with_it() -> None:
    """Composed 90226: the end of a replay was lost, and its client waited until the stall bound."""

    async def case(fleet: Fleet) -> None:
        fleet.gateway.withheld = [Q1]
        del fleet.gateway.heard[Q1]
        await fleet.until(5.0, 10, Q2)
        assert fleet.told == [], "its engine still works on it"
        fleet.tell("w.w0", FINISHED)
        fleet.scheduler.view.landed()
        await fleet.until(6.0, 10, Q2)
        assert fleet.told == [], "its end may be on its way"
        await fleet.until(8.0, 10, Q2)

    fleet = await run(case)
    (judged,) = fleet.told
    assert (judged.request, judged.finished, judged.decodes) == ("q1", True, False)
    assert 1_500_000 <= judged.silent_us < 2_500_000
    assert fleet.gateway.broken == [("w0", 1, "q1", 1, "stuck", "its next token is overdue")]


async def test_a_replay_that_ends_in_time_is_left_alone() -> None:
    async def case(fleet: Fleet) -> None:
        fleet.gateway.withheld = [Q1]
        fleet.tell("w.w0", FINISHED)
        fleet.scheduler.view.landed()
        await fleet.until(1.0, 10, Q1, Q2)
        fleet.gateway.withheld = []
        await fleet.until(4.0, 10, Q1, Q2)

    assert (await run(case)).told == []


# --- the leader took the replica for lost, and it returned


def disown(fleet: Fleet) -> None:
    """The log says that r0 was lost, and that its two requests ended."""
    nothing: Any = None
    for request in ("q1", "q2"):
        live = fleet.scheduler.live[request] = LiveRequest(nothing)
        live.begin_attempt(1, "w0", 1)
    log_of(fleet, "fleet", v.ReplicaLost("r0", 1))
    for request in ("q1", "q2"):
        log_of(fleet, "fleet", ended(request, outcome="failed"))
    assert not fleet.fleet.requests


def log_of(fleet: Fleet, stream: str, event: Any) -> None:
    """The replica follows the log."""
    fleet.tell(stream, event)
    fleet.watch.seen(stream, 0, event)


@pytest.mark.parametrize("before", [True, False])
async def test_an_end_that_does_not_come_is_overdue_though_the_leader_ended_the_request(
    before: bool,
) -> None:
    async def case(fleet: Fleet) -> None:
        if before:
            log_of(fleet, "w.w0", FINISHED)
        disown(fleet)
        if not before:
            log_of(fleet, "w.w0", FINISHED)
        await fleet.until(4.0, 0, Q2)

    fleet = await run(case)
    (judged,) = fleet.told
    assert judged.finished and judged.stuck and judged.silent_us < 2_000_000
    assert fleet.gateway.broken == [("w0", 1, "q1", 1, "stuck", "its next token is overdue")]


async def test_a_stream_that_decodes_moves_though_the_leader_ended_the_request() -> None:
    async def case(fleet: Fleet) -> None:
        disown(fleet)
        await fleet.until(2.5, 10, Q2)

    (judged,) = (await run(case)).told
    assert (judged.request, judged.decodes, judged.stuck) == ("q1", True, True)


async def test_a_request_that_only_left_the_account_is_no_finished_one() -> None:
    """The agent lost records. The engine may still have the request, and let it wait."""

    async def case(fleet: Fleet) -> None:
        disown(fleet)
        log_of(fleet, "w.w0", engine_step(lost=3))
        assert not fleet.fleet.workers["w0"].attempts
        await fleet.until(10.0, 10)

    fleet = await run(case)
    assert fleet.told == [] and fleet.gateway.broken == []


async def test_what_was_remembered_of_them_goes_with_the_stream() -> None:
    async def case(fleet: Fleet) -> None:
        disown(fleet)
        log_of(fleet, "w.w0", FINISHED)
        assert fleet.watch._disowned.is_finished("q1", 1)
        for request in ("q1", "q2"):
            log_of(fleet, "r.r0", ended(request))

    assert not (await run(case)).watch._disowned._finished
