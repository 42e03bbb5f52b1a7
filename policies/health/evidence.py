"""Evidence about workers' health, as the fold collects it, and what the leader owes because of it.

Theory of operation. Each handler runs after the fold took the event otherwise. It notes what the
event says about a worker and reviews that worker (`judgement`). What the leader has to write is
left at the fleet, outside of its state, until `owed` takes it. The fold remembers the last verdict
that was owed, so each is owed once; a new leader owes again what its predecessor did not write.

Evidence against a worker is a wrong answer of its engine, a stream that got stuck there, a
connection that failed as those to dead engines do, a judged hang, a death, a lapsed lease, slow
steps, and a wrong answer to a canary. No evidence is: a 4xx, a client that left, an announced
overload (429, 503), our own error, and a request that ended as its client's fault, with all that it
did to workers before.

A log of replicas that do not decide health has none: then nothing is collected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    AdminCommand,
    EffectKind,
    EnginePhase,
    FailureClass,
    HealthState,
    RequestOutcome,
)
from relume.policies.canary import answers
from relume.policies.health import pace
from relume.policies.health.health_settings import MOST_ERRORS
from relume.policies.health.judgement import EXCLUDED, FADE_WINDOWS, VERSION, Review, is_slow
from relume.policies.liveness.suspicious import OVERLOADED, SUSPICIOUS, WRONG
from relume.policies.state import dirty_set
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Fleet, Worker, WorkerHealth

AGENT = "its agent"
"""The judge of a hang beside replicas, whose names have no space."""

Handler = Callable[[Fleet, str, int, Any], None]


def owed(fleet: Fleet) -> list[Any]:
    """What the leader has to write because of the events folded since the last call."""
    found: list[Any] | None = fleet.__dict__.pop("health_owed", None)
    return found or []


def decides(fleet: Fleet) -> bool:
    """Whether every living replica decides health and follows it."""
    alive = [replica for replica in fleet.replicas.values() if replica.alive]
    leader = fleet.replicas.get(fleet.leader)
    return (
        leader is not None
        and VERSION in leader.settings
        and all(VERSION in replica.settings for replica in alive)
    )


def has_failures(worker: Worker) -> bool:
    """Whether requests failed on the worker's engine lately, whoever was at fault. If so, the next
    one that fails there is not taken to be at fault: two workers that fail every request would
    make every client's request look wrong."""
    health = worker.health
    return not isinstance(health, UnsetType) and bool(health.failures or health.forgiven)


def dispatched(fleet: Fleet, worker: Worker, health: WorkerHealth, event: v.RouteDecided) -> None:
    """A request goes to a worker about which something is known."""
    if health.state == HealthState.PROBING:
        health.probes[key_of(event.request, event.attempt)] = fleet.tick


def is_open_probe(fleet: Fleet, worker_name: str, key: str) -> bool:
    """Whether the attempt is a probe of that worker that has not ended. Never for replicas that
    decide by an earlier version: they would not see it end."""
    worker = fleet.workers.get(worker_name)
    if worker is None or isinstance(worker.health, UnsetType):
        return False
    return key in worker.health.probes and _all_know(fleet, 3)


def ended(fleet: Fleet, event: v.RequestEnded, places: list[tuple[str, str]]) -> None:
    """A request with dispatches at `places` ended. One that its client is at fault for is no
    evidence against any worker."""
    for name, key in places:
        worker = fleet.workers.get(name)
        if worker is None or isinstance(health := worker.health, UnsetType):
            continue
        probed = health.probes.pop(key, None) is not None
        if probed and event.outcome == RequestOutcome.COMPLETED:
            health.passes += 1
        elif event.outcome == RequestOutcome.REJECTED and event.request in health.failures:
            health.forgiven[event.request] = health.failures.pop(event.request)
        else:
            continue
        _review(fleet, worker)


def _leave(fleet: Fleet, review: Review) -> None:
    if review.owed:
        if fleet.__dict__.get("health_owed_at") != fleet.revision:
            fleet.__dict__["health_owed_at"] = fleet.revision
            fleet.__dict__["health_owed"] = []
        fleet.__dict__.setdefault("health_owed", []).extend(review.owed)


def _review(fleet: Fleet, worker: Worker) -> None:
    """Judge one worker, and whether too many fail."""
    if isinstance(worker.health, UnsetType) or not decides(fleet):
        return
    review = Review(fleet)
    review.worker(worker)
    if review.guard(worker.model):
        for other in fleet.workers.values():
            if other.model == worker.model:
                review.worker(other)
    _leave(fleet, review)


def _review_all(fleet: Fleet, review: Review | None = None) -> None:
    if not decides(fleet):
        return
    known = [w for w in fleet.workers.values() if not isinstance(w.health, UnsetType)]
    if not known:
        return
    review = review or Review(fleet)
    for worker in known:
        review.worker(worker)
    for model in {worker.model: None for worker in known}:
        review.guard(model)
    _leave(fleet, review)


def _health_of(fleet: Fleet, worker: Worker) -> WorkerHealth | None:
    """The worker's, from now on; None where health is not decided."""
    health = worker.health
    if isinstance(health, UnsetType):
        if not decides(fleet):
            return None
        health = worker.health = WorkerHealth(incarnation=worker.incarnation)
    return health


def _about(fleet: Fleet, name: str, incarnation: int) -> tuple[Worker, WorkerHealth] | None:
    """The worker whose present incarnation an event concerns."""
    worker = fleet.workers.get(name)
    if worker is None or worker.incarnation != incarnation:
        return None
    health = _health_of(fleet, worker)
    return (worker, health) if health is not None else None


# --- what replicas saw ---------------------------------------------------------------


def _on_observed(fleet: Fleet, stream: str, epoch: int, event: v.TransportObserved) -> None:
    kind, key = event.kind, key_of(event.request, event.attempt)
    wrong = kind in WRONG and event.status not in OVERLOADED
    if not wrong and kind not in SUSPICIOUS:
        worker = fleet.workers.get(event.worker)
        if worker is not None and not isinstance(worker.health, UnsetType):
            worker.health.probes.pop(key, None)
        return
    if (about := _about(fleet, event.worker, event.incarnation)) is None:
        return
    worker, health = about
    if health.probes.pop(key, None) is not None:
        health.failed = True
    if wrong:
        health.failures[event.request] = fleet.tick
        while len(health.failures) > MOST_ERRORS:
            del health.failures[next(iter(health.failures))]
    else:
        health.doubt = SUSPICIOUS[kind]
    _review(fleet, worker)


def _on_judged(fleet: Fleet, stream: str, epoch: int, event: v.StallJudged) -> None:
    if event.hung and (about := _about(fleet, event.worker, event.incarnation)) is not None:
        worker, health = about
        health.hung_for[stream[2:]] = fleet.tick
        _review(fleet, worker)


def _on_suspected(fleet: Fleet, stream: str, epoch: int, event: v.WorkerSuspected) -> None:
    if (about := _about(fleet, event.worker, event.incarnation)) is not None:
        worker, health = about
        if not health.hung_for:
            health.doubt = FailureClass.CRASH
        _review(fleet, worker)


def _on_cleared(fleet: Fleet, stream: str, epoch: int, event: v.WorkerCleared) -> None:
    if (about := _about(fleet, event.worker, event.incarnation)) is not None:
        worker, health = about
        health.hung_for.pop(stream[2:], None)
        _review(fleet, worker)


# --- what agents and the leader say --------------------------------------------------


def _on_engine(fleet: Fleet, stream: str, epoch: int, event: Any) -> None:
    """An engine's life: a new incarnation has no evidence against it."""
    worker = fleet.workers.get(stream[2:])
    if worker is None:
        return
    if worker.engine == EnginePhase.DEAD:
        _health_of(fleet, worker)
    _begin(worker)
    _review(fleet, worker)


def _begin(worker: Worker) -> None:
    health = worker.health
    if isinstance(health, UnsetType) or health.incarnation == worker.incarnation:
        return
    health.incarnation = worker.incarnation
    health.failures, health.hung_for, health.probes = {}, {}, {}
    health.forgiven = {}
    health.slow = UNSET
    health.doubt, health.until = FailureClass.NONE, -1
    health.failed, health.passes = False, 0


def _on_hung(fleet: Fleet, stream: str, epoch: int, event: v.EngineHung) -> None:
    """Its agent found the engine hung: that holds until the agent takes it back."""
    if (about := _about(fleet, stream[2:], event.incarnation)) is not None:
        worker, health = about
        health.hung_for[AGENT] = fleet.tick
        _review(fleet, worker)


def _on_recovered(fleet: Fleet, stream: str, epoch: int, event: v.EngineRecovered) -> None:
    if (about := _about(fleet, stream[2:], event.incarnation)) is not None:
        worker, health = about
        health.hung_for.pop(AGENT, None)
        _review(fleet, worker)


def _on_canary(fleet: Fleet, stream: str, epoch: int, event: v.CanaryReported) -> None:
    """A canary is evidence about a worker, also about one of which nothing is known."""
    worker = fleet.workers.get(stream[2:])
    if worker is None or worker.incarnation != event.incarnation:
        return
    if worker.engine != EnginePhase.READY:
        return
    if not decides(fleet):
        if fleet.leader not in fleet.replicas and not event.error:
            answers.stored(fleet, worker, event)  # for the leader to come
        return
    review = Review(fleet)
    if review.by_canary:
        _take_canary(fleet, worker, event, review)


def _take_canary(fleet: Fleet, worker: Worker, event: v.CanaryReported, review: Review) -> None:
    """One without an answer says nothing about what the engine computes, but fails the probe of a
    worker that is probed. A right one is a probe that succeeded, after a quarantine."""
    health = worker.health
    probing = (
        health
        if not isinstance(health, UnsetType) and health.state == HealthState.PROBING
        else None
    )
    if event.error:
        if probing is not None:
            probing.failed = True
            _review(fleet, worker)
        return
    decision = answers.taken(fleet, worker, event, review.canary)
    if decision is not None:
        review.owed.append(decision)
        _leave(fleet, review)
    record = answers.record_of(worker)
    if record is None:
        return
    for other in answers.mark_undecided(fleet, record.kind, event.canary, review.canary):
        if other is not worker:
            _health_of(fleet, other)
            _review(fleet, other)
    if record.wrong or record.doubtful:
        known = _health_of(fleet, worker)
        if record.wrong and known is not None and known.state == HealthState.QUARANTINED:
            known.quarantined = worker.incarnation  # this engine is no better
    elif probing is not None and record.good and probing.failure == FailureClass.CORRUPTION:
        probing.passes += 1
    _review(fleet, worker)


def _on_canary_values(fleet: Fleet, stream: str, epoch: int, event: v.CanaryValuesDecided) -> None:
    """The answers of its class are compared with the golden values from here on."""
    compared = answers.decided(fleet, event, Review(fleet).canary)
    for worker, is_right_now in compared:
        record = answers.record_of(worker)
        if record is not None and (record.wrong or record.doubtful):
            _health_of(fleet, worker)
        health = worker.health
        if is_right_now and not isinstance(health, UnsetType):
            if health.quarantined == worker.incarnation:
                health.quarantined -= 1  # it was wrong by values that hold no longer
    for worker, _ in compared:
        _review(fleet, worker)


def _on_lost(fleet: Fleet, stream: str, epoch: int, event: v.WorkerLost) -> None:
    worker = fleet.workers.get(event.worker)
    if worker is not None and not worker.present:
        _health_of(fleet, worker)
        _review(fleet, worker)


def _on_effects(fleet: Fleet, stream: str, epoch: int, event: v.EffectsDecided) -> None:
    for effect in event.effects:
        worker = fleet.workers.get(effect.worker)
        if worker is not None and effect.kind in (EffectKind.DRAIN, EffectKind.UNDRAIN):
            _health_of(fleet, worker)
            _review(fleet, worker)


def cannot_be_trusted(worker: Worker) -> str:
    """Why no operator can end the quarantine of the worker now; empty if one can."""
    health = worker.health
    state = HealthState.HEALTHY if isinstance(health, UnsetType) else health.state
    if state != HealthState.QUARANTINED:
        return f"{worker.name} is not quarantined, it is {state}"
    if worker.engine != EnginePhase.READY or not worker.present:
        return f"the engine of {worker.name} is not ready; try again when it is"
    return ""


def _trust(fleet: Fleet, name: str, principal: str) -> None:
    """An operator ends a quarantine. What the engine answered so far does not count; while the worker
    is probed, one more wrong answer quarantines it again."""
    worker = fleet.workers.get(name)
    if worker is None or cannot_be_trusted(worker) or isinstance(worker.health, UnsetType):
        return
    worker.health.released_by = principal
    if (record := answers.record_of(worker)) is not None:
        record.wrong.clear()
        record.doubtful.clear()


def _on_commanded(fleet: Fleet, stream: str, epoch: int, event: v.AdminCommanded) -> None:
    if event.command == AdminCommand.TRUST and decides(fleet):
        _trust(fleet, event.target, event.principal)
        if (worker := fleet.workers.get(event.target)) is not None:
            _review(fleet, worker)


def _on_replicas(fleet: Fleet, stream: str, epoch: int, event: Any) -> None:
    """A replica came or left: its word counts, or does no longer."""
    alive = {replica.name for replica in fleet.replicas.values() if replica.alive}
    for worker in fleet.workers.values():
        if not isinstance(health := worker.health, UnsetType):
            believed = {n: at for n, at in health.hung_for.items() if n in alive or n == AGENT}
            health.hung_for = believed
    if type(event) is v.ReplicaStarted:
        for worker in fleet.workers.values():
            if not isinstance(health := worker.health, UnsetType):
                health.hung_for.pop(event.replica, None)
    _review_all(fleet)


def _on_elected(fleet: Fleet, stream: str, epoch: int, event: v.LeaderElected) -> None:
    """The new leader owes what is not decided, whatever its predecessor owed."""
    owed(fleet)
    if not isinstance(fleet.withheld, UnsetType):
        fleet.withheld = {}
    for worker in fleet.workers.values():
        if not isinstance(health := worker.health, UnsetType):
            health.owed = (health.state, health.failure, health.prober)
    for command in fleet.open_commands.values():
        if command.command == AdminCommand.TRUST:
            _trust(fleet, command.target, command.principal)
    review = Review(fleet)
    if review.by_canary and decides(fleet):
        review.owed += answers.elected(fleet, review.canary)
        for worker in answers.mark_all_undecided(fleet, review.canary):
            _health_of(fleet, worker)
        _leave(fleet, review)
    _review_all(fleet)


def _on_tick(fleet: Fleet, stream: str, epoch: int, event: v.Tick) -> None:
    """Evidence fades, breakers rest, and slow workers are found."""
    if not decides(fleet):
        return
    review = Review(fleet)
    config = review.config
    begin = event.number - config.window_ticks
    by_records = _all_know(fleet, 3)
    for name, percent in pace.measured(fleet, by_records).items() if review.by_pace else ():
        worker = fleet.workers[name]
        if percent >= config.slow_percent > 0 or not isinstance(worker.health, UnsetType):
            if (known := _health_of(fleet, worker)) is not None:
                pace.note(known, percent, event.number, config)
    for worker in fleet.workers.values():
        health = worker.health
        if isinstance(health, UnsetType):
            if not review.by_pace and is_slow(worker, config):
                _health_of(fleet, worker)
            continue
        if health.failures and min(health.failures.values()) <= begin:
            health.failures = {r: at for r, at in health.failures.items() if at > begin}
            dirty_set.changed(fleet, worker.name)
        if health.forgiven and min(health.forgiven.values()) <= begin:
            health.forgiven = {r: at for r, at in health.forgiven.items() if at > begin}
        if health.trips and health.state == HealthState.HEALTHY:
            if event.number - health.since > FADE_WINDOWS * config.window_ticks:
                health.trips = 0
    _review_all(fleet, review)


def _doubt_requests(fleet: Fleet, event: v.HealthDecided) -> None:
    """What a corrupt worker gave to live requests is in doubt."""
    if event.state == HealthState.QUARANTINED and event.failure == FailureClass.CORRUPTION:
        for request in fleet.requests.values():
            if any(name == event.worker for name, _ in request.places):
                request.doubted = True


def _on_decided(fleet: Fleet, stream: str, epoch: int, event: v.HealthDecided) -> None:
    """The decision holds from here on, if it is about the present incarnation."""
    _doubt_requests(fleet, event)
    worker = fleet.workers.get(event.worker)
    if worker is None or worker.incarnation != event.incarnation:
        return
    health = worker.health
    if isinstance(health, UnsetType):
        health = worker.health = WorkerHealth(incarnation=worker.incarnation)
    state = event.state
    if state == HealthState.UNHEALTHY and event.failure == FailureClass.ERRORS:
        health.trips += 1
    if state != health.state or state == HealthState.UNHEALTHY:
        health.probes, health.passes, health.failed = {}, 0, False
        if health.state == HealthState.PROBING:
            health.failures = {}
    if state in EXCLUDED and health.state not in EXCLUDED:
        health.opened = event.since
    health.state, health.failure, health.evidence = state, event.failure, event.evidence
    health.since, health.until = event.since, event.until
    health.since_unix_ms = fleet.tick_unix_ms
    health.prober, health.most_probes = event.prober, event.probes
    health.price_percent = event.price_percent
    if state == HealthState.QUARANTINED:
        if isinstance(health.quarantined, UnsetType):
            health.condemned = health.quarantined = event.incarnation
    elif not isinstance(health.quarantined, UnsetType):
        health.condemned = health.quarantined = health.released_by = UNSET
    health.decided_by = {}
    if state == HealthState.PROBING:
        health.decided_by = {r.name: r.decisions for r in fleet.replicas.values() if r.alive}
        if _all_know(fleet, 3):
            # A high one, which only requests correct, would keep every probe away.
            worker.overhead_us = 0


def _all_know(fleet: Fleet, version: int) -> bool:
    """Whether every living replica decides health by this version, or a later one."""
    alive = [replica for replica in fleet.replicas.values() if replica.alive]
    return all(int(replica.settings.get(VERSION, "0")) >= version for replica in alive)


def _on_withheld(fleet: Fleet, stream: str, epoch: int, event: v.VerdictsWithheld) -> None:
    withheld = {} if isinstance(fleet.withheld, UnsetType) else dict(fleet.withheld)
    withheld.pop(event.model, None)
    if event.workers:
        withheld[event.model] = event.workers
    fleet.withheld = withheld
    dirty_set.changed(fleet)


HANDLERS: dict[type, Handler] = {
    v.TransportObserved: _on_observed,
    v.StallJudged: _on_judged,
    v.WorkerSuspected: _on_suspected,
    v.WorkerCleared: _on_cleared,
    v.EngineStarted: _on_engine,
    v.EngineReady: _on_engine,
    v.EngineDied: _on_engine,
    v.EngineHung: _on_hung,
    v.EngineRecovered: _on_recovered,
    v.CanaryReported: _on_canary,
    v.CanaryValuesDecided: _on_canary_values,
    v.WorkerRegistered: _on_engine,
    v.StreamResumed: _on_engine,
    v.WorkerDeregistered: _on_engine,
    v.WorkerLost: _on_lost,
    v.EffectsDecided: _on_effects,
    v.AdminCommanded: _on_commanded,
    v.ReplicaStarted: _on_replicas,
    v.ReplicaStopped: _on_replicas,
    v.ReplicaLost: _on_replicas,
    v.LeaderElected: _on_elected,
    v.Tick: _on_tick,
    v.HealthDecided: _on_decided,
    v.VerdictsWithheld: _on_withheld,
}
"""Called after the fold's own handler, if there is one."""
