"""A status is advanced to when it is asked about, by times of the replica's own clock."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from relume.events import vocabulary as v
from relume.policies.routing.first_token_v1 import Forecast, forecast, tpot_us, ttft_us
from relume.policies.routing.worker_estimate import estimate_of
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View
from tests.policies.story import Story, arrived, decided, ended, queued, ready

BASE, TOKEN, REQUEST = 10_000, 20, 400
"""Microseconds of a step, of a prompt token and of a decoding request in it."""


class Steps:
    """A worker whose steps follow a rule, and a replica's view of it."""

    def __init__(self, budget: int = 512, report: int = 8) -> None:
        """`report` steps come at once."""
        self.report = report
        self.held: list[v.EngineStep] = []
        self.story = Story()
        self.story.tell(
            "w.w0",
            v.WorkerRegistered(worker="w0", domain="host", agent_pid=7),
            v.EngineStarted("w0", 1, 7, 1),
        )
        told = structs.replace(ready(), hardware="scripted", step_tokens=budget)
        self.story.tell("w.w0", told)
        self.story.replica()
        self.view = View("r.r0", self.story.fleet)
        self.number = 0
        self.at_us = 0

    @property
    def worker(self) -> Worker:
        return self.story.fleet.workers["w0"]

    def step(self, prompt: int, batch: int, context: int, *changes: Any, waiting: int = 0) -> None:
        """One step, received when it is over."""
        self.number += 1
        us = BASE + TOKEN * prompt + REQUEST * batch
        self.at_us += us
        told = v.EngineStep(
            incarnation=1,
            step=self.number,
            duration_us=us,
            batch=batch,
            sum_context=context,
            prefill_tokens=prompt,
            waiting=waiting,
            kv_used=8,
            changes=changes,
        )
        self.held.append(told)
        if changes or len(self.held) >= self.report:
            self.flush()

    def flush(self) -> None:
        """What was held back comes."""
        held, self.held = self.held, []
        if held:
            self.hear(self.story.tell("w.w0", *held).revision)

    def say(self, *changes: Any, waiting: int = 0) -> None:
        """Changes between steps."""
        told = v.EngineStep(
            incarnation=1,
            step=self.number,
            duration_us=0,
            batch=0,
            sum_context=0,
            prefill_tokens=0,
            waiting=waiting,
            kv_used=8,
            changes=changes,
        )
        self.hear(self.story.tell("w.w0", told).revision)

    def hear(self, revision: int) -> None:
        self.view.landed()
        since = self.at_us - self.view.receipts.clock_us
        self.view.own(self.view.position + 1, v.GroupsReceived(revision, (0, since)))

    def at(self, later_us: int) -> Forecast:
        self.view.now_us = self.at_us + later_us
        return forecast(self.view, self.worker)

    def learn(self) -> Steps:
        """So many steps that their costs are known."""
        for n in range(400):
            prompt = 512 if n % 3 == 0 else n % 97 if n % 3 == 1 else 0
            self.step(prompt, n % 23, (n % 23) * (50 + n % 41))
        for _ in range(self.report):
            self.step(0, 0, 0)
        self.flush()
        return self


def close(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 0.05 * wanted


def test_step_costs_are_learnt_from_steps() -> None:
    steps = Steps().learn()
    assert steps.at(0).grounds == "measured"
    assert close(tpot_us(steps.view, steps.worker, 8), BASE + 8 * REQUEST)
    assert close(ttft_us(steps.view, steps.worker, 400), BASE + 400 * TOKEN)
    assert close(ttft_us(steps.view, steps.worker, 1000), 2 * BASE + 1000 * TOKEN)


def test_prompts_drain_as_time_passes() -> None:
    steps = Steps().learn()
    steps.say(queued(prompt=1500), v.RequestAdmitted("q1", 1, 0))
    one = BASE + 512 * TOKEN
    told = [steps.at(us) for us in (0, one - 10_000, one, 2 * one)]
    assert [f.prefill_tokens for f in told] == [1500, 1500, 988, 476]
    assert told[0].rest_us > told[1].rest_us > 0
    later = steps.at(3 * one + 40_000)
    assert (later.prefill_tokens, later.batch) == (0, 1)
    assert later.context > 1500


def test_a_step_that_was_not_reported_has_not_ended() -> None:
    """Each is reported by itself: only within the time of a report may one have ended."""
    steps = Steps(report=1).learn()
    steps.say(queued(prompt=1500), v.RequestAdmitted("q1", 1, 0))
    one = BASE + 512 * TOKEN
    told = [steps.at(us) for us in (0, one // 2, one - 1000, one + 200, one + 30_000, 3 * one)]
    assert [f.prefill_tokens for f in told] == [1500, 1500, 988, 988, 1500, 1500]


def test_decoding_requests_grow_by_a_token_a_step() -> None:
    steps = Steps().learn()
    steps.say(queued(prompt=100), v.RequestAdmitted("q1", 1, 0))
    steps.step(100, 0, 0, v.PrefillChunkDone("q1", 1, 100, 100), v.FirstToken("q1", 1))
    assert (steps.at(0).batch, steps.at(0).context) == (1, 100)
    grown = steps.at(5 * (BASE + REQUEST))
    assert (grown.batch, grown.context) == (1, 105)
    steps.step(0, 1, 101, v.EngineFinished("q1", 1, "stop", 2))
    assert (steps.at(0).batch, steps.at(0).context, steps.at(10**6).context) == (0, 0, 0)


def test_silence_beyond_all_measure_is_no_progress() -> None:
    steps = Steps().learn()
    steps.say(queued(prompt=3000), v.RequestAdmitted("q1", 1, 0))
    hung = steps.at(60_000_000)
    assert (hung.prefill_tokens, hung.silent) == (3000, True)


def test_reports_without_progress_are_credited_with_none() -> None:
    """The engine makes steps, and computes nothing of the prompt it has."""
    steps = Steps(report=1).learn()
    steps.say(queued(prompt=1500), v.RequestAdmitted("q1", 1, 0))
    for _ in range(40):
        steps.step(0, 3, 300)
        told = steps.at(2 * BASE)
        assert told.prefill_tokens >= 1500 - 512, "one step at most may be on its way"
        assert estimate_of(steps.view, steps.worker).free_at_us > steps.view.now_us + 2 * BASE
    assert steps.at(0).prefill_tokens == 1500


def test_dispatches_count_before_the_engine_says_so() -> None:
    steps = Steps().learn()
    empty = ttft_us(steps.view, steps.worker, 100)
    steps.view.own(steps.view.position + 1, arrived())
    steps.view.own(steps.view.position + 1, decided(prompt=900))
    told = steps.at(0)
    assert (told.prefill_tokens, told.flight_tokens, told.waiting) == (900, 900, 1)
    assert ttft_us(steps.view, steps.worker, 100) > empty + 900 * TOKEN


def test_steps_with_prompts_may_cost_more_than_their_tokens() -> None:
    """A fixed cost of any prompt is told from that of tokens, and counts once a step."""
    steps = Steps()
    for n in range(600):
        prompt = 512 if n % 3 == 0 else 1 + n % 97 if n % 3 == 1 else 0
        steps.at_us += 5000 if prompt else 0
        number, us = n + 1, BASE + TOKEN * prompt + REQUEST * (n % 23) + (5000 if prompt else 0)
        told = v.EngineStep(
            incarnation=1,
            step=number,
            duration_us=us,
            batch=n % 23,
            sum_context=(n % 23) * 60,
            prefill_tokens=prompt,
            waiting=0,
            kv_used=8,
        )
        steps.hear(steps.story.tell("w.w0", told).revision)
    steps.hear(
        steps.story.tell(
            "w.w0",
            v.EngineStep(
                incarnation=1,
                step=601,
                duration_us=BASE,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=0,
                kv_used=8,
            ),
        ).revision
    )
    assert close(ttft_us(steps.view, steps.worker, 10), BASE + 5000 + 10 * TOKEN)
    assert close(ttft_us(steps.view, steps.worker, 1000), 2 * BASE + 10_000 + 1000 * TOKEN)
    assert close(tpot_us(steps.view, steps.worker, 8), BASE + 8 * REQUEST)


def sent_unconfirmed(report: int) -> Steps:
    """A worker that decodes, and 900 tokens sent 20 ms later of which nothing is told."""
    steps = Steps(report=report).learn()
    steps.say(queued(prompt=100), v.RequestAdmitted("q1", 1, 0))
    steps.step(100, 0, 0, v.PrefillChunkDone("q1", 1, 100, 100), v.FirstToken("q1", 1))
    steps.flush()
    steps.view.own(steps.view.position + 1, arrived("q2"))
    sent = structs.replace(decided("q2", prompt=900), at_us=steps.at_us + 20_000)
    steps.view.own(steps.view.position + 1, sent)
    return steps


def test_what_was_sent_is_computed_meanwhile_where_reports_are_gathered() -> None:
    steps = sent_unconfirmed(report=8)
    two = 2 * BASE + 900 * TOKEN + 2 * REQUEST
    soon, half, done = (steps.at(us) for us in (22_000, 50_000, 30_000 + two))
    assert (soon.prefill_tokens, soon.batch) == (900, 1)
    assert 0 < half.prefill_tokens < 900
    assert (done.prefill_tokens, done.flight_tokens, done.batch) == (0, 0, 2)
    assert done.context > 1000


def test_what_was_sent_counts_while_each_step_is_reported() -> None:
    """The engine would have said that it has it."""
    steps = sent_unconfirmed(report=1)
    assert steps.at(90_000).prefill_tokens == 900


def test_what_first_tokens_take_beyond_steps_is_learnt_though_requests_end_late() -> None:
    steps = Steps().learn()
    computing = ttft_us(steps.view, steps.worker, 100)
    for burst in range(8):  # all of one are sent before any of it ends
        names = [f"q{burst}-{n}" for n in range(20)]
        predicted = ttft_us(steps.view, steps.worker, 100)
        for name in names:
            steps.story.tell(
                "r.r0", arrived(name), structs.replace(decided(name), ttft_us=predicted)
            )
        for name in names:
            told = structs.replace(ended(name), ttft_us=computing + 30_000)
            steps.story.tell("r.r0", told)
    assert close(steps.worker.overhead_us, 30_000)
    assert close(ttft_us(steps.view, steps.worker, 100), computing + 30_000)


def test_without_times_a_status_counts_as_reported() -> None:
    steps = Steps().learn()
    steps.say(queued(prompt=1500), v.RequestAdmitted("q1", 1, 0))
    steps.view.now_us = -1
    assert forecast(steps.view, steps.worker).prefill_tokens == 1500
