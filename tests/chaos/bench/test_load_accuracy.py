"""What the bench `load-accuracy` calls predicted is the estimate that workers are chosen by."""

from __future__ import annotations

import pytest
from msgspec import structs

from relume.chaos.bench.scheduling import load_accuracy
from relume.chaos.bench.scheduling.load_accuracy import predicted_prefill
from relume.events import vocabulary as v
from relume.policies.routing.worker_estimate import WorkerEstimate, estimate_of
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View
from tests.policies.routing.test_predict import BASE, TOKEN, Steps
from tests.policies.story import arrived, decided, queued


def test_predicted_prompt_tokens_drain_with_time() -> None:
    steps = Steps().learn()
    steps.say(queued(prompt=1500), v.RequestAdmitted("q1", 1, 0))
    whole_us = 3 * BASE + 1500 * TOKEN
    left = [
        predicted_prefill(steps.view, steps.worker, steps.at_us + part * whole_us // 4)
        for part in range(6)
    ]
    assert left[0] > 1200 and left[-1] == 0
    assert left == sorted(left, reverse=True)
    assert abs(left[2] - 750) < 150


def test_what_the_engine_has_not_confirmed_counts_in_full() -> None:
    steps = Steps().learn()
    steps.view.own(steps.view.position + 1, arrived())
    steps.view.own(steps.view.position + 1, decided(prompt=900))
    assert predicted_prefill(steps.view, steps.worker, steps.at_us + 10**9) == 900


def test_a_change_of_the_estimate_changes_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps().learn()
    steps.say(queued(prompt=1500), v.RequestAdmitted("q1", 1, 0))
    before = predicted_prefill(steps.view, steps.worker, steps.at_us)

    def hurried(view: View, worker: Worker) -> WorkerEstimate:
        found = estimate_of(view, worker)
        return structs.replace(found, free_at_us=found.free_at_us - 20_000)

    monkeypatch.setattr(load_accuracy, "estimate_of", hurried)
    assert predicted_prefill(steps.view, steps.worker, steps.at_us) < before
