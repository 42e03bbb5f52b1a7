"""The time that an engine lets pass between two steps while requests wait for the next."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from relume.engine_shim.engine import plugin
from relume.engine_shim.engine.progress import Progress
from relume.events.log.codec import decode
from relume.events.vocabulary import EngineStep
from relume.events.wire.reports import ReportReader

pytestmark = pytest.mark.full  # vLLM takes seconds to import


class ScriptedScheduler:
    """Drives the reports of a scheduler by a clock in milliseconds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        from relume.engine_shim.engine import reporting_scheduler, step_waits

        self.ms = 0
        self.waited_ms = 0
        self.computed = Progress()
        self.records: list[EngineStep] = []
        self.reporter = SimpleNamespace(take_lost=self._take_lost, send=self._send, has_lost=False)
        progress = SimpleNamespace(
            write=lambda **_: None,
            prefix_resets=lambda: 0,
            statements=lambda: 0,
            computed=self.computed.computed,
        )
        clock = SimpleNamespace(monotonic_ns=self.now_ns)
        patch.setattr(plugin, "reporter", lambda: self.reporter)
        patch.setattr(plugin, "progress", lambda: progress)
        patch.setattr(reporting_scheduler, "time", clock)
        patch.setattr(step_waits, "WaitForCpu", lambda: SimpleNamespace(lap_us=self._lap))
        self.reports = reporting_scheduler._Reports()

    def _take_lost(self) -> int:
        lost, self.reporter.has_lost = int(self.reporter.has_lost), False
        return lost

    def _send(self, frame: bytes, lost: int) -> None:
        for record in ReportReader().feed(frame):
            self.records.append(decode(record))

    def now_ns(self) -> int:
        return self.ms * 1_000_000

    def _lap(self) -> int:
        waited_us, self.waited_ms = self.waited_ms * 1000, 0
        return waited_us

    def begin(self) -> Any:
        """A step is scheduled."""
        step = self.reports.begin(self.now_ns())
        step.reported = True
        return step

    def end(self, running: int = 1, waiting: int = 0) -> None:
        """The oldest step ends; these requests are left."""
        self.reports.end(running, waiting, 0)

    def step(self, running: int = 1, waiting: int = 0) -> None:
        """A step of 5 ms."""
        self.begin()
        self.ms += 5
        self.end(running, waiting)

    @property
    def times(self) -> list[tuple[int, int]]:
        """Gap and duration of each reported step, ms."""
        return [(r.gap_us // 1000, r.duration_us // 1000) for r in self.records]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> ScriptedScheduler:
    return ScriptedScheduler(monkeypatch)


@pytest.mark.parametrize("left", [(1, 0), (0, 1)])
def test_time_between_two_steps_is_a_gap_while_requests_are_left(
    engine: ScriptedScheduler, left: tuple[int, int]
) -> None:
    engine.ms = 1000
    engine.step(*left)
    engine.ms += 60
    engine.step(*left)
    engine.step(*left)
    assert engine.times == [(0, 5), (60, 5), (0, 5)]


def test_an_idle_engine_has_no_gap(engine: ScriptedScheduler) -> None:
    engine.step(0, 0)
    engine.ms += 7000
    engine.step()
    assert engine.times == [(0, 5), (0, 5)]


def test_requests_that_left_between_two_steps_leave_no_gap(engine: ScriptedScheduler) -> None:
    engine.step()
    engine.ms += 10
    engine.reports.show(0, 0, 0)  # as when the last request is aborted
    engine.ms += 7000
    engine.step()
    assert engine.times == [(0, 5), (0, 5)]


def test_waiting_for_something_else_than_the_engine_is_no_gap(engine: ScriptedScheduler) -> None:
    engine.step(0, 1)
    engine.ms += 10
    engine.reports.no_step()  # the request waits for its KV blocks
    engine.ms += 500
    engine.step()
    assert engine.times == [(0, 5), (0, 5)]


def test_steps_that_overlap_have_no_gap(engine: ScriptedScheduler) -> None:
    """With async scheduling, a step is scheduled while the one before it runs."""
    engine.begin()
    engine.ms += 2
    engine.begin()
    engine.ms += 3
    engine.end()
    engine.ms += 60
    engine.begin()
    engine.ms += 1
    engine.end()
    engine.ms += 5
    engine.end(0, 0)
    assert engine.times == [(0, 5), (0, 61), (0, 5)]


def test_waits_for_a_cpu_are_told_of_the_step_and_of_the_gap_before_it(
    engine: ScriptedScheduler,
) -> None:
    engine.step()
    engine.waited_ms = 3
    engine.step()
    engine.step()
    engine.step(0, 0)
    engine.waited_ms = 50  # idle: nobody waited for it
    engine.begin()
    engine.waited_ms += 2
    engine.end()
    assert [record.wait_us for record in engine.records] == [0, 3000, 0, 0, 2000]


def test_while_another_process_computes_its_waits_count_and_not_those_of_who_polls_for_it(
    engine: ScriptedScheduler,
) -> None:
    engine.step()
    engine.computed.write_computed(took_us=4000, waited_us=1500, late_us=0)
    engine.waited_ms = 4
    engine.step()  # of 5 ms
    engine.computed.write_computed(took_us=6000, waited_us=1500, late_us=500)
    engine.ms += 3
    engine.waited_ms = 2
    engine.step()
    engine.waited_ms = 3
    engine.step(0, 0)
    assert [record.wait_us for record in engine.records] == [0, 2500, 2500, 3000]


def test_a_worker_adds_up_what_its_part_of_the_steps_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rank 0 alone: with tensor parallelism the ranks wait for each other."""
    from relume.engine_shim.engine.vllm_private import worker_times

    class Worker:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def execute_model(self, sleep_s: float) -> str:
            time.sleep(sleep_s)
            return "output"

        def sample_tokens(self, error: str) -> None:
            time.sleep(0.02)
            raise RuntimeError(error)

    monkeypatch.setattr(worker_times, "Worker", Worker)
    progress = Progress()
    worker_times.install(progress)
    assert Worker(1).execute_model(0.001) == "output" and progress.computed() == (0, 0, 0)
    worker = Worker(0)
    assert worker.execute_model(sleep_s=0.02) == "output"
    took_us, waited_us, _ = progress.computed()
    assert took_us >= 20_000 and 0 <= waited_us < took_us
    with pytest.raises(RuntimeError, match="odd"):
        worker.sample_tokens("odd")
    assert progress.computed()[0] >= took_us + 20_000


def test_a_worker_that_begins_late_waited_no_longer_than_the_step_is_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from relume.engine_shim.engine.vllm_private import worker_times

    waits_us = iter((900_000, 0, 900_000, 0, 900_000, 0, 7, 0))
    monkeypatch.setattr(
        worker_times, "WaitForCpu", lambda: SimpleNamespace(lap_us=lambda: next(waits_us))
    )
    progress, worker = Progress(), SimpleNamespace(rank=0)
    part = worker_times._StepTimes(progress).measured(lambda worker: None)

    def began(ago_ms: int) -> None:
        progress.write(1, time.monotonic_ns() - ago_ms * 1_000_000, 1, 0, 0)

    part(worker)  # no step: it warms up
    assert progress.computed()[2] == 0
    began(ago_ms=5)
    part(worker)
    late_us = progress.computed()[2]
    assert 5000 <= late_us < 900_000
    part(worker)  # another part of the same step
    assert progress.computed()[2] == late_us
    began(ago_ms=5)
    part(worker)
    assert progress.computed()[2] == late_us + 7


def test_an_idle_engine_says_once_that_records_were_dropped(engine: ScriptedScheduler) -> None:
    """Else its agent would believe for ever what was said before."""
    engine.step(0, 0)
    engine.reports.tell_loss(0, 0)
    assert len(engine.records) == 1
    engine.reporter.has_lost = True
    for _ in range(3):
        engine.reports.tell_loss(0, 7)
    (_, said) = engine.records
    assert (said.lost, said.kv_used, said.duration_us, said.changes) == (1, 7, 0, ())
