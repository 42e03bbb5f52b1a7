"""Evidence about workers' health, as the fold collects it, and what the leader owes because of it.

Theory of operation. Each handler runs after the fold took the event otherwise. It notes what the
event says about a worker and has it judged (`worker_reviews`, `judgement`). Handlers of canaries are
in `canary_evidence`, those of cross-checks in `cross_check_evidence`. What the leader has to write is
left at the fleet, outside of its state, until `owed` takes it. The fold remembers the last verdict
that was owed, so each is owed once; a new leader owes again what its predecessor did not write.

Evidence against a worker is a wrong answer of its engine, a stream that got stuck there, a
connection that failed as those to dead engines do, a judged hang, a death, a lapsed lease, slow
steps, reports that cannot be read, a wrong answer to a canary, and an answer that other engines
contradict. No evidence is: a 4xx,
a client that left, an announced overload (429, 503), our own error, and a request that ended as its
client's fault, with all that it did to workers before.

A failed request counts for a window. Routing prefers other workers meanwhile, so in light load the
next one may fail after it. So it counts on, for the breaker alone, until a request succeeds there.

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
    ProbeResult,
    RequestOutcome,
    RolloutStage,
    TransportKind,
)
from relume.policies.canary import answers
from relume.policies.crosscheck import check_budget, disputes
from relume.policies.health import (
    canary_evidence,
    cross_check_evidence,
    pace,
    pace_v14,
    prefix_caches,
)
from relume.policies.health.health_life import EXCLUDED
from relume.policies.health.health_settings import MOST_ERRORS
from relume.policies.health.health_state import DroppedReports, WorkerHealth
from relume.policies.health.judgement import FADE_WINDOWS, PENDING_VERSION, Review, is_slow_v1
from relume.policies.health.worker_reviews import (
    all_know,
    all_living_know,
    decides,
    find_about,
    health_of,
    leave,
    review_all,
    review_worker,
)
from relume.policies.liveness.suspicious import OVERLOADED, SUSPICIOUS, WRONG
from relume.policies.state import dirty_set
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Fleet, Request, Worker
from relume.policies.state.step_times import fade_overheads
from relume.policies.weights import comparison, weights_evidence

AGENT = "its agent"
"""The judge of a hang beside replicas, whose names have no space."""
HANG_HAS_WORK = 16
"""The version from which on a silent engine is hung for all replicas only if it has work."""

Handler = Callable[[Fleet, str, int, Any], None]


def owed(fleet: Fleet) -> list[Any]:
    """What the leader has to write because of the events folded since the last call."""
    found: list[Any] | None = fleet.__dict__.pop("health_owed", None)
    return found or []


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
    return key in worker.health.probes and all_know(fleet, 3)


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
        review_worker(fleet, worker)


def succeeded(fleet: Fleet, request: Request) -> None:
    """The request ended well where it was dispatched last: what failed there before counts no longer
    than the window."""
    worker = fleet.workers.get(request.worker)
    if worker is None or isinstance(health := worker.health, UnsetType):
        return
    if worker.incarnation != request.incarnation:
        return
    if (health.failures or health.earlier is not UNSET) and all_know(fleet, 6):
        health.earlier, health.succeeded = UNSET, fleet.tick


# --- what replicas saw ---------------------------------------------------------------


def _on_observed(fleet: Fleet, stream: str, epoch: int, event: v.TransportObserved) -> None:
    kind, key = event.kind, key_of(event.request, event.attempt)
    wrong = kind in WRONG and event.status not in OVERLOADED
    if not wrong and kind not in SUSPICIOUS:
        worker = fleet.workers.get(event.worker)
        if worker is not None and not isinstance(worker.health, UnsetType):
            worker.health.probes.pop(key, None)
        return
    if (about := find_about(fleet, event.worker, event.incarnation)) is None:
        return
    worker, health = about
    if health.probes.pop(key, None) is not None:
        health.failed = True
    if wrong:
        health.failures[event.request] = fleet.tick
        while len(health.failures) > MOST_ERRORS:
            del health.failures[next(iter(health.failures))]
    elif kind != TransportKind.STALL or not _is_explained(fleet, health):
        health.doubt = SUSPICIOUS[kind]
    review_worker(fleet, worker)


def _on_judged(fleet: Fleet, stream: str, epoch: int, event: v.StallJudged) -> None:
    if event.hung and (about := find_about(fleet, event.worker, event.incarnation)) is not None:
        worker, health = about
        silent = event.probe == ProbeResult.SILENT and not _has_work(worker)
        if silent and all_know(fleet, HANG_HAS_WORK):
            health.doubt = FailureClass.UNREACHABLE
        else:
            health.hung_for[stream[2:]] = fleet.tick
        review_worker(fleet, worker)


def _is_explained(fleet: Fleet, health: WorkerHealth) -> bool:
    """Whether an earlier event says why the worker is suspected; what a judgement leads to does not."""
    return bool(health.doubt) and all_know(fleet, HANG_HAS_WORK)


def _has_work(worker: Worker) -> bool:
    """Whether the engine reported requests that it has not ended: a replica whose requests and probes do
    not arrive sees the same as with a hung one."""
    return worker.decoding > 0 or worker.waiting > 0


def _on_suspected(fleet: Fleet, stream: str, epoch: int, event: v.WorkerSuspected) -> None:
    if (about := find_about(fleet, event.worker, event.incarnation)) is not None:
        worker, health = about
        if not health.hung_for and not _is_explained(fleet, health):
            health.doubt = FailureClass.CRASH
        review_worker(fleet, worker)


def _on_cleared(fleet: Fleet, stream: str, epoch: int, event: v.WorkerCleared) -> None:
    if (about := find_about(fleet, event.worker, event.incarnation)) is not None:
        worker, health = about
        health.hung_for.pop(stream[2:], None)
        if all_know(fleet, HANG_HAS_WORK):
            health.doubt = FailureClass.NONE
        review_worker(fleet, worker)


# --- what agents and the leader say --------------------------------------------------


def _on_engine(fleet: Fleet, stream: str, epoch: int, event: Any) -> None:
    """An engine's life: a new incarnation has no evidence against it."""
    worker = fleet.workers.get(stream[2:])
    if worker is None:
        return
    if worker.engine == EnginePhase.DEAD:
        health_of(fleet, worker)
    _begin(worker)
    review_worker(fleet, worker)


def _begin(worker: Worker) -> None:
    health = worker.health
    if isinstance(health, UnsetType) or health.incarnation == worker.incarnation:
        return
    health.incarnation = worker.incarnation
    health.failures, health.hung_for, health.probes = {}, {}, {}
    health.forgiven = {}
    health.slow = health.earlier = health.succeeded = health.dropped = UNSET
    health.doubt, health.until = FailureClass.NONE, -1
    health.failed, health.passes = False, 0


def _on_hung(fleet: Fleet, stream: str, epoch: int, event: v.EngineHung) -> None:
    """Its agent found the engine hung: that holds until the agent takes it back."""
    if (about := find_about(fleet, stream[2:], event.incarnation)) is not None:
        worker, health = about
        health.hung_for[AGENT] = fleet.tick
        review_worker(fleet, worker)


def _on_recovered(fleet: Fleet, stream: str, epoch: int, event: v.EngineRecovered) -> None:
    if (about := find_about(fleet, stream[2:], event.incarnation)) is not None:
        worker, health = about
        health.hung_for.pop(AGENT, None)
        review_worker(fleet, worker)


def _on_dropped(fleet: Fleet, stream: str, epoch: int, event: v.ReportsDropped) -> None:
    """Its agent cannot read what it reports: what is known of its load may be wrong."""
    if (about := find_about(fleet, stream[2:], event.incarnation)) is not None:
        worker, health = about
        if isinstance(dropped := health.dropped, UnsetType):
            dropped = health.dropped = DroppedReports()
        dropped.count[fleet.tick] = dropped.count.get(fleet.tick, 0) + event.count
        while len(dropped.count) > MOST_ERRORS:
            del dropped.count[next(iter(dropped.count))]
        dropped.reason, dropped.is_muted = event.reason, dropped.is_muted or event.muted
        review_worker(fleet, worker)


def _on_lost(fleet: Fleet, stream: str, epoch: int, event: v.WorkerLost) -> None:
    worker = fleet.workers.get(event.worker)
    if worker is not None and not worker.present:
        health_of(fleet, worker)
        review_worker(fleet, worker)


def _on_effects(fleet: Fleet, stream: str, epoch: int, event: v.EffectsDecided) -> None:
    drains = (EffectKind.DRAIN, EffectKind.UNDRAIN)
    prefix_caches.on_effects(fleet, event)
    _review(fleet, *(effect.worker for effect in event.effects if effect.kind in drains))


def _on_leaving(fleet: Fleet, stream: str, epoch: int, event: v.WorkerLeaving) -> None:
    _review(fleet, stream[2:])


def _on_rollout(fleet: Fleet, stream: str, epoch: int, event: v.RolloutDecided) -> None:
    if event.stage != RolloutStage.BEGUN:
        _review(fleet, *event.workers)


def _review(fleet: Fleet, *names: str) -> None:
    for name in names:
        if (worker := fleet.workers.get(name)) is not None:
            health_of(fleet, worker)
            review_worker(fleet, worker)


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
    review_all(fleet)


def _on_elected(fleet: Fleet, stream: str, epoch: int, event: v.LeaderElected) -> None:
    """The new leader owes what is not decided, whatever its predecessor owed."""
    owed(fleet)
    if not isinstance(fleet.withheld, UnsetType):
        fleet.withheld = {}
    for worker in fleet.workers.values():
        if not isinstance(health := worker.health, UnsetType):
            health.owed = (health.state, health.failure, health.prober)
            health.weights_owed = comparison.key_of(health.weights)
    for command in fleet.open_commands.values():
        if command.command == AdminCommand.TRUST:
            canary_evidence.trust_worker(fleet, command.target, command.principal)
    review = Review(fleet)
    if review.by_canary and decides(fleet):
        review.owed += answers.find_all_due(fleet, review.canary)
        for worker in answers.mark_all_undecided(fleet, review.canary):
            health_of(fleet, worker)
        leave(fleet, review)
    review_all(fleet)


def _on_tick(fleet: Fleet, stream: str, epoch: int, event: v.Tick) -> None:
    """Evidence and overheads fade, breakers rest, and slow workers are found."""
    if not decides(fleet):
        return
    review = Review(fleet)
    config = review.config
    if all_know(fleet, 5):
        fade_overheads(fleet, event.number)
    steady = all_living_know(fleet, pace.STEADY_VERSION)
    for name, percent in _paces(fleet, review, steady).items():
        worker = fleet.workers[name]
        if percent >= config.slow_percent > 0 or not isinstance(worker.health, UnsetType):
            if (known := health_of(fleet, worker)) is not None:
                pace.note(known, percent, event.number, config, steady=steady)
    for worker in fleet.workers.values():
        health = worker.health
        if isinstance(health, UnsetType):
            if not review.by_pace and is_slow_v1(worker, config):
                health_of(fleet, worker)
        else:
            _fade_evidence(fleet, worker, health, config.window_ticks)
    disputes.expire(fleet)
    check_budget.begin_saving(fleet)
    review_all(fleet, review)


def _paces(fleet: Fleet, review: Review, steady: bool) -> dict[str, int]:
    """The pace of each worker, by the version that every replica knows."""
    if not review.by_pace:
        return {}
    if all_living_know(fleet, pace.VERSION):
        return pace.measured(fleet, review.config, pace.PRIOR_MEASURES if steady else 0.0)
    for worker in fleet.workers.values():
        worker.decode_steps = UNSET
    return pace_v14.measured(fleet, all_know(fleet, 3))


def _fade_evidence(fleet: Fleet, worker: Worker, health: WorkerHealth, window_ticks: int) -> None:
    begin = fleet.tick - window_ticks
    if health.failures and min(health.failures.values()) <= begin:
        if all_know(fleet, 6):
            _keep_earlier(health, begin)
        health.failures = {r: at for r, at in health.failures.items() if at > begin}
        dirty_set.changed(fleet, worker.name)
    if not isinstance(earlier := health.earlier, UnsetType):
        oldest = fleet.tick - FADE_WINDOWS * window_ticks
        health.earlier = {r: at for r, at in earlier.items() if at > oldest} or UNSET
    if health.forgiven and min(health.forgiven.values()) <= begin:
        health.forgiven = {r: at for r, at in health.forgiven.items() if at > begin}
    if not isinstance(dropped := health.dropped, UnsetType):
        dropped.count = {at: count for at, count in dropped.count.items() if at > begin}
        if not dropped.count and not dropped.is_muted:
            health.dropped = UNSET
    if health.trips and health.state == HealthState.HEALTHY:
        if fleet.tick - health.since > FADE_WINDOWS * window_ticks:
            health.trips = 0


def _keep_earlier(health: WorkerHealth, begin: int) -> None:
    """Failures that leave the window count on, if no request succeeded since."""
    earlier = {} if isinstance(health.earlier, UnsetType) else dict(health.earlier)
    succeeded = -1 if isinstance(health.succeeded, UnsetType) else health.succeeded
    earlier.update((r, at) for r, at in health.failures.items() if succeeded < at <= begin)
    while len(earlier) > MOST_ERRORS:
        del earlier[next(iter(earlier))]
    health.earlier = earlier or UNSET


def _on_decided(fleet: Fleet, stream: str, epoch: int, event: v.HealthDecided) -> None:
    """The decision holds from here on, if it is about the present incarnation."""
    canary_evidence.doubt_requests(fleet, event)
    prefix_caches.on_health_decided(fleet, event)
    worker = fleet.workers.get(event.worker)
    if worker is None or not _holds(fleet, worker, event):
        return
    state = event.state
    health = worker.health
    if isinstance(health, UnsetType):
        health = worker.health = WorkerHealth(incarnation=worker.incarnation)
    if state == HealthState.UNHEALTHY and event.failure == FailureClass.ERRORS:
        health.trips += 1
    if state != health.state or state == HealthState.UNHEALTHY:
        health.probes, health.passes, health.failed = {}, 0, False
        if health.state == HealthState.PROBING:
            health.failures, health.earlier = {}, UNSET
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
        health.weights = health.weights_owed = UNSET
    health.decided_by = {}
    if state == HealthState.PROBING:
        health.decided_by = {r.name: r.decisions for r in fleet.replicas.values() if r.alive}
        if all_know(fleet, 3):
            # A high one, which only requests correct, would keep every probe away.
            worker.overhead_us = 0


def _holds(fleet: Fleet, worker: Worker, event: v.HealthDecided) -> bool:
    """Whether the decision is about the present incarnation. A quarantine is about the next ones too."""
    if event.state == HealthState.QUARANTINED and event.incarnation < worker.incarnation:
        return all_know(fleet, PENDING_VERSION)
    return event.incarnation == worker.incarnation


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
    v.ReportsDropped: _on_dropped,
    v.RestoreStarted: prefix_caches.on_restore_started,
    v.CrossCheckDecided: cross_check_evidence.on_begun,
    v.CrossChecked: cross_check_evidence.on_checked,
    v.CanaryReported: canary_evidence.on_canary,
    v.CanaryValuesDecided: canary_evidence.on_canary_values,
    v.WeightsReadStarted: weights_evidence.on_read_started,
    v.WeightsDigested: weights_evidence.on_digested,
    v.WeightsCompared: weights_evidence.on_compared,
    v.WorkerRegistered: _on_engine,
    v.StreamResumed: _on_engine,
    v.WorkerLeaving: _on_leaving,
    v.WorkerDeregistered: _on_engine,
    v.WorkerLost: _on_lost,
    v.EffectsDecided: _on_effects,
    v.RolloutDecided: _on_rollout,
    v.AdminCommanded: canary_evidence.on_commanded,
    v.ReplicaStarted: _on_replicas,
    v.ReplicaStopped: _on_replicas,
    v.ReplicaLost: _on_replicas,
    v.LeaderElected: _on_elected,
    v.Tick: _on_tick,
    v.HealthDecided: _on_decided,
    v.VerdictsWithheld: _on_withheld,
}
"""Called after the fold's own handler, if there is one."""
