"""The fold goes by the tables of engine, worker and request life, whatever comes in whatever order."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.policies.state import fold as folding
from relume.policies.state.fleet import Fleet, Head
from relume.policies.state.fold import fold
from relume.policies.state.lifecycles import engine_life, request_life, worker_life
from relume.policies.state.lifecycles.engine_life import NOT_NAMED, Age, age_of
from relume.policies.state.lifecycles.request_life import Input, State
from relume.policies.state.lifecycles.worker_life import Concerns
from tests.policies.story import arrived, decided, ended, engine_step, ready, replica_started

LOAD_ONLY = {
    v.TransportObserved, v.WorkerSuspected, v.WorkerCleared, v.LeaderResigned, v.GroupsReceived,
    v.EffectsDecided, v.EffectApplied, v.AdminCommanded, v.ConfigChanged, v.DetailDecided,
    v.StateDaemonStarted, v.StateDaemonLost, v.StateDaemonReported, v.CheckpointAcknowledged,
    v.CheckpointsAcknowledged, v.CheckpointEvicted, v.CheckpointDropped, v.HolderChosen,
    v.RecoveryPlanned, v.MigrationPlanned, v.RestoreDone, v.RestoreFailed, v.LinkMeasured,
    v.CheckpointsReleased, v.RestoreStarted, v.StallJudged, v.HealthDecided, v.VerdictsWithheld,
    v.EngineHung, v.EngineRecovered, v.ReportsDropped, v.CanaryReported, v.CanaryValuesDecided,
    v.CheckpointsVoided, v.CrossCheckDecided, v.CrossChecked, v.DegradationDecided, v.RolloutDecided,
    v.FeatureLevelRaised, v.SparesDecided, v.SegmentSkipped, v.WeightsReadStarted, v.WeightsDigested,
    v.WeightsCompared, v.WeightsLoaded, v.WeightsLoading,
}  # fmt: skip
"""Folded records that concern no life."""
OF_REQUESTS = {
    v.RequestArrived, v.RequestEnded, v.ClientReturned, v.ReplicaStarted, v.ReplicaStopped,
    v.ReplicaLost, v.LeaderElected, v.Tick, v.EngineStep,
}  # fmt: skip
"""Those that concern the life of requests; `request_life.Input` says how."""


def test_every_folded_record_is_in_a_table_or_concerns_no_life() -> None:
    of_engines = {kind for kind, _ in engine_life.LIFE}
    of_workers = {kind for kind, _ in worker_life.LIFE}
    known = of_engines | of_workers | OF_REQUESTS | LOAD_ONLY
    assert folding._HANDLERS.keys() - known == set(), "say which life it concerns, or that none"
    assert not LOAD_ONLY & (of_engines | of_workers | OF_REQUESTS)


def test_tables_are_whole() -> None:
    ages = [Age.OLDER, Age.SAME, Age.NEWER]
    for kind in {kind for kind, _ in engine_life.LIFE}:
        named = {age for other, age in engine_life.LIFE if other is kind}
        assert named in (set(ages), {NOT_NAMED}), kind
    for row in engine_life.LIFE.values():
        assert tuple(row) == engine_life.STATES
        assert all(step is None or step.state in engine_life.STATES for step in row.values())
    for kind, concerns in product((v.WorkerLost, v.WorkerForgotten), Concerns):
        assert (kind, concerns) in worker_life.LIFE
    assert all(tuple(row) == worker_life.STATES for row in worker_life.LIFE.values())
    assert set(request_life.LIFE) == set(Input)
    assert all(tuple(row) == tuple(State) for row in request_life.LIFE.values())


# --- engines and workers -------------------------------------------------------------------

numbers = st.integers(1, 3)
steps = st.tuples(numbers, st.booleans()).map(
    lambda drawn: v.EngineStep(
        incarnation=drawn[0],
        step=1,
        duration_us=900 * drawn[1],
        batch=1,
        sum_context=9,
        prefill_tokens=0,
        waiting=0,
        kv_used=1,
        changes=(v.RequestQueued("q1", 1, 40),),
    )
)
worker_records = st.one_of(
    st.just(v.WorkerRegistered(worker="w0", domain="host", agent_pid=7)),
    st.just(v.WorkerDeregistered("w0", "left")),
    st.just(v.StreamResumed(1, 2)),
    numbers.map(lambda n: v.WorkerLost("w0", n, "lease")),
    numbers.map(lambda n: v.WorkerForgotten("w0", n)),
    numbers.map(lambda n: v.EngineStarted("w0", n, 100, 1)),
    numbers.map(lambda n: ready("w0", n)),
    numbers.map(lambda n: v.EngineDied("w0", n, "killed")),
    numbers.map(lambda n: v.EngineRestartScheduled("w0", n, 50)),
    numbers.map(lambda n: v.StreamsReported(n, (("held", n),))),
    numbers.map(lambda n: v.PrefixBlocksChanged(incarnation=n, reset=True, block_tokens=16)),
    numbers.map(lambda n: decided("q1", incarnation=n)),
    steps,
)
EITHER = (v.WorkerLost, v.WorkerForgotten)


def stream_of(event: Any) -> str:
    if isinstance(event, EITHER):
        return "fleet"
    return "r.r0" if isinstance(event, v.RouteDecided) else "w.w0"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(worker_records, st.integers(1, 3)), max_size=25))
def test_engines_and_workers_live_by_their_tables(told: list[tuple[Any, int]]) -> None:
    fleet = Fleet()
    fold(fleet, "r.r0", 1, replica_started())
    for event, epoch in told:
        kind, worker = type(event), fleet.workers.get("w0")
        known = worker_life.state_of(fleet, "w0")
        engine = worker.engine if worker is not None else "none"
        age, concerns, held = NOT_NAMED, Concerns.IT, False
        if worker is not None:
            held = bool(worker.attempts)
            if kind in EITHER and event.epoch != worker.epoch:
                concerns = Concerns.ANOTHER_EPOCH
        named = getattr(event, "incarnation", None)
        if named is not None and kind is not v.EngineRestartScheduled:
            before = worker.incarnation if worker is not None else 0
            age = Age.SAME if named == before else Age.NEWER if named > before else Age.OLDER
            assert worker is None or age is age_of(worker, named)
        streams = dict(worker.streams) if worker is not None else {}
        fold(fleet, stream_of(event), epoch, event)

        expected = worker_life.LIFE[kind, concerns][known]
        if kind is v.WorkerForgotten and expected is not None and held:
            expected = known  # something of it is left
        assert worker_life.state_of(fleet, "w0") == (known if expected is None else expected)
        here = fleet.workers.get("w0")
        if here is None or kind in (v.StreamResumed, v.WorkerForgotten):
            continue
        step = engine_life.LIFE[kind, age][engine] if known != "unknown" or expected else None
        if kind is v.WorkerLost and expected is None:
            step = None
        assert here.engine == (engine if step is None else step.state), (event, engine)
        if step is not None and step.clears:
            assert not here.attempts and not here.cached.marks and not here.streams
        elif step is None:
            assert bool(here.attempts) == held and here.streams == streams


# --- requests ------------------------------------------------------------------------------

GRACE = 2
names = st.sampled_from(["q1", "q2"])
boots = st.sampled_from(["b1", "b2"])


def queued_by_engine(request: str, boot: str) -> v.EngineStep:
    dispatch = msgspec.structs.replace(
        decided(request, basis=v.Basis(0, 5)), decision=f"r0.{boot}.{request}"
    )
    return engine_step(v.RequestQueued(request, 1, 40, encode(dispatch)))


request_records = st.one_of(
    st.tuples(st.just("arrived"), names, boots),
    st.tuples(st.just("queued"), names, boots),
    st.tuples(st.just("returned"), names, st.sampled_from(["r.r0", "r.r1"])),
    st.tuples(st.just("ended"), names, st.sampled_from(["r.r0", "r.r1", "fleet"])),
    st.tuples(st.just("started"), st.just(""), boots),
    st.tuples(st.just("lost"), st.just(""), st.just("")),
    st.tuples(st.just("elected"), st.just(""), st.just("")),
    st.tuples(st.just("tick"), st.just(""), st.just("")),
)


def apply(fleet: Fleet, what: str, name: str, which: str) -> None:
    if what == "arrived":
        event = arrived(name)
        if name == "q2":
            event = msgspec.structs.replace(event, resumable="token", grace_ticks=GRACE)
        fold(fleet, "r.r0", 1, event)
    elif what == "queued":
        fold(fleet, "w.w0", 1, queued_by_engine(name, which))
    elif what == "returned":
        fold(
            fleet,
            which,
            1,
            v.ClientReturned(request=name, claim="c", attempt=1, tokens=0, events=0),
        )
    elif what == "ended":
        fold(fleet, which, 1, ended(name))
    elif what == "started":
        fold(fleet, "r.r0", 1, replica_started("r0", which))
    elif what == "lost":
        fold(fleet, "fleet", 1, v.ReplicaLost("r0", fleet.replicas["r0"].epoch))
    elif what == "elected":
        fold(fleet, "fleet", 1, v.LeaderElected("r0", fleet.replicas["r0"].boot))
    else:
        number = fleet.tick + 1
        fold(fleet, "fleet", 1, v.Tick(number, 1_000 * number))


def told_of(fleet: Fleet, request: str, what: str, name: str, which: str) -> list[Input]:
    """What an event may be to `request`: one of these, or nothing."""
    known, told = fleet.requests.get(request), fleet.unacknowledged.get(request)
    gone = Input.GATEWAY_GONE_GRACE if known and known.grace_ticks else Input.GATEWAY_GONE
    if what in ("arrived", "queued", "returned", "ended") and name != request:
        return []
    if what == "ended":
        foreign = known is not None and which not in (known.owner, "fleet")
        if foreign:
            return [Input.ENDED_FOREIGN]
        if told is not None and fleet.replicas["r0"].boot != told.boot:
            return [Input.ENDED, Input.LIFE_OVER]
        return [Input.ENDED]
    if what in ("started", "lost", "elected"):
        moved = [gone] if known is not None else []
        if what == "started" and told is not None and told.ended and told.boot != which:
            return [Input.LIFE_OVER]
        return moved
    if what == "tick":
        return [Input.GRACE_OVER] if known is not None else [Input.NO_WORD_COMES]
    return [{"arrived": Input.ARRIVED, "queued": Input.QUEUED, "returned": Input.RETURNED}[what]]


ALWAYS = {"arrived", "returned", "ended"}
"""What concerns its request without a further condition."""


@settings(max_examples=150, deadline=None)
@given(st.lists(request_records, max_size=30))
def test_requests_live_by_their_table(told: list[tuple[str, str, str]]) -> None:
    fleet = Fleet()
    for replica in ("r0", "r1"):
        fold(fleet, f"r.{replica}", 1, replica_started(replica))
    fold(fleet, "w.w0", 1, v.EngineStarted("w0", 1, 100, 1))
    fold(fleet, "w.w0", 1, ready())
    fleet.streams["r.r0"] = Head(1, 1, b"", 1)
    for what, name, which in told:
        before = {q: request_life.state_of(fleet, q) for q in ("q1", "q2")}
        inputs = {q: told_of(fleet, q, what, name, which) for q in before}
        apply(fleet, what, name, which)
        for request, state in before.items():
            after, expected = request_life.state_of(fleet, request), state
            for one in inputs[request]:
                following = request_life.LIFE[one][expected]
                expected = expected if following is None else following
            allowed = {expected} if what in ALWAYS else {expected, state}
            assert after in allowed, (what, name, which, state, inputs[request])


def test_all_states_of_a_request_are_reached() -> None:
    """The walk above is worth as much as the states it comes through."""
    seen = set()

    def look(fleet: Fleet) -> None:
        seen.update(request_life.state_of(fleet, q) for q in ("q1", "q2"))

    for course in (
        "arrived q1", "arrived q1,lost", "arrived q2,lost", "arrived q2,lost,tick,tick,tick",
        "queued q1", "queued q1,started,tick,tick", "queued q1,ended q1",
    ):  # fmt: skip
        fleet = Fleet()
        fold(fleet, "r.r0", 1, replica_started("r0", "b1"))
        fold(fleet, "w.w0", 1, v.EngineStarted("w0", 1, 100, 1))
        fold(fleet, "w.w0", 1, ready())
        look(fleet)
        for step in course.split(","):
            what, _, name = step.partition(" ")
            which = {"ended": "fleet", "queued": "b1", "started": "b2"}.get(what, "b1")
            apply(fleet, what, name, which)
            look(fleet)
    assert seen == set(State)
