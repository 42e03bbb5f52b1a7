"""Events of replica streams: requests, decisions about them, and what was observed."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.enums import (
    AdminCommand,
    AttemptMode,
    CheckCause,
    Exclusion,
    Guarantee,
    ProbeResult,
    RequestOutcome,
    RouteCause,
    Tier,
    TimerKind,
    TransportKind,
)


class ReplicaStarted(Event, frozen=True, tag="replica_started/1", kw_only=True):
    """A control plane replica took its stream."""

    replica: str
    boot: str
    host: str
    port: int
    pid: int
    seed: int = 0
    """Seed of its random draws."""
    policy: str = "least_load"
    settings: tuple[tuple[str, str], ...] = ()
    """(name, value) of settings that decisions depend on, e.g. ("stall.cap_us", "3000000")."""


class ReplicaStopped(Event, frozen=True, tag="replica_stopped/1"):
    """The replica leaves on purpose with no stream open."""

    replica: str
    reason: str
    ended: int = 0
    """Requests that ended by themselves while it stopped."""
    moved: int = 0
    """Resumable streams that it left to other replicas."""
    cut: int = 0
    """Requests that it ended with an error."""


class RequestArrived(Event, frozen=True, tag="request_arrived/1", kw_only=True):
    """A client's request was accepted."""

    request: str
    model: str
    route: str
    """Path of the API."""
    stream: bool
    """A streaming response was asked for."""
    prompt_tokens: int
    max_tokens: int
    """Maximum number of generated tokens."""
    verdict: Guarantee
    reason: str = ""
    """Why the guarantee is not better."""
    estimated: bool = True
    """The prompt length is an estimate."""
    tenant: str = ""
    client_id: str = ""
    """The x-request-id that it came with or was given; need not be unique."""
    trace: str = ""
    """W3C traceparent that it came with."""
    resumable: str = ""
    """Digest of the resume token; empty: not resumable."""
    grace_ticks: int = 0
    """Ticks after its gateway's loss in which a client may return."""
    output_limit: int = 0
    """What `max_tokens` was lowered to, because capacity is short; 0: it was not."""


class ClientReturned(Event, frozen=True, tag="client_returned/1", kw_only=True):
    """The client of a resumable stream connected to this replica. From here on this replica
    owns the request, if it is still live and has not expired; what an earlier owner writes
    later is void."""

    request: str
    claim: str
    """Id of this return."""
    attempt: int
    """The attempt that was under way."""
    tokens: int
    """Tokens that the client has."""
    events: int
    """Events that the client has after that token."""


class Candidate(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """One worker that a decision looked at. The fields after `excluded` are known if it could
    be chosen."""

    worker: str
    incarnation: int
    cost: int
    """Cost in the policy's unit; lower is better."""
    prefill_tokens: int
    """Prompt tokens to compute."""
    requests: int
    """Requests on the worker."""
    excluded: Exclusion = Exclusion.NONE
    hit_tokens: int = 0
    """Prompt tokens of this request in its prefix cache."""
    batch: int = 0
    """Requests that it decodes."""
    context_tokens: int = 0
    """Tokens of all requests that it decodes."""
    kv_free: int = 0
    """KV blocks that would be left."""
    ttft_us: int = -1
    """Predicted time to first token; -1: unknown."""
    tpot_us: int = -1
    """Predicted time per output token; -1: unknown."""


class RouteDecided(Event, frozen=True, tag="route_decided/1", kw_only=True):
    """Where an attempt of a request goes, and on what ground: the dispatch."""

    decision: str
    basis: Basis
    request: str
    attempt: int
    cause: RouteCause
    """Why a dispatch was needed: arrival, or how the last attempt was lost."""
    mode: AttemptMode
    """How the attempt begins."""
    delivered: int
    prompt_tokens: int
    worker: str
    """The chosen worker; empty: none could take it."""
    incarnation: int
    policy: str
    """Policy that decided; `planned`: as the `RecoveryPlanned` of the lost attempt has it, or
    the `MigrationPlanned` of the one handed over."""
    model: str
    avoid: tuple[str, ...] = ()
    """Incarnations (`worker:incarnation`) that this request must avoid, because they failed
    it."""
    candidates: tuple[Candidate, ...] = ()
    others: tuple[tuple[str, int], ...] = ()
    """(reason, number) of workers that are not among the candidates, in a fleet of more than
    16; reason "": they were eligible, and are no better than the best named."""
    prefix: bytes = b""
    """Packed hashes of the prompt's prefixes (`relume.events.wire.prefix`); empty: unknown."""
    at_us: int = -1
    """Its time, on the clock of `GroupsReceived`; -1: unknown, statuses then count unadvanced."""
    ttft_us: int = -1
    """Predicted time to first token on the chosen worker; -1: unknown."""
    session: str = ""
    """Digest of the session; empty: none."""
    tier: Tier = Tier.NONE
    cached_tokens: int = 0
    """Tokens of its prompt that the chosen worker is expected to hold."""
    refused: str = ""
    """Why no worker was to take it although one could."""
    doubted: bool = False
    """Some of the delivered tokens come from a worker that computes wrong results, so the
    attempt compares them."""


class TransportObserved(Event, frozen=True, tag="transport_observed/1", kw_only=True):
    """What the replica saw of one attempt's connection."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    kind: TransportKind
    """What the replica saw of the attempt's connection."""
    delivered: int
    detail: str = ""
    status: int = 0
    """Status of the worker's answer; 0: none came."""


class StallJudged(Event, frozen=True, tag="stall_judged/1", kw_only=True):
    """Decision: is the silent engine hung? All inputs of the policy, and its answer."""

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    silent_us: int
    """Time since the last byte or step."""
    probe: ProbeResult
    """Answered, silent, refused or none."""
    probe_steps: int
    """Steps that the engine says it made since the last probe; -1: unknown."""
    step_age_us: int
    """Age of the current step."""
    bound_us: int
    """Silence that the policy allowed."""
    hung: bool
    """The answer."""
    cpu_us: int = -1
    """CPU time between two probes; -1: unknown."""
    held: int = -1
    """Requests that the engine has; -1: unknown."""
    expected_us: int = -1
    """The longest that the current step should take; -1: the engine does not say."""
    wait_us: int = -1
    """Time that its thread waited for a CPU between two probes; -1: unknown."""
    turns: int = -1
    """Turns of the engine's loop between two probes; -1: unknown."""


class StreamJudged(Event, frozen=True, tag="stream_judged/1", kw_only=True):
    """Decision: is the stream of an attempt stuck? Its engine makes steps, and no token comes.
    All inputs of the policy, and its answer. An engine that answers no probe is out of reach."""

    decision: str
    basis: Basis
    request: str
    attempt: int
    worker: str
    incarnation: int
    silent_us: int
    """Time since the stream's last byte; with a silent probe, since the last byte of any stream of the
    engine."""
    from_step: int
    """Number of the engine's last step when the replica found the stream silent."""
    probe: ProbeResult
    """What the engine's HTTP server did when it was probed: answered, or was silent."""
    steps: int
    """Steps of the engine since `from_step`, by the log."""
    decodes: bool
    """Whether the engine decodes the attempt, by its reports."""
    finished: bool
    """Whether the engine is done with the attempt, by its reports."""
    bound_us: int
    """Silence that the policy allowed."""
    stuck: bool
    """The answer."""
    held: int = -1
    """Requests that the engine had when it was probed, of a stream that has begun there; -1:
    unknown."""


class WorkerSuspected(Event, frozen=True, tag="worker_suspected/1"):
    """This replica sends nothing new to the incarnation until it is cleared."""

    worker: str
    incarnation: int
    reason: str


class WorkerCleared(Event, frozen=True, tag="worker_cleared/1"):
    """The suspicion is over: the incarnation works again, or answers and has nothing to do. The
    fields after `evidence` are what two probes showed."""

    worker: str
    incarnation: int
    evidence: str
    """What ended the suspicion."""
    probe: ProbeResult = ProbeResult.NONE
    """Result of the second probe; none: written before probes were recorded."""
    steps: int = -1
    """Steps between two probes; -1: unknown."""
    cpu_us: int = -1
    """CPU time between two probes; -1: unknown."""
    held: int = -1
    """Requests that the engine has; -1: unknown."""
    step_age_us: int = 0
    """Age of the current step."""
    expected_us: int = -1
    """The longest that the current step should take; -1: the engine does not say."""
    turns: int = -1
    """Turns of the engine's loop between two probes; -1: unknown."""


class RequestEnded(Event, frozen=True, tag="request_ended/1", kw_only=True):
    """The terminal event of a request (I1), as its client saw it: the first in the log's
    total order ends the request.

    One exception to there being one: a gateway that lives but was cut from the log is
    declared lost, and the leader ends its requests in stream `fleet`; back again, it lands its own
    end of those that it served meanwhile. That later event is not counted; it closes dispatches
    still accounted and shows what the client saw.

    `status` is the HTTP status
    (499 for a client that left). `verdict` as sent to the client.
    """

    request: str
    outcome: RequestOutcome
    """How the request ended."""
    status: int
    """HTTP status; 499: the client left."""
    tokens: int
    """Tokens that the client got."""
    finish: str
    """vLLM's finish reason."""
    attempts: int
    """Dispatches in total."""
    verdict: Guarantee
    ttft_us: int = -1
    """Time to first token; -1: unknown."""
    longest_gap_us: int = -1
    """Longest pause between two tokens; -1: unknown."""
    detail: str = ""


class CrossCheckDecided(Event, frozen=True, tag="cross_check_decided/1", kw_only=True):
    """Decision: an idle engine answers a finished request again, and the token ids are
    compared. Digests are those of `relume.events.wire.token_digest`."""

    decision: str
    basis: Basis
    request: str
    worker: str
    """Worker that answered the client."""
    incarnation: int
    """Incarnation that answered the client."""
    by: str
    """Worker that answers it again: another of the class, or in a dispute the same one."""
    by_incarnation: int
    """Incarnation of its engine."""
    cause: CheckCause
    tokens: int
    """Tokens of that answer."""
    answer: bytes
    """Digest of the token ids that the client got."""


class CrossChecked(Event, frozen=True, tag="cross_checked/1", kw_only=True):
    """What came of a `CrossCheckDecided`."""

    decision: str
    """Id of the `CrossCheckDecided`."""
    request: str
    worker: str
    """Worker that answered the client."""
    incarnation: int
    """Incarnation that answered the client."""
    by: str
    """Worker that answered it again."""
    by_incarnation: int
    """Incarnation of its engine."""
    took_us: int
    """Time of the engine."""
    answer: bytes = b""
    """Digest of the token ids that it gave."""
    differs: int = -1
    """Index of the first token that the client did not get; -1: all are equal."""
    error: str = ""
    """Why there is no answer; empty: there is one."""


class GroupsReceived(Event, frozen=True, tag="groups_received/1"):
    """When watched revision groups arrived: `revision` of the first, then pairs (revision
    counted from it, microseconds since the pair before) in order; the first time counts from the
    replica's own monotonic origin. A group within a millisecond after another has no pair of its
    own: that pair names the later revision."""

    revision: int
    """Revision of the first group."""
    deltas: tuple[int, ...]
    """Pairs (revision, microseconds), each counted from the pair before."""


class TimerFired(Event, frozen=True, tag="timer_fired/1"):
    """A timer of this replica ran out, and what it did next follows from that."""

    timer: TimerKind
    """Which timer."""
    key: str
    """What the timer belongs to: a request, or worker:incarnation."""


class AdminCommanded(Event, frozen=True, tag="admin_commanded/1", kw_only=True):
    """An operator's change, with its principal (I16)."""

    command_id: str
    """Digest of principal and idempotency key."""
    principal: str
    """Who asked."""
    command: AdminCommand
    """What the operator asks for."""
    target: str
    """A worker, a setting, the leader, or the model of a rolling restart."""
    value: str = ""
    """The new value."""
    reason: str = ""
    """Of a drain: why, in the operator's words."""
    deadline_ticks: int = 0
    """Of a drain, and of each worker's in a rolling restart: ticks after which running requests no
    longer wait for a cheap move; 0: no deadline, and the default of a rolling restart."""
    force: bool = False
    """Of a drain: also if fewer workers stay open than `migration.drain_floor`."""
