"""Events of stream `fleet`, which only the leader writes."""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.enums import (
    EffectKind,
    FailureClass,
    HealthState,
    RolloutStage,
    StepDetail,
    WeightsOutcome,
)


class LeaderElected(Event, frozen=True, tag="leader_elected/1"):
    """`replica` owns stream `fleet`; its epoch fences every older leader."""

    replica: str
    boot: str


class LeaderResigned(Event, frozen=True, tag="leader_resigned/1"):
    """The leader steps down on purpose."""

    replica: str
    reason: str


class Tick(Event, frozen=True, tag="tick/1"):
    """The only clock that policies see."""

    number: int
    """Number of the tick."""
    unix_ms: int
    """Wall clock, for people."""


class WorkerLost(Event, frozen=True, tag="worker_lost/1"):
    """The worker's lease (owner key of `epoch`) is gone while the log was healthy."""

    worker: str
    epoch: int
    reason: str


class WorkerForgotten(Event, frozen=True, tag="worker_forgotten/1"):
    """The worker left long ago and is removed: the fold has nothing under its name. Void if an
    owner other than that of `epoch` has come since."""

    worker: str
    epoch: int


class ReplicaLost(Event, frozen=True, tag="replica_lost/1"):
    """A replica's lease is gone while the log was healthy; its streams are orphans."""

    replica: str
    epoch: int


class Effect(Struct, frozen=True, array_like=True, gc=False):
    """One imperative to a worker's agent, which refuses it for an older engine than its own."""

    kind: EffectKind
    """What the agent is to do."""
    worker: str
    incarnation: int = 0
    """Incarnation it is meant for; 0: any."""
    argument: str = ""
    """Further argument; empty: none."""


class EffectsDecided(Event, frozen=True, tag="effects_decided/1", kw_only=True):
    """Effects for agents; applied once by target state (I15)."""

    decision: str
    basis: Basis
    cause: str
    effects: tuple[Effect, ...]
    """The effects."""
    again: int = -1
    """Index of an effect of that decision, which is repeated for an agent that may have missed
    it (the log before may be trimmed); -1: new effects."""


class DetailDecided(Event, frozen=True, tag="detail_decided/1", kw_only=True):
    """Decision: how much of their engines' steps agents write, and all it rests on. Repeated
    while detail is reduced, for agents that start later."""

    detail: StepDetail
    """How much is written from here on."""
    was: StepDetail
    """The value before."""
    database_bytes: int
    """Size of etcd's database."""
    quota_bytes: int
    """etcd's quota."""
    shed_percent: int
    """Percentage of the quota at which records are merged."""


class HealthDecided(Event, frozen=True, tag="health_decided/1", kw_only=True):
    """Decision: the health of a worker, from the evidence of all replicas and agents. In
    `probing`, only `prober` sends it requests."""

    worker: str
    incarnation: int
    """Incarnation that it holds for."""
    state: HealthState
    """The health of the worker."""
    failure: FailureClass
    """Class of the failure; empty: none."""
    evidence: str
    """What the decision goes by."""
    since: int
    """Tick from which it holds."""
    until: int = -1
    """First tick at which an open breaker may probe; -1: its cause must be gone first."""
    prober: str = ""
    """The replica that sends it probes; empty: none does."""
    probes: int = 0
    """Maximum number of probes at once."""
    price_percent: int = 100
    """Share of a request's cost that counts there, percent."""
    good_tick: int = -1
    """Of a corruption: tick of the last right answers to the canaries that are wrong now, the
    earliest. What the engine computed since then is in doubt. -1: one was never right."""


class RolloutDecided(Event, frozen=True, tag="rollout_decided/1", kw_only=True):
    """Decision: the next stage of a rolling restart of a model's engines."""

    rollout: str
    """The command that began it."""
    model: str
    stage: RolloutStage
    """What happens now."""
    workers: tuple[str, ...]
    """Workers of this step; of `begun`: all, in the order in which they are restarted."""
    left: int
    """Workers that come after this step."""
    reason: str = ""
    """For people. Of `paused`: why. Of `returned`: why the step was given up before its restart."""


class VerdictsWithheld(Event, frozen=True, tag="verdicts_withheld/1", kw_only=True):
    """Decision: so many workers of a model fail at once that a common cause is likelier than
    that all of them broke: no breaker opens."""

    model: str
    workers: tuple[str, ...]
    """Those that fail; none: verdicts are no longer withheld."""
    serving: int
    """Workers of the model that serve."""
    share_percent: int
    """Share of them that may fail before verdicts are withheld."""


class CanaryValuesDecided(Event, frozen=True, tag="canary_values_decided/1", kw_only=True):
    """Decision: the golden values of a canary for a class of workers, version by version."""

    kind: str
    """Class of workers: model, build, hardware, digest of the weights, prompt set."""
    canary: int
    """Number of the canary in its prompt set."""
    version: int
    """Version of the values of this canary and class."""
    tokens: tuple[int, ...]
    """Ids of the greedy tokens."""
    low: tuple[float, ...]
    """Smallest log probabilities that are right."""
    high: tuple[float, ...]
    """Largest log probabilities that are right."""
    exact: bool
    """Whether the values hold bit by bit."""
    witnesses: tuple[str, ...]
    """Workers whose answers agreed; one: its class had no other."""
    workers: int
    """Workers in the class."""


class WeightsCompared(Event, frozen=True, tag="weights_compared/1", kw_only=True):
    """Decision: whether the model files of a quarantined worker are those of most healthy workers of
    its class, once its engine has answered enough canaries rightly. It is released unless they differ."""

    tag_level: ClassVar[int] = 2

    worker: str
    incarnation: int
    outcome: WeightsOutcome
    """What the comparison found."""
    digest: str = ""
    """Digest of its files; empty: unknown."""
    expected: str = ""
    """Digest of the files of most healthy workers of its class; empty: unknown."""
    witnesses: tuple[str, ...] = ()
    """These workers."""
    files: tuple[str, ...] = ()
    """Names of files that differ from theirs, as far as they are known."""
    reason: str = ""
    """Why the files are not compared; empty: they are."""


class DegradationDecided(Event, frozen=True, tag="degradation_decided/1", kw_only=True):
    """Decision: what the fleet does without for a model, because its workers serve less than its
    clients ask for; and the figures that it rests on. Without a figure the level falls: the demand
    or the capacity is not known, or levels are no longer decided."""

    model: str
    level: int
    """Level from here on: 0 normal, 1 shorter answers, 2 no batch tier, 3 later first tokens, 4 no
    new requests."""
    was: int
    """Level before."""
    since: int
    """Tick from which it holds."""
    due_ticks: int
    """Ticks for which a higher level, or a lower one, had been due; -1: levels are no longer
    decided."""
    share: int = -1
    """Part of the demand that is served, in thousandths; -1: unknown."""
    workers: int = 0
    """Workers that serve the model."""
    wanted: int = 0
    """Workers that would serve the demand."""
    sequences: int = 0
    """Requests that can run at once."""
    requests_per_ks: int = 0
    """Requests that the workers can compute in 1000 seconds."""
    tokens_per_s: int = 0
    """Prompt and output tokens that they can compute."""
    usable_per_ks: int = 0
    """Requests in 1000 seconds that count as capacity."""
    demand_per_ks: int = 0
    """Requests in 1000 seconds that arrive."""
    prompt_tokens: int = 0
    """Prompt tokens that are computed for the mean request."""
    output_tokens: int = 0
    """Tokens that the mean request generates."""


class FeatureLevelRaised(Event, frozen=True, tag="feature_level_raised/1", kw_only=True):
    """Decision: events of this feature level may be written from here on, since each live replica
    reads them. Repeated from time to time, for agents that start later."""

    level: int
    """The level from here on."""
    was: int
    """The level before; the same: it is stated again."""
    replicas: tuple[str, ...]
    """The live replicas."""


class SegmentSkipped(Event, frozen=True, tag="segment_skipped/1", kw_only=True):
    """Fact: a segment of a worker's stream is damaged, or does not continue it, or a key in another stream
    never was a segment. No reader uses it."""

    stream: str
    """The stream; of a worker: `w.` and its name."""
    segment: int
    """Its number in the stream."""
    after: int
    """Number of the last segment that is used (0: none), until another one continues the stream."""
    reason: str
    """What is wrong with it."""


class SparesDecided(Event, frozen=True, tag="spares_decided/1", kw_only=True):
    """Decision: which workers of a model are spares. A spare gets no requests while another worker of
    its model is open, except those of tier batch and those that another worker failed."""

    model: str
    spares: tuple[str, ...]
    """The spares from here on, the longest-serving first."""
    was: tuple[str, ...]
    """The spares before. Of these, an open one that is no spare any longer is promoted."""
    since: int
    """Tick from which it holds."""
    workers: int
    """Workers of the model that count."""
    failed: int
    """Of these, those that are not open to requests."""
    due: int
    """Number of spares that the model should have."""
    short_ticks: int
    """Ticks for which there had been a spare too few; -1: there was not."""


class CheckpointsReleased(Event, frozen=True, tag="checkpoints_released/1"):
    """These requests ended, and some of their blocks are still held: each holder drops them. Sent
    once; what a holder misses expires."""

    requests: tuple[str, ...]
    """Requests whose blocks are dropped."""


class CheckpointsVoided(Event, frozen=True, tag="checkpoints_voided/1"):
    """Decision: what attempts wrote to holders is not used, because a worker had them and
    computes wrong results. Each holder drops it."""

    worker: str
    incarnation: int
    attempts: tuple[tuple[str, int], ...]
    """(request, number): what it and earlier attempts of the request wrote is dropped."""


class StateHashed(Event, frozen=True, tag="state_hashed/1"):
    """Hash of the canonical fold at a revision (I7), as the leader computed it."""

    revision: int
    hash: bytes
    order: bytes = b""
    """Digest of all segments up to there in their total order, whatever is made of them."""
    shape: str = ""
    """Name of the state that the hash covers: another build may keep other state."""


class SnapshotTaken(Event, frozen=True, tag="snapshot_taken/1"):
    """A snapshot of the fold is durable."""

    revision: int
    hash: bytes
    trimmed: int = 0
    """Revision before which the log may be gone."""


class ConfigChanged(Event, frozen=True, tag="config_changed/1"):
    """A setting that decisions depend on has a new value from here on, or a command could not
    be carried out."""

    key: str
    """Name of the setting; empty: the command could not be carried out."""
    value: str
    """The new value; without a key, why the command could not be carried out."""
    decision: str = ""
    """The command that changed it."""
