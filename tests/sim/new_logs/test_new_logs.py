"""etcd is restored from a backup under a simulated fleet, and a new log begins in the former one's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.chaos.outcome import Outcome
from relume.chaos.runner import world
from relume.chaos.runner.cases import case_of
from relume.chaos.runner.judge import judge
from relume.chaos.sim.sim_fleet import digest
from relume.chaos.validators.former_log import RENEWAL
from relume.chaos.validators.records import events_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome
from tests.runner.plants import PLANTS, planted

UNDER_LOAD = str(Path(__file__).with_name("etcd-restored-under-load.yaml"))
RESUMABLE = str(Path(__file__).with_name("etcd-restored-resumable.yaml"))


def arrived(log: tuple[RevisionGroup, ...]) -> set[str]:
    """The requests that arrived in a log."""
    return {e.event.request for e in events_of(log) if type(e.event) is v.RequestArrived}


def run(scenario: str, seed: int) -> Outcome:
    return world.simulate(case_of(scenario, seed))


@pytest.mark.parametrize("seed", [3, 21])
def test_the_fleet_goes_on_in_a_new_log(seed: int) -> None:
    outcome = run(RENEWAL, seed)
    verdict = judge(outcome)
    assert verdict.result == "passed", verdict.why
    assert {history.record.outcome for history in outcome.histories} == {"completed"}
    former, present = ({g.revision for g in log} for log in (outcome.former, outcome.groups))
    assert min(present) < max(former), "it began with the revision of the backup"
    ids = arrived(outcome.former), arrived(outcome.groups)
    assert all(ids) and not ids[0] & ids[1]


def test_it_is_a_function_of_its_seed() -> None:
    one, other = run(RENEWAL, 5), run(RENEWAL, 5)
    assert digest(one) == digest(other) and one.former == other.former


def test_the_new_log_counts_the_requests_of_the_engines_that_it_adopts() -> None:
    """They have long streams, which the replicas that lost their log continue."""
    outcome = run(UNDER_LOAD, 0)
    assert judge(outcome).result == "passed"
    stated = set[tuple[str, int]]()
    for entry in events_of(outcome.groups, "w."):
        if type(entry.event) is v.EngineStep:
            changes = entry.event.changes
            stated |= {
                (change.request, change.attempt)
                for change in changes
                if type(change) is v.RequestQueued and not change.dispatch
            }
    assert stated and {request for request, _ in stated} <= arrived(outcome.former)


@pytest.mark.parametrize("seed", [0, 1])
def test_resumable_streams_continue_in_the_new_log(seed: int) -> None:
    """Seed 0: a client returned more than 20 s after its engine had said that it has the stream, when that had
    dropped it. It got 502 in place of 410."""
    outcome = run(RESUMABLE, seed)
    verdict = judge(outcome)
    assert verdict.result == "passed", verdict.why
    both = arrived(outcome.former) & arrived(outcome.groups)
    ended = [e.event for e in events_of(outcome.groups) if type(e.event) is v.RequestEnded]
    completed = {end.request for end in ended if end.outcome == RequestOutcome.COMPLETED}
    assert len(both & completed) >= 2


@pytest.mark.full
@pytest.mark.parametrize("scenario", [RENEWAL, UNDER_LOAD, RESUMABLE])
def test_twenty_seeds_pass(scenario: str) -> None:
    """60 runs of one or two seconds."""
    verdicts = {seed: judge(run(scenario, seed)) for seed in range(20)}
    assert {s: v.why for s, v in verdicts.items() if v.result != "passed"} == {}


@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("agents_stay", "I20"),
        ("new_log_ends_engines", "I20"),
        ("adopted_requests_uncounted", "I21"),
        ("restored_log_continued", "I1"),
        ("streams_end_with_log", "bound:lost_streams"),
    ],
)
def test_it_fails_with_a_planted_bug(name: str, promise: str) -> None:
    plant = PLANTS[name]
    with planted(plant):
        verdict = judge(run(plant.run.given, plant.run.seed))
    assert verdict.result == "failed" and promise in verdict.signature
