"""The closed vocabularies: every word that a field, a metric label or the admin API may carry.

A member is a string and is written as that string. A log of a newer build may hold a word that
this build does not know. Such a word decodes to a member named UNKNOWN that keeps the word: it is
equal to no other member, no rule applies to it, and it is written back unchanged.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Word(StrEnum):
    """Base of the vocabularies."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, str):
            return None
        word = str.__new__(cls, value)
        word._name_, word._value_ = "UNKNOWN", value
        return word

    @property
    def known(self) -> bool:
        """Whether this build has a meaning for the word."""
        return self._value_ in type(self)._value2member_map_


class Guarantee(Word):
    """How a stream survives the loss of its worker, best first."""

    EXACT = "exact"
    """Another worker continues from the delivered tokens, identically."""
    BEST_EFFORT = "best_effort"
    """The same, on an engine that failed its self-test."""
    SAMPLED = "sampled"
    """Unseeded sampling: another worker continues validly, not identically."""
    REPLAY = "replay"
    """Another worker generates everything again; the tokens delivered before are compared."""
    RESTART = "restart"
    """A new start while the client has nothing; else the request fails."""
    NONE = ""
    """Not known, or not applicable."""


class RouteCause(Word):
    """Why a request is dispatched (`RouteDecided.cause`)."""

    ARRIVAL = "arrival"
    RESET = "reset"
    STALL = "stall"
    STUCK = "stuck"
    """The stream got no more tokens while its engine made steps."""
    ENGINE_DEAD = "engine_dead"
    ENGINE_ERROR = "engine_error"
    STALE = "stale"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    DECLINED = "declined"
    MOVED = "moved"
    WAIT_OVER = "wait_over"
    RETURNED = "returned"
    """The client came back, and its worker has the stream no longer."""
    DETACHED = "detached"
    """The worker's stream buffer holds too little of the stream."""
    CORRUPT = "corrupt"
    """The worker was quarantined, because it computes wrong results."""


class AttemptMode(Word):
    """How an attempt begins."""

    NEW = "new"
    CONTINUE = "continue"
    """From the delivered tokens."""
    REPLAY = "replay"
    """From the start; the delivered tokens are compared, not sent again."""
    ATTACH = "attach"
    """Join the attempt that runs there already. Never in a `RouteDecided`."""
    HOPELESS = "hopeless"
    """No attempt can continue what the client has. Never in a `RouteDecided`."""


class TransportKind(Word):
    """How an attempt's connection ended or failed (`TransportObserved.kind`)."""

    RESET = "reset"
    EOF = "eof"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    """No connection in time."""
    STALE = "stale"
    """Another incarnation answered."""
    ENGINE_DEAD = "engine_dead"
    """The agent or the engine itself reported the death."""
    ENGINE_ERROR = "engine_error"
    """The engine answered, but wrongly."""
    DECLINED = "declined"
    """The new worker of a migrated request answered with a 4xx."""
    STALL = "stall"
    STUCK = "stuck"
    """This stream got no more tokens while its engine made steps."""
    TIMEOUT = "timeout"
    MOVED = "moved"
    """Handed over on request: no failure."""
    DETACHED = "detached"
    """The worker's stream buffer holds too little of the stream."""
    CORRUPT = "corrupt"
    """The worker was quarantined: what it computes is wrong."""


class RequestOutcome(Word):
    """How a request ended (`RequestEnded.outcome`)."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


class TimerKind(Word):
    """Which timer of a replica fired (`TimerFired.timer`)."""

    WAIT = "wait"
    """The request found no worker within the bound."""
    RETRY = "retry"
    """The request goes again to where it failed."""
    STALL = "stall"
    """The silence of `worker:incarnation` reached the bound."""
    GRACE = "grace"
    """The client of a detached request did not come back."""


class ProbeResult(Word):
    """What an engine did when a replica probed it (`StallJudged.probe`, `StreamJudged.probe`)."""

    ANSWERED = "answered"
    SILENT = "silent"
    REFUSED = "refused"
    NONE = "none"


class AdminCommand(Word):
    """What an operator may command (`AdminCommanded.command`)."""

    DRAIN = "drain"
    UNDRAIN = "undrain"
    RESTART = "restart"
    HOLD = "hold"
    RELEASE = "release"
    TRUST = "trust"
    """End a quarantine."""
    CONFIG = "config"
    RESIGN = "resign"
    ROLLOUT = "rollout"
    """Restart the engines of a model, one failure domain after the other."""
    CANCEL_ROLLOUT = "cancel_rollout"


class RolloutStage(Word):
    """How far a rolling restart is (`RolloutDecided.stage`)."""

    BEGUN = "begun"
    DRAINING = "draining"
    """Requests leave the workers of the present step."""
    RESTARTING = "restarting"
    CHECKING = "checking"
    """The new engines are ready; their canaries are awaited."""
    RETURNED = "returned"
    """The workers of the step get requests again: after `restarting` with new engines, before it the step
    was given up."""
    PAUSED = "paused"
    RESUMED = "resumed"
    DONE = "done"
    CANCELLED = "cancelled"


class EffectKind(Word):
    """What the leader commands an agent to do (`Effect.kind`)."""

    DRAIN = "drain"
    UNDRAIN = "undrain"
    RESTART = "restart"
    HOLD = "hold"
    """Do not restart the engine."""
    RELEASE = "release"
    """Restart the engine again."""
    CANARY = "canary"
    """Send all canaries to the engine now."""
    LIMIT_BATCH = "limit_batch"
    """Run at most this share of the engine's maximum number of requests at once (`Effect.argument`, in
    percent)."""
    RESET_PREFIX_CACHE = "reset_prefix_cache"
    """Let no further request read what the engine's prefix cache holds now."""


class CheckCause(Word):
    """Why a finished request is answered again by another engine (`CrossCheckDecided.cause`)."""

    SHARE = "share"
    """It is one of the share that is."""
    DOUBT = "doubt"
    """An answer of its worker differed from that of another one before."""
    DISPUTE = "dispute"
    """Its own answer did: this is a further opinion."""


class StepDetail(Word):
    """How much of their engines' steps agents write (`DetailDecided`)."""

    FULL = "full"
    SHED = "shed"
    """Load statistics are merged; no change of a request's state is left out."""


class DeathReason(Word):
    """Why an engine process is gone (`EngineDied.reason`)."""

    EXIT = "exit"
    KILLED = "killed"
    HUNG = "hung"
    REPLACED = "replaced"
    STOPPED = "stopped"
    """The agent leaves, and ends its engine."""
    UNKNOWN_REASON = "unknown"


class EnginePhase(Word):
    """The life of a worker's engine, as the fold has it."""

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineKind(Word):
    """What serves at an engine's address (`EngineReady.kind`)."""

    VLLM = ""
    """vLLM with Relume's plugin."""
    PLAIN = "plain"
    """An OpenAI-compatible server without the plugin: no token ids, no load reports."""


class HostKind(Word):
    """How an agent runs its engine (`--host-kind`)."""

    SERVE = "serve"
    ZYGOTE = "zygote"
    PLAIN = "plain"


class QueueCause(Word):
    """Why a request waits in the admission queue (`RequestHeld.cause`)."""

    SATURATED = "saturated"
    """All workers are at their queue limit."""
    NO_WORKER = "no worker"
    """No worker accepts requests."""
    BEHIND = "behind"
    """Others wait already."""


class HealthState(Word):
    """The health of a worker, as the leader decides it (`HealthDecided.state`)."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Something failed, or it is slow: it gets requests at a higher price."""
    UNHEALTHY = "unhealthy"
    """It gets none: its breaker is open."""
    PROBING = "probing"
    """It gets a few, to see whether it works again: its breaker is half open."""
    DRAINING = "draining"
    DEAD = "dead"
    """No engine serves there."""
    QUARANTINED = "quarantined"
    """What it computes is not trusted: it gets none until an operator releases it."""


class WeightsOutcome(Word):
    """How the model files of a quarantined worker compare with those of most healthy workers of its
    class (`WeightsCompared.outcome`)."""

    SAME = "same"
    DIFFERENT = "different"
    """It is not released by canaries."""
    UNKNOWN = "unknown"
    """They cannot be compared: canaries alone decide."""


class BreakerState(Word):
    """The circuit breaker of a worker, as its health shows it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class FailureClass(Word):
    """What is wrong with a worker (`HealthDecided.failure`)."""

    NONE = ""
    CRASH = "crash"
    """Its engine's process ended: a hard crash, an uncorrectable memory error."""
    HOST = "host"
    """Its agent's lease lapsed: the host is down or cut off from etcd."""
    HANG = "hang"
    """Its engine holds requests and does nothing: a lost link between GPUs, a deadlock."""
    UNREACHABLE = "unreachable"
    """Replicas have no connection to it."""
    ERRORS = "errors"
    """It answers, with errors."""
    SLOW = "slow"
    """Its steps take several times those of its class: a throttled GPU, a busy host."""
    CORRUPTION = "corruption"
    """It answers, and what it computes is wrong."""
    REPORTS = "reports"
    """Its engine reports what cannot be read: nobody knows its load."""


class RecoveryTier(Word):
    """What of a failed engine's state the next one could use, by where its weights came from."""

    UNKNOWN = ""
    """The next engine has not said so, or has no pools (`--keep-weights-mb`)."""
    SOFTWARE_CRASH = "software_crash"
    """All weights were in the memory of the host, which outlived the engine."""
    DEVICE_LOST = "device_lost"
    """Those of some ranks were; the others read files."""
    COLD = "cold"
    """All weights came from files."""


class FailedPart(Word):
    """Which process an incident is about, or which stream of the log."""

    WORKER = "worker"
    """An engine, or the host that it runs on."""
    DAEMON = "daemon"
    """The state daemon of a worker's host."""
    GATEWAY = "gateway"
    """A replica of the control plane."""
    STREAM = "stream"
    """A worker's stream in the log: something in it cannot be read."""


class Exclusion(Word):
    """Why a worker gets no request, cannot restore one, or holds no checkpoint of it
    (`Candidate.excluded`, `RecoveryOption.excluded`, `HolderCandidate.excluded`)."""

    NONE = ""
    """It may."""
    ENGINE_NONE = "engine none"
    ENGINE_STARTING = "engine starting"
    ENGINE_DEAD = "engine dead"
    OTHER_MODEL = "other model"
    LOST = "lost"
    DRAINING = "draining"
    SUSPECTED = "suspected"
    """By the replica that decides."""
    UNHEALTHY = "unhealthy"
    """By the leader's decision: its breaker is open."""
    PROBING = "probing"
    """By the leader's decision: another request is its probe."""
    QUARANTINED = "quarantined"
    UNREADABLE = "unreadable records"
    """Its agent wrote records that cannot be read, and no operator has acknowledged them."""
    SPARE = "spare"
    """By the leader's decision: it waits for another worker of its model to fail."""
    WITHOUT_PLUGIN = "tells no token ids"
    """A server without the plugin cannot continue a request."""
    FAILED_BEFORE = "failed it before"
    """This request, on this incarnation."""
    FAILING = "failing"
    """Several requests failed on it, and the leader has not decided yet."""
    NO_KV_SPACE = "no KV room"
    SILENT = "silent"
    """No report for longer than its steps take, though it has work."""
    TOO_LATE = "too late"
    """The first token, for the goal of the request's tier."""
    SATURATED = "saturated"
    """At the limit of the admission queue."""
    FAILED = "failed"
    """The request is interrupted because this engine failed."""
    SOURCE = "it runs there"
    """The request leaves this worker."""
    FINGERPRINT = "fingerprint"
    """Its KV blocks are of another kind than the checkpoint's."""
    UNREACHABLE = "unreachable"
    """No link from the holder to it."""
    BUDGET = "budget"
    """Its state daemon has no room for the checkpoint."""
    OVER_TIME_BUDGET = "over the time budget"
    """The blocks would arrive there too late, and computing again gives the next token sooner."""


class ShedReason(Word):
    """Why a request is refused unsent (`RequestShed.reason`)."""

    DEADLINE = "deadline"
    """Its first token is predicted after its deadline."""
    EXPIRED = "expired"
    """Its deadline has passed."""
    TOO_LONG = "too long"
    """It waited for the maximum time."""
    QUEUE_FULL = "room full"
    DISPLACED = "displaced"
    """The queue was full, and another request has its place."""
    TENANT_SHARE = "tenant share"
    NO_WORKER = "no worker"
    STOPPING = "stopping"
    """The gateway stops."""
    DEGRADED = "degraded"
    """The level of degradation of its model refuses its tier."""


class MigrationCause(Word):
    """Why requests leave a living worker (`MigrationPlanned.cause`)."""

    DRAIN = "drain"
    IMBALANCE = "imbalance"
    PROMOTION = "promotion"
    """The worker was a spare; requests of tier batch leave it."""


class PlacementCause(Word):
    """Why holders of a checkpoint are chosen (`HolderChosen.cause`)."""

    ARRIVAL = "arrival"
    RECOVERED = "recovered"
    MOVED = "moved"
    HOLDER_LOST = "holder_lost"
    DRAINING = "draining"
    HOLDER_JOINED = "holder_joined"


class DropReason(Word):
    """Why a holder has nothing of a request any more (`CheckpointDropped.reason`)."""

    FINISHED = "finished"
    EXPIRED = "expired"
    EVICTED = "evicted"


class RestoreFailure(Word):
    """Why a restore stopped (`RestoreFailed.reason`)."""

    CORRUPT = "corrupt"
    """Digest, size or token ids are not what they must be."""
    GONE = "gone"
    UNREACHABLE = "unreachable"
    """No connection, or no answer in time."""
    MALFORMED = "malformed"
    DEVICE = "device"
    """Copies to the engine's memory fail."""
    INTERNAL = "internal"
    FINGERPRINT = "fingerprint"
    FENCED = "fenced"
    BUSY = "busy"
    AUTHENTICATION = "authentication"
    VERSION = "version"
    SESSION = "session"
    MEMORY = "memory"


class RecoveryKind(Word):
    """How an attempt gets its KV blocks (`RecoveryOption.kind`)."""

    RESTORE = "restore"
    RECOMPUTE = "recompute"


class Tier(Word):
    """Service tier of a request."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"
    NONE = ""
    """Not recorded: written before there were tiers."""


class WorkerState(Word):
    """One word for a worker in the admin API and in `relume status`; the first that holds."""

    NONE = "none"
    LOST = "lost"
    HELD = "held"
    STARTING = "starting"
    DEAD = "dead"
    QUARANTINED = "quarantined"
    UNHEALTHY = "unhealthy"
    PROBING = "probing"
    SUSPECTED = "suspected"
    """By this replica, or by the leader's decision."""
    DRAINING = "draining"
    DRAINED = "drained"
    SPARE = "spare"
    """It waits for another worker of its model to fail."""
    SERVING = "serving"


class RequestState(Word):
    """One word for a request in the admin API."""

    LIVE = "live"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"
    REJECTED = "rejected"


class CommandState(Word):
    """How far an operator's command is."""

    ACCEPTED = "accepted"
    """In the log; the leader has not answered."""
    DECIDED = "decided"
    REFUSED = "refused"
