"""The judgement: from the evidence about a worker to its health.

Theory of operation. The fold collects evidence (`relume.policies.health.evidence`). `finding_of`
says what it amounts to, and the table (`health_life`) what follows in the state that the leader
decided last. Time is ticks.

- *Errors* count by request: `errors` different requests that failed within the window open the
  breaker. It holds for a time that doubles with each opening in a row, with a jitter drawn from the
  leader's recorded seed. Since version 12 the time does not double while no other worker of the model
  is open. Then one replica probes it, until another one has requests and it has none.
  Since version 9 requests that wait for a worker count too. Since version 6 failures before the window
  count too, up to ten windows, while no request has succeeded there since.
- *A hang* is a replica's judgement (`StallJudged`), for which the engine made no step in the log
  either: it holds for all replicas, until that replica finds the engine at work or idle. Since version 16
  an engine that did not answer the probe, and has no work by the log, is one that the replica cannot
  reach: a hung one is found by its agent, and by all replicas whose requests it has.
- *Lost connections* count by replica: one replica that cannot reach a worker may itself be cut off.
  More than half of the living ones, and two at least, exclude it for all.
- *Slowness* is the time of decode steps beside that of the worker's peers (`pace`). Version 1 went
  by the factor that predictions learn (`Worker.slowness`), which takes minutes to learn. Since version
  11 the time of canaries counts too, so that a worker without requests is measured (`canary_pace`).
- *Wrong answers* to canaries quarantine the worker, since version 4 (`relume.policies.canary`). The
  quarantine outlives a restart. Right answers of a later engine lead to probes, and these out of it;
  since version 9 not if that engine was the first of its class, so that its answers are the values,
  since version 10 nor if one of the worker's engines was that in this quarantine. Since version 13
  and feature level 2 model files that differ from those of its class hold it (`relume.policies.weights`).
- *Contradicted answers* to clients' requests do the same, since version 5 (`relume.policies.crosscheck`).
- *Unreadable reports* exclude the worker, since version 8, if its agent dropped some in several ticks
  within the window, or reads no more of the engine.

The guard. If more than a share of the workers of a model fail at once, the cause is likelier to be
common to them, and excluding them would leave no worker for its requests. Then no breaker opens,
and those that opened within the window close. Replicas' own suspicions hold all the same. A decided
quarantine stands: it counts towards the share, and the guard does not lift it. Since version 7 wrong
results are withheld only if the workers with wrong results alone are more than the share: what other
workers suffer from is no reason to believe wrong results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from random import Random

from msgspec import UNSET, UnsetType

from relume.events.vocabulary import (
    CanaryValuesDecided,
    HealthDecided,
    VerdictsWithheld,
    WeightsCompared,
)
from relume.events.vocabulary.enums import DeathReason, EnginePhase, FailureClass, HealthState
from relume.policies.agreement import leaders_version
from relume.policies.canary import answers, canary_settings
from relume.policies.canary.canary_state import CanaryRecord
from relume.policies.crosscheck import check_settings, disputes
from relume.policies.health import canary_pace, pace
from relume.policies.health.health_life import EXCLUDED, LIFE, Finding, is_quarantined
from relume.policies.health.health_settings import HealthConfig, config_of
from relume.policies.health.health_state import DroppedReports, WorkerHealth
from relume.policies.health.open_workers import open_without
from relume.policies.leader.feature_level import in_force
from relume.policies.state import dirty_set
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.weights import comparison

VERSION = "version.health"
"""The setting by which replicas record that they decide health, how, and follow it."""
PENDING_VERSION = 14
"""Since when an engine that dies before its quarantine is in the log leaves it to the next one."""

Decision = HealthDecided | VerdictsWithheld | CanaryValuesDecided | WeightsCompared
"""What the leader writes about health."""

Found = tuple[Finding, FailureClass, str]
"""A finding, its class, and the evidence in words."""

ENDED_BY_OPERATOR = " ended its quarantine"
"""What follows the operator's name in the evidence."""
ROTATE_TICKS = 2
"""A prober without requests for so long hands over to a replica that has some."""
SLOW_AGAIN = 0.8
"""A slow worker is a suspect until its step time is below this part of the limit."""
FADE_WINDOWS = 10
"""A worker that was healthy for so many windows has its next breaker open for the shortest time."""
_SHOWN = 3
_NEWEST = 1 << 16
"""Stands for the version of a leader that recorded none. It decides nothing; what the fold holds as owed
stays as in earlier builds."""


class LeaderSettings:
    """The settings in force for what the leader decides."""

    def __init__(self, fleet: Fleet) -> None:
        leader = fleet.replicas.get(fleet.leader)
        self._started = leader.settings if leader is not None else {}
        self._changed = fleet.config

    def setting(self, name: str, default: str) -> str:
        """See `SettingsView`."""
        return self._changed.get(name) or self._started.get(name, default)


class Review:
    """One look at the fleet, after an event was folded. `owed` collects what the leader has to
    write."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.config = config_of(LeaderSettings(fleet))
        self.owed: list[Decision] = []
        version = leaders_version(fleet, VERSION, unrecorded=_NEWEST)
        self.by_pace = version >= 2
        """Whether slowness is decided as since version 2."""
        self.by_canary = version >= 4
        """Whether canaries are evidence, as since version 4."""
        self.by_checks = version >= 5
        """Whether cross-checks are evidence, as since version 5."""
        self.by_earlier = version >= 6
        """Whether failures before the window count, as since version 6."""
        self.by_kind = version >= 7
        """Whether wrong results are guarded apart from other failures, as since version 7."""
        self.by_reports = version >= 8
        """Whether unreadable reports are evidence, as since version 8."""
        self.by_waiting = version >= 9
        """Whether requests without a worker count for who probes, as since version 9."""
        self.by_time = version >= 11
        """Whether the time of canaries is evidence, as since version 11."""
        self.by_others = version >= 12
        """Whether a hold depends on the other workers of the model, as since version 12."""
        self.by_weights = (
            version >= comparison.VERSION and in_force(fleet) >= WeightsCompared.tag_level
        )
        """Whether model files are compared, as since version 13."""
        self.by_pending = version >= PENDING_VERSION
        """Whether a quarantine counts from its decision on, as since version 14."""
        self.canary = canary_settings.config_of(LeaderSettings(fleet))
        self.checks = check_settings.config_of(LeaderSettings(fleet))
        self._alive = [r.name for r in fleet.replicas.values() if r.alive]
        self._failing: dict[str, tuple[str, ...]] = {}

    def worker(self, worker: Worker) -> None:
        """Judge one worker."""
        health = worker.health
        if isinstance(health, UnsetType):
            return
        if health.state == HealthState.QUARANTINED and self.by_weights:
            self._compare_weights(worker, health)
        finding, failure, evidence = finding_of(self, worker, health)
        is_pending = self.by_pending and health.owed[0] == HealthState.QUARANTINED
        state = LIFE[finding][HealthState.QUARANTINED if is_pending else health.state]
        if state == HealthState.QUARANTINED and finding != Finding.UNTRUSTED:
            failure = health.owed[1] if is_pending else health.failure
            evidence = health.evidence  # nothing else ends it
        if state in EXCLUDED and self._withholds(worker, health):
            state = HealthState.SUSPECT
            evidence = f"withheld, too many workers fail at once: {evidence}"
        prober = self._prober(worker, health) if state == HealthState.PROBING else ""
        verdict = state, failure, prober
        if verdict != health.owed:
            health.owed = verdict
            self.owed.append(self._decision(worker, health, verdict, finding, evidence))

    def _compare_weights(self, worker: Worker, health: WorkerHealth) -> None:
        """Once only its files may speak against its release, are they the right ones?"""
        if not _awaits_release(self, worker, health):
            return
        found = comparison.due(self.fleet, worker, health, self.canary.digest_ticks)
        if found is not None and comparison.key_of(found) != health.weights_owed:
            health.weights_owed = comparison.key_of(found)
            self.owed.append(found)

    def guard(self, model: str) -> bool:
        """Record when verdicts against workers of a model begin or cease to be withheld; returns
        whether they did."""
        fleet, failing = self.fleet, self._too_many(model)
        withheld = {} if isinstance(fleet.withheld, UnsetType) else fleet.withheld
        changed = bool(failing) != bool(withheld.get(model))
        if changed:
            fleet.withheld = {**withheld, model: failing}
            if not failing:
                del fleet.withheld[model]
            dirty_set.changed(fleet)
            self.owed.append(
                VerdictsWithheld(
                    model=model,
                    workers=failing,
                    serving=len(list(self._serving(model))),
                    share_percent=self.config.share_percent,
                )
            )
        return changed

    def suspecting(self, worker: Worker) -> list[str]:
        """Living replicas that suspect the worker's incarnation."""
        replicas = self.fleet.replicas
        name, incarnation = worker.name, worker.incarnation
        return [r for r in self._alive if replicas[r].suspects.get(name, 0) == incarnation]

    @property
    def alive(self) -> int:
        """Number of living replicas."""
        return len(self._alive)

    def _decision(
        self,
        worker: Worker,
        health: WorkerHealth,
        verdict: tuple[HealthState, FailureClass, str],
        finding: Finding,
        evidence: str,
    ) -> HealthDecided:
        state, failure, prober = verdict
        opens = state == HealthState.UNHEALTHY and failure == FailureClass.ERRORS
        return HealthDecided(
            worker=worker.name,
            incarnation=worker.incarnation,
            state=state,
            failure=failure,
            evidence=evidence or finding.value,
            since=self.fleet.tick,
            until=self.fleet.tick + self._hold(worker, health) if opens else -1,
            prober=prober,
            probes=self.config.probes if prober else 0,
            price_percent=self.config.price_percent if state == HealthState.SUSPECT else 100,
            good_tick=self._good_tick(worker, state, failure),
        )

    def _good_tick(self, worker: Worker, state: HealthState, failure: FailureClass) -> int:
        """Since when the results of a corrupt worker are in doubt."""
        if state != HealthState.QUARANTINED or failure != FailureClass.CORRUPTION:
            return -1
        if self.by_checks and disputes.is_outvoted(disputes.record_of(worker), self.checks):
            return -1  # nothing says when it began
        record = answers.record_of(worker)
        return answers.good_tick_of(record) if record is not None else -1

    def _hold(self, worker: Worker, health: WorkerHealth) -> int:
        """Ticks for which a breaker that opens now stays open: between half and all of a time that
        doubles with each opening in a row, while another worker can serve."""
        config, fleet = self.config, self.fleet
        doubles = not self.by_others or open_without(fleet, worker.model, (worker.name,)) > 0
        trips = min(health.trips, 16) if doubles else 0
        most = min(config.hold_ticks << trips, config.longest_ticks)
        leader = fleet.replicas.get(fleet.leader)
        seed = leader.seed if leader is not None else 0
        draw = Random(f"{seed}:{worker.name}:{worker.incarnation}:{fleet.tick}:{health.trips}")
        return max(1, most - draw.randrange(most // 2 + 1))

    def _prober(self, worker: Worker, health: WorkerHealth) -> str:
        """The replica that probes: the same, unless it has probed nothing for a while, and another one
        has requests that wait for a worker and it has not, or has made decisions and it has not."""
        alive, prober, fleet = self._alive, health.prober, self.fleet
        if prober not in alive:
            return fleet.leader if fleet.leader in alive else next(iter(alive), prober)
        if health.probes or fleet.tick - health.since < ROTATE_TICKS:
            return prober
        at = alive.index(prober)
        by_turn = (*alive[at:], *alive[:at])
        waiting = self._with_probes_for(worker) if self.by_waiting else set()
        if waiting and prober not in waiting:
            return next(name for name in by_turn if name in waiting)
        if health.passes:
            return prober
        for name in by_turn:
            if fleet.replicas[name].decisions > health.decided_by.get(name, 0):
                return name
        return prober

    def _with_probes_for(self, worker: Worker) -> set[str]:
        """Replicas with requests that wait for a worker, and to which this one is not suspect."""
        replicas, suspected = self.fleet.replicas, worker.incarnation
        return {
            name
            for name in self._waiting.get(worker.model, set()).intersection(self._alive)
            if replicas[name].suspects.get(worker.name) != suspected
        }

    @functools.cached_property
    def _waiting(self) -> dict[str, set[str]]:
        """By model, replicas with requests that no worker has; not those that a gateway left."""
        workers = self.fleet.workers
        found: dict[str, set[str]] = {}
        for request in self.fleet.requests.values():
            if not request.orphaned and not any(
                name in workers and key in workers[name].attempts for name, key in request.places
            ):
                found.setdefault(request.model, set()).add(request.owner[2:])
        return found

    def _serving(self, model: str) -> Iterator[Worker]:
        """Workers of the model with an engine that is ready, and those in quarantine, whose engine
        may just be restarted. Those that drain are among them: what they run would fail too if the
        cause were common."""
        for worker in self.fleet.workers.values():
            if worker.present and worker.model == model:
                if worker.engine == EnginePhase.READY or is_quarantined(worker):
                    yield worker

    def _too_many(self, model: str) -> tuple[str, ...]:
        """Workers of a model whose verdicts are withheld, since more than the share fail; without
        those whose quarantine stands."""
        found = self._failing.get(model)
        if found is None:
            found = self._failing[model] = self._withheld_of(model)
        return found

    def _withheld_of(self, model: str) -> tuple[str, ...]:
        serving, standing, failing = 0, 0, dict[str, Finding]()
        for worker in self._serving(model):
            serving += 1
            health = worker.health
            if isinstance(health, UnsetType):
                continue
            finding = finding_of(self, worker, health)[0]
            if LIFE[finding][health.state] not in EXCLUDED:
                continue
            if _is_distrusted(health):
                standing += 1
            else:
                failing[worker.name] = finding
        most = self.config.share_percent * serving
        if (len(failing) + standing) * 100 <= most:
            return ()
        wrong = [name for name, finding in failing.items() if finding == Finding.UNTRUSTED]
        if self.by_kind and (len(wrong) + standing) * 100 <= most:
            return tuple(name for name in failing if name not in wrong)
        return tuple(failing)

    def _withholds(self, worker: Worker, health: WorkerHealth) -> bool:
        """Whether the worker is to stay open: breakers that opened before the window stay as they
        are, and so does a quarantine, whatever happens to other workers."""
        old = health.state in EXCLUDED and (
            self.fleet.tick - health.opened > self.config.window_ticks
        )
        return not old and worker.name in self._too_many(worker.model)


def _is_distrusted(health: WorkerHealth) -> bool:
    """Whether the worker is quarantined, or probed after that."""
    probed = health.state == HealthState.PROBING and health.failure == FailureClass.CORRUPTION
    return probed or health.state == HealthState.QUARANTINED


def finding_of(review: Review, worker: Worker, health: WorkerHealth) -> Found:
    """What the evidence about the worker amounts to now."""
    if review.by_canary and (found := _of_canaries(review, worker, health)):
        return found
    if worker.engine != EnginePhase.READY or not worker.present:
        return _gone(worker, health)
    if worker.draining:
        return Finding.LEAVING, FailureClass.NONE, "an operator drains it"
    if worker.drains:
        evidence = "its agent stops" if worker.leaving is not UNSET else "a rolling restart"
        return Finding.LEAVING, FailureClass.NONE, evidence
    if health.hung_for:
        return Finding.FAILING, FailureClass.HANG, f"judged hung by {_names(health.hung_for)}"
    dropped = health.dropped if review.by_reports else UNSET
    if not isinstance(dropped, UnsetType) and _has_no_reports(dropped, review.config):
        return Finding.FAILING, FailureClass.REPORTS, _unreadable(dropped)
    suspecting = review.suspecting(worker)
    if len(suspecting) > 1 and 2 * len(suspecting) > review.alive:
        by = f"suspected by {len(suspecting)} of {review.alive} replicas"
        return Finding.FAILING, health.doubt or FailureClass.UNREACHABLE, by
    if found := _of_breaker(review, health):
        return found
    if found := _of_doubts(review, worker, health, suspecting):
        return found
    return Finding.FINE, FailureClass.NONE, ""


def _of_doubts(
    review: Review, worker: Worker, health: WorkerHealth, suspecting: list[str]
) -> Found | None:
    """What raises the price of a worker, the first that holds."""
    config, tick = review.config, review.fleet.tick
    record = answers.record_of(worker) if review.by_canary else None
    if record is not None and (record.wrong or record.doubtful):
        return Finding.DOUBTFUL, FailureClass.CORRUPTION, answers.in_words(record)
    checks = disputes.record_of(worker) if review.by_checks else None
    if checks is not None and disputes.has_differed(worker, tick):
        return Finding.DOUBTFUL, FailureClass.CORRUPTION, disputes.in_words(checks)
    if suspecting:
        doubt = health.doubt or FailureClass.UNREACHABLE
        return Finding.DOUBTFUL, doubt, f"suspected by {_names(suspecting)}"
    if health.failures:
        return Finding.DOUBTFUL, FailureClass.ERRORS, _failed(health.failures)
    if review.by_reports and not isinstance(health.dropped, UnsetType):
        return Finding.DOUBTFUL, FailureClass.REPORTS, _unreadable(health.dropped)
    if review.by_pace:
        if pace.is_slow(health, tick, config):
            return Finding.DOUBTFUL, FailureClass.SLOW, pace.in_words(health)
        if (
            review.by_time
            and record is not None
            and canary_pace.has_slow_canaries(record, tick, config)
        ):
            return Finding.DOUBTFUL, FailureClass.SLOW, canary_pace.in_words(record)
    elif is_slow_v1(worker, config):
        times = int(worker.slowness * 10 + 0.5)
        evidence = f"its steps take {times // 10}.{times % 10} times those of its class"
        return Finding.DOUBTFUL, FailureClass.SLOW, evidence
    return None


def _of_canaries(review: Review, worker: Worker, health: WorkerHealth) -> Found | None:
    """What wrong answers to canaries amount to, and right ones after a quarantine."""
    record = answers.record_of(worker)
    if worker.engine != EnginePhase.READY or not worker.present:
        return None
    if not isinstance(by := health.released_by, UnsetType):
        return Finding.RELEASED, FailureClass.CORRUPTION, f"{by}{ENDED_BY_OPERATOR}"
    checks = disputes.record_of(worker) if review.by_checks else None
    if checks is not None and disputes.is_outvoted(checks, review.checks):
        return Finding.UNTRUSTED, FailureClass.CORRUPTION, disputes.in_words(checks)
    if record is None:
        return None
    corrupt = health.failure == FailureClass.CORRUPTION
    released = health.state == HealthState.PROBING and corrupt
    if answers.is_wrong(record, review.canary) or (released and record.wrong):
        return Finding.UNTRUSTED, FailureClass.CORRUPTION, answers.in_words(record)
    if not _has_passed(review, worker, health, record):
        return None
    evidence = f"{record.good} right answers to canaries in a row"
    if review.by_weights:
        if comparison.is_held(worker, health):
            return None
        if (found := comparison.verdict_of(worker, health)) is not None:
            evidence += f"; {comparison.in_words(found)}"
    return Finding.RELEASED, FailureClass.CORRUPTION, evidence


def _has_passed(review: Review, worker: Worker, health: WorkerHealth, record: CanaryRecord) -> bool:
    """Whether a later engine of a quarantined worker has answered enough canaries rightly, and not by
    its own word."""
    if health.state != HealthState.QUARANTINED or isinstance(health.quarantined, UnsetType):
        return False
    is_new = worker.incarnation > health.quarantined
    if not is_new or record.good < review.canary.release:
        return False
    is_witnessed = answers.is_witnessed(review.fleet, worker.name, record, health.opened)
    return is_witnessed and health.unproven != worker.incarnation


def _awaits_release(review: Review, worker: Worker, health: WorkerHealth) -> bool:
    """Whether only its model files may speak against the release of a quarantined worker."""
    record, checks = answers.record_of(worker), disputes.record_of(worker)
    if record is None or worker.engine != EnginePhase.READY or not worker.present:
        return False
    if checks is not None and disputes.is_outvoted(checks, review.checks):
        return False
    is_released = health.released_by is not UNSET
    return not is_released and _has_passed(review, worker, health, record)


def _of_breaker(review: Review, health: WorkerHealth) -> Found | None:
    """What wrong answers, an open breaker and probes amount to."""
    config, tick = review.config, review.fleet.tick
    if health.state == HealthState.PROBING:
        if health.failed:
            return Finding.FAILING, FailureClass.ERRORS, "a probe failed"
        if health.passes >= config.passes:
            return Finding.PASSED, FailureClass.NONE, f"{health.passes} probes succeeded"
        corrupt = health.failure == FailureClass.CORRUPTION
        failure = FailureClass.CORRUPTION if corrupt else FailureClass.ERRORS
        return Finding.TRIED, failure, health.evidence
    if health.until >= 0:
        finding = Finding.HELD if tick < health.until else Finding.RESTED
        return finding, FailureClass.ERRORS, health.evidence
    failures = health.failures
    if review.by_earlier and failures and not isinstance(health.earlier, UnsetType):
        failures = {**health.earlier, **failures}
    if len(failures) >= config.errors:
        return Finding.FAILING, FailureClass.ERRORS, _failed(failures)
    return None


def is_slow_v1(worker: Worker, config: HealthConfig) -> bool:
    """Whether the worker's steps take too long, beside those of its class, by version 1."""
    limit = config.slow_percent / 100
    health = worker.health
    if not isinstance(health, UnsetType) and health.failure == FailureClass.SLOW:
        limit *= SLOW_AGAIN
    return 0 < limit <= worker.slowness


def _gone(worker: Worker, health: WorkerHealth) -> Found:
    if not worker.present:
        return Finding.GONE, FailureClass.HOST, worker.died_of or "its agent left"
    if worker.engine == EnginePhase.STARTING and health.state == HealthState.DEAD:
        return Finding.GONE, health.failure, health.evidence
    hung = worker.died_of == DeathReason.HUNG
    cause = FailureClass.HANG if hung else FailureClass.CRASH
    return Finding.GONE, cause, f"its engine died ({worker.died_of or 'restarted'})"


def _has_no_reports(dropped: DroppedReports, config: HealthConfig) -> bool:
    """Whether so little of the engine's reports can be read that its load is unknown."""
    return dropped.is_muted or 0 < config.dropped_ticks <= len(dropped.count)


def _unreadable(dropped: DroppedReports) -> str:
    if dropped.is_muted:
        return f"its agent reads no more reports of the engine: {dropped.reason}"
    count = sum(dropped.count.values())
    return f"{count} report{'s' if count > 1 else ''} of the engine unreadable: {dropped.reason}"


def _failed(failures: dict[str, int]) -> str:
    count = len(failures)
    return f"{count} request{'s' if count > 1 else ''} failed on it: {_names(failures)}"


def _names(names: dict[str, int] | list[str]) -> str:
    named = list(names)
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more
