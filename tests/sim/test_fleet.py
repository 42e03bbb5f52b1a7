"""Whole fleets in virtual time: the named scenarios, and that a seed is all there is to a run."""

import os
import subprocess
import sys

import msgspec
import pytest

from chaos.runner.judge import judge
from chaos.scenario import reading
from chaos.scenario.language import Burst, Fault, Fixed, Fleet, Scenario, Traffic, When
from chaos.sim.fleet import digest, run
from chaos.validators import check_all
from chaos.validators.records import events_of
from events.vocabulary import AdminCommanded

SCENARIOS = (
    "calm",
    "engine-killed-in-decode",
    "engine-killed-in-restore",
    "agent-killed",
    "domain-lost",
    "primary-and-holder-killed",
    "blocks-corrupt",
    "etcd-leader-killed",
    "worker-cut-from-gateway",
)


def outcome_of(name, seed):
    return run(reading.load(reading.find(name)), seed)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_named_scenario_keeps_every_promise(name):
    outcome = outcome_of(name, 5)
    records = [history.record for history in outcome.histories]
    assert not outcome.error and outcome.drained
    assert check_all(outcome.groups, records) == []
    real = [record for record in records if not record.undisturbed]
    assert len(real) == len(outcome.schedule.requests)
    assert {record.outcome for record in real} == {"completed"}
    assert len(outcome.fired) == len(outcome.scenario.faults)


def test_a_token_too_few_is_found():
    outcome = outcome_of("engine-killed-in-decode", 11)
    records = [history.record for history in outcome.histories]
    records[5].tokens.pop(3)
    assert {found.promise for found in check_all(outcome.groups, records)} >= {"I2"}


def test_a_run_is_a_function_of_its_seed_whatever_hashes_are():
    here = digest(outcome_of("engine-killed-in-restore", 5))
    command = [sys.executable, "-m", "chaos.sim.fleet", "engine-killed-in-restore", "--seed", "5"]
    for hashes in ("1", "2"):
        said = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert f"digest {here}" in said.stdout
    assert digest(outcome_of("engine-killed-in-restore", 6)) != here


def test_a_run_is_at_rest_when_what_was_said_in_an_outage_is_in_the_log():
    traffic = Traffic(Burst(2, 12.0), Fixed(16, 4), requests=4)
    away = Fault("etcd-kill", When(at_s=8.0), "e0", for_s=25.5)
    scenario = Scenario("outage", "Etcd is away.", Fleet(2, control_planes=2), traffic, (away,))
    verdict = judge(run(scenario, 1))
    assert (verdict.result, verdict.why) == ("passed", ())


def test_what_was_acknowledged_is_kept_and_looked_for():
    outcome = outcome_of("leader-killed-at-effect", 3)
    assert outcome.landed and outcome.commands
    gone = {name for name, _ in outcome.commands[:1]}
    groups = [group for group in outcome.groups if not names_in(group) & gone]
    assert len(groups) == len(outcome.groups) - 1
    verdict = judge(msgspec.structs.replace(outcome, groups=tuple(groups)))
    assert {"I13", "I16"} <= {found.promise for found in verdict.violations}


def names_in(group):
    return {
        event.command_id for at in events_of([group]) if type(event := at.event) is AdminCommanded
    }


def test_what_comes_over_a_slow_link_comes_later():
    def first_tokens_ms(faults):
        traffic = Traffic(Burst(4, 2.0), Fixed(16, 8), requests=12)
        scenario = Scenario("slow", "Links are slow.", Fleet(2), traffic, faults)
        verdict = judge(run(scenario, 1))
        assert verdict.broken == {}
        return verdict.figures["ttft_ms_mean"]

    slow = Fault("link-slow", When(at_s=0.0), "all", peer="gateway", for_s=60.0, amount=300.0)
    assert first_tokens_ms((slow,)) > 600 + first_tokens_ms(())
