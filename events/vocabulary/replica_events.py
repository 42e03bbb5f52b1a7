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


class RequestArrived(Event, frozen=True, tag="request_arrived/1", kw_only=True):
    """A client's request was accepted. `verdict`: its resume guarantee; `reason`: why it is not
    better. `client_id`: the x-request-id it came with or was given, which need not be unique.
    `trace`: the W3C traceparent it came with. `resumable`: digest of the client's resume token;
    empty: it cannot resume. It may return up to `grace_ticks` ticks after its gateway was lost."""

    request: str
    model: str
    route: str
    stream: bool
    prompt_tokens: int
    max_tokens: int
    verdict: Guarantee
    reason: str = ""
    estimated: bool = True
    tenant: str = ""
    client_id: str = ""
    trace: str = ""
    resumable: str = ""
    grace_ticks: int = 0


class ClientReturned(Event, frozen=True, tag="client_returned/1", kw_only=True):
    """The client of a resumable stream connected to this replica with everything up to token
    `tokens` and `events` events after it. From here on this replica owns the request, if it
    is still live and has not expired; what an earlier owner writes later is void. `claim`
    names this return; `attempt` was under way."""

    request: str
    claim: str
    attempt: int
    tokens: int
    events: int


class Candidate(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """One worker a decision looked at: its cost (integer, lower is better) and parts.
    `excluded` says why it could not be chosen; empty when it could. Of its metrics then:
    prompt tokens of this request that it holds (`hit_tokens`), requests it decodes and their
    tokens in all, blocks it would have left, predicted TTFT and TPOT of this request in
    microseconds (-1: not computed)."""

    worker: str
    incarnation: int
    cost: int
    prefill_tokens: int
    requests: int
    excluded: Exclusion = Exclusion.NONE
    hit_tokens: int = 0
    batch: int = 0
    context_tokens: int = 0
    kv_free: int = 0
    ttft_us: int = -1
    tpot_us: int = -1


class RouteDecided(Event, frozen=True, tag="route_decided/1", kw_only=True):
    """Where attempt `attempt` of a request goes, and on what ground: the dispatch.

    `worker` empty: none could take it. `policy`
    planned: as the `RecoveryPlanned` of the lost attempt has it, or the `MigrationPlanned` of
    the one handed over.
    `delivered` tokens are with the client already. `avoid`: workers that failed it.
    `others`: in a fleet of more than 16 workers, how many are not among the candidates, by
    reason ("": they were eligible, and are no better than the best named).
    `prefix`: packed hashes of the prompt's prefixes (`relume.events.wire.prefix`), empty if
    unknown. `at_us`: its time, on the clock of `GroupsReceived` (-1: unknown, statuses then count
    unadvanced). `ttft_us`: predicted TTFT on the chosen worker, -1 unknown. `session` and `tier`
    are the request's; `cached_tokens` of its prompt are expected to be held by the worker.
    `refused`: why it was refused although a worker could serve it. `doubted`: some of the delivered
    tokens come from a worker that computes wrong results, so the attempt compares them.
    """

    decision: str
    basis: Basis
    request: str
    attempt: int
    cause: RouteCause
    mode: AttemptMode
    delivered: int
    prompt_tokens: int
    worker: str
    incarnation: int
    policy: str
    model: str
    avoid: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    others: tuple[tuple[str, int], ...] = ()
    prefix: bytes = b""
    at_us: int = -1
    ttft_us: int = -1
    session: str = ""
    tier: Tier = Tier.NONE
    cached_tokens: int = 0
    refused: str = ""
    doubted: bool = False


class TransportObserved(Event, frozen=True, tag="transport_observed/1", kw_only=True):
    """What the replica saw of one attempt's connection. `status` of the worker's answer (0: none
    came)."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    kind: TransportKind
    delivered: int
    detail: str = ""
    status: int = 0


class StallJudged(Event, frozen=True, tag="stall_judged/1", kw_only=True):
    """Decision: is the silent engine hung? All inputs of the policy, and its answer.

    `silent_us` since the last byte or step; `probe_steps` steps the engine says it made since the
    last look (-1 unknown);
    `step_age_us` age of the step it is in; `bound_us` what the policy allowed; `cpu_us`
    CPU time it used between two looks (-1 unknown); `held` requests it has (-1 unknown);
    `expected_us` the longest that its step should take (-1: it does not say), `wait_us` time it
    waited for a CPU and `turns` of its loop between two looks (-1 unknown).
    """

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    silent_us: int
    probe: ProbeResult
    probe_steps: int
    step_age_us: int
    bound_us: int
    hung: bool
    cpu_us: int = -1
    held: int = -1
    expected_us: int = -1
    wait_us: int = -1
    turns: int = -1


class StreamJudged(Event, frozen=True, tag="stream_judged/1", kw_only=True):
    """Decision: is the stream of attempt `attempt` stuck? Its engine makes steps, and no token
    comes. All inputs of the policy, and its answer.

    `silent_us` since the stream's last byte; `from_step`: number of the engine's last step when the
    replica found the stream silent; `probe`: what the engine did when it was probed after that.
    By the log: `steps` made since `from_step`, whether the engine `decodes` the attempt or has
    `finished` it, `bound_us` what the policy allowed.
    """

    decision: str
    basis: Basis
    request: str
    attempt: int
    worker: str
    incarnation: int
    silent_us: int
    from_step: int
    probe: ProbeResult
    steps: int
    decodes: bool
    finished: bool
    bound_us: int
    stuck: bool


class WorkerSuspected(Event, frozen=True, tag="worker_suspected/1"):
    """This replica sends nothing new to the incarnation until it is cleared."""

    worker: str
    incarnation: int
    reason: str


class WorkerCleared(Event, frozen=True, tag="worker_cleared/1"):
    """The suspicion is over: the incarnation works again, or answers and has nothing to do.

    What two probes showed: `probe` is the second's result (none: written before these were
    recorded), `steps` made in between and `cpu_us` of CPU time used (-1 unknown), `held` requests
    it has. `step_age_us`, `expected_us` and `turns` as in `StallJudged`. `evidence` says it in
    words."""

    worker: str
    incarnation: int
    evidence: str
    probe: ProbeResult = ProbeResult.NONE
    steps: int = -1
    cpu_us: int = -1
    held: int = -1
    step_age_us: int = 0
    expected_us: int = -1
    turns: int = -1


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
    status: int
    tokens: int
    finish: str
    attempts: int
    verdict: Guarantee
    ttft_us: int = -1
    longest_gap_us: int = -1
    detail: str = ""


class CrossCheckDecided(Event, frozen=True, tag="cross_check_decided/1", kw_only=True):
    """Decision: an idle engine answers a finished request again, and the token ids are compared.

    `worker` and `incarnation` answered the client, with `tokens` tokens of digest `answer`
    (`relume.events.wire.token_digest`). `by` and `by_incarnation` answer now: another engine of the
    class, or in a dispute the same one.
    """

    decision: str
    basis: Basis
    request: str
    worker: str
    incarnation: int
    by: str
    by_incarnation: int
    cause: CheckCause
    tokens: int
    answer: bytes


class CrossChecked(Event, frozen=True, tag="cross_checked/1", kw_only=True):
    """What came of a `CrossCheckDecided`: the digest `answer` of the token ids that `by` gave, of
    which token `differs` is the first that the client did not get (-1: all are equal). `error`: why
    there is no answer."""

    decision: str
    request: str
    worker: str
    incarnation: int
    by: str
    by_incarnation: int
    took_us: int
    answer: bytes = b""
    differs: int = -1
    error: str = ""


class GroupsReceived(Event, frozen=True, tag="groups_received/1"):
    """When watched revision groups arrived: `revision` of the first, then pairs (revision
    counted from it, microseconds since the pair before) in order; the first time counts from the
    replica's own monotonic origin. A group within a millisecond after another has no pair of its
    own: that pair names the later revision."""

    revision: int
    deltas: tuple[int, ...]


class TimerFired(Event, frozen=True, tag="timer_fired/1"):
    """A timer of this replica ran out, and what it did next follows from that. `key`: the request,
    or worker:incarnation."""

    timer: TimerKind
    key: str


class AdminCommanded(Event, frozen=True, tag="admin_commanded/1", kw_only=True):
    """An operator's change, with its principal (I16). `command_id` is made of
    the principal and its idempotency key. `target`: the worker, the setting that gets `value`, or
    the leader that resigns."""

    command_id: str
    principal: str
    command: AdminCommand
    target: str
    value: str = ""
