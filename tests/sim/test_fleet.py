"""Whole fleets in virtual time: the named scenarios, and that a seed is all there is to a run."""

import itertools
import os
import subprocess
import sys
import weakref
from pathlib import Path

import msgspec
import pytest

from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.scenario.language import Burst, Fault, Fixed, Fleet, Scenario, Traffic, When
from relume.chaos.sim.sim_fleet import Settings, SimFleet, at_rest, digest, run
from relume.chaos.sim.world.throttle import PERIOD_S, Throttle
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.chaos.validators import check_all
from relume.chaos.validators.records import events_of, log_of
from relume.events.vocabulary import AdminCommanded, EngineReady, SegmentSkipped, WorkerLost
from relume.events.vocabulary.enums import EnginePhase
from tests.policies.story import Story, died

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
    return run(scenario_reader.load(scenario_reader.find(name)), seed)


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


def test_a_fleet_goes_with_its_run():
    """All of it: with what stayed of each, two thousand runs would fill the memory."""
    made = []

    def make(*args):
        fleet = SimFleet(*args)
        made.extend(map(weakref.ref, (fleet, fleet.loop, fleet.wires, fleet.etcd, fleet.clients)))
        return fleet

    assert not run(scenario_reader.load(scenario_reader.find("calm")), 5, make=make).error
    assert [one() for one in made] == [None] * 5


@pytest.mark.full
def test_a_run_is_a_function_of_its_seed_whatever_hashes_are():
    here = digest(outcome_of("engine-killed-in-restore", 5))
    code = "from tests.sim.test_fleet import digest, outcome_of\n"
    code += "print('digest', digest(outcome_of('engine-killed-in-restore', 5)))"
    command = [sys.executable, "-c", code]
    for hashes in ("1", "2"):
        said = subprocess.run(
            command,
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert f"digest {here}" in said.stdout
    assert digest(outcome_of("engine-killed-in-restore", 6)) != here


def test_a_run_is_at_rest_when_what_was_said_in_an_outage_is_in_the_log():
    traffic = Traffic(arrivals=Burst(2, 12.0), lengths=Fixed(16, 4), requests=4)
    away = Fault(what="etcd-kill", when=When(at_s=8.0), target="e0", for_s=25.5)
    scenario = Scenario(
        name="outage",
        about="Etcd is away.",
        fleet=Fleet(workers=2, control_planes=2),
        traffic=traffic,
        faults=(away,),
    )
    verdict = judge(run(scenario, 1))
    assert (verdict.result, verdict.why) == ("passed", ())


def test_a_run_is_at_rest_without_a_worker_that_a_damaged_segment_keeps_away():
    """Composed 160600: its engine's death came into the log before the damage, so it stayed dead there."""
    scenario = Scenario(
        name="gone",
        about="A worker cannot come back.",
        fleet=Fleet(workers=3, domains=3),
        traffic=Traffic(arrivals=Burst(6, 1.0), lengths=Fixed(100, 100), requests=6),
        faults=(
            Fault(what="segment-damaged", when=When(at_s=3.0), target="w0"),
            Fault(what="engine-kill", when=When(at_s=3.001), target="w0"),
        ),
    )
    outcome = run(scenario, 0)
    assert log_of(outcome.groups).end.workers["w0"].engine == EnginePhase.DEAD
    assert outcome.drained
    skipped = [e.event for e in events_of(outcome.groups) if type(e.event) is SegmentSkipped]
    assert [event.stream for event in skipped] == ["w.w0"], "the leader says so once"


def test_a_worker_that_is_back_or_whose_stream_is_sound_is_waited_for():
    story = Story()
    story.leader()
    worker = story.worker()
    assert at_rest(story.fleet, lambda _worker: False)
    story.tell("w.w0", died())
    assert not at_rest(story.fleet, lambda _worker: True), "its agent is there"
    story.lapse("w.w0")
    story.tell("fleet", WorkerLost("w0", worker.epoch, "lease lapsed"))
    assert not at_rest(story.fleet, lambda _worker: False), "its agent will be"
    assert at_rest(story.fleet, lambda worker: worker == "w0")


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
        traffic = Traffic(arrivals=Burst(4, 2.0), lengths=Fixed(16, 8), requests=12)
        scenario = Scenario(
            name="slow",
            about="Links are slow.",
            fleet=Fleet(workers=2),
            traffic=traffic,
            faults=faults,
        )
        verdict = judge(run(scenario, 1))
        assert verdict.broken == {}
        return verdict.figures["ttft_ms_mean"]

    slow = Fault(
        what="link-slow",
        when=When(at_s=0.0),
        target="all",
        peer="gateway",
        for_s=60.0,
        amount=300.0,
    )
    assert first_tokens_ms((slow,)) > 600 + first_tokens_ms(())


def test_what_has_a_tenth_of_a_core_takes_ten_times_as_long():
    traffic = Traffic(arrivals=Burst(1, 4.0), lengths=Fixed(256, 64), requests=4)

    def tpot_ms(*faults):
        outcome = run(
            Scenario(
                name="limited",
                about="Little CPU.",
                fleet=Fleet(workers=1),
                traffic=traffic,
                faults=faults,
            ),
            1,
        )
        verdict = judge(outcome)
        assert verdict.broken == {} and len(outcome.fired) == len(faults)
        return verdict.figures["tpot_ms_mean"], outcome

    limit = Fault(what="cpu-limit", when=When(at_s=0.0), target="w0", for_s=60.0, amount=0.1)
    plain, _ = tpot_ms()
    slow, _ = tpot_ms(limit)
    assert 9 * plain < slow < 11 * plain
    # An engine that starts meanwhile takes as much longer to load.
    _, outcome = tpot_ms(limit, Fault(what="engine-kill", when=When(at_s=1.0), target="w0"))
    ready = [at.at_ms for at in events_of(outcome.groups) if type(at.event) is EngineReady]
    assert ready[1] - outcome.began_ms > 1000 + 9000 * 0.8


def test_a_process_stands_still_for_the_rest_of_each_period_and_stays_stopped_if_it_is():
    loop, ran = VirtualLoop(1), []
    process = loop.process("p")

    def note():
        ran.append(loop.time())
        process.call_at(loop.time() + 0.001, note)

    throttle = Throttle(loop, lambda: [process], 0.25)
    process.call_soon(note)
    loop.call_at(1.0, process.stop)
    loop.call_at(2.0, process.go_on)
    loop.call_at(3.0, throttle.end)
    loop.call_at(3.5, loop.stop)
    with loop.patched():
        loop.run_forever()
    loop.close()
    idle = sum(b - a for a, b in itertools.pairwise(ran) if PERIOD_S < 2 * (b - a) < 1)
    assert 0.7 * 2 < idle < 0.8 * 2
    assert [b - a > 0.9 for a, b in itertools.pairwise(ran)].count(True) == 1
    assert not any(1.0 < at < 2.0 for at in ran) and sum(at > 3.0 for at in ran) > 400


def test_what_has_no_room_on_disk_stays_in_memory_until_there_is_room():
    seen = []

    def watching(fleet):
        def look():
            hosts = fleet.hosts.values()
            counts = [host.daemon.store.stats() for host in hosts if host.daemon is not None]
            full = all(host.disk.full for host in hosts)
            seen.append((full, *(sum(c[name] for c in counts) for name in ("demoted", "taken"))))
            fleet.loop.call_later(0.1, look)

        fleet.loop.call_soon(look)

    outcome = run(
        scenario_reader.load(scenario_reader.find("disk-full")),
        0,
        settings=Settings(watching=watching),
    )
    assert judge(outcome).result == "passed"
    full = [at for at, (is_full, *_) in enumerate(seen) if is_full]
    first, last = seen[full[0]], seen[full[-1]]
    assert first[1] == last[1] > 0 and last[2] > first[2]
    assert seen[-1][1] > last[1]
