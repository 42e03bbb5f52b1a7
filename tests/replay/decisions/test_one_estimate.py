"""A worker is chosen by one estimate of TTFT, and the decision records that estimate. Replay takes
it again, and the older record of version 1 by the rule of version 1."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from relume.chaos.scenario import scenario_reader
from relume.chaos.sim.sim_fleet import run
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.codec import decode, decode_all, encode
from relume.events.log.interface import RevisionGroup
from relume.policies.decision_versions import DECISION_VERSIONS, RETAKEN
from relume.policies.routing import choose_worker, first_token_v1, selection
from relume.policies.routing.route_query import RouteQuery
from relume.policies.routing.worker_estimate import UNHEARD_US, WorkerEstimate
from tests.policies.story import decided
from tests.replay import frozen
from tests.replay.decisions.test_scheduler_replay import eventful_log

SCENARIOS = ("calm", "engine-killed-in-decode", "agent-killed")


def routes(groups: list[RevisionGroup]) -> list[v.RouteDecided]:
    records = [record for group in groups for s in group.segments for record in s.records]
    return [event for event in decode_all(records) if type(event) is v.RouteDecided]


def disagreements(groups: list[RevisionGroup]) -> Counter[str]:
    """By what became of it: decisions of policies that weigh time, and whether they record the
    chosen worker's own estimate."""
    found: Counter[str] = Counter()
    for event in routes(groups):
        if event.policy not in selection.POLICIES or not event.worker:
            continue
        chosen = next(c for c in event.candidates if c.worker == event.worker)
        estimate = chosen.ttft_us if chosen.ttft_us < UNHEARD_US else -1
        found["agree" if event.ttft_us == estimate else "disagree"] += 1
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_simulated_decision_records_the_estimate_it_was_taken_by(name: str) -> None:
    groups = run(scenario_reader.load(scenario_reader.find(name)), 5).groups
    found = disagreements(groups)
    assert found["disagree"] == 0 and found["agree"] > 50, found
    assert verify(groups).ok


@pytest.mark.parametrize("policy", selection.POLICIES)
async def test_every_policy_that_weighs_time_records_its_estimate(policy: str) -> None:
    groups = await eventful_log(3, 30, policy=policy, workers=4)
    found = disagreements(groups)
    assert found["disagree"] == 0 and found["agree"] > 50, found


async def test_a_record_of_another_estimate_is_a_divergence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = await eventful_log(2, 30, policy="predicted_ttft")
    assert verify(groups).ok
    later = choose_worker.first_token_us
    monkeypatch.setitem(choose_worker.FIRST_TOKEN, 2, lambda *of: later(*of) + 1)
    assert {d.what for d in verify(groups).divergences} == {"prediction"}


def test_version_1_is_retaken_by_its_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frozen logs were written before version 2; their record differs from the choice."""
    assert DECISION_VERSIONS["first_token"] == 2 and 1 in RETAKEN["first_token"]
    history = frozen.read("routing")
    verdict = frozen.verdict_of(history)
    assert verdict.divergences == [] and verdict.untaken == {}
    found = disagreements(history.groups)
    assert found["disagree"] > 100
    monkeypatch.setattr(first_token_v1, "REPORT_US", first_token_v1.REPORT_US + 200)
    assert frozen.verdict_of(history).divergences


def test_a_frozen_log_of_version_2_records_the_estimate() -> None:
    history = frozen.read("one-estimate")
    verdict = frozen.verdict_of(history)
    assert verdict.divergences == [] and verdict.complete
    found = disagreements(history.groups)
    assert found["disagree"] == 0 and found["agree"] > 60, found


async def test_version_2_does_not_go_by_the_rule_of_version_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = await eventful_log(2, 30, policy="predicted_ttft")
    monkeypatch.setattr(first_token_v1, "ttft_us", None)
    assert verify(groups).ok


def test_an_estimate_that_says_nothing_is_not_recorded() -> None:
    """A worker that was not heard of since before anything is remembered has an end of its prompts
    beyond all measure: no figure to learn from."""
    from tests.policies.story import Story

    story = Story()
    story.worker("w0")
    story.replica("r0")
    view = choose_worker.View("r.r0", story.fleet)
    view.now_us = 10
    query = RouteQuery(request="q", model="m", prompt_tokens=8, delivered=0)
    choice = choose_worker.decide(view, query, "predicted_ttft")
    assert choice.worker == "w0" and choice.ttft_us >= 0
    assert choose_worker.first_token_us(view, query, "predicted_ttft", choice) == choice.ttft_us
    for more_us in (5, -3_600_000_000):  # before its time, and an hour later
        vague = msgspec.structs.replace(choice, ttft_us=UNHEARD_US + more_us)
        assert choose_worker.first_token_us(view, query, "predicted_ttft", vague) == -1


def test_a_decision_about_a_worker_that_was_not_heard_of_can_be_read() -> None:
    """Composed 81052: no reader took its cost, so a request had no first attempt."""
    day_us = 24 * 3600 * 1_000_000
    cost = estimate_of_unheard().cost_us(0, 1_000_000) + day_us
    candidate = v.Candidate(
        worker="w0", incarnation=1, cost=cost, prefill_tokens=1, requests=1, ttft_us=cost
    )
    event = msgspec.structs.replace(decided(), candidates=(candidate,))
    assert decode(encode(event)) == event


def estimate_of_unheard() -> WorkerEstimate:
    return WorkerEstimate(
        worker="w0", incarnation=1, free_at_us=UNHEARD_US, token_ns=1000, fixed_us=1000, silent_at_us=1,
        tpot_us=1000, prefill_tokens=1, requests=1, batch=1, context_tokens=1, kv_free=1,
    )  # fmt: skip
