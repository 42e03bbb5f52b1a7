"""Capacity: three figures with their units, and what bounds each."""

from __future__ import annotations

from random import Random

import pytest

from relume.events.vocabulary.enums import EnginePhase, HealthState
from relume.policies.degradation import capacity
from relume.policies.degradation.capacity import Workload, capacity_of, of_worker, sequences_of
from relume.policies.health.health_state import WorkerHealth
from relume.policies.state.fleet import Fleet, StepTime, Worker
from relume.policies.state.step_times import DEFAULTS, Costs

WORK = Workload(prompt_tokens=512, output_tokens=128)


def fleet_of(*workers: Worker, grounds: str = "measured") -> Fleet:
    weights = list(DEFAULTS)
    known = StepTime(model="m", weights=weights, products=[], targets=[], grounds=grounds)
    return Fleet(workers={w.name: w for w in workers}, steptimes={"m/b/h": known})


def worker(name: str = "w0", **more: object) -> Worker:
    given = {
        "present": True, "engine": EnginePhase.READY, "model": "m", "steps_like": "m/b/h",
        "block_size": 16, "kv_blocks": 4000, "max_seqs": 128, "step_tokens": 8192, **more,
    }  # fmt: skip
    return Worker(name=name, **given)  # type: ignore[arg-type]


def one(found: Worker, workload: Workload = WORK) -> capacity.Capacity:
    return of_worker(found, Costs(fleet_of(found), found), workload)


def test_sequences_are_bound_by_blocks_and_by_the_engine() -> None:
    assert sequences_of(worker(), 640) == 100
    assert sequences_of(worker(max_seqs=64), 640) == 64
    assert sequences_of(worker(), 641) == 97, "blocks are not shared"
    assert sequences_of(worker(kv_blocks=10), 640) == 0


def test_a_rate_follows_from_sequences_by_littles_law() -> None:
    found, costs = worker(max_seqs=10), Costs(fleet_of(worker()), worker())
    prompts = 10 * WORK.prompt_tokens / WORK.output_tokens
    work = prompts * WORK.prompt_tokens / 2
    context = 10 * (WORK.prompt_tokens + WORK.output_tokens / 2)
    mixed = costs.mixed * 10 / WORK.output_tokens
    step_us = costs.base + mixed + 10 * costs.request + context * costs.context
    step_us += prompts * costs.prompt + work * costs.work
    residence_s = WORK.output_tokens * step_us / 1e6
    assert one(found).requests_per_ks == pytest.approx(10 / residence_s * 1000, rel=0.01)


def test_tokens_are_requests_times_their_tokens() -> None:
    found = one(worker())
    assert found.tokens_per_s == pytest.approx(found.requests_per_ks / 1000 * 640, rel=0.01)


def test_the_tokens_of_a_step_bound_the_batch() -> None:
    few, many = one(worker(step_tokens=50)), one(worker(step_tokens=8192))
    assert few.requests_per_ks < many.requests_per_ks
    assert few.sequences == many.sequences


@pytest.mark.parametrize("seed", range(10))
def test_no_more_of_a_resource_means_less_capacity(seed: int) -> None:
    random = Random(seed)
    for _ in range(100):
        work = Workload(
            prompt_tokens=random.randrange(1, 4000), output_tokens=random.randrange(1, 2000)
        )
        given = {
            "kv_blocks": random.randrange(0, 10_000), "max_seqs": random.randrange(1, 512),
            "step_tokens": random.randrange(1, 9000),
        }  # fmt: skip
        more = {name: value + random.randrange(0, 500) for name, value in given.items()}
        less, most = one(worker(**given), work), one(worker(**more), work)
        assert less.requests_per_ks <= most.requests_per_ks, (seed, work, given, more)
        assert less.sequences <= most.sequences
        slow = one(worker(**given, slowness=1.5), work)
        assert slow.requests_per_ks <= less.requests_per_ks


@pytest.mark.parametrize("blocks_used", [0, 3000])
def test_running_requests_take_no_capacity_away(blocks_used: int) -> None:
    assert one(worker(kv_used=blocks_used)) == one(worker())


def test_only_workers_that_take_requests_count() -> None:
    quarantined = WorkerHealth(state=HealthState.QUARANTINED)
    suspect = WorkerHealth(state=HealthState.SUSPECT)
    workers = (
        worker("w0"),
        worker("w1", draining=True),
        worker("w2", present=False),
        worker("w3", engine=EnginePhase.DEAD),
        worker("w4", model="other"),
        worker("w5", health=quarantined),
        worker("w6", health=suspect),
    )
    fleet = fleet_of(*workers)
    found = capacity_of(fleet, "m", WORK)
    assert found is not None and found.workers == 2
    assert found.requests_per_ks == 2 * one(worker()).requests_per_ks
    assert capacity.capacity_of_all(fleet, "m", WORK).workers == 6


def test_capacity_is_unknown_until_step_times_were_measured() -> None:
    assert capacity_of(fleet_of(worker(), grounds="default"), "m", WORK) is None
    assert capacity_of(fleet_of(worker(), grounds="class"), "m", WORK) is not None
    assert capacity_of(fleet_of(worker(plain=True)), "m", WORK) is None


def test_no_worker_is_a_known_capacity_of_nothing() -> None:
    found = capacity_of(fleet_of(worker(present=False)), "m", WORK)
    assert found is not None and found.requests_per_ks == 0
