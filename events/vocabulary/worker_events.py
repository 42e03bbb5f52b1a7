"""Events of worker streams: agent, engine, and what the engine reports."""

from __future__ import annotations

from typing import ClassVar

from relume.events.vocabulary.base import Event
from relume.events.vocabulary.enums import DeathReason, EngineKind
from relume.events.vocabulary.step_changes import AnyChange


class WorkerRegistered(Event, frozen=True, tag="worker_registered/1", kw_only=True):
    """An agent took ownership of its worker's stream."""

    worker: str
    domain: str
    """Failure domain: what fails together."""
    agent_pid: int
    """Process id of the agent."""
    agent_url: str = ""
    """Status page of the agent; empty: none."""
    notices: str = ""
    """`host:port` at which the agent announces deaths; empty: it does not."""


class WorkerLeaving(Event, frozen=True, tag="worker_leaving/1"):
    """The agent is asked to stop. Requests leave its engine, which it stops when it has none."""

    worker: str
    within_ms: int
    """Time after which the engine stops although it has requests."""


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
    """Start time of the process, from /proc."""


class EngineReady(Event, frozen=True, tag="engine_ready/1", kw_only=True):
    """The engine has passed its self-test and answers HTTP at `host:port`."""

    worker: str
    incarnation: int
    host: str
    port: int
    model: str
    max_model_len: int
    """Maximum tokens of one request."""
    block_size: int
    """Tokens per KV block."""
    kv_blocks: int
    """KV blocks in its pool."""
    build: str = ""
    """Version of the engine."""
    exact: tuple[str, ...] = ()
    """Abilities that its self-test found exact."""
    family: str = ""
    """Fingerprint family of the engine's KV blocks; empty: no checkpoints."""
    block_bytes: int = 0
    """Bytes of one block in a checkpoint, all ranks together; 0: no checkpoints."""
    inexact: tuple[tuple[str, str], ...] = ()
    """(ability, why) that its self-test did not find exact."""
    hardware: str = ""
    """What it computes on; empty: unknown."""
    step_tokens: int = 0
    """Maximum tokens of one step; 0: unknown."""
    kind: EngineKind = EngineKind.VLLM
    """Empty: engine with the plugin; `plain`: a server without it."""
    max_seqs: int = 0
    """Maximum number of requests that run at once; 0: unknown."""


class EngineDied(Event, frozen=True, tag="engine_died/1"):
    """The engine process is gone."""

    worker: str
    incarnation: int
    reason: DeathReason
    detail: str = ""


class EngineHung(Event, frozen=True, tag="engine_hung/1", kw_only=True):
    """The agent found its engine hung: in several looks one after another its loop took no
    turn, though it could have."""

    worker: str
    incarnation: int
    silent_us: int
    """Time since the last turn of its loop."""
    looks: int
    """Looks in a row that count against it."""
    steps: int
    """Steps that it finished."""
    step_age_us: int
    """Age of the step in progress; 0: none."""
    expected_us: int
    """The longest that the step in progress should take; -1: unknown."""
    cpu_us: int
    """CPU time that it used since its last turn; -1: unknown."""
    wait_us: int
    """Time that it waited for a CPU since its last turn."""
    running: int
    """Requests that run in it."""
    waiting: int
    """Requests that wait in it."""
    process_state: str
    """State of its process in /proc: R, S, D, T (stopped)."""
    stacks: str = ""
    """File on its host with the stacks of all its threads; empty: they could not be had."""


class ReportsDropped(Event, frozen=True, tag="reports_dropped/1", kw_only=True):
    """The agent dropped what its engine reported, because readers of the log could not read it. At
    most one a second."""

    worker: str
    incarnation: int
    count: int
    """Reports dropped since the last such event of this engine."""
    reason: str
    """Why the last of them was dropped."""
    muted: bool = False
    """A process of the engine sends what cannot be cut into reports: the agent reads no more of
    it."""


class EngineRecovered(Event, frozen=True, tag="engine_recovered/1"):
    """An engine that its agent found hung takes turns again."""

    worker: str
    incarnation: int
    hung_us: int
    """Time since the turn before its hang."""


class CanaryReported(Event, frozen=True, tag="canary_reported/1", kw_only=True):
    """The agent sent a canary to its engine. This is the greedy answer."""

    worker: str
    incarnation: int
    canary: int
    """Number of the canary in its prompt set."""
    prompts: int
    """Version of the set of prompts."""
    tokens: tuple[int, ...] = ()
    """Ids of the greedy tokens."""
    logprobs: tuple[float, ...] = ()
    """The largest log probabilities at each position, as many for each token, largest first."""
    took_us: int = 0
    """Time until the answer."""
    alone: bool = False
    """Whether nothing else ran or waited in the engine before or after, and nothing came
    meanwhile."""
    exact: bool = False
    """Whether the engine gives the same bits alone and in a batch, as its agent found."""
    weights: str = ""
    """Digest of the model's files; empty: they are not local."""
    confirms: bool = False
    """Whether it was sent at once, because the answer before differed."""
    error: str = ""
    """Why there is no answer; empty: there is one."""
    wait_us: int = 0
    """For how much of `took_us` the engine waited for a CPU."""


class WeightsReadStarted(Event, frozen=True, tag="weights_read_started/1", kw_only=True):
    """The agent reads every byte of the files of the model that its engine serves. `WeightsDigested`
    follows, while that engine lives."""

    tag_level: ClassVar[int] = 2

    worker: str
    incarnation: int
    weights: str
    """Digest of the names, the sizes and the first MiB of the files, as in `CanaryReported`."""
    size_bytes: int
    """Size of the files that are to be read."""


class WeightsDigested(Event, frozen=True, tag="weights_digested/1", kw_only=True):
    """The digest of every byte of the files of the model that an engine serves."""

    tag_level: ClassVar[int] = 2

    worker: str
    incarnation: int
    weights: str = ""
    """Digest of the names, the sizes and the first MiB of the files, as in `CanaryReported`."""
    digest: str = ""
    """Digest of the names and all bytes of the files; empty: see `error`."""
    files: tuple[tuple[str, str], ...] = ()
    """(name, digest of all bytes) of the files of more than 1 MiB, if they are not too many."""
    size_bytes: int = 0
    """Size of the files."""
    reread: bool = True
    """Whether every file was read for this engine. Otherwise digests are used that the agent had of
    files whose size, times and inode are the same."""
    took_ms: int = 0
    """Time that it took."""
    error: str = ""
    """Why there is no digest; empty: there is one."""


class WeightsLoading(Event, frozen=True, tag="weights_loading/1", kw_only=True):
    """How far an engine is that reads the files of its model. Its agent says so every other second, while
    that changes."""

    tag_level: ClassVar[int] = 3

    worker: str
    incarnation: int
    bytes: int
    """Size of the files."""
    read_bytes: int
    """Part of it that its first rank has read; each rank reads all files."""


class WeightsLoaded(Event, frozen=True, tag="weights_loaded/1", kw_only=True):
    """Where an engine had its weights from: it read the files, or found them in a pool of its host's
    memory, which outlives engines."""

    tag_level: ClassVar[int] = 2

    worker: str
    incarnation: int
    ranks: int
    """Number of ranks that have reported."""
    bytes: int
    """Size of the weights of all ranks."""
    read_bytes: int
    """Part of it that came from files; the rest was in pools."""
    took_ms: int
    """Time of the slowest rank."""
    why: str = ""
    """Why a rank's weights are in no pool; empty: they are."""


class EngineRestartScheduled(Event, frozen=True, tag="engine_restart_scheduled/1"):
    """The agent will start incarnation `incarnation` after `delay_ms`."""

    worker: str
    incarnation: int
    delay_ms: int
    """Delay before the start."""


class EngineStep(Event, frozen=True, tag="engine_step/1", kw_only=True):
    """One step of the engine, or load changes between steps (`duration_us` 0)."""

    incarnation: int
    step: int
    """Number of the step."""
    duration_us: int
    batch: int
    """Requests that decode."""
    sum_context: int
    """Tokens of context of all decoding requests."""
    prefill_tokens: int
    """Prompt tokens that were computed."""
    waiting: int
    """Requests that wait in the engine."""
    kv_used: int
    """KV blocks of the pool in use."""
    changes: tuple[AnyChange, ...] = ()
    """Load changes within the step."""
    lost: int = 0
    """Records that were dropped before this one, because the agent did not read. Their changes
    are missing."""
    gap_us: int = 0
    """Time between the step before and this one, while requests ran or waited; 0: none, or
    unknown (the first step, or the engine was idle)."""
    wait_us: int = 0
    """Time for which it waited for a CPU, in the step and the gap; 0: also unknown. While another process
    computes for the scheduler's, that one's waits count."""


class PrefixBlocksChanged(Event, frozen=True, tag="prefix_blocks_changed/1", kw_only=True):
    """What the engine's prefix cache lost and gained, in this order."""

    incarnation: int
    stored: bytes = b""
    """Packed hashes of prefixes that entered the cache (`relume.events.wire.prefix`)."""
    removed: bytes = b""
    """Packed hashes of prefixes that left the cache."""
    reset: bool = False
    """The cache was empty before this record, and is reported from here on."""
    block_tokens: int = 0
    """Tokens per block."""


class StreamsReported(Event, frozen=True, tag="streams_reported/1"):
    """Statistics of the streams that the engine buffers for clients that may resume, by name, at a
    low rate and when they changed, for people. Counts are since the engine started."""

    incarnation: int
    figures: tuple[tuple[str, int], ...]


class EffectApplied(Event, frozen=True, tag="effect_applied/1"):
    """An effect of a decision was carried out, or refused."""

    decision: str
    """Id of the `EffectsDecided`."""
    index: int
    """Index of the effect in it."""
    outcome: str = "applied"
    """`applied`, or why it was refused."""


class StreamResumed(Event, frozen=True, tag="stream_resumed/1"):
    """The writer's lease lapsed during an outage and it took its own stream again."""

    old_epoch: int
    """Epoch before the lease lapsed."""
    new_epoch: int
    """Epoch from here on."""
    spooled: int = 0
    """Events that waited on disk."""
