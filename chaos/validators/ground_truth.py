"""What a simulated fleet really was, beside what the log says of it.

The simulator knows its engines, state daemons, gateways and leases. It notes their state with each
report that they write, so that the fold of that report can be compared with the very state that it
reports. Records still on their way then make no difference. Real fleets have no such record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct, field


class ReportKey(NamedTuple):
    """A report of an engine: its incarnation, step, and last change. Reports may be merged on
    their way, but then the last change of the merged report is that of its last part."""

    incarnation: int
    step: int
    change: type
    request: str
    attempt: int


class EngineLoad(NamedTuple):
    """What an engine has: attempts, how many of them decode, the tokens of those, and the prompt
    tokens that it is yet to compute; requests that wait, and KV blocks in use."""

    attempts: int
    decoding: int
    context: int
    left: int
    waiting: int
    kv_used: int


class HeldBlocks(NamedTuple):
    """What a state daemon holds when it writes `event`: per request, tokens without a gap and
    bytes."""

    event: Any
    boot: str
    requests: dict[str, tuple[int, int]]


class ClientCall(NamedTuple):
    """A request on its client's side. `gateway`: the stream of its replica, empty if its client
    returned and may have been elsewhere. `status` and `message` of the error that ended it (0: none
    did; no message: an engine's own answer on a relayed route). Times in ns of the run's loop;
    `first_ns` 0: it got no token; `last_ns`: the last one that it got; `served_by`: the stream of the
    replica that it got it from; `model`: empty if the fleet has but one."""

    gateway: str = ""
    kind: str = "streaming"
    tenant: str = ""
    sent_ns: int = 0
    first_ns: int = 0
    ended_ns: int = 0
    status: int = 0
    message: str = ""
    last_ns: int = 0
    served_by: str = ""
    model: str = ""


class QueuedReport(NamedTuple):
    """An engine's report that it took an attempt: at which step, and with which decision of its gateway
    (`RequestQueued.dispatch`)."""

    worker: str
    incarnation: int
    step: int
    dispatch: bytes


class EngineEnd(Struct, frozen=True, kw_only=True):
    """A living engine at the end of a run."""

    incarnation: int
    attempts: frozenset[str]
    load: EngineLoad


class GroundTruth(Struct, kw_only=True):
    """`reports`: by worker, each report of its engines and their load at that moment. `held`: by
    (stream, position) of the last event of a report, what a state daemon held. `found`: differences
    that the simulator saw while it ran, as (subject, text); `looks`: how often it checked the folds
    of replicas; `unknown`: (stream, request) that a replica served and its fold did not have as
    its own. Those at the end: `engines`, `daemons`, `gateways` (live requests by replica
    stream) and `owners` (None: not recorded). `unwritten`: streams whose writers had events that
    etcd lacked then, and why. `serving`: by worker, since when (ns) its engine served, or did not;
    `idle`: the same for engines without a request. `calls`: by client request, what its client knows;
    `attempts`: of that request each attempt that an engine took, by its name, the worker and when (ns);
    `queued`: by attempt, its engine's report of that, which may be dropped on its way;
    `ended`: when (ns) attempts left their engine; `finished`: those that it generated to the end.
    `counted`: by stream, what replicas without
    unwritten events counted of their ends, and of tokens. The run began at `began_ns`.
    `clock_ms`: by (revision, stream) of a replica or the leader, the error of the writer's wall clock
    from that segment on. `etcd_keys`: by owner key and manifest, why no order of the calls to
    etcd explains what clients saw of it: empty if one does, None if the search gave up. None as a whole:
    calls were not recorded. `models`: by worker, of a fleet with several."""

    reports: dict[str, dict[ReportKey, EngineLoad]] = field(default_factory=dict)
    held: dict[tuple[str, int], HeldBlocks] = field(default_factory=dict)
    found: list[tuple[str, str]] = field(default_factory=list)
    engines: dict[str, EngineEnd] = field(default_factory=dict)
    daemons: dict[str, HeldBlocks] = field(default_factory=dict)
    gateways: dict[str, frozenset[str]] = field(default_factory=dict)
    owners: dict[str, int] | None = None
    unwritten: dict[str, str] = field(default_factory=dict)
    unknown: set[tuple[str, str]] = field(default_factory=set)
    looks: int = 0
    began_ns: int = 0
    serving: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    idle: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    calls: dict[str, ClientCall] = field(default_factory=dict)
    attempts: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)
    queued: dict[str, QueuedReport] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    counted: dict[str, dict[str, int]] = field(default_factory=dict)
    clock_ms: dict[tuple[int, str], int] = field(default_factory=dict)
    etcd_keys: dict[str, str | None] | None = None
    models: dict[str, str] = field(default_factory=dict)

    def serves(self, worker: str, call: ClientCall) -> bool:
        """Whether the worker has the model that the client names."""
        return self.models.get(worker, call.model) == call.model

    def served(self, worker: str, since_ns: int, until_ns: int, least_ns: int) -> bool:
        """Whether its engine served for `least_ns` on end in that time."""
        return _lasted(self.serving.get(worker, []), since_ns, until_ns, least_ns)

    def idled(self, worker: str, since_ns: int, until_ns: int) -> bool:
        """Whether its engine served without a request for the whole of that time."""
        whole_ns = until_ns - since_ns
        return self.served(worker, since_ns, until_ns, whole_ns) and _lasted(
            self.idle.get(worker, []), since_ns, until_ns, whole_ns
        )


def _lasted(turns: Sequence[tuple[int, bool]], since_ns: int, until_ns: int, least_ns: int) -> bool:
    """Whether it was so for `least_ns` on end in that time."""
    ends = (*(at for at, _ in turns[1:]), until_ns)
    return any(
        is_so and min(to, until_ns) - max(at, since_ns) >= least_ns
        for (at, is_so), to in zip(turns, ends, strict=False)
    )
