"""Events of worker streams: agent, engine, and what the engine reports."""

from __future__ import annotations

from relume.events.vocabulary.base import Event
from relume.events.vocabulary.enums import DeathReason, EngineKind
from relume.events.vocabulary.step_changes import AnyChange


class WorkerRegistered(Event, frozen=True, tag="worker_registered/1", kw_only=True):
    """An agent took ownership of its worker's stream. `domain` is the failure domain; at `notices`
    (host:port) the agent sends death notices, empty if it does not."""

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


class EngineReady(Event, frozen=True, tag="engine_ready/1", kw_only=True):
    """The engine answers HTTP at `host:port`. `exact` names what its self-test found exact.
    `family`: fingerprint family of its KV blocks, `block_bytes`: a block's size in a
    checkpoint, all ranks together; empty and 0 without checkpoints.
    `inexact`: what the self-test did not find exact, and why. `hardware` it computes on, and the
    maximum tokens per step (empty and 0: unknown)."""

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
    inexact: tuple[tuple[str, str], ...] = ()
    hardware: str = ""
    step_tokens: int = 0
    kind: EngineKind = EngineKind.VLLM


class EngineDied(Event, frozen=True, tag="engine_died/1"):
    """The engine process is gone."""

    worker: str
    incarnation: int
    reason: DeathReason
    detail: str = ""


class EngineHung(Event, frozen=True, tag="engine_hung/1", kw_only=True):
    """The agent found its engine hung: in `looks` looks one after another its loop took no turn,
    though it could have. It finished `steps` steps in its life; the one that it is in has the age
    `step_age_us` (0: it is in none) and was expected to take `expected_us` (-1 unknown). Since its
    last sign of life it used `cpu_us` of CPU time (-1 unknown) and waited `wait_us` for a CPU.
    `process_state`: that of /proc. `stacks`: file on the worker's host with the stacks of all its
    threads, empty if they could not be had."""

    worker: str
    incarnation: int
    silent_us: int
    looks: int
    steps: int
    step_age_us: int
    expected_us: int
    cpu_us: int
    wait_us: int
    running: int
    waiting: int
    process_state: str
    stacks: str = ""


class EngineRecovered(Event, frozen=True, tag="engine_recovered/1"):
    """An engine that its agent found hung takes turns again, after `hung_us`."""

    worker: str
    incarnation: int
    hung_us: int


class CanaryReported(Event, frozen=True, tag="canary_reported/1", kw_only=True):
    """The agent sent canary `canary` of prompt set `prompts` to its engine. The greedy answer:
    `tokens`, and at each position the largest log probabilities (`logprobs`, as many for each token,
    largest first). It took `took_us`; `alone`: nothing else ran or waited in the engine before or
    after, and nothing came meanwhile. `exact`: this engine gives the same bits alone and in a batch,
    as its agent found. `weights`: digest of the model's files, empty if they are not local.
    `confirms`: sent at once, because the answer before differed. `error`: why there is no answer."""

    worker: str
    incarnation: int
    canary: int
    prompts: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    took_us: int = 0
    alone: bool = False
    exact: bool = False
    weights: str = ""
    confirms: bool = False
    error: str = ""


class EngineRestartScheduled(Event, frozen=True, tag="engine_restart_scheduled/1"):
    """The agent will start incarnation `incarnation` after `delay_ms`."""

    worker: str
    incarnation: int
    delay_ms: int


class EngineStep(Event, frozen=True, tag="engine_step/1", kw_only=True):
    """One step of the engine, or load changes between steps (`duration_us` 0).

    `batch` requests decoded with `sum_context` tokens of context in all;
    `prefill_tokens` were computed; `waiting` stay queued; `kv_used` blocks of the
    pool are in use; `lost` records were dropped before this one because the agent
    did not read (their changes are missing). `gap_us` passed between the end of the step before
    and the beginning of this one, while requests were running or waiting all along (0: none, or
    unknown: the first step, or after the engine was idle). In both, its thread waited for a CPU for
    `wait_us` (0: also unknown).
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
    gap_us: int = 0
    wait_us: int = 0


class PrefixBlocksChanged(Event, frozen=True, tag="prefix_blocks_changed/1", kw_only=True):
    """What the engine's prefix cache gained and lost, as packed hashes of prefixes
    (`relume.events.wire.prefix`); `removed` came before `stored`. `reset`: before both it was
    empty, and from here on it is reported, in blocks of `block_tokens`."""

    incarnation: int
    stored: bytes = b""
    removed: bytes = b""
    reset: bool = False
    block_tokens: int = 0


class StreamsReported(Event, frozen=True, tag="streams_reported/1"):
    """Statistics of the streams that the engine buffers for clients that may resume, by name, at a
    low rate and when they changed, for people. Counts are since the engine started."""

    incarnation: int
    figures: tuple[tuple[str, int], ...]


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
