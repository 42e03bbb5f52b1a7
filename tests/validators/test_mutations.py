"""A good run of real workers, altered so that exactly one promise is broken: that one is
named, and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from relume.chaos.outcome import Outcome
from relume.chaos.runner.strikes import strikes_of
from relume.chaos.validators import CHECKS, check_all
from relume.chaos.validators.ground_truth import ClientCall, EngineLoad, GroundTruth, ReportKey
from relume.chaos.validators.promises.log import (
    i13_durable,
    i16_admin_logged,
    i21_fold_is_true,
)
from relume.chaos.validators.promises.requests import i22_needless_failure, i25_told_truth
from relume.chaos.validators.promises.service import i26_lost_speed
from relume.chaos.validators.promises.workers import i19_engine_stops, i20_ends_of_processes
from relume.chaos.validators.records import ClientRecord, Log, events_of
from relume.events import vocabulary as v
from relume.events.log.interface import LandedSegment
from relume.events.vocabulary.enums import FailureClass, HealthState, RolloutStage
from tests.runner.recorded import outcome, told


@pytest.fixture(scope="module")
def good() -> Outcome:
    return outcome()


def broken(run: Outcome) -> set[str]:
    clients = [history.record for history in run.histories]
    found = check_all(run.groups, clients)
    found += i13_durable.check(run.groups, clients, run.landed)
    found += i16_admin_logged.check(run.groups, clients, run.commands)
    found += i21_fold_is_true.check(run.groups, clients, run.truth)
    found += i22_needless_failure.check(run.groups, clients, run.truth, run.began_ms)
    found += i19_engine_stops.check(run.groups, clients, run.truth)
    found += i20_ends_of_processes.check(run.groups, clients, strikes_of(run))
    found += i25_told_truth.check(run.groups, clients, run.truth)
    found += i26_lost_speed.check(run.groups, clients, strikes_of(run))
    return {violation.promise for violation in found}


def client(run: Outcome, at: int, **changes: object) -> Outcome:
    """`run` with another record of its client number `at`."""
    histories = list(run.histories)
    histories[at] = replace(histories[at], record=replace(histories[at].record, **changes))
    return replace(run, histories=tuple(histories))


def more(run: Outcome, stream: str, *events: object) -> Outcome:
    return replace(run, groups=told(run.groups, stream, *events))


def event(run: Outcome, kind: type) -> v.Event:
    return next(at.event for at in events_of(run.groups) if type(at.event) is kind)


def i1(run: Outcome) -> Outcome:
    return client(run, 5, outcome="failed", tokens=[], starts=[], token_count=0)


def i2(run: Outcome) -> Outcome:
    told = events_of(run.groups, "w.")
    restored = {at.event.request for at in told if type(at.event) is v.RestoreStarted}
    free = [
        at.event.client_id
        for at in events_of(run.groups)
        if type(at.event) is v.RequestArrived and at.event.request not in restored
    ]
    at = next(i for i, h in enumerate(run.histories) if i > 5 and h.record.request in free)
    tokens = [*run.histories[at].record.tokens]
    tokens[-1] += 1
    return client(run, at, tokens=tokens)


def i2_cut(run: Outcome) -> Outcome:
    """A client that left got a wrong token before."""
    run = client(run, 5, outcome="cancelled", tokens=[0, 1, 3], starts=[0, 1, 2], token_count=3)
    return run


def i3(run: Outcome) -> Outcome:
    starts = [*run.histories[5].record.starts]
    starts[7] = starts[6]
    return client(run, 5, starts=starts)


def i4(run: Outcome) -> Outcome:
    """An engine takes an attempt that was sent to another one."""
    decided = event(run, v.RouteDecided)
    other = next(w for w in ("w1", "w2", "w3") if w != decided.worker)
    changes = v.RequestQueued(decided.request, 1, 5), v.EngineFinished(decided.request, 1, "-", 0)
    return more(
        run,
        f"w.{other}",
        v.EngineStep(
            incarnation=1,
            step=1 << 30,
            duration_us=0,
            batch=0,
            sum_context=0,
            prefill_tokens=0,
            waiting=0,
            kv_used=0,
            changes=changes,
        ),
    )


def i5(run: Outcome) -> Outcome:
    """The last writer's lease had lapsed."""
    *before, last = run.groups
    lapsed = replace(before[-1], owners=((last.segments[0].stream, 0),))
    return replace(run, groups=(*before[:-1], lapsed, last))


def i6(run: Outcome) -> Outcome:
    """The last segment is not the one that was written."""
    *before, last = run.groups
    segments = (replace(last.segments[0], at_ms=last.segments[0].at_ms + 1), *last.segments[1:])
    return replace(run, groups=(*before, replace(last, segments=segments)))


def i7(run: Outcome) -> Outcome:
    """A state hash that is not the fold's."""
    hashed = v.StateHashed(run.groups[-1].revision, bytes(16), bytes(16))
    return more(run, "fleet", hashed)


def i8(run: Outcome) -> Outcome:
    daemon = event(run, v.StateDaemonReported)
    figures = (("memory_used", 1 << 40),)
    return more(
        run, f"w.{daemon.worker}", v.StateDaemonReported(daemon.worker, daemon.boot, figures)
    )


def i9(run: Outcome) -> Outcome:
    """A breaker opens, and another request goes there all the same."""
    decided = event(run, v.RouteDecided)
    opened = v.HealthDecided(
        worker=decided.worker, incarnation=decided.incarnation, state=HealthState.UNHEALTHY,
        failure=FailureClass.ERRORS, evidence="3 requests failed on it", since=1, until=9,
    )  # fmt: skip
    run = more(run, "fleet", opened)
    basis = v.Basis(run.groups[-1].revision, 0)
    late = {"request": "late", "attempt": 1}
    return more(
        run,
        "r.r0",
        replace(event(run, v.RequestArrived), request="late", client_id="late"),
        replace(decided, basis=basis, **late),
        replace(event(run, v.RequestEnded), request="late", attempts=1, tokens=0, outcome="failed"),
    )


def i10(run: Outcome) -> Outcome:
    return client(run, 5, gaps_ms=[10_500.0])


def i11(run: Outcome) -> Outcome:
    """A level is decided for which too much of the demand is served."""
    decision = v.DegradationDecided(
        model=event(run, v.RequestArrived).model, level=2, was=0, since=9, due_ticks=3, share=900,
        workers=1, wanted=2, requests_per_ks=900, usable_per_ks=900, demand_per_ks=1000,
    )  # fmt: skip
    return more(run, "fleet", decision)


def i11_refused(run: Outcome) -> Outcome:
    """A request is refused because of a level, and none was decided."""
    arrived = replace(event(run, v.RequestArrived), request="late", client_id="late")
    refused = v.RequestShed(
        decision="r0.b.x", basis=v.Basis(run.groups[-1].revision, 1 << 30), request="late",
        at_us=0, reason="degraded", model=arrived.model, tier="batch", tenant="", tokens=1, size=1,
        deadline_us=0, waited_us=-1, ahead_requests=0, ahead_tokens=0, predicted_us=-1, depth=0,
        retry_after_s=1,
    )  # fmt: skip
    ended = replace(
        event(run, v.RequestEnded), request="late", attempts=0, tokens=0, outcome="rejected"
    )
    return more(run, "r.r0", arrived, refused, ended)


def i12(run: Outcome) -> Outcome:
    return more(
        run,
        "w.w1",
        v.EngineStep(
            incarnation=1,
            step=1 << 30,
            duration_us=5,
            batch=0,
            sum_context=0,
            prefill_tokens=0,
            waiting=0,
            kv_used=3,
        ),
    )


def i13(run: Outcome) -> Outcome:
    return replace(
        run, landed=(LandedSegment(stream="w.w1", revision=9, seq=100_000, first=1, last=2),)
    )


def i14(run: Outcome) -> Outcome:
    """Restored in part, computed from behind that part on."""
    started = event(run, v.RestoreStarted)
    step = event(run, v.EngineStep)
    request, life = "lone", step.incarnation
    restore = v.RestoreStarted(
        incarnation=life,
        request=request,
        child=0,
        attempt=1,
        holder=started.holder,
        tokens=64,
        first=16,
    )
    failed = v.RestoreFailed(
        incarnation=life,
        request=request,
        child=0,
        attempt=1,
        holder=started.holder,
        tokens=32,
        reason="corrupt",
    )
    chunk = v.EngineStep(
        incarnation=life, step=1 << 30, duration_us=5, batch=0, sum_context=0, prefill_tokens=0, waiting=0, kv_used=0,
        changes=(v.PrefillChunkDone(request, 1, 20, 100), v.EngineFinished(request, 1, "-", 0)),
    )  # fmt: skip
    return more(run, "w.w1", restore, failed, chunk)


def i15(run: Outcome) -> Outcome:
    return more(run, "w.w1", v.EffectApplied("nobody's", 0))


def i16(run: Outcome) -> Outcome:
    """An acknowledged change that the log does not know."""
    return replace(run, commands=(("c1", "root"),))


def i21(run: Outcome) -> Outcome:
    """An engine never had the requests that it reported."""
    steps = [at.event for at in events_of(run.groups, "w.w1") if type(at.event) is v.EngineStep]
    none = EngineLoad(0, 0, 0, 0, 0, 0)
    reports = {
        ReportKey(step.incarnation, step.step, type(last), last.request, last.attempt): none
        for step in steps
        for last in step.changes[-1:]
    }
    return replace(run, truth=GroundTruth(reports={"w1": reports}))


def i22(run: Outcome) -> Outcome:
    """A client that returns in the middle of its stream is told that there is none."""
    course = max(Log(run.groups).courses.values(), key=lambda c: c.ends[0].at_ms - c.arrived.at_ms)
    at_ns = ((course.arrived.at_ms + course.ends[0].at_ms) // 2 - run.began_ms) * 1_000_000
    calls = {course.arrived.event.client_id: ClientCall(status=410, ended_ns=at_ns)}
    return replace(run, truth=GroundTruth(calls=calls))


def i22_busy(run: Outcome) -> Outcome:
    """A client is told that the queue is full, and it is empty."""
    name = run.histories[5].record.request
    calls = {name: ClientCall(status=429, message="too many requests wait")}
    return replace(run, truth=GroundTruth(calls=calls))


def dispatched(run: Outcome, name: str, **changes: object) -> tuple[v.Event, ...]:
    """A request that is dispatched on all that the log knows, and fails."""
    decided = event(run, v.RouteDecided)
    alive = event(run, v.EngineDied).worker != decided.worker
    basis = v.Basis(run.groups[-1].revision, 1 << 30)
    known = {"incarnation": 1 if alive else 2, "basis": basis, **changes}
    return (
        replace(event(run, v.RequestArrived), request=name, client_id=name),
        replace(decided, request=name, attempt=1, **known),
        replace(event(run, v.RequestEnded), request=name, attempts=1, tokens=0, outcome="failed"),
    )


def i17(run: Outcome) -> Outcome:
    """A worker is declared lost that owns its stream."""
    registered = event(run, v.WorkerRegistered).worker
    epoch = next(at.epoch for at in events_of(run.groups, f"w.{registered}"))
    return more(run, "fleet", v.WorkerLost(registered, epoch, "lease lapsed"))


def i18(run: Outcome) -> Outcome:
    """A replica suspects an engine, and sends it another request all the same."""
    arrived, decided, ended = dispatched(run, "late")
    suspected = v.WorkerSuspected(decided.worker, decided.incarnation, "it is silent")
    return more(run, "r.r0", suspected, arrived, decided, ended)


def i18_again(run: Outcome) -> Outcome:
    """A request goes back to the engine that failed it."""
    arrived, decided, ended = dispatched(run, "late")
    failed = v.TransportObserved(
        request="late", attempt=1, worker=decided.worker, incarnation=decided.incarnation,
        kind="declined", delivered=0,
    )  # fmt: skip
    again = replace(decided, attempt=2, cause="declined")
    return more(run, "r.r0", arrived, decided, failed, again, replace(ended, attempts=2))


def i18_spare(run: Outcome) -> Outcome:
    """A request goes to a spare, although other workers are open."""
    arrived, decided, ended = dispatched(run, "late")
    spares = v.SparesDecided(
        model=decided.model, spares=(decided.worker,), was=(), since=9, workers=4, failed=0, due=1,
        short_ticks=5,
    )  # fmt: skip
    run = more(run, "fleet", spares)
    basis = v.Basis(run.groups[-1].revision, decided.basis.position)
    return more(run, "r.r0", arrived, replace(decided, basis=basis), ended)


def i19(run: Outcome) -> Outcome:
    """A client left at the beginning, and its engine never stopped."""
    name = run.histories[5].record.request
    truth = GroundTruth(
        calls={name: ClientCall()},
        attempts={name: [("q/1", "w1", 0)]},
        serving={"w1": [(0, True)]},
    )
    return replace(client(run, 5, outcome="cancelled"), truth=truth)


def i20(run: Outcome) -> Outcome:
    """An engine died that no fault struck."""
    (kill,) = run.fired
    return replace(run, fired=(replace(kill, target="w1"),))


def i25(run: Outcome) -> Outcome:
    """A client got another status than the log says."""
    return client(run, 5, status=201)


def i25_error(run: Outcome) -> Outcome:
    """A client was told of a failure in the middle of an answer that is whole in the log."""
    name = run.histories[5].record.request
    return replace(run, truth=GroundTruth(calls={name: ClientCall(status=502, message="lost")}))


def i26(run: Outcome) -> Outcome:
    """The engine was killed one and a half seconds before any replica noticed it."""
    (kill,) = run.fired
    return replace(run, fired=(replace(kill, at_ns=kill.at_ns - 1_500_000_000),))


def i27(run: Outcome) -> Outcome:
    """All workers drain at once for a rolling restart."""
    names = tuple(run.schedule.workers)
    stage = RolloutStage.DRAINING
    return more(
        run,
        "fleet",
        v.RolloutDecided(rollout="c", model="tiny", stage=stage, workers=names, left=0),
    )


def i23(run: Outcome) -> Outcome:
    """A plan restores a token more than the holder has."""
    planned = event(run, v.RecoveryPlanned)
    choice = next(c for c in planned.choices if c.options[c.chosen].kind == "restore")
    options = list(choice.options)
    option = options[choice.chosen]
    options[choice.chosen] = replace(option, restored=option.restored + 1)
    choices = (replace(choice, options=tuple(options)),)
    return more(run, "r.r0", replace(planned, decision="r0.b.x", choices=choices))


def i24(run: Outcome) -> Outcome:
    """Many requests find two equal workers, and the same one gets them all."""
    first = replace(event(run, v.RouteDecided).candidates[0], excluded="")
    name = event(run, v.RouteDecided).worker
    equal = replace(first, worker=name), replace(first, worker="idle")
    events = []
    for number in range(40):
        changes = {"policy": "least_load", "candidates": equal}
        events += dispatched(run, f"late{number}", **changes)
    return more(run, "r.r0", *events)


MUTATIONS: dict[str, tuple[Callable[[Outcome], Outcome], ...]] = {
    "I1": (i1,), "I2": (i2, i2_cut), "I3": (i3,), "I4": (i4,), "I5": (i5,), "I6": (i6,),
    "I7": (i7,), "I8": (i8,), "I9": (i9,), "I10": (i10,), "I11": (i11, i11_refused),
    "I12": (i12,), "I13": (i13,), "I14": (i14,),
    "I15": (i15,), "I16": (i16,), "I17": (i17,), "I18": (i18, i18_again, i18_spare),
    "I19": (i19,), "I20": (i20,), "I21": (i21,),
    "I22": (i22, i22_busy), "I23": (i23,), "I24": (i24,), "I25": (i25, i25_error),
    "I26": (i26,), "I27": (i27,),
}  # fmt: skip

ALSO = {
    "I9": {"I7"},
    "I11": {"I7"},
    "I18": {"I7"},
    "I22": {"I25"},
    "I23": {"I7"},
    "I24": {"I7"},
    "I27": {"I7"},
}
"""What must be broken with it: the policy is right, so replay finds another decision too; and all
answers in this log are whole, so an error is not what it says. Seeded bugs
in the policies (`tests/runner/decision_plants.py`) break these promises alone, and so do the tests
of each."""


def test_the_good_run_breaks_nothing(good: Outcome) -> None:
    assert broken(good) == set()
    assert len(good.histories) == 57


def test_every_promise_there_is_has_a_mutation() -> None:
    assert set(MUTATIONS) == set(CHECKS)


@pytest.mark.parametrize(
    ("promise", "mutate"), [(name, m) for name, ms in MUTATIONS.items() for m in ms]
)
def test_exactly_the_broken_promise_is_named(
    good: Outcome, promise: str, mutate: Callable[[Outcome], Outcome]
) -> None:
    assert broken(mutate(good)) == {promise, *ALSO.get(promise, ())}


def test_a_log_is_decoded_once(good: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(good.groups)
    list(events_of(log))
    monkeypatch.setattr("relume.events.log.codec._many", None)
    monkeypatch.setattr("relume.events.log.codec._decoder", None)
    assert check_all(log, [], ("I1", "I4", "I7", "I8", "I12", "I14")) == []


def test_a_prefix_is_no_difference(good: Outcome) -> None:
    """How much a client got whose connection broke is unknown; what it got is not."""
    record = ClientRecord(
        request="q",
        status=200,
        outcome="cut",
        token_count=3,
        content_id="the same",
        tokens=[0, 1, 2],
    )
    clients = [*(h.record for h in good.histories), record]
    assert check_all(good.groups, clients, ("I2",)) == []
    record.tokens = [0, 2]
    assert [f.about for f in check_all(good.groups, clients, ("I2",))] == ["q"]
