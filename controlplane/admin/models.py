"""What the admin API answers, as structs: the JSON and the OpenAPI schemas come from here."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from relume.events.log import codec
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import (
    AdminCommand,
    BreakerState,
    CommandState,
    EffectKind,
    EnginePhase,
    FailureClass,
    Guarantee,
    HealthState,
    RequestState,
    WorkerState,
)
from relume.policies.degradation.capacity import serves
from relume.policies.degradation.decisions import figures_of
from relume.policies.degradation.degradation_settings import DegradationConfig
from relume.policies.degradation.demand import leader_config, models_of
from relume.policies.health.health_life import breaker_of
from relume.policies.health.health_state import WorkerHealth
from relume.policies.rollout import rollout_records
from relume.policies.spares.spare_decisions import is_spare
from relume.policies.state import unreadable
from relume.policies.state.fleet import NO_WEIGHTS, Fleet, Worker
from relume.policies.state.operator_commands import NO_DRAIN
from relume.policies.state.overlay.view import View
from relume.policies.weights import comparison


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """One worker. Load counts come from the replica's view, its own dispatches included.
    `suspected` by this replica; `health` as the leader decided it for all, with its circuit
    `breaker`, the class of the failure, the evidence, and since when (0: from the beginning).
    `unreadable`: why a record of its agent cannot be read, until an operator trusts the worker.
    Requests are to leave it: `draining` by an operator's command, `leaving` since its agent stops,
    `rolling` for a rolling restart; within `drain_ticks_left` (-1: there is no deadline).
    `drain_reason` and `drained_by` as the drain's command says. `weights_bytes` its engine loaded, of which
    `weights_read_bytes` came from files and the rest from pools (0: they are not left in pools). While
    `weights_took_ms` is -1, the files have `weights_bytes`, of which `weights_read_bytes` are read."""

    name: str
    state: WorkerState
    engine: EnginePhase
    present: bool
    draining: bool
    leaving: bool
    rolling: bool
    held: bool
    suspected: bool
    health: HealthState
    breaker: BreakerState
    failure: FailureClass
    evidence: str
    health_since_unix_ms: int
    agent_pid: int
    engine_pid: int
    incarnation: int
    epoch: int
    domain: str
    host: str
    port: int
    model: str
    build: str
    exact: tuple[str, ...]
    max_model_len: int
    requests: int
    prefill_tokens: int
    batch: int
    waiting: int
    kv_used: int
    kv_blocks: int
    steps: int
    step_us_high: int
    deaths: int
    died_of: str
    restart_delay_ms: int
    preemptions: int
    lost_records: int
    unreadable: str
    drain_reason: str
    drained_by: str
    drain_ticks_left: int
    weights_bytes: int
    weights_read_bytes: int
    weights_took_ms: int


class WorkerList(Struct, frozen=True):
    """All workers in the order the log met them, as of `revision`."""

    revision: int
    workers: list[WorkerInfo]


class ReplicaInfo(Struct, frozen=True, kw_only=True):
    """One control plane replica."""

    name: str
    alive: bool
    leader: bool
    boot: str
    host: str
    port: int
    pid: int
    policy: str
    suspects: dict[str, int]


class LeaderInfo(Struct, frozen=True, kw_only=True):
    """The leader. `epoch` is that of stream `fleet`; 0 with `leader` empty: no leader."""

    leader: str
    epoch: int
    tick: int
    tick_unix_ms: int
    healthy_since_tick: int
    answered_by: str
    answered_by_leads: bool


class DegradationInfo(Struct, frozen=True, kw_only=True):
    """Demand and capacity of one model, and its level of degradation since a tick (0: normal).
    `known`: whether the figures are; else they are 0 and `served_permille` is -1. `usable_requests_s`
    of `requests_s` count as capacity; `served_permille` of the demand is served with them.
    `wanted_workers` would serve the demand; while unknown, as many as the model has."""

    model: str
    level: int
    since_tick: int
    known: bool
    served_permille: int
    workers: int
    wanted_workers: int
    sequences: int
    requests_s: float
    tokens_s: int
    usable_requests_s: float
    demand_requests_s: float
    demand_tokens_s: int
    prompt_tokens: int
    output_tokens: int


class DegradationList(Struct, frozen=True):
    """All models that have demand, by the fold at `revision`; none with `mode` off."""

    revision: int
    mode: str
    models: list[DegradationInfo]


class LogInfo(Struct, frozen=True, kw_only=True):
    """This replica's position in the log. `pending` of its own events are not durable yet;
    the newest group was folded `silent_ms` ago. `detail` of the engines' steps that agents
    write: full, or shed while etcd is short of room."""

    revision: int
    position: int
    durable: int
    pending: int
    healthy: bool
    silent_ms: int
    spool_bytes: int
    detail: str


class FleetInfo(Struct, frozen=True, kw_only=True):
    """The fleet in one answer."""

    replica: str
    revision: int
    models: list[str]
    serving: bool
    leader: LeaderInfo
    log: LogInfo
    workers: list[WorkerInfo]
    replicas: list[ReplicaInfo]
    live_requests: int
    arrived: int
    ended: int
    decisions: int
    open_commands: int
    pending_effects: int


class RequestInfo(Struct, frozen=True, kw_only=True):
    """One request. The counts of an ended one are what its client saw. `client_id`: its
    x-request-id. `workers`: where its attempts went, in order. `arrived_ms`: when it arrived, on
    the wall clock of its gateway (-1: before what this replica remembers)."""

    request: str
    client_id: str
    state: RequestState
    model: str
    route: str
    stream: bool
    owner: str
    verdict: Guarantee
    reason: str
    prompt_tokens: int
    max_tokens: int
    attempts: int
    workers: list[str]
    status: int = 0
    tokens: int = -1
    finish: str = ""
    ttft_us: int = -1
    longest_gap_us: int = -1
    detail: str = ""
    arrived_ms: int = -1


class RequestList(Struct, frozen=True):
    """Live requests and those that ended most recently, newest last. `more`: older ones match too."""

    revision: int
    requests: list[RequestInfo]
    more: bool = False


class EventInfo(Struct, frozen=True, kw_only=True):
    """One event and its place: `id` is `revision.index`, the total order; `position` its
    number in `stream`. `event` holds `type` and the fields by name. `text`: the event in one
    line, if the query has `text=1`."""

    id: str
    revision: int
    stream: str
    position: int
    at_ms: int
    event: dict[str, Any]
    text: str = ""


class EventPage(Struct, frozen=True):
    """Events in order. `next` is the cursor to continue from (pass it as `after`); `complete`:
    there is nothing newer."""

    events: list[EventInfo]
    next: str
    complete: bool


class RequestDetail(Struct, frozen=True):
    """A request with everything the log says of its course, except engine steps."""

    request: RequestInfo
    events: list[EventInfo]


class DecisionInfo(Struct, frozen=True, kw_only=True):
    """One decision about where it goes, whether it waits or is refused, its basis (revision,
    position) in `decision`. `source`: `log`, or
    `admission` when only the worker's journal still holds it (the gateway died first).
    `predicted_ttft_us` where it went, and `actual_ttft_us` on the clock of the replica that
    decided, or of the client's answer (-1: not known)."""

    id: str
    revision: int
    stream: str
    position: int
    source: str
    decision: dict[str, Any]
    predicted_ttft_us: int = -1
    actual_ttft_us: int = -1


class DecisionList(Struct, frozen=True):
    """The decisions about one request, in order."""

    request: str
    decisions: list[DecisionInfo]


class HolderInfo(Struct, frozen=True, kw_only=True):
    """A state daemon. `load`: expected recovery load (LUMEN Eq. 4) of `placed_blocks` and the
    worker's requests; `promised_bytes` are placed on it and not held yet; `rates_bytes_s`:
    measured restores from it, by the worker that restored; `budget_bytes` is of memory and
    file together."""

    worker: str
    alive: bool
    boot: str
    domain: str
    address: str
    local: str
    budget_bytes: int
    held_bytes: int
    promised_bytes: int
    placed_blocks: int
    load: int
    requests: int
    evicted: int
    rates_bytes_s: dict[str, int]


class CheckpointInfo(Struct, frozen=True, kw_only=True):
    """The checkpoint of one live request: its holders, and the tokens each acknowledged
    (`covered`, former holders included) of the `kv_tokens` that its engine has in whole
    blocks (-1: not known)."""

    request: str
    attempt: int
    worker: str
    holders: tuple[str, ...]
    expected_blocks: int
    covered: dict[str, int]
    kv_tokens: int


class CheckpointList(Struct, frozen=True, kw_only=True):
    """Which holder has what. `balance_percent`: the highest load of a living holder to the lowest,
    in percent (0: fewer than two); `restores` by how they ended, and the `tokens` saved."""

    revision: int
    placement: str
    recovery: str
    wanted: int
    balance_percent: int
    restores: dict[str, int]
    holders: list[HolderInfo]
    requests: list[CheckpointInfo]


class EffectInfo(Struct, frozen=True):
    """One effect of a command. `outcome`: pending, applied, or why the agent refused."""

    kind: EffectKind
    worker: str
    incarnation: int
    outcome: str


class CommandInfo(Struct, frozen=True, kw_only=True):
    """An operator's command. `revision`: where the log has the leader's answer."""

    command_id: str
    principal: str
    command: AdminCommand
    target: str
    value: str
    state: CommandState
    revision: int = 0
    message: str = ""


class DrainRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a drain. `deadline_s`: after it, running requests no longer wait for a cheap move (0:
    no deadline). `force`: also if too few workers of the model stay open."""

    reason: Annotated[str, Meta(max_length=200)] = ""
    deadline_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    force: bool = False


class RolloutRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a rolling restart. `deadline_s`: time in which requests may leave each worker (0: the
    default)."""

    model: str
    deadline_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0


class RolloutInfo(Struct, frozen=True, kw_only=True):
    """The last rolling restart, and whether it is `active`. `workers` of the present step, `todo` to
    come. `paused`: why the next step waits. `rollout`: id of its command; empty: there was none."""

    rollout: str = ""
    active: bool = False
    model: str = ""
    principal: str = ""
    stage: str = ""
    since_tick: int = 0
    workers: list[str] = []
    todo: list[str] = []
    paused: str = ""


class CommandDetail(Struct, frozen=True):
    """A command and what became of its effects."""

    command: CommandInfo
    effects: list[EffectInfo]


class Setting(Struct, frozen=True, kw_only=True):
    """One setting decisions depend on. `changed`: an operator set it, else it is what the
    replica was started with."""

    key: str
    value: str
    default: str
    changed: bool
    description: str


class SettingList(Struct, frozen=True):
    """The settings of the fleet, and those of this process (secrets masked)."""

    settings: list[Setting]
    serve: dict[str, Any]


class SettingChange(Struct, frozen=True, forbid_unknown_fields=True):
    """Body of PUT config."""

    key: str
    value: str | int | float


class StreamInfo(Struct, frozen=True, kw_only=True):
    """One stream of the log: its end in the fold, and its owner's epoch (0: none)."""

    stream: str
    epoch: int
    owner_epoch: int
    seq: int
    position: int
    hash: str


class StreamList(Struct, frozen=True):
    """All streams with the hash of the whole fold at `revision` (I7)."""

    revision: int
    state_hash: str
    streams: list[StreamInfo]


class Health(Struct, frozen=True):
    """Whether the replica can do its work."""

    status: str
    revision: int
    serving: bool
    log_healthy: bool


class ErrorBody(Struct, frozen=True):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct, frozen=True):
    """Every answer that is not 2xx."""

    error: ErrorBody


def evidence_of(fleet: Fleet, worker: Worker) -> str:
    """Why the worker is not healthy, and what holds it in quarantine; empty for a healthy one."""
    health = WorkerHealth() if isinstance(worker.health, UnsetType) else worker.health
    if health.state == HealthState.HEALTHY:
        return ""
    return "; ".join(filter(None, (health.evidence, comparison.state_in_words(fleet, worker))))


def worker_info(view: View, worker: Worker) -> WorkerInfo:
    """The worker as the replica's view has it."""
    prefill, requests = view.load(worker)
    suspected = is_suspected(view, worker)
    health = WorkerHealth() if isinstance(worker.health, UnsetType) else worker.health
    drain = NO_DRAIN if isinstance(worker.drain, UnsetType) else worker.drain
    loaded = NO_WEIGHTS if isinstance(worker.loaded, UnsetType) else worker.loaded
    return WorkerInfo(
        name=worker.name,
        state=shown_state(view.fleet, worker, suspected, requests),
        engine=worker.engine,
        present=worker.present,
        draining=worker.draining,
        leaving=worker.leaving is not UNSET,
        rolling=worker.rolling is not UNSET,
        held=worker.held,
        suspected=suspected,
        health=health.state,
        breaker=breaker_of(health.state),
        failure=health.failure,
        evidence=evidence_of(view.fleet, worker),
        health_since_unix_ms=health.since_unix_ms,
        agent_pid=worker.agent_pid,
        engine_pid=worker.engine_pid,
        incarnation=worker.incarnation,
        epoch=worker.epoch,
        domain=worker.domain,
        host=worker.host,
        port=worker.port,
        model=worker.model,
        build=worker.build,
        exact=worker.exact,
        max_model_len=worker.max_model_len,
        requests=requests,
        prefill_tokens=prefill,
        batch=worker.batch,
        waiting=worker.waiting,
        kv_used=worker.kv_used,
        kv_blocks=worker.kv_blocks,
        steps=worker.step,
        step_us_high=worker.step_us_high,
        deaths=worker.deaths,
        died_of=worker.died_of,
        restart_delay_ms=worker.restart_delay_ms,
        preemptions=worker.preemptions,
        lost_records=worker.lost_records,
        unreadable=unreadable.why(view.fleet, worker.name),
        drain_reason=drain.reason,
        drained_by=drain.principal,
        drain_ticks_left=_ticks_left(worker, view.fleet.tick),
        weights_bytes=loaded.bytes,
        weights_read_bytes=loaded.read_bytes,
        weights_took_ms=loaded.took_ms,
    )


def is_suspected(view: View, worker: Worker) -> bool:
    """Whether the view's replica suspects the worker's engine."""
    return worker.incarnation > 0 and view.suspect(worker.name) == worker.incarnation


def shown_state(fleet: Fleet, worker: Worker, suspected: bool, requests: int) -> WorkerState:
    """One word for the worker, spares included."""
    state = worker_state(worker, suspected, requests)
    if state == WorkerState.SERVING and is_spare(fleet, worker):
        return WorkerState.SPARE
    return state


def _ticks_left(worker: Worker, tick: int) -> int:
    """Until the first deadline by which its requests are to leave it; -1: there is none."""
    causes = (worker.drain, worker.leaving, worker.rolling)
    known = [cause.deadline_tick for cause in causes if not isinstance(cause, UnsetType)]
    deadlines = [at for at in known if at >= 0]
    return max(min(deadlines) - tick, 0) if deadlines else -1


def rollout_of(fleet: Fleet) -> RolloutInfo:
    """The last rolling restart."""
    if isinstance(found := fleet.rollout, UnsetType):
        return RolloutInfo()
    return RolloutInfo(
        rollout=found.rollout,
        active=rollout_records.active(fleet) is not None,
        model=found.model,
        principal=found.principal,
        stage=found.stage,
        since_tick=found.since,
        workers=list(found.workers),
        todo=found.todo,
        paused=found.paused,
    )


def degradation_of(fleet: Fleet, only: str = "") -> DegradationList:
    """Demand, capacity and level of each model, or of one."""
    config = leader_config(fleet)
    found = [
        _degradation_info(fleet, model, level.level, level.since, config)
        for model, level in models_of(fleet).items()
        if not only or model == only
    ]
    return DegradationList(fleet.revision, config.mode, found)


def _degradation_info(
    fleet: Fleet, model: str, level: int, since: int, config: DegradationConfig
) -> DegradationInfo:
    figures = figures_of(fleet, model, config)
    if figures is None:
        count = sum(worker.model == model for worker in fleet.workers.values())
        return DegradationInfo(
            model=model, level=level, since_tick=since, known=False, served_permille=-1,
            workers=sum(serves(fleet, worker, model) for worker in fleet.workers.values()),
            wanted_workers=count, sequences=0, requests_s=0, tokens_s=0, usable_requests_s=0,
            demand_requests_s=0, demand_tokens_s=0, prompt_tokens=0, output_tokens=0,
        )  # fmt: skip
    return DegradationInfo(
        model=model,
        level=level,
        since_tick=since,
        known=True,
        served_permille=figures.share,
        workers=figures.capacity.workers,
        wanted_workers=figures.wanted,
        sequences=figures.capacity.sequences,
        requests_s=figures.capacity.requests_per_ks / 1000,
        tokens_s=figures.capacity.tokens_per_s,
        usable_requests_s=figures.usable_per_ks / 1000,
        demand_requests_s=figures.demand_per_ks / 1000,
        demand_tokens_s=figures.demand_tokens_per_s,
        prompt_tokens=figures.workload.prompt_tokens,
        output_tokens=figures.workload.output_tokens,
    )


def worker_state(worker: Worker, suspected: bool, requests: int) -> WorkerState:
    """One word for the worker; the first that holds."""
    if not worker.present:
        return WorkerState.LOST if worker.epoch else WorkerState.NONE
    if worker.held and worker.engine != EnginePhase.READY:
        return WorkerState.HELD
    if worker.engine != EnginePhase.READY:
        return WorkerState(worker.engine)
    state = HealthState.HEALTHY if worker.health is UNSET else worker.health.state
    if breaker_of(state) != BreakerState.CLOSED:
        return WorkerState(state)
    if suspected:
        return WorkerState.SUSPECTED
    if worker.drains:
        return WorkerState.DRAINING if requests else WorkerState.DRAINED
    if state == HealthState.SUSPECT:
        return WorkerState.SUSPECTED
    return WorkerState.SERVING


def streams_of(fleet: Fleet, digest: bytes) -> StreamList:
    """Heads and owners of all streams; `digest` is the state hash."""
    streams = [
        StreamInfo(
            stream=name,
            epoch=head.epoch,
            owner_epoch=fleet.owners.get(name, 0),
            seq=head.seq,
            position=head.position,
            hash=head.hash.hex(),
        )
        for name, head in sorted(fleet.streams.items())
    ]
    streams += [
        StreamInfo(stream=name, epoch=0, owner_epoch=epoch, seq=0, position=0, hash="")
        for name, epoch in sorted(fleet.owners.items())
        if name not in fleet.streams
    ]
    return StreamList(fleet.revision, digest.hex(), streams)


def event_info(entry: Entry, text: str = "") -> EventInfo:
    """An event of the log for people, with its line if the caller has one."""
    return EventInfo(
        id=f"{entry.revision}.{entry.index}",
        revision=entry.revision,
        stream=entry.stream,
        position=entry.position,
        at_ms=entry.at_ms,
        event=codec.to_json(entry.event),
        text=text,
    )
