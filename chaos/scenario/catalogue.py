"""The faults, phases, figures, promises and hardware classes that scenarios may name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct

from relume.events import vocabulary as v
from relume.events.vocabulary import step_changes as changes

Target = Literal["worker", "domain", "control plane", "etcd", "clients", "request"]


class FaultKind(Struct, frozen=True, kw_only=True):
    """A fault: its target, whether it lasts, and its needs.

    `lasts`: no (it is over at once), may, must. `amount`: meaning and unit of a fault's `amount`,
    and its maximum; None: the fault has no amount. `pauses`: whether it may have a `pause_ms`.
    `peers`: possible other ends of its link. `roles`: targets in addition to names, `any`, `all`
    and `subject`. `needs`: the package or module of the feature that it needs.
    """

    about: str
    target: Target
    lasts: Literal["no", "may", "must"] = "no"
    amount: tuple[str, float] | None = None
    pauses: bool = False
    peers: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    needs: str | None = None


_LINKS = ("etcd", "gateway", "holder")
_ENDS = ("leader", "follower")

FAULTS: Mapping[str, FaultKind] = {
    "engine-kill": FaultKind(about="kill -9 of an engine", target="worker"),
    "agent-kill": FaultKind(about="kill -9 of an agent; its engine is orphaned", target="worker"),
    "agent-terminate": FaultKind(
        about="SIGTERM to an agent: its requests leave, it stops its engine, another agent starts",
        target="worker",
    ),
    "engine-stop": FaultKind(
        about="SIGSTOP to an engine, then CONT", target="worker", lasts="must"
    ),
    "agent-stop": FaultKind(about="SIGSTOP to an agent, then CONT", target="worker", lasts="must"),
    "worker-slow": FaultKind(
        about="steps take longer, or begin later",
        target="worker",
        lasts="must",
        amount=("times as long", 1000.0),
        pauses=True,
    ),
    "cpu-limit": FaultKind(
        about="each process of a worker gets a share of a core",
        target="worker",
        lasts="must",
        amount=("share of a core", 1.0),
    ),
    "weights-flipped": FaultKind(
        about="a bit of a weight flips in memory: logits change, and tokens of some requests",
        target="worker",
    ),
    "weights-flipped-unseen": FaultKind(
        about="a bit of a weight flips that no canary touches: tokens of some requests change",
        target="worker",
    ),
    "model-file-damaged": FaultKind(
        about="a byte late in a worker's model files changes on its disk, which no canary and no request "
        "touches; at the end the files are downloaded again",
        target="worker",
        lasts="may",
    ),
    "record-unreadable": FaultKind(
        about="an agent writes a record that nobody can read", target="worker"
    ),
    "segment-damaged": FaultKind(
        about="bytes that are no segment stand in a worker's stream, where its agent is to write",
        target="worker",
    ),
    "notice-absurd": FaultKind(
        about="a replica's connection to an agent says that its engine died, in an epoch far in the future",
        target="worker",
    ),
    "reports-unreadable": FaultKind(
        about="an agent cannot read what its engine reports of its steps",
        target="worker",
        lasts="must",
        amount=("share", 1.0),
    ),
    "rank-kill": FaultKind(
        about="one rank of a tensor-parallel engine dies",
        target="worker",
        needs="relume.engine_shim.elastic_tp",
    ),
    "reload-fails": FaultKind(
        about="the next starts of an engine fail", target="worker", amount=("starts", 20.0)
    ),
    "draft-mismatch": FaultKind(
        about="the draft model proposes other tokens",
        target="worker",
        lasts="must",
        needs="relume.engine_shim.proposer",
    ),
    "holder-kill": FaultKind(about="kill -9 of a host's state daemon", target="worker"),
    "holder-stop": FaultKind(
        about="SIGSTOP to a host's state daemon, then CONT", target="worker", lasts="must"
    ),
    "primary-and-holder-kill": FaultKind(
        about="an engine and the daemon that holds its blocks die together", target="worker"
    ),
    "block-corrupt": FaultKind(
        about="bits flip in blocks a daemon holds", target="worker", amount=("blocks", 100_000.0)
    ),
    "dram-budget": FaultKind(
        about="a daemon's budget shrinks to a share",
        target="worker",
        lasts="must",
        amount=("share left", 1.0),
    ),
    "disk-full": FaultKind(
        about="a daemon that holds blocks in a file cannot write any more of them there",
        target="worker",
        lasts="must",
    ),
    "stream-loss": FaultKind(
        about="KV streams lose messages", target="worker", lasts="must", amount=("share", 1.0)
    ),
    "stream-duplicate": FaultKind(
        about="KV streams repeat messages", target="worker", lasts="must", amount=("share", 1.0)
    ),
    "stream-reorder": FaultKind(
        about="KV streams reorder messages", target="worker", lasts="must", amount=("share", 1.0)
    ),
    "domain-loss": FaultKind(about="every process of a failure domain dies", target="domain"),
    "cut": FaultKind(about="a link carries nothing", target="worker", lasts="must", peers=_LINKS),
    "cut-from-half": FaultKind(
        about="half of the replicas, rounded down, cannot reach a worker, which cannot reach them",
        target="worker",
        lasts="must",
    ),
    "cut-one-way": FaultKind(
        about="a link carries nothing from the target to the peer",
        target="worker",
        lasts="must",
        peers=_LINKS,
    ),
    "link-slow": FaultKind(
        about="messages of a link arrive later",
        target="worker",
        lasts="must",
        amount=("milliseconds", 60_000.0),
        peers=("etcd", "gateway"),
    ),
    "frame-cut": FaultKind(
        about="the connection of one answer breaks within a frame", target="worker"
    ),
    "frame-lost": FaultKind(
        about="frames of a worker's answers do not arrive",
        target="worker",
        lasts="must",
        amount=("share", 1.0),
    ),
    "frame-repeated": FaultKind(
        about="frames of a worker's answers arrive twice",
        target="worker",
        lasts="must",
        amount=("share", 1.0),
    ),
    "dispatch-refused": FaultKind(
        about="a worker refuses requests: it is full, or will not have them, or errs",
        target="worker",
        lasts="must",
        amount=("share", 1.0),
    ),
    "engine-errors": FaultKind(
        about="a worker answers requests with 500 at once",
        target="worker",
        lasts="must",
        amount=("share", 1.0),
    ),
    "answer-broken": FaultKind(
        about="a worker gives answers up in their middle, and says so",
        target="worker",
        lasts="must",
        amount=("share", 1.0),
    ),
    "stream-stuck": FaultKind(
        about="one stream gets no more tokens; its engine makes steps for it and for all others",
        target="worker",
    ),
    "gateway-kill": FaultKind(
        about="kill -9 of a control plane replica", target="control plane", roles=_ENDS
    ),
    "leader-stop": FaultKind(
        about="SIGSTOP to the leader beyond its lease, then CONT: two leaders for a while",
        target="control plane",
        lasts="must",
        roles=_ENDS,
    ),
    "gateway-cpu-limit": FaultKind(
        about="a control plane replica gets a share of a core",
        target="control plane",
        lasts="must",
        amount=("share of a core", 1.0),
        roles=_ENDS,
    ),
    "replica-cut": FaultKind(
        about="nothing passes between a control plane replica and etcd",
        target="control plane",
        lasts="must",
        roles=_ENDS,
    ),
    "replica-calls-lost": FaultKind(
        about="what a replica sends to etcd does not arrive",
        target="control plane",
        lasts="must",
        roles=_ENDS,
    ),
    "replica-answers-lost": FaultKind(
        about="etcd carries out a replica's calls; its answers and events do not arrive",
        target="control plane",
        lasts="must",
        roles=_ENDS,
    ),
    "replica-spool-torn": FaultKind(
        about="a replica dies while it writes its spool, whose last batch is torn",
        target="control plane",
        roles=_ENDS,
    ),
    "replica-spool-corrupt": FaultKind(
        about="a replica dies, and the last record of its spool is cut or has a wrong bit",
        target="control plane",
        roles=_ENDS,
    ),
    "replica-clock-jump": FaultKind(
        about="the wall clock of a replica jumps forward",
        target="control plane",
        amount=("seconds", 1e6),
        roles=_ENDS,
    ),
    "replica-clock-back": FaultKind(
        about="the wall clock of a replica jumps backward",
        target="control plane",
        amount=("seconds", 1e6),
        roles=_ENDS,
    ),
    "replica-clock-drift": FaultKind(
        about="the wall clock of a replica runs fast",
        target="control plane",
        lasts="must",
        amount=("parts per million", 1e6),
        roles=_ENDS,
    ),
    "stray-key": FaultKind(
        about="keys that are no segments stand far ahead in the streams of a replica and of the leader",
        target="control plane",
        roles=_ENDS,
    ),
    "etcd-kill": FaultKind(
        about="kill -9 of a member, started again", target="etcd", lasts="may", roles=_ENDS
    ),
    "etcd-stop": FaultKind(
        about="SIGSTOP to a member, then CONT", target="etcd", lasts="must", roles=_ENDS
    ),
    "etcd-quota": FaultKind(about="etcd is out of space", target="etcd", lasts="must"),
    "etcd-restored": FaultKind(
        about="a backup of etcd is saved; at the end of its duration etcd is restored from it, and an "
        "operator begins a new log",
        target="etcd",
        lasts="must",
    ),
    "disk-slow": FaultKind(
        about="each fsync of a member takes longer",
        target="etcd",
        lasts="must",
        amount=("milliseconds", 60_000.0),
        roles=_ENDS,
    ),
    "etcd-defragment": FaultKind(
        about="a member defragments its database, and answers nothing meanwhile",
        target="etcd",
        roles=_ENDS,
    ),
    "etcd-replace": FaultKind(
        about="a member is removed with its data, and a new one takes its place",
        target="etcd",
        roles=_ENDS,
    ),
    "disk-hangs": FaultKind(
        about="fsync calls of a member do not return; a leader loses its leadership",
        target="etcd",
        lasts="must",
        roles=_ENDS,
    ),
    "etcd-cut": FaultKind(
        about="a member is cut from the others, not from its clients",
        target="etcd",
        lasts="must",
        roles=_ENDS,
    ),
    "watch-silent": FaultKind(
        about="a member answers calls and sends no events to watches",
        target="etcd",
        lasts="must",
        roles=_ENDS,
    ),
    "etcd-clock-jump": FaultKind(
        about="the clock of etcd's leader jumps forward: leases have less time left",
        target="etcd",
        amount=("seconds", 1e6),
        roles=_ENDS,
    ),
    "etcd-clock-drift": FaultKind(
        about="the clock of etcd's leader runs fast: leases end earlier. Live, leases that would have "
        "ended are revoked: etcd has no clock that another process can change",
        target="etcd",
        lasts="must",
        amount=("parts per million", 1e6),
        roles=_ENDS,
    ),
    "clock-jump": FaultKind(
        about="the wall clock of a host jumps forward",
        target="worker",
        amount=("seconds", 1e6),
    ),
    "clock-back": FaultKind(
        about="the wall clock of a host jumps backward",
        target="worker",
        amount=("seconds", 1e6),
    ),
    "clock-drift": FaultKind(
        about="the wall clock of a host runs fast",
        target="worker",
        lasts="must",
        amount=("parts per million", 1e6),
    ),
    "agent-spool-torn": FaultKind(
        about="an agent dies while it writes its spool, whose last batch is torn", target="worker"
    ),
    "agent-spool-corrupt": FaultKind(
        about="an agent dies, and the last record of its spool is cut or has a wrong bit",
        target="worker",
    ),
    "client-gone": FaultKind(about="a client hangs up", target="request"),
}
"""Faults by name, in the order of lists."""

PHASES: Mapping[str, tuple[str, str]] = {
    "prefill": ("RequestAdmitted", "FirstToken"),
    "decode": ("FirstToken", "EngineFinished"),
    "restore": ("RestoreStarted", "RestoreDone"),
    "recovery": ("RecoveryPlanned", "FirstToken"),
    "checkpoint": ("HolderChosen", "CheckpointAcknowledged"),
    "engine-start": ("EngineStarted", "EngineReady"),
    "effect": ("EffectsDecided", "EffectApplied"),
}
"""Phases in whose middle a fault may strike: the event that begins each, and the one that ends it."""

FIGURES: Mapping[str, str] = {
    "requests": "requests that clients sent",
    "faults_fired": "faults that really happened",
    "broken_streams": "streams that did not end as they should",
    "refused_streams": "requests refused before their first token, with the time to come back",
    "lost_streams": "broken streams that were not refused",
    "moved_streams": "streams that continued on another worker",
    "failed_attempts": "attempts that a worker answered with an error",
    "lost_attempts": "attempts whose worker was lost",
    "engines_rolled": "workers that a rolling restart left with a new engine",
    "breakers_opened": "decisions that a worker gets no requests because it fails",
    "levels_decided": "changes of the level of degradation",
    "highest_level": "highest level of degradation that was decided",
    "degraded_refusals": "requests refused because of a level of degradation",
    "spares_promoted": "open workers that ceased to be spares",
    "promotion_ms_most": "longest time from an engine's death in the log to the promotion of a spare",
    "workers_quarantined": "decisions that a worker gets no requests because its answers are wrong",
    "ttft_ms_mean": "time to first token",
    "ttft_ms_p99": "time to first token",
    "ttft_ms_p99_interactive": "time to first token of requests of tier interactive",
    "ttft_ms_p99_batch": "time to first token of requests of tier batch",
    "tenant_fairness": "tokens served to the worst-off tenant, as a share of its equal part or of its demand",
    "tpot_ms_mean": "time per output token after the first",
    "gap_ms_p99": "longest time between two tokens of a stream",
    "recovery_ms_p99": "from a worker's death to the next token of one of its streams",
    "makespan_s": "from the first arrival to the last token",
}

PROMISES = tuple(f"I{number}" for number in range(1, 28))

HARDWARE: Mapping[str, tuple[str, ...]] = {
    "tiny": ("cpu",),
    "qwen3-32b": ("rtxpro6000x2",),
}
"""Hardware classes of each model. `tiny` on `cpu` is the development machine's real engine."""

EVENTS: Mapping[str, tuple[str, ...]] = {
    kind.__name__: kind.__struct_fields__
    for kind in (
        *get_args(v.AnyEvent),
        *(k for k in vars(changes).values() if isinstance(k, type) and k is not changes.Change
          and issubclass(k, changes.Change)),
    )
}  # fmt: skip
"""Fields of each event and of each change within an engine step, by the type's name."""


def applicable(what: str) -> bool:
    """Whether the feature that fault `what` needs exists."""
    needs = FAULTS[what].needs
    return needs is None or exists(needs)


def exists(module: str) -> bool:
    """Whether `module` can be found; imports its package, but not the module."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
