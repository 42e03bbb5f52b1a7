"""Every fact and decision the log may hold, as frozen structs.

Facts are in the past tense. A struct is data only; what it does to the fleet is in
`relume.policies.state.fold`. Wire form is a msgpack array whose first element is the tag,
`name/version`. A published tag never changes its meaning: a field may be appended
with a default, anything else takes a new version and an upcast in `relume.events.log.codec`.

Units are in the names: `_us` microseconds, `_ms` milliseconds, `_tokens`, `_blocks`.
Worker events are in stream `w.<worker>`, replica events in `r.<replica>`, the
leader's in `fleet`; identities are (worker, incarnation) and (request, attempt).
"""

from __future__ import annotations

from relume.events.vocabulary.admission_events import RequestHeld, RequestShed
from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.checkpoint_events import (
    CheckpointAcknowledged,
    CheckpointDropped,
    CheckpointEvicted,
    CheckpointsAcknowledged,
    HeldPrefix,
    HolderCandidate,
    HolderChosen,
    LinkMeasured,
    RecoveryChoice,
    RecoveryOption,
    RecoveryPlanned,
    RestoreDone,
    RestoreFailed,
    RestoreStarted,
    StateDaemonLost,
    StateDaemonReported,
    StateDaemonStarted,
)
from relume.events.vocabulary.leader_events import (
    CanaryValuesDecided,
    CheckpointsReleased,
    CheckpointsVoided,
    ConfigChanged,
    DegradationDecided,
    DetailDecided,
    Effect,
    EffectsDecided,
    FeatureLevelRaised,
    HealthDecided,
    LeaderElected,
    LeaderResigned,
    ReplicaLost,
    RolloutDecided,
    SegmentSkipped,
    SnapshotTaken,
    SparesDecided,
    StateHashed,
    Tick,
    VerdictsWithheld,
    WeightsCompared,
    WorkerForgotten,
    WorkerLost,
)
from relume.events.vocabulary.migration_events import (
    MigrationAbandoned,
    MigrationChoice,
    MigrationPlanned,
)
from relume.events.vocabulary.replica_events import (
    AdminCommanded,
    Candidate,
    ClientReturned,
    CrossCheckDecided,
    CrossChecked,
    GroupsReceived,
    ReplicaStarted,
    ReplicaStopped,
    RequestArrived,
    RequestEnded,
    RouteDecided,
    StallJudged,
    StreamJudged,
    TimerFired,
    TransportObserved,
    WorkerCleared,
    WorkerSuspected,
)
from relume.events.vocabulary.step_changes import (
    AnyChange,
    Change,
    EngineFinished,
    FirstToken,
    KvBlocksFilled,
    PrefillChunkDone,
    RequestAdmitted,
    RequestPreempted,
    RequestQueued,
)
from relume.events.vocabulary.worker_events import (
    CanaryReported,
    EffectApplied,
    EngineDied,
    EngineHung,
    EngineReady,
    EngineRecovered,
    EngineRestartScheduled,
    EngineStarted,
    EngineStep,
    PrefixBlocksChanged,
    ReportsDropped,
    StreamResumed,
    StreamsReported,
    WeightsDigested,
    WeightsLoaded,
    WeightsLoading,
    WeightsReadStarted,
    WorkerDeregistered,
    WorkerLeaving,
    WorkerRegistered,
)

WORKER_EVENTS = (
    WorkerRegistered
    | WorkerLeaving
    | WorkerDeregistered
    | EngineStarted
    | EngineReady
    | EngineDied
    | EngineHung
    | EngineRecovered
    | ReportsDropped
    | EngineRestartScheduled
    | EngineStep
    | EffectApplied
    | StreamResumed
    | StreamsReported
    | StateDaemonStarted
    | StateDaemonLost
    | StateDaemonReported
    | CheckpointAcknowledged
    | CheckpointsAcknowledged
    | CheckpointEvicted
    | CheckpointDropped
    | RestoreStarted
    | RestoreDone
    | LinkMeasured
    | RestoreFailed
    | PrefixBlocksChanged
    | CanaryReported
    | WeightsReadStarted
    | WeightsDigested
    | WeightsLoaded
    | WeightsLoading
)
REPLICA_EVENTS = (
    ReplicaStarted
    | ReplicaStopped
    | RequestArrived
    | RouteDecided
    | TransportObserved
    | StallJudged
    | StreamJudged
    | WorkerSuspected
    | WorkerCleared
    | RequestEnded
    | GroupsReceived
    | TimerFired
    | AdminCommanded
    | HolderChosen
    | RecoveryPlanned
    | ClientReturned
    | MigrationPlanned
    | MigrationAbandoned
    | RequestHeld
    | RequestShed
    | CrossCheckDecided
    | CrossChecked
)
LEADER_EVENTS = (
    LeaderElected
    | LeaderResigned
    | Tick
    | WorkerLost
    | WorkerForgotten
    | ReplicaLost
    | EffectsDecided
    | CheckpointsReleased
    | CheckpointsVoided
    | StateHashed
    | SnapshotTaken
    | ConfigChanged
    | DetailDecided
    | HealthDecided
    | VerdictsWithheld
    | CanaryValuesDecided
    | WeightsCompared
    | DegradationDecided
    | RolloutDecided
    | FeatureLevelRaised
    | SegmentSkipped
    | SparesDecided
)
AnyEvent = WORKER_EVENTS | REPLICA_EVENTS | LEADER_EVENTS
