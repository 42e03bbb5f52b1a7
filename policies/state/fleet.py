"""What the fold knows: workers, live requests, streams, replicas. Data only: plain msgspec
structs, so a snapshot is `encode(fleet)` and the state hash (I7) is a digest of those bytes.
Dictionaries keep insertion order, which is the log's.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from relume.events.vocabulary import Effect
from relume.events.vocabulary.enums import (
    AdminCommand,
    EnginePhase,
    Guarantee,
    StepDetail,
)
from relume.policies.canary.canary_state import CanaryRecord, ClassValues
from relume.policies.crosscheck.check_state import CheckRecord, Dispute
from relume.policies.degradation.degradation_state import ModelDemand
from relume.policies.health.health_state import DecodeSteps, StepPace, WorkerHealth
from relume.policies.rollout.rollout_state import Rollout
from relume.policies.spares.spare_state import ModelSpares
from relume.policies.weights.weights_state import WeightsRecord


class Attempt(Struct, kw_only=True):
    """One attempt's share of its engine's load.

    `left`: prompt tokens not computed yet. `dispatched`: its `RouteDecided` was folded;
    `queued`: the engine reported it, with its `tokens`; `decoding`: its prefill is
    over; `preempted`: it lost its blocks and all its `tokens` are computed again, of which its
    engine had `generated` some; `ended`: the request has its terminal event, only the engine's
    last word is awaited; `filled`: full KV blocks it has; `tick`: of the last word about it.
    """

    request: str
    attempt: int
    left: int
    dispatched: bool = False
    queued: bool = False
    decoding: bool = False
    ended: bool = False
    filled: int = 0
    tokens: int = 0
    tick: int = 0
    preempted: bool = False
    generated: int | UnsetType = UNSET


class StepTime(Struct, kw_only=True):
    """What a step costs on workers of one class (`relume.policies.state.step_times`). `weights` of its features,
    in microseconds; `products` and `targets` are the normal equations they solve, older steps
    fading; `spread`: mean relative error; `samples` taken. Orders of workers go by
    `routing_weights`, which follow `weights` when it makes a difference (`step_times.PUBLISHED_CHANGE`).
    `grounds`: measured, class (weights are still of another build or hardware of `model`),
    default."""

    model: str
    weights: list[float]
    products: list[float]
    targets: list[float]
    grounds: str
    spread: float = 0.5
    samples: int = 0
    routing_weights: list[float] = field(default_factory=list, name="told")


class Cached(Struct):
    """What an engine's prefix cache holds, as far as it is reported
    (`relume.policies.state.prefix_index`). `block_tokens`: of its blocks, 0 without reports.
    `marks`: hashes of prefixes. `expected`: by attempt, prefixes of prompts that it is to
    compute."""

    block_tokens: int = 0
    marks: dict[int, None] = field(default_factory=dict)
    expected: dict[str, bytes] = field(default_factory=dict)


class UnreadableRecords(Struct, kw_only=True):
    """Records of a stream that cannot be read: how many, and of the last one its position, the digest
    of its bytes and why. `acknowledged`: how many of them an operator has acknowledged, by `command`.
    A segment that is skipped counts as one: `segment` is the number of the last of them, and `position`
    the stream's then."""

    count: int = 0
    position: int = 0
    digest: str = ""
    reason: str = ""
    acknowledged: int = 0
    command: str = ""
    segment: int | UnsetType = UNSET


class Drain(Struct, kw_only=True):
    """Why a worker drains, and until which tick its requests may wait for a cheap move (-1: no
    deadline)."""

    principal: str
    reason: str
    deadline_tick: int


LOADING = -1
"""The time of weights that are being loaded."""


class LoadedWeights(Struct, array_like=True):
    """See `WeightsLoaded`; while `took_ms` is LOADING, see `WeightsLoading`."""

    bytes: int
    read_bytes: int
    took_ms: int


NO_WEIGHTS = LoadedWeights(0, 0, 0)


class Leaving(Struct, kw_only=True):
    """Since when the worker's agent stops, or its engine is to be restarted. From `deadline_tick` on
    its requests wait for no cheap move."""

    since_tick: int
    deadline_tick: int


class Worker(Struct, kw_only=True):
    """One worker, from the log. Engine states: none, starting, ready, dead.

    Of the account: `prefill_left` sums all its `attempts`, `flights` and `flight_left` those
    that the engine has not confirmed, `prefilling` and `prefilling_tokens` count those it has
    and does not decode yet, with all their tokens. `absurd` counts records whose figures
    cannot be (they are not taken), `heard_tick` is of the last changes told, `step_tokens` are at
    most in a step (0: not known). `overhead_us`: of a time to first token, what steps do not
    explain. `plain`: a server without our plugin, whose token ids are not known.
    """

    name: str
    epoch: int = 0
    domain: str = ""
    present: bool = False
    agent_pid: int = 0
    agent_url: str = ""
    notices: str = ""
    incarnation: int = 0
    engine: EnginePhase = EnginePhase.NONE
    engine_pid: int = 0
    host: str = ""
    port: int = 0
    model: str = ""
    build: str = ""
    exact: tuple[str, ...] = ()
    plain: bool = False
    max_model_len: int = 0
    block_size: int = 0
    kv_blocks: int = 0
    family: str = ""
    block_bytes: int = 0
    draining: bool = False
    held: bool = False
    deaths: int = 0
    died_of: str = ""
    restart_delay_ms: int = 0
    # load, from the last step
    step: int = 0
    batch: int = 0
    sum_context: int = 0
    waiting: int = 0
    kv_used: int = 0
    step_us_high: int = 0
    lost_records: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    # what migration goes by: tick of the drain and of the last move (-1: none), requests at
    # the last ticks
    drained_tick: int = -1
    moved_tick: int = -1
    recent: list[int] = field(default_factory=list)
    # what computing a prompt costs here (policies.pace)
    decode_us: int = 0
    prefill_us: int = 0
    prefill_tokens: int = 0
    # its class of `step_times`, what steps take here over what they take there, and how
    # many are still all looked at
    steps_like: str = ""
    slowness: float = 1.0
    eager: int = 0
    step_tokens: int = 0
    # where its engine stood (policies.predict): the step under way began with the records of
    # revision `step_revision`, its prompts to compute with those of `prompts_revision`; the last
    # revision with steps, the time from the first to the last in one (falling slowly) and in this
    # one so far; requests that decode, their tokens in all
    step_revision: int = 0
    prompts_revision: int = 0
    report_revision: int = 0
    report_us: int = 0
    reported_us: int = 0
    decoding: int = 0
    context: int = 0
    absurd: int = 0
    heard_tick: int = 0
    overhead_us: int = 0
    streams: dict[str, int] = field(default_factory=dict)  # buffered, as it last reported
    # the account
    prefill_left: int = 0
    flights: int = 0
    flight_left: int = 0
    # the last dispatch: whose, when on that replica's clock, told at which revision
    sent_by: str = ""
    sent_us: int = -1
    sent_revision: int = 0
    prefilling: int = 0
    prefilling_tokens: int = 0
    attempts: dict[str, Attempt] = field(default_factory=dict)
    finished_early: dict[str, int] = field(default_factory=dict)
    # its prefix cache, and its number of reported marks
    prefix_marks: int = 0
    cached: Cached = field(default_factory=Cached)
    # not in the state before anything is known: older logs have none
    health: WorkerHealth | UnsetType = UNSET
    pace: StepPace | UnsetType = UNSET
    decode_steps: DecodeSteps | UnsetType = UNSET
    canary: CanaryRecord | UnsetType = UNSET
    checks: CheckRecord | UnsetType = UNSET
    drain: Drain | UnsetType = UNSET
    max_seqs: int | UnsetType = UNSET
    leaving: Leaving | UnsetType = UNSET
    rolling: Leaving | UnsetType = UNSET
    batch_limit: int | UnsetType = UNSET
    """Share of its maximum number of requests that its engine runs at once, in percent."""
    restored: int | UnsetType = UNSET
    """Tick of the last restore since its prefix cache was empty (not before version 11 of `health`)."""
    convicted: int | UnsetType = UNSET
    """Tick of the last verdict that its results are wrong (the same)."""
    weights: WeightsRecord | UnsetType = UNSET
    """Its model files (not before feature level 2)."""
    loaded: LoadedWeights | UnsetType = UNSET
    """Where its engine had its weights from, if they are to be in pools."""

    @property
    def price_percent(self) -> int:
        """What its requests cost in routing: more while its health is in doubt."""
        return 100 if isinstance(self.health, UnsetType) else self.health.price_percent

    @property
    def drains(self) -> bool:
        """Whether requests are to leave it: an operator drains it, its agent stops, or a rolling
        restart has come to it."""
        return self.draining or self.leaving is not UNSET or self.rolling is not UNSET


class Request(Struct, kw_only=True):
    """A live request: accepted, no terminal event yet.

    `places`: (worker, attempt key) of its dispatches. `orphaned` counts the events that
    left it without a gateway; the leader answers the first of them only. `engine_prompt_tokens`
    (`counted` in snapshots): prompt tokens by an engine's count (0: no engine had it yet, -1: it has
    several choices), where `prompt_tokens` may be its gateway's estimate. `worker`, `incarnation`:
    where its latest attempt went; `predicted_us` its first token's time, of a first attempt only.
    `resumable`, `grace_ticks`: see `RequestArrived`; `claim`: the client's last return. An orphan
    that may be resumed is `due` at that tick, and `expired` at the one that found it so (0: not).
    `doubted`: it was sent to a worker that is known to compute wrong results; what attempts up to
    `void_attempt` wrote to holders is not used.
    """

    request: str
    owner: str
    boot: str
    model: str
    stream: bool
    prompt_tokens: int
    verdict: Guarantee
    attempt: int = 0
    places: list[tuple[str, str]] = field(default_factory=list)
    orphaned: int = 0
    worker: str = ""
    incarnation: int = 0
    route: str = ""
    max_tokens: int = 0
    tenant: str = ""
    client_id: str = ""
    resumable: str = ""
    grace_ticks: int = 0
    claim: str = ""
    due: int = 0
    expired: int = 0
    engine_prompt_tokens: int = field(default=0, name="counted")
    predicted_us: int = -1
    doubted: bool | UnsetType = UNSET
    void_attempt: int | UnsetType = UNSET


class Receipts(Struct):
    """When a replica received the latest revisions (`relume.policies.state.overlay.receive_clock`): everything up to
    `revisions[i]` at `times[i]`, microseconds on its own clock, which stands at `clock_us`."""

    revisions: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    clock_us: int = 0


class Replica(Struct, kw_only=True):
    """A control plane replica, by its stream's name without the `r.`.

    `suspects`: worker -> incarnation it suspects. `settings` it was started with, as far
    as decisions depend on them. `decisions` counts its `RouteDecided`. `decided`: position of
    the last one's basis; `began`: an arrival of an earlier life is at this position or ahead.
    `receipts`: when it received what.
    """

    name: str
    epoch: int = 0
    boot: str = ""
    host: str = ""
    port: int = 0
    pid: int = 0
    policy: str = "least_load"
    seed: int = 0
    alive: bool = False
    decisions: int = 0
    suspects: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    receipts: Receipts = field(default_factory=Receipts)
    decided: int = 0
    began: int = 0


class Unheard(Struct, kw_only=True):
    """A request that only its engine told of, at `tick`: its gateway's word is on its way, or
    never comes. `replica` and `boot` of that gateway. It was `due` at that tick (0: not), and
    the leader `ended` it."""

    replica: str
    boot: str
    attempt: int
    tick: int
    due: int = 0
    ended: bool = False


class Coverage(Struct):
    """What one holder acknowledged of one request: per child, tokens and bytes."""

    attempt: int
    tokens: dict[int, int] = field(default_factory=dict)
    bytes: dict[int, int] = field(default_factory=dict)


class Placed(Struct, kw_only=True):
    """Where the checkpoint of a live request goes, and how large it was expected to be."""

    primary: str
    attempt: int
    holders: tuple[str, ...]
    blocks: int
    bytes: int


class Planned(Struct, kw_only=True):
    """Where a request goes if attempt `attempt` of it is lost or moved, and the holder it is
    restored from (empty: it is computed again). Of a move: the worker it leaves, and when."""

    attempt: int
    worker: str
    holder: str = ""
    source: str = ""
    tick: int = -1


class Rate(Struct):
    """What restores over one link moved, and the time that took; old ones fade."""

    bytes: int = 0
    us: int = 0


class Holder(Struct, kw_only=True):
    """The state daemon of one worker's host, from the log. `rates`: restores from
    it, by the worker that restored. `figures` are the statistics that the daemon last reported.
    `budget_bytes` are of its memory and its file.
    `placed_blocks`: of the checkpoints placed on it, as Eq. 4 counts them, `promised_bytes`
    of them not held yet; kept up as sums of `coverage.share`."""

    name: str
    boot: str = ""
    epoch: int = 0
    address: str = ""
    local: str = ""
    machine: str = ""
    family: str = ""
    budget_bytes: int = 0
    alive: bool = False
    held_bytes: int = 0
    covered: dict[str, Coverage] = field(default_factory=dict)
    evicted: int = 0
    placed_blocks: int = 0
    promised_bytes: int = 0
    rates: dict[str, Rate] = field(default_factory=dict)
    figures: dict[str, int] = field(default_factory=dict)


class DrainOrder(Struct, kw_only=True):
    """What an operator said with the command to drain a worker: see `AdminCommanded`."""

    reason: str
    deadline_ticks: int
    force: bool


class OpenCommand(Struct, kw_only=True):
    """An operator's command that the leader has not carried out yet; `tries`: how often it was
    tried. `drain`: only if there is more to say than the command. `late`: it waited for the log."""

    principal: str
    command: AdminCommand
    target: str
    value: str
    tries: int = field(default=1, name="asked")
    drain: DrainOrder | UnsetType = UNSET
    late: bool | UnsetType = UNSET


class PendingEffect(Struct, kw_only=True):
    """Effect `index` of a decision, which its agent has neither applied nor refused yet.
    The log that held it may be trimmed: the leader writes it again from here. `due`: the
    agent restarted since it was last written."""

    decision: str
    index: int
    cause: str
    effect: Effect
    due: bool = False


class Head(Struct):
    """The end of one stream: epoch, segment number and hash, events so far."""

    epoch: int
    seq: int
    hash: bytes
    position: int


class Fleet(Struct, dict=True, kw_only=True):
    """The fold of the log up to `revision`.

    `order` digests the segments folded so far with their revisions, so that two states
    with the same hash come from the same events in the same total order.

    `owners` (living owner keys, stream -> epoch) and `gone` (stream -> tick at which its
    owner was missed first) are what etcd shows of leases now. Their history is
    not in the segments, so they are no part of the state hash and decide nothing but
    when the leader writes `WorkerLost` and `ReplicaLost`, the facts the fold goes by.

    `holders`: state daemons by worker; `placed`: live requests that have a checkpoint
    holder; `ending`: requests that had one and ended at that tick; their blocks may still
    be held. `planned`: decided moves of requests by the request. `restores`: how restores
    ended, and the tokens they saved. `detail`: of the engines' steps in the log, full or shed.
    `steptimes`: by class of worker. `withheld`: by model, workers against which verdicts are withheld
    (unset before the first); `canaries`: by class, the golden values; `disputes`: by request, those
    about answers; `finished`: by request, prompt tokens of the latest requests that may be answered
    again (`relume.policies.crosscheck.check_budget`); `demand`: by model, where degradation is decided;
    `spares`: by model, where there are any; `rollout`: the last rolling restart; `feature_level`: unset
    before the first raise (`relume.policies.leader.feature_level`). `landing`: streams of replicas that write
    what waited for the log.
    `unacknowledged` (`unheard` in snapshots): see
    `relume.policies.state.lifecycles.unacknowledged`. What is no field
    (`relume.policies.state.dirty_set`) is no part of the state.
    """

    revision: int = 0
    order: bytes = b""
    workers: dict[str, Worker] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    streams: dict[str, Head] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    gone: dict[str, int] = field(default_factory=dict)
    config: dict[str, str] = field(default_factory=dict)
    commands: dict[str, bool] = field(default_factory=dict)
    open_commands: dict[str, OpenCommand] = field(default_factory=dict)
    pending_effects: dict[str, PendingEffect] = field(default_factory=dict)
    leader: str = ""
    tick: int = -1
    tick_unix_ms: int = 0
    healthy_since_tick: int = 0
    arrived: int = 0
    ended: int = 0
    decisions: int = 0
    changes: int = 0
    detail: StepDetail = StepDetail.FULL
    holders: dict[str, Holder] = field(default_factory=dict)
    placed: dict[str, Placed] = field(default_factory=dict)
    ending: dict[str, int] = field(default_factory=dict)
    restores: dict[str, int] = field(default_factory=dict)
    planned: dict[str, Planned] = field(default_factory=dict)
    steptimes: dict[str, StepTime] = field(default_factory=dict)
    unacknowledged: dict[str, Unheard] = field(default_factory=dict, name="unheard")
    withheld: dict[str, tuple[str, ...]] | UnsetType = UNSET
    canaries: dict[str, ClassValues] | UnsetType = UNSET
    disputes: dict[str, Dispute] | UnsetType = UNSET
    unreadable: dict[str, UnreadableRecords] | UnsetType = UNSET
    demand: dict[str, ModelDemand] | UnsetType = UNSET
    rollout: Rollout | UnsetType = UNSET
    decode_times: dict[str, StepTime] | UnsetType = UNSET
    feature_level: int | UnsetType = UNSET
    spares: dict[str, ModelSpares] | UnsetType = UNSET
    finished: dict[str, int] | UnsetType = UNSET
    landing: tuple[str, ...] | UnsetType = UNSET


_UNTOLD = Cached()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Fleet)


def dump(fleet: Fleet) -> bytes:
    """The fleet as bytes, whole: a snapshot."""
    return _encoder.encode(fleet)


def load(data: bytes) -> Fleet:
    """The fleet of a snapshot. Raises msgspec.ValidationError when it is not one."""
    return _decoder.decode(data)


def state_hash(fleet: Fleet) -> bytes:
    """Hash of the state that follows from the segments alone (I7), 16 bytes.

    Leases are left out, and so is the revision: a transaction that only touched an
    owner key has a revision and no segment. What prefix caches hold stands in it by number
    only: there may be a million marks.
    """
    saved = fleet.revision, fleet.owners, fleet.gone
    cached = [worker.cached for worker in fleet.workers.values()]
    fleet.revision, fleet.owners, fleet.gone = 0, {}, {}
    for worker in fleet.workers.values():
        worker.cached = _UNTOLD
    try:
        data = _encoder.encode(fleet)
    finally:
        fleet.revision, fleet.owners, fleet.gone = saved
        for worker, its in zip(fleet.workers.values(), cached, strict=True):
            worker.cached = its
    return blake2b(data, digest_size=16).digest()
