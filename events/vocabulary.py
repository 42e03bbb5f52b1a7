"""Every fact and decision the log may hold, as frozen structs.

Facts are in the past tense. A struct is data only; what it does to the fleet is in
`policies.fleet`. Wire form is a msgpack array whose first element is the tag,
`name/version`. A published tag never changes its meaning: a field may be appended
with a default, anything else takes a new version and an upcast in `events.codec`.

Units are in the names: `_us` microseconds, `_ms` milliseconds, `_tokens`, `_blocks`.
Worker events stand in stream `w.<worker>`, replica events in `r.<replica>`, the
leader's in `fleet`; identities are (worker, incarnation) and (request, attempt).
"""

from __future__ import annotations

from msgspec import Struct


class Event(Struct, frozen=True, array_like=True, gc=False):
    """Base of all events; array_like keeps a record near 40 bytes."""


class Basis(Struct, frozen=True, array_like=True, gc=False):
    """What a decision was taken on: the canonical fold at `revision` (etcd's), plus the
    replica's own events up to `position` (1-based, its stream) that it did not hold yet."""

    revision: int
    position: int


# --- changes inside one engine step -------------------------------------------------


class Change(Struct, frozen=True, array_like=True, gc=False):
    """One load change inside an engine step; `request` and `attempt` name whose."""

    request: str
    attempt: int


class RequestQueued(Change, frozen=True, tag="q"):
    """The engine took the request; `dispatch` is the encoded `RouteDecided` it came with."""

    prompt_tokens: int
    dispatch: bytes = b""


class RequestAdmitted(Change, frozen=True, tag="a"):
    """The scheduler gave it blocks; `cached_tokens` of its prompt need no computing."""

    cached_tokens: int
    blocks: int = 0


class PrefillChunkDone(Change, frozen=True, tag="c"):
    """`tokens` of its prompt were computed in this step; `computed` in all."""

    tokens: int
    computed: int


class FirstToken(Change, frozen=True, tag="t"):
    """Its prefill ended and its first token left the model."""


class KvBlocksFilled(Change, frozen=True, tag="k"):
    """It holds `blocks` full KV blocks now."""

    blocks: int


class RequestPreempted(Change, frozen=True, tag="p"):
    """It lost its blocks and waits to be computed again."""


class EngineFinished(Change, frozen=True, tag="f"):
    """The engine is done with it. `reason` as vLLM says it: stop, length, abort, error."""

    reason: str
    output_tokens: int


AnyChange = (
    RequestQueued
    | RequestAdmitted
    | PrefillChunkDone
    | FirstToken
    | KvBlocksFilled
    | RequestPreempted
    | EngineFinished
)

# --- worker streams ----------------------------------------------------------------


class WorkerRegistered(Event, frozen=True, tag="worker_registered/1"):
    """An agent took its worker's stream. `domain` is the failure domain; at `notices`
    (host:port) the agent tells of deaths directly, empty when it does not."""

    worker: str
    domain: str
    agent_pid: int
    agent_url: str = ""
    notices: str = ""


class WorkerDeregistered(Event, frozen=True, tag="worker_deregistered/1"):
    """The agent leaves on purpose; nothing of it remains."""

    worker: str
    reason: str


class EngineStarted(Event, frozen=True, tag="engine_started/1"):
    """An engine process exists (`pid`, `start_ticks` of /proc) and is loading."""

    worker: str
    incarnation: int
    pid: int
    start_ticks: int


class EngineReady(Event, frozen=True, tag="engine_ready/1"):
    """The engine answers HTTP at `host:port`. `exact` names what its self-test found exact.
    `family`: fingerprint family of its KV blocks, `block_bytes`: a block's size in a
    checkpoint, all ranks together; empty and 0 when it takes no part in checkpoints."""

    worker: str
    incarnation: int
    host: str
    port: int
    model: str
    max_model_len: int
    block_size: int
    kv_blocks: int
    build: str = ""
    exact: tuple[str, ...] = ()
    family: str = ""
    block_bytes: int = 0


class EngineDied(Event, frozen=True, tag="engine_died/1"):
    """The engine process is gone. `reason`: exit, killed, hung, replaced, unknown."""

    worker: str
    incarnation: int
    reason: str
    detail: str = ""


class EngineRestartScheduled(Event, frozen=True, tag="engine_restart_scheduled/1"):
    """The agent will start incarnation `incarnation` after `delay_ms`."""

    worker: str
    incarnation: int
    delay_ms: int


class EngineStep(Event, frozen=True, tag="engine_step/1"):
    """One step of the engine, or load changes between steps (`duration_us` 0).

    `batch` requests decoded with `sum_context` tokens of context in all;
    `prefill_tokens` were computed; `waiting` stay queued; `kv_used` blocks of the
    pool are taken; `lost` records were dropped before this one because the agent
    did not read (their changes are missing).
    """

    incarnation: int
    step: int
    duration_us: int
    batch: int
    sum_context: int
    prefill_tokens: int
    waiting: int
    kv_used: int
    changes: tuple[AnyChange, ...] = ()
    lost: int = 0


class EffectApplied(Event, frozen=True, tag="effect_applied/1"):
    """Effect `index` of `decision` was carried out (or refused: `outcome`)."""

    decision: str
    index: int
    outcome: str = "applied"


class StreamResumed(Event, frozen=True, tag="stream_resumed/1"):
    """The writer's lease lapsed during an outage and it took its own stream again."""

    old_epoch: int
    new_epoch: int
    spooled: int = 0


# --- checkpoints, in worker streams ---------------------------------------------------


class StateDaemonStarted(Event, frozen=True, tag="state_daemon_started/1"):
    """The state daemon of `worker`'s host serves, and nothing said of it earlier holds: what
    it has, if its new agent found it running, is acknowledged anew behind this. `boot` names
    this life of it, `budget_bytes` what it may hold (LUMEN Eq. 5), `family` the fingerprint
    family of the blocks its worker can use. `address` (tcp://...) is for other hosts, empty
    when it listens to none; `local` (unix:...) for engines on the same `machine`."""

    worker: str
    boot: str
    epoch: int
    address: str
    budget_bytes: int
    family: str = ""
    local: str = ""
    machine: str = ""


class StateDaemonLost(Event, frozen=True, tag="state_daemon_lost/1"):
    """That life of the daemon is over, and all it held with it."""

    worker: str
    boot: str
    reason: str


class StateDaemonReported(Event, frozen=True, tag="state_daemon_reported/1"):
    """Figures of the daemon by name, at a low rate, for people: bytes, blocks, counts."""

    worker: str
    boot: str
    figures: tuple[tuple[str, int], ...]


class CheckpointAcknowledged(Event, frozen=True, tag="checkpoint_acknowledged/1"):
    """`holder` holds the first `tokens` (`blocks` whole blocks on every rank, `bytes` in
    all) of a request's child, written by `attempt`: the checkpointed prefix |C_r|. The only
    source of coverage. A later record of the same boot replaces an earlier one."""

    holder: str
    boot: str
    request: str
    child: int
    attempt: int
    blocks: int
    tokens: int
    bytes: int


class HeldPrefix(Struct, frozen=True, array_like=True, gc=False):
    """What one `CheckpointAcknowledged` tells, beside its holder and boot."""

    request: str
    child: int
    attempt: int
    blocks: int
    tokens: int
    bytes: int


class CheckpointsAcknowledged(Event, frozen=True, tag="checkpoints_acknowledged/1"):
    """Several `CheckpointAcknowledged` of one holder in one record: positions since it was
    asked last, of each request the newest only."""

    holder: str
    boot: str
    held: tuple[HeldPrefix, ...]


class CheckpointEvicted(Event, frozen=True, tag="checkpoint_evicted/1"):
    """`holder` needed the room: `tokens` of the prefix are left, `bytes` in all."""

    holder: str
    boot: str
    request: str
    child: int
    tokens: int
    bytes: int


class CheckpointDropped(Event, frozen=True, tag="checkpoint_dropped/1"):
    """`holder` holds nothing of the request any more. `reason`: finished, expired,
    replaced, corrupt."""

    holder: str
    boot: str
    request: str
    child: int
    reason: str


class RestoreStarted(Event, frozen=True, tag="restore_started/1"):
    """The engine fetches `tokens` of the attempt's prefix from `holder`, from token `first`
    on: what is before them it has itself."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    first: int = 0


class RestoreDone(Event, frozen=True, tag="restore_done/1"):
    """They are in its cache, each block verified; the rest is computed."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    bytes: int
    duration_us: int


class RestoreFailed(Event, frozen=True, tag="restore_failed/1"):
    """Only `tokens` could be used; all behind them is computed again. `reason`:
    unreachable, corrupt, fingerprint, gone, timeout, busy."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    reason: str


# --- replica streams ---------------------------------------------------------------


class ReplicaStarted(Event, frozen=True, tag="replica_started/1"):
    """A control plane replica took its stream; `boot` names this life of it. `settings`:
    (name, value) of what its decisions depend on, e.g. ("stall.cap_us", "3000000")."""

    replica: str
    boot: str
    host: str
    port: int
    pid: int
    seed: int = 0
    policy: str = "least_load"
    settings: tuple[tuple[str, str], ...] = ()


class ReplicaStopped(Event, frozen=True, tag="replica_stopped/1"):
    """The replica leaves on purpose with no stream open."""

    replica: str
    reason: str


class RequestArrived(Event, frozen=True, tag="request_arrived/1"):
    """A client's request was accepted. `verdict`: how a cut can be survived
    (`exact`, `sampled`, `replay`, `restart`), and why not better. `client_id`: the
    x-request-id it came with or was given, which need not be unique. `trace`: the W3C
    traceparent it came with."""

    request: str
    model: str
    route: str
    stream: bool
    prompt_tokens: int
    max_tokens: int
    verdict: str
    reason: str = ""
    estimated: bool = True
    tenant: str = ""
    client_id: str = ""
    trace: str = ""


class Candidate(Struct, frozen=True, array_like=True, gc=False):
    """One worker a decision looked at: its cost (integer, lower is better) and parts.
    `excluded` says why it could not be chosen; empty when it could."""

    worker: str
    incarnation: int
    cost: int
    prefill_tokens: int
    requests: int
    excluded: str = ""


class RouteDecided(Event, frozen=True, tag="route_decided/1"):
    """Where attempt `attempt` of a request goes, and on what ground: the dispatch.

    `cause`: arrival, reset, stall, engine_dead, engine_error, stale, refused, unreachable,
    declined, wait_over.
    `mode`: new, continue, replay, restart. `worker` empty: none could take it. `policy`
    planned: as the `RecoveryPlanned` of the lost attempt has it.
    `delivered` tokens are with the client already. `avoid`: workers that failed it.
    """

    decision: str
    basis: Basis
    request: str
    attempt: int
    cause: str
    mode: str
    delivered: int
    prompt_tokens: int
    worker: str
    incarnation: int
    policy: str
    model: str
    avoid: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()


class TransportObserved(Event, frozen=True, tag="transport_observed/1"):
    """What the replica saw of one attempt's connection.
    `kind`: reset, eof, refused, unreachable (no connection in time), stale, engine_dead (its
    agent or the engine itself said so), engine_error (it answered, but wrongly), declined (a
    moved request answered with a 4xx), stall, timeout."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    kind: str
    delivered: int
    detail: str = ""


class StallJudged(Event, frozen=True, tag="stall_judged/1"):
    """Decision: is the silent engine hung? All inputs of the policy, and its answer.

    `silent_us` since the last byte or step; `probe`: answered, silent, refused, none;
    `probe_steps` steps the engine says it made since the last look (-1 unknown);
    `step_age_us` age of the step it is in; `bound_us` what the policy allowed; `cpu_us`
    CPU time it used between two looks (-1 unknown); `held` requests it has (-1 unknown).
    """

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    silent_us: int
    probe: str
    probe_steps: int
    step_age_us: int
    bound_us: int
    hung: bool
    cpu_us: int = -1
    held: int = -1


class WorkerSuspected(Event, frozen=True, tag="worker_suspected/1"):
    """This replica sends nothing new to the incarnation until it is cleared."""

    worker: str
    incarnation: int
    reason: str


class WorkerCleared(Event, frozen=True, tag="worker_cleared/1"):
    """The suspicion is over: the incarnation made progress again."""

    worker: str
    incarnation: int
    evidence: str


class RequestEnded(Event, frozen=True, tag="request_ended/1"):
    """The terminal event of a request (I1), as its client saw it: the first in the log's
    total order ends the request.

    One exception to there being one: a gateway that lives but was cut from the log is
    declared lost, and the leader ends its requests in stream `fleet`; back again, it lands
    its own word on those that it served meanwhile. That later event is not
    counted; it closes dispatches still accounted and tells what the client saw.

    `outcome`: completed, cancelled, failed, rejected. `status` is the HTTP status
    (499 for a client that left). `verdict` as carried to the client.
    """

    request: str
    outcome: str
    status: int
    tokens: int
    finish: str
    attempts: int
    verdict: str
    ttft_us: int = -1
    longest_gap_us: int = -1
    detail: str = ""


class GroupsReceived(Event, frozen=True, tag="groups_received/1"):
    """When watched revision groups arrived: `revision` of the first, then pairs
    (revision delta, microseconds delta) in order; the first delta counts from the
    replica's own monotonic origin."""

    revision: int
    deltas: tuple[int, ...]


class TimerFired(Event, frozen=True, tag="timer_fired/1"):
    """A timer of this replica ran out, and what it did next follows from that. `timer`: wait
    (request `key` found no worker within the bound), retry (it goes again to where it failed),
    stall (`key` is worker:incarnation: its silence reached the bound)."""

    timer: str
    key: str


class AdminCommanded(Event, frozen=True, tag="admin_commanded/1"):
    """An operator's change, with its principal (I16). `command_id` is made of
    the principal and its idempotency key. `command`: drain, undrain, restart, hold, release
    (`target` a worker), config (a setting and its `value`), resign (the leader)."""

    command_id: str
    principal: str
    command: str
    target: str
    value: str = ""


# --- checkpoints, in replica streams --------------------------------------------------


class HolderCandidate(Struct, frozen=True, array_like=True, gc=False):
    """One worker a placement looked at. `load`: its expected recovery load (LUMEN Eq. 4) in
    blocks; `free_bytes` of its budget (Eq. 5). `excluded` says why not; empty when it could."""

    worker: str
    load: int
    free_bytes: int
    excluded: str = ""


class HolderChosen(Event, frozen=True, tag="holder_chosen/1"):
    """Decision: where a request's checkpoint goes (LUMEN Algorithm 1). `cause`: arrival,
    recovered, holder_lost, draining, holder_joined. `holders` may be fewer than wanted, or
    none: `reason` says why (budget, alone, policy). `expected_bytes` is what was reserved."""

    decision: str
    basis: Basis
    request: str
    attempt: int
    cause: str
    primary: str
    holders: tuple[str, ...]
    policy: str
    wanted: int
    expected_blocks: int
    expected_bytes: int
    reason: str = ""
    candidates: tuple[HolderCandidate, ...] = ()


class RecoveryOption(Struct, frozen=True, array_like=True, gc=False):
    """One way a recovery looked at. `kind`: restore or recompute, on `worker` from
    `holder`'s checkpoint of `restored` tokens. Microseconds: until the worker is free,
    moving the blocks, computing the rest; `done_us` is their end together."""

    worker: str
    kind: str
    holder: str
    restored: int
    wait_us: int
    move_us: int
    compute_us: int
    done_us: int
    excluded: str = ""


class RecoveryChoice(Struct, frozen=True, array_like=True, gc=False):
    """What was chosen for one request (`chosen` indexes `options`; -1: none was left).
    `tokens` of it must be in a cache. `avoid`: `worker:incarnation` that failed it before."""

    request: str
    attempt: int
    tokens: int
    chosen: int
    options: tuple[RecoveryOption, ...]
    avoid: tuple[str, ...] = ()


class RecoveryPlanned(Event, frozen=True, tag="recovery_planned/1"):
    """Decision: where the interrupted requests of one failure go (LUMEN Algorithm 2),
    together, with all that was looked at."""

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    policy: str
    choices: tuple[RecoveryChoice, ...]


# --- the leader's stream -----------------------------------------------------------


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


class ReplicaLost(Event, frozen=True, tag="replica_lost/1"):
    """A replica's lease is gone while the log was healthy; its streams are orphans."""

    replica: str
    epoch: int


class Effect(Struct, frozen=True, array_like=True, gc=False):
    """One imperative to a worker's agent. `kind`: hold (do not restart), release,
    restart, drain, undrain. Refused when `incarnation` (0: any) is older than the agent's."""

    kind: str
    worker: str
    incarnation: int = 0
    argument: str = ""


class EffectsDecided(Event, frozen=True, tag="effects_decided/1"):
    """What the leader asks of agents; applied once by target state (I15). `again` >= 0:
    nothing new, effect `again` of that decision stated anew for an agent that may have
    missed it (the log before may be trimmed)."""

    decision: str
    basis: Basis
    cause: str
    effects: tuple[Effect, ...]
    again: int = -1


class DetailDecided(Event, frozen=True, tag="detail_decided/1"):
    """Decision: how much of their engines' steps agents write, `full` or `shed` (figures
    coalesced, no change of a request's course left out), where it `was`; and all it rests
    on. Said again while shed, for agents that come later."""

    detail: str
    was: str
    database_bytes: int
    quota_bytes: int
    shed_percent: int


class CheckpointsReleased(Event, frozen=True, tag="checkpoints_released/1"):
    """These requests ended, and blocks of theirs are still held: whoever has some drops
    them. Told once; what is not heard expires."""

    requests: tuple[str, ...]


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


WORKER_EVENTS = (
    WorkerRegistered
    | WorkerDeregistered
    | EngineStarted
    | EngineReady
    | EngineDied
    | EngineRestartScheduled
    | EngineStep
    | EffectApplied
    | StreamResumed
    | StateDaemonStarted
    | StateDaemonLost
    | StateDaemonReported
    | CheckpointAcknowledged
    | CheckpointsAcknowledged
    | CheckpointEvicted
    | CheckpointDropped
    | RestoreStarted
    | RestoreDone
    | RestoreFailed
)
REPLICA_EVENTS = (
    ReplicaStarted
    | ReplicaStopped
    | RequestArrived
    | RouteDecided
    | TransportObserved
    | StallJudged
    | WorkerSuspected
    | WorkerCleared
    | RequestEnded
    | GroupsReceived
    | TimerFired
    | AdminCommanded
    | HolderChosen
    | RecoveryPlanned
)
LEADER_EVENTS = (
    LeaderElected
    | LeaderResigned
    | Tick
    | WorkerLost
    | ReplicaLost
    | EffectsDecided
    | CheckpointsReleased
    | StateHashed
    | SnapshotTaken
    | ConfigChanged
    | DetailDecided
)
AnyEvent = WORKER_EVENTS | REPLICA_EVENTS | LEADER_EVENTS
