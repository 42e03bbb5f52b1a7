"""Events of stream `fleet`, which only the leader writes."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState, StepDetail


class LeaderElected(Event, frozen=True, tag="leader_elected/1"):
    """`replica` owns stream `fleet`; its epoch fences every older leader."""

    replica: str
    boot: str


class LeaderResigned(Event, frozen=True, tag="leader_resigned/1"):
    """The leader steps down on purpose."""

    replica: str
    reason: str


class Tick(Event, frozen=True, tag="tick/1"):
    """The only clock policies see. `unix_ms` is for people; `number` counts."""

    number: int
    unix_ms: int


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
    """One imperative to a worker's agent. Refused when `incarnation` (0: any) is older than the
    agent's."""

    kind: EffectKind
    worker: str
    incarnation: int = 0
    argument: str = ""


class EffectsDecided(Event, frozen=True, tag="effects_decided/1", kw_only=True):
    """Effects for agents; applied once by target state (I15). `again` >= 0: nothing new, effect
    `again` of that decision repeated for an agent that may have missed it (the log before may be
    trimmed)."""

    decision: str
    basis: Basis
    cause: str
    effects: tuple[Effect, ...]
    again: int = -1


class DetailDecided(Event, frozen=True, tag="detail_decided/1", kw_only=True):
    """Decision: how much of their engines' steps agents write, where it `was`; and all it rests
    on. Said again while shed, for agents that come later."""

    detail: StepDetail
    was: StepDetail
    database_bytes: int
    quota_bytes: int
    shed_percent: int


class HealthDecided(Event, frozen=True, tag="health_decided/1", kw_only=True):
    """Decision: the health of `worker`, from the evidence of all replicas and agents. It holds for
    `incarnation` from tick `since` on. In `probing`, only `prober` sends it requests, at most
    `probes` at once; `until` is the first tick at which an open breaker may probe (-1: its cause
    must be gone first). A request counts `price_percent` of its cost there. Of a corruption,
    `good_tick` is that of the last right answers to the canaries that are wrong now, the earliest:
    what the engine computed since then is in doubt (-1: one of them was never right)."""

    worker: str
    incarnation: int
    state: HealthState
    failure: FailureClass
    evidence: str
    since: int
    until: int = -1
    prober: str = ""
    probes: int = 0
    price_percent: int = 100
    good_tick: int = -1


class VerdictsWithheld(Event, frozen=True, tag="verdicts_withheld/1", kw_only=True):
    """Decision: `workers` of a `model` fail at once, more than `share_percent` of the `serving`
    ones, so a common cause is likelier than that all of them broke: no breaker opens. No
    `workers`: that is over."""

    model: str
    workers: tuple[str, ...]
    serving: int
    share_percent: int


class CanaryValuesDecided(Event, frozen=True, tag="canary_values_decided/1", kw_only=True):
    """Decision: the golden values of canary `canary` for class `kind` of workers (model, build,
    hardware, digest of the weights, prompt set), version by version. `witnesses` agreed on them, of
    `workers` in the class; a single one: the class had no other. Each log probability is between
    `low` and `high`, which are equal where `exact`."""

    kind: str
    canary: int
    version: int
    tokens: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    exact: bool
    witnesses: tuple[str, ...]
    workers: int


class CheckpointsReleased(Event, frozen=True, tag="checkpoints_released/1"):
    """These requests ended, and some of their blocks are still held: each holder drops them. Sent
    once; what a holder misses expires."""

    requests: tuple[str, ...]


class CheckpointsVoided(Event, frozen=True, tag="checkpoints_voided/1"):
    """Decision: what these `attempts` (request, number) and earlier ones wrote to holders is not
    used, because `worker` had them and computes wrong results. Each holder drops it."""

    worker: str
    incarnation: int
    attempts: tuple[tuple[str, int], ...]


class StateHashed(Event, frozen=True, tag="state_hashed/1"):
    """Hash of the canonical fold at `revision` (I7), as the leader computed it. `order`
    digests the segments up to there in their total order, whatever is made of them;
    `shape` names what state `hash` is of: another build may keep other state."""

    revision: int
    hash: bytes
    order: bytes = b""
    shape: str = ""


class SnapshotTaken(Event, frozen=True, tag="snapshot_taken/1"):
    """A snapshot of the fold at `revision` is durable under `hash`; the log before
    `trimmed` may be gone."""

    revision: int
    hash: bytes
    trimmed: int = 0


class ConfigChanged(Event, frozen=True, tag="config_changed/1"):
    """A setting decisions depend on has a new value from here on (no key: the command
    `decision` could not be carried out, `value` says why)."""

    key: str
    value: str
    decision: str = ""
