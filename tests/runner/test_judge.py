"""Verdicts: what fails, what proves nothing, what passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from relume.chaos.outcome import FiredFault, Outcome
from relume.chaos.runner import artifacts, run_statistics
from relume.chaos.runner.judge import Verdict, judge
from relume.chaos.runner.report import verdict_text
from relume.chaos.runner.run_facts import facts_of
from relume.chaos.scenario.catalogue import FIGURES
from relume.chaos.scenario.language import Bound, Disorder, Fault, When
from relume.chaos.scenario.schedule import PlannedFault, expand
from relume.chaos.validators import CHECKS
from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import Log, events_of
from relume.controlplane.cli.relume_command import main as relume
from relume.events import vocabulary as v
from relume.events.log.interface import LandedSegment, RevisionGroup
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState
from tests.policies.story import Story, arrived, started
from tests.runner.recorded import SCENARIO, outcome, told


@pytest.fixture(scope="module")
def good() -> Outcome:
    return outcome()


def with_client(run: Outcome, at: int, **changes: Any) -> Outcome:
    histories = list(run.histories)
    histories[at] = replace(histories[at], record=replace(histories[at].record, **changes))
    return replace(run, histories=tuple(histories))


def expecting(run: Outcome, *bounds: Bound) -> Outcome:
    return replace(run, scenario=replace(run.scenario, expect=bounds))


def test_a_sound_run_passes_and_says_what_was_judged(good: Outcome) -> None:
    verdict = judge(good)
    assert verdict.result == "passed" and verdict.why == ()
    assert set(verdict.judged) == set(CHECKS)
    assert set(verdict.figures) == set(FIGURES)
    assert verdict.faults[0].at_ns == (good.fired[0].at_ns,)
    text = "\n".join(verdict_text.verdict_lines(verdict))
    assert "PASSED" in text and "kept      I1 I2" in text


def test_a_broken_promise_fails_and_is_named(good: Outcome) -> None:
    verdict = judge(with_client(good, 5, gaps_ms=[11_000.0]))
    assert verdict.result == "failed"
    assert verdict.signature == ("I10",)
    assert "I10 is broken" in verdict.why
    assert "11000 ms" in "\n".join(verdict_text.verdict_lines(verdict))


def test_while_every_worker_is_cut_off_no_request_recovers(good: Outcome) -> None:
    names = sorted(good.schedule.workers)
    cuts = tuple(
        PlannedFault(name=f"c{n}", what="cut-one-way", target=name, at_ns=0, peer="gateway")
        for n, name in enumerate(names)
    )
    schedule = replace(good.schedule, faults=(*good.schedule.faults, *cuts))
    waited = replace(with_client(good, 5, gaps_ms=[11_000.0]), schedule=schedule)
    begun_ns = 500_000_000
    for until_s, targets, result in (
        (3, names, "passed"), (2, names, "failed"), (3, names[1:], "failed"),
    ):  # fmt: skip
        cut = tuple(
            FiredFault(
                name=f"c{n}",
                what="cut-one-way",
                target=name,
                at_ns=begun_ns * (n + 1),
                until_ns=begun_ns + until_s * 10**9,
            )
            for n, name in enumerate(names)
            if name in targets
        )
        assert judge(replace(waited, fired=(*good.fired, *cut))).result == result
    cut = tuple(
        FiredFault(
            name=f"c{n}", what="cut-one-way", target=name, at_ns=begun_ns, until_ns=4 * begun_ns
        )
        for n, name in enumerate(names[1:], 1)
    )
    stopped = FiredFault(
        name="s", what="agent-stop", target=names[0], at_ns=begun_ns, until_ns=4 * begun_ns
    )
    died = FiredFault(name="k", what="engine-kill", target=names[0], at_ns=begun_ns // 2)
    for more, result in (
        ((stopped,), "failed"), ((stopped, died), "passed"), ((died,), "failed"),
    ):  # fmt: skip
        assert judge(replace(waited, fired=(*good.fired, *cut, *more))).result == result


@pytest.mark.parametrize(("peer", "died", "unserved_ms"), [
    ("etcd", True, 2000), ("etcd", False, 0), ("gateway", False, 2000),
])  # fmt: skip
def test_a_dead_worker_that_is_cut_from_etcd_cannot_return(
    good: Outcome, peer: str, died: bool, unserved_ms: int
) -> None:
    """Composed 90111."""
    dead, *others = sorted(good.schedule.workers)
    cut = PlannedFault(name="c", what="cut", target=dead, at_ns=0, peer=peer)
    stopped = FiredFault(
        name="s", what="engine-stop", target=",".join(others),
        at_ns=1_000_000_000, until_ns=6_000_000_000,
    )  # fmt: skip
    away = FiredFault(
        name="c", what="cut", target=dead, at_ns=2_000_000_000, until_ns=4_000_000_000
    )
    killed = FiredFault(name="k", what="engine-kill", target=dead, at_ns=1_500_000_000)
    schedule = replace(good.schedule, faults=(*good.schedule.faults, cut))
    fired = (stopped, away, *((killed,) if died else ()))
    run = replace(good, schedule=schedule, fired=fired, ended_ns=60 * 10**9)
    assert facts_of(run, Log([])).unserved_ms == unserved_ms


@pytest.mark.parametrize("amount", [0.3, 1.0])
def test_a_model_fails_while_each_of_its_workers_does_or_gets_no_requests(
    good: Outcome, amount: float
) -> None:
    second = 10**9
    *firsts, last, worst = sorted(good.schedule.workers)
    errors = PlannedFault(name="e", what="engine-errors", target=worst, at_ns=0, amount=amount)
    fired = (
        FiredFault(name="u", what="record-unreadable", target=last, at_ns=second),
        FiredFault(
            name="e", what="engine-errors", target=worst, at_ns=2 * second, until_ns=9 * second
        ),
    )
    schedule = replace(
        good.schedule, faults=(errors,), models=dict.fromkeys((last, worst), "second")
    )
    run = replace(good, schedule=schedule, fired=fired, began_ms=1000, ended_ns=60 * second)
    facts = facts_of(run, Log([]))
    assert firsts and facts.unserved_ms == 0
    assert list(facts.slowed.failing) == ([("second", 3000, 10_000)] if amount > 0.5 else [])


@pytest.mark.parametrize(("back_s", "unserved_ms"), [(0.5, 9000), (6.0, 4000)])
def test_an_engine_cannot_load_between_two_outages_of_the_log(
    good: Outcome, back_s: float, unserved_ms: int
) -> None:
    """Composed 130999: etcd was back for half a second."""
    second = 10**9
    again = 5 + back_s
    outages = [
        FiredFault(name=n, what="etcd-stop", target="e0", at_ns=int(a * second), until_ns=int(b * second))
        for n, a, b in (("a", 1, 5), ("b", again, again + 5))
    ]  # fmt: skip
    killed = FiredFault(
        name="k", what="engine-kill", target=",".join(good.schedule.workers), at_ns=second
    )
    schedule = replace(good.schedule, etcd=("e0",))
    run = replace(good, schedule=schedule, fired=(*outages, killed), ended_ns=60 * second)
    assert facts_of(run, Log([])).unserved_ms == unserved_ms


def test_slow_links_to_gateways_that_struck_arefacts_of(good: Outcome) -> None:
    slow = [
        PlannedFault(name=name, what="link-slow", target="w0", at_ns=0, peer=peer, amount=amount)
        for name, peer, amount in (("a", "gateway", 300.0), ("b", "etcd", 900.0), ("c", "gateway", 500.0))
    ]  # fmt: skip
    fired = [FiredFault(name=name, what="link-slow", target="w0", at_ns=1) for name in "ab"]
    run = replace(good, schedule=replace(good.schedule, faults=tuple(slow)), fired=tuple(fired))
    assert facts_of(run, Log([])).slowed.link_ms == 300


def test_it_is_known_how_late_reports_of_engines_come(good: Outcome) -> None:
    disorder = Disorder(report_delay_ms=3000, late_writer="w1", late_writer_ms=200)
    fleet = replace(good.scenario.fleet, disorder=disorder)
    run = replace(good, scenario=replace(good.scenario, fleet=fleet))
    expected = {"w0": 3000, "w1": 3400, "w2": 3000, "w3": 3000}
    assert facts_of(run, Log([])).report_ms == expected


def test_workers_that_are_cut_from_gateways_arefacts_of(good: Outcome) -> None:
    planned = [
        PlannedFault(name=name, what="cut-one-way", target="w0,w1", at_ns=0, peer=peer)
        for name, peer in (("a", "gateway"), ("b", "etcd"))
    ]
    fired = [
        FiredFault(name=name, what="cut-one-way", target="w0,w1", at_ns=10**9, until_ns=2 * 10**9)
        for name in "ab"
    ]
    schedule = replace(good.schedule, faults=tuple(planned))
    run = replace(good, schedule=schedule, fired=tuple(fired), began_ms=100)
    assert facts_of(run, Log([])).slowed.cut == (("w0", 1100, 2100), ("w1", 1100, 2100))


@pytest.mark.parametrize(("outage_s", "is_blind"), [(0, False), (1, True)])
def test_replicas_that_could_not_read_the_log_arefacts_of(
    good: Outcome, outage_s: int, is_blind: bool
) -> None:
    """Events reach a replica whose calls are lost, until it compares a silent watch with a read
    (composed 182226)."""
    second = 10**9
    fired = [
        FiredFault(name="e", what="etcd-quota", target="e0", at_ns=0, until_ns=outage_s * second)
    ] * outage_s  # fmt: skip
    fired += [
        FiredFault(name=what, what=what, target=name, at_ns=10**9, until_ns=2 * 10**9)
        for what, name in (
            ("replica-cut", "r0"), ("replica-answers-lost", "r1"), ("replica-calls-lost", "r2"),
        )
    ]  # fmt: skip
    run = replace(good, fired=tuple(fired), began_ms=100)
    names = ("r.r0", "r.r1", "r.r2")[: 2 + is_blind]
    assert facts_of(run, Log([])).slowed.blind == tuple((name, 1100, 2100) for name in names)


@pytest.mark.parametrize(("starts", "unserved_ms"), [(2, 6000), (1, 0)])
def test_nor_while_an_engine_fails_to_start_more_often_than_a_few_times(
    good: Outcome, starts: int, unserved_ms: int
) -> None:
    """Composed 183644: of two workers the records of one could not be read, and two faults let four
    starts of the other fail."""
    second, (held, *others) = 10**9, sorted(good.schedule.workers)
    planned = [
        PlannedFault(name=name, what="reload-fails", target="all", at_ns=0, amount=starts)
        for name in "ab"
    ]
    fired = [
        FiredFault(name=name, what="reload-fails", target=",".join(others), at_ns=2 * second)
        for name in "ab"
    ]
    fired += [FiredFault(name="u", what="record-unreadable", target=held, at_ns=4 * second)]
    truth = GroundTruth(began_ns=second)
    truth.serving = {name: [(0, True), (3 * second, False), (11 * second, True)] for name in others}
    run = replace(
        good, schedule=replace(good.schedule, faults=tuple(planned)), fired=tuple(fired),
        ended_ns=60 * second, truth=truth,
    )  # fmt: skip
    assert facts_of(run, Log([])).unserved_ms == unserved_ms


@pytest.mark.parametrize(("struck", "released_ms", "unserved_ms"), [
    (True, 0, 5000), (True, 2500, 1500), (False, 0, 0),
])  # fmt: skip
def test_nor_while_the_last_one_is_in_quarantine_because_of_a_fault(
    good: Outcome, struck: bool, released_ms: int, unserved_ms: int
) -> None:
    """Composed 185695: of two workers the model files of one were damaged, and the other stood still."""
    second, (wrong, *others) = 10**9, sorted(good.schedule.workers)
    story = Story()
    story.leader()
    for at_ms, state in ((500, HealthState.QUARANTINED), (released_ms, HealthState.PROBING)):
        if at_ms:
            story.at_ms = good.began_ms + at_ms
            decided = v.HealthDecided(
                worker=wrong, incarnation=1, state=state, failure=FailureClass.CORRUPTION,
                evidence="", since=1,
            )  # fmt: skip
            story.tell("fleet", decided)
    fired = (
        FiredFault(
            name="s", what="engine-stop", target=",".join(others), at_ns=second, until_ns=6 * second
        ),
        FiredFault(
            name="f", what="model-file-damaged", target=wrong if struck else others[0], at_ns=1
        ),
    )
    run = replace(good, fired=fired, ended_ns=60 * second)
    assert facts_of(run, Log(story.groups)).unserved_ms == unserved_ms


def test_engines_of_a_simulated_run_live_as_long_as_they_served(good: Outcome) -> None:
    """Composed 183449: an agent that stood still wrote 14 s late that its engine had died."""
    truth = GroundTruth(began_ns=10**9)
    truth.serving = {"w0": [(10**9, True), (3 * 10**9, False), (4 * 10**9, True)]}
    run = replace(good, truth=truth, began_ms=100)
    first, last = facts_of(run, Log([])).slowed.lives
    assert first == (100, 2100) and last[0] == 3100 and last[1] > 1 << 40


def test_the_death_of_an_engine_by_another_cause_than_a_fault_isfacts_of(good: Outcome) -> None:
    """Composed 182326: an agent restarted the engine of a state daemon that was killed, and etcd was
    away for 9 s."""
    second, names = 10**9, sorted(good.schedule.workers)
    stopped = FiredFault(
        name="e", what="etcd-stop", target="e0", at_ns=2 * second, until_ns=11 * second
    )
    run = replace(
        good, schedule=replace(good.schedule, etcd=("e0",)), fired=(stopped,), ended_ns=60 * second
    )
    for died_s, unserved_ms in ((8, 9000), (20, 0)):
        truth = GroundTruth(began_ns=7 * second)
        truth.serving = {name: [(0, True), (died_s * second, False)] for name in names}
        assert facts_of(replace(run, truth=truth), Log([])).unserved_ms == unserved_ms


@pytest.mark.parametrize(
    ("what", "members", "outages"),
    [("etcd-kill", 1, ((1100, 2100),)), ("etcd-kill", 3, ()), ("disk-slow", 1, ())],
)
def test_outages_of_etcd_arefacts_of(
    good: Outcome, what: str, members: int, outages: tuple[tuple[int, int], ...]
) -> None:
    """Of three members, two remain; a slow disk only delays what is written."""
    fired = FiredFault(name="k", what=what, target="e0", at_ns=10**9, until_ns=2 * 10**9)
    schedule = replace(good.schedule, etcd=tuple(f"e{n}" for n in range(members)))
    run = replace(good, schedule=schedule, fired=(fired,), began_ms=100)
    assert facts_of(run, Log([])).slowed.outages == outages


def test_workers_that_faults_made_slow_arefacts_of(good: Outcome) -> None:
    planned = [
        PlannedFault(name=name, what=what, target="w0,w1", at_ns=0, amount=amount)
        for name, what, amount in (("a", "worker-slow", 8.0), ("b", "cpu-limit", 0.25))
    ]
    second = 1_000_000_000
    fired = (
        FiredFault(name="a", what="worker-slow", target="w0", at_ns=second, until_ns=3 * second),
        FiredFault(name="b", what="cpu-limit", target="w0,w1", at_ns=2 * second),
    )
    schedule = replace(good.schedule, faults=tuple(planned))
    run = replace(good, schedule=schedule, fired=fired, began_ms=100, ended_ns=9 * second)
    assert facts_of(run, Log([])).slowed.workers == (
        ("w0", 1100, 3100, 8.0), ("w0", 2100, 9100, 4.0), ("w1", 2100, 9100, 4.0),
    )  # fmt: skip


@pytest.mark.parametrize(("ends", "unserved_ms"), [(True, 1500), (False, 4500)])
def test_nor_while_an_operator_has_drained_the_last_one(
    good: Outcome, ends: bool, unserved_ms: int
) -> None:
    """Composed 25649: of two workers one was drained, the other dead, and etcd was full for 11 s."""
    story = Story()
    story.leader()
    for at_ms, kind in ((1000, EffectKind.DRAIN), (2500, EffectKind.UNDRAIN))[: 1 + ends]:
        story.at_ms = good.began_ms + at_ms
        effects = (v.Effect(kind, sorted(good.schedule.workers)[0]),)
        decided = v.EffectsDecided(
            decision=kind, basis=v.Basis(1, 0), cause="root", effects=effects
        )
        story.tell("fleet", decided)
    stopped = FiredFault(
        name="s", what="engine-stop", target=",".join(sorted(good.schedule.workers)[1:]),
        at_ns=500_000_000, until_ns=5_500_000_000,
    )  # fmt: skip
    run = replace(good, fired=(stopped,), ended_ns=60 * 10**9)
    assert facts_of(run, Log(story.groups)).unserved_ms == unserved_ms


@pytest.mark.parametrize(("opened_ms", "then", "unserved_ms"), [
    (500, (), 3000), (500, ((900, HealthState.PROBING),), 0), (1500, (), 0),
    (500, ((4500, HealthState.HEALTHY),), 3000),
])  # fmt: skip
def test_nor_while_the_log_cannot_close_the_breaker_of_the_last_one(
    good: Outcome, opened_ms: int, then: tuple[tuple[int, HealthState], ...], unserved_ms: int
) -> None:
    """Composed 172196: of three workers two had to stop, the breaker of the third was open, and etcd was
    full for 14 s."""
    held, *others = sorted(good.schedule.workers)
    story = Story()
    story.leader()
    for at_ms, state in ((opened_ms, HealthState.UNHEALTHY), *then):
        story.at_ms = good.began_ms + at_ms
        decided = v.HealthDecided(
            worker=held,
            incarnation=1,
            state=state,
            failure=FailureClass.ERRORS,
            evidence="",
            since=1,
        )
        story.tell("fleet", decided)
    stopped = FiredFault(
        name="s", what="engine-stop", target=",".join(others),
        at_ns=200_000_000, until_ns=9_000_000_000,
    )  # fmt: skip
    full = FiredFault(
        name="f", what="etcd-quota", target="e0", at_ns=1_000_000_000, until_ns=4_000_000_000
    )
    run = replace(good, fired=(stopped, full), ended_ns=60 * 10**9)
    assert facts_of(run, Log(story.groups)).unserved_ms == unserved_ms


def test_validators_know_who_was_killed_and_what_prompts_share(good: Outcome) -> None:
    requests = (replace(good.schedule.requests[0], prefix=(1, 2), prefix_block=32),)
    run = replace(
        good,
        schedule=replace(good.schedule, requests=(*requests, *good.schedule.requests[1:])),
        fired=(FiredFault(name="g", what="gateway-kill", target="r0", at_ns=2_000_000_000),),
    )
    known = facts_of(run, Log(run.groups))
    assert known.killed == [("r.r0", good.began_ms + 2000)]
    named = {h.record.request for h in good.histories if h.request == requests[0].name}
    assert known.shared == dict.fromkeys(named, 64) and named


def test_a_bound_that_is_not_met_fails(good: Outcome) -> None:
    verdict = judge(expecting(good, Bound("ttft_ms_mean", most=10)))
    assert (verdict.result, verdict.signature) == ("failed", ("bound:ttft_ms_mean",))


def test_an_error_of_the_run_fails(good: Outcome) -> None:
    verdict = judge(replace(good, error="stuck: no process can run", drained=False))
    assert (verdict.result, verdict.signature) == ("failed", ("error",))
    assert "I12" not in verdict.judged


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ((Bound("requests", least=57),), "requests is 56, not at least 57"),
        ((Bound("faults_fired", least=2),), "faults_fired is 1"),
        ((Bound("recovery_ms_p99", most=1e9), Bound("requests", least=99)), "requests is 56"),
    ],
)
def test_too_little_of_anything_proves_nothing(
    good: Outcome, bounds: tuple[Bound, ...], says: str
) -> None:
    verdict = judge(expecting(good, *bounds))
    assert verdict.result == "inconclusive"
    assert verdict.signature == ()
    assert any(says in reason for reason in verdict.why)


def test_a_planned_fault_that_did_not_strike_proves_nothing(good: Outcome) -> None:
    (kill,) = good.schedule.faults
    more = (kill, replace(kill, name="f1", target="w1"))
    unhit = replace(expecting(good), schedule=replace(good.schedule, faults=more))
    verdict = judge(unhit)
    assert verdict.result == "inconclusive"
    assert verdict.why == ("f1 engine-kill did not strike w1",)
    # A scenario may say itself how many are enough.
    assert judge(expecting(unhit, Bound("faults_fired", least=0))).result == "passed"


def test_a_fault_whose_feature_does_not_exist_proves_nothing(good: Outcome) -> None:
    scenario = replace(
        SCENARIO, faults=(Fault(what="rank-kill", when=When(at_s=1.0), target="w0"),)
    )
    schedule = expand(scenario, 7)
    waiting = replace(schedule.faults[0], applicable=False)
    run = replace(good, schedule=replace(schedule, faults=(waiting,)))
    verdict = judge(run)
    assert verdict.result == "inconclusive"
    assert "not yet applicable" in verdict.why[0]


def test_a_run_without_counterparts_or_rest_proves_nothing(good: Outcome) -> None:
    alone = replace(
        good,
        histories=tuple(h for h in good.histories if not h.record.undisturbed),
    )
    verdict = judge(alone)
    assert verdict.result == "inconclusive" and verdict.unproven[0].startswith("I2:")
    restless = judge(replace(good, drained=False))
    assert restless.result == "inconclusive" and "I12" in restless.why[0]


def test_a_scenario_may_restrict_its_promises(good: Outcome) -> None:
    run = replace(good, scenario=replace(good.scenario, promises=("I3",)))
    assert judge(with_client(run, 5, gaps_ms=[11_000.0])).result == "passed"


def test_an_unknown_end_is_counted_and_not_held_against_anybody(good: Outcome) -> None:
    """The connection broke because the gateway died: the answer may have ended anyhow."""
    cut = with_client(good, 9, outcome="cut", tokens=[0, 1], starts=[0, 1], token_count=2)
    assert judge(cut).signature == ("I1", "bound:broken_streams")
    gone = RevisionGroup(good.groups[-1].revision + 1, owners=(("r.r0", 0),))
    lost = told((*good.groups, gone), "fleet", v.ReplicaLost("r0", 16))
    killed = FiredFault(name="f1", what="gateway-kill", target="r0", at_ns=good.ended_ns)
    verdict = judge(replace(expecting(cut), groups=lost, fired=(*good.fired, killed)))
    assert (verdict.result, verdict.unknown) == ("passed", 1)
    assert "how they ended is unknown" in "\n".join(verdict_text.verdict_lines(verdict))


def test_what_was_acknowledged_counts(good: Outcome) -> None:
    verdict = judge(
        replace(
            good, landed=(LandedSegment(stream="w.w1", revision=9, seq=100_000, first=1, last=2),)
        )
    )
    assert verdict.signature == ("I13",)
    assert judge(replace(good, commands=(("c", "root"),))).signature == ("I16",)


def test_figures_are_the_clients_and_the_logs(good: Outcome) -> None:
    found = run_statistics.figures_of(good, Log(good.groups))
    ttft = [(h.first_ns - h.sent_ns) / 1e6 for h in good.histories if h.first_ns]
    assert found["ttft_ms_mean"] == pytest.approx(sum(ttft) / 56)
    assert found["moved_streams"] == 14
    assert 50 < (found["recovery_ms_p99"] or 0) < 1000
    calm = replace(good, histories=(), fired=())
    found = run_statistics.figures_of(calm, Log(()))
    assert found["requests"] == found["faults_fired"] == 0
    assert found["ttft_ms_mean"] is found["recovery_ms_p99"] is found["makespan_s"] is None


def test_quantiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert run_statistics.quantile(values, 0.99) == 99
    assert run_statistics.quantile([3.0], 0.99) == 3
    assert run_statistics.quantile([], 0.5) is None


def test_a_clock_that_jumped_is_put_right(good: Outcome) -> None:
    """A worker's wall clock an hour ahead makes no recovery an hour long."""
    groups = []
    for group in good.groups:
        segments = tuple(
            replace(s, at_ms=s.at_ms + 3_600_000) if s.stream == "w.w1" else s
            for s in group.segments
        )
        groups.append(replace(group, segments=segments))
    last = max(s.at_ms for g in good.groups for s in g.segments)
    assert max(at.at_ms for at in events_of(groups)) > last
    put_right = [at for at in events_of(Log(groups)) if at.revision <= good.groups[-30].revision]
    assert max(at.at_ms for at in put_right) <= last
    run = replace(good, groups=tuple(groups), scenario=replace(SCENARIO, promises=("I10",)))
    assert judge(run).result == "passed"


@pytest.mark.parametrize(("stamped_ms", "found_ms"), [(22_300, 22_300), (3_600_000, 8_100)])
def test_a_segment_that_waited_for_etcd_shows_no_clock_that_jumped(
    stamped_ms: int, found_ms: int
) -> None:
    """Composed 172196: etcd was full for 14 s. What a replica and the leader had stamped before that
    landed after what a worker stamped at its end."""
    story = Story()
    story.leader()
    for at_ms, stream, event in (
        (8_000, "r.r0", arrived()),
        (stamped_ms, "w.w0", started()),
        (8_100, "r.r0", arrived("q2")),
        (22_400, "r.r0", arrived("q3")),
        (8_500, "fleet", v.Tick(number=1, unix_ms=0)),
        (22_700, "fleet", v.Tick(number=2, unix_ms=0)),
    ):
        story.at_ms = at_ms
        story.tell(stream, event)
    found = [at.at_ms for at in events_of(Log(story.groups), "w.w0")]
    assert found == [found_ms]


def test_replicas_whose_clocks_jumped_are_put_right_by_the_truth(good: Outcome) -> None:
    middle = good.groups[len(good.groups) // 2].revision
    groups, errors = [], {}
    for group in good.groups:
        segments = []
        for segment in group.segments:
            is_late = group.revision > middle and not segment.stream.startswith("w.")
            if is_late and segment.stream not in {stream for _, stream in errors}:
                errors[group.revision, segment.stream] = 3_600_000
            more_ms = 3_600_000 if is_late else 0
            segments.append(replace(segment, at_ms=segment.at_ms + more_ms))
        groups.append(replace(group, segments=tuple(segments)))
    true = [at.at_ms for at in events_of(good.groups)]
    assert [at.at_ms for at in events_of(Log(groups))] != true
    assert [at.at_ms for at in events_of(Log(groups, errors))] == true


def test_a_run_comes_back_from_its_folder(good: Outcome, tmp_path: Path) -> None:
    verdict = judge(good)
    artifacts.keep(tmp_path / "run", good, verdict, "relume-chaos run recorded --seed 7")
    back, run = artifacts.outcome_in(tmp_path / "run")
    assert back == good
    kept = (tmp_path / "run" / "verdict.json").read_bytes()
    assert msgspec.json.decode(kept, type=Verdict) == judge(back) == verdict
    assert (run.seed, run.digest) == (7, good.schedule.digest())
    assert run.commit == artifacts.checkout()[0]


def test_relume_replay_opens_its_log(
    good: Outcome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifacts.keep(tmp_path, good, judge(good), "x")
    assert relume(["replay", "--log", str(tmp_path / "log.rlog"), "--verify"]) == 0
    assert "every decision came out the same" in capsys.readouterr().out


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(artifacts.BadRun, match="holds no run"):
        artifacts.outcome_in(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(artifacts.BadRun, match="damaged"):
        artifacts.outcome_in(tmp_path)


def test_a_log_that_does_not_fold_does_not_take_the_rest_with_it(
    good: Outcome, tmp_path: Path
) -> None:
    bad = told(good.groups, "w.w1")
    segment = bad[-1].segments[0]
    broken = replace(bad[-1], segments=(replace(segment, records=(b"\x93nonsense",)),))
    run = replace(good, groups=(*good.groups, broken))
    verdict: Verdict = judge(good)
    artifacts.keep(tmp_path, run, verdict, "x")
    back, kept = artifacts.outcome_in(tmp_path)
    assert kept.log_error and back.groups == () and back.histories == good.histories
