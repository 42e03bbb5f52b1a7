"""Events of replica streams: requests, decisions about them, and what was observed."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary.base import Basis, Event


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
    traceparent it came with. `resumable`: digest of what a client shows to go on with its
    stream after a lost connection; empty: it cannot. It may come back so many ticks
    (`grace_ticks`) after its gateway was lost."""

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
    resumable: str = ""
    grace_ticks: int = 0


class ClientReturned(Event, frozen=True, tag="client_returned/1"):
    """The client of a resumable stream connected to this replica with everything up to token
    `tokens` and `events` events behind it. From here on this replica owns the request, if it
    is still live and has not expired; what an earlier owner writes later is void. `claim`
    names this return; `attempt` was under way."""

    request: str
    claim: str
    attempt: int
    tokens: int
    events: int


class Candidate(Struct, frozen=True, array_like=True, gc=False):
    """One worker a decision looked at: its cost (integer, lower is better) and parts.
    `excluded` says why it could not be chosen; empty when it could. Of its metrics then:
    prompt tokens of this request that it holds (`hit_tokens`), requests it decodes and their
    tokens in all, blocks it would have left, expected microseconds to this request's first
    token and from token to token (-1: not asked)."""

    worker: str
    incarnation: int
    cost: int
    prefill_tokens: int
    requests: int
    excluded: str = ""
    hit_tokens: int = 0
    batch: int = 0
    context_tokens: int = 0
    kv_free: int = 0
    ttft_us: int = -1
    tpot_us: int = -1


class RouteDecided(Event, frozen=True, tag="route_decided/1"):
    """Where attempt `attempt` of a request goes, and on what ground: the dispatch.

    `cause`: arrival, reset, stall, engine_dead, engine_error, stale, refused, unreachable,
    declined, moved, wait_over.
    `mode`: new, continue, replay, restart. `worker` empty: none could take it. `policy`
    planned: as the `RecoveryPlanned` of the lost attempt has it, or the `MigrationPlanned` of
    the one handed over.
    `delivered` tokens are with the client already. `avoid`: workers that failed it.
    `others`: in a fleet of more than 16 workers, how many are not among the candidates, by
    reason ("": they could have been chosen, and are no better than the best named).
    `prefix`: packed hashes of the prompt's prefixes (`events.prefix`), empty where unknown.
    `at_us`: when it was asked, on the clock of `GroupsReceived` (-1: not told, statuses then
    count as they were told). `ttft_us`: time to first token predicted where it goes, -1 unknown.
    `session` and `tier` are the request's; `cached_tokens` of its prompt are expected to be held
    by the worker. `refused`: why nobody was to take it though somebody could.
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
    others: tuple[tuple[str, int], ...] = ()
    prefix: bytes = b""
    at_us: int = -1
    ttft_us: int = -1
    session: str = ""
    tier: str = ""
    cached_tokens: int = 0
    refused: str = ""


class TransportObserved(Event, frozen=True, tag="transport_observed/1"):
    """What the replica saw of one attempt's connection.
    `kind`: reset, eof, refused, unreachable (no connection in time), stale, engine_dead (its
    agent or the engine itself said so), engine_error (it answered, but wrongly), declined (a
    moved request answered with a 4xx), stall, timeout; moved (handed over as asked: no
    failure)."""

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
    """When watched revision groups arrived: `revision` of the first, then pairs (revision
    counted from it, microseconds since the pair before) in order; the first time counts from the
    replica's own monotonic origin. A group within a millisecond behind another has no pair of its
    own: that pair names the later revision."""

    revision: int
    deltas: tuple[int, ...]


class TimerFired(Event, frozen=True, tag="timer_fired/1"):
    """A timer of this replica ran out, and what it did next follows from that. `timer`: wait
    (request `key` found no worker within the bound), retry (it goes again to where it failed),
    stall (`key` is worker:incarnation: its silence reached the bound), grace (the client of
    request `key` did not come back)."""

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
