"""The faults, phases, figures, promises and hardware classes that scenarios may name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Literal, get_args

from msgspec import Struct

from relume.events import vocabulary as v
from relume.events.vocabulary import changes

Target = Literal["worker", "domain", "control plane", "etcd", "clients", "request"]


class FaultKind(Struct, frozen=True):
    """A fault: whom it strikes, whether it lasts, and what it takes.

    `lasts`: no (it is over at once), may, must. `amount`: what `amount` means, with its unit,
    and the greatest value; None: there is none. `peers`: ends of the link it may cut. `roles`:
    targets beside names, `any`, `all` and `subject`. `needs`: the package or module of the
    feature without which it is not applicable.
    """

    about: str
    target: Target
    lasts: Literal["no", "may", "must"] = "no"
    amount: tuple[str, float] | None = None
    peers: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    needs: str | None = None


_LINKS = ("etcd", "gateway", "holder")
_ENDS = ("leader", "follower")

FAULTS: Mapping[str, FaultKind] = {
    "engine-kill": FaultKind("kill -9 of an engine", "worker"),
    "agent-kill": FaultKind("kill -9 of an agent; its engine is orphaned", "worker"),
    "engine-stop": FaultKind("SIGSTOP to an engine, then CONT", "worker", "must"),
    "agent-stop": FaultKind("SIGSTOP to an agent, then CONT", "worker", "must"),
    "worker-slow": FaultKind(
        "steps take longer", "worker", "must", ("times as long", 1000.0)
    ),
    "cpu-limit": FaultKind(
        "each process of a worker gets a share of a core", "worker", "must",
        ("share of a core", 1.0),
    ),
    "weights-flipped": FaultKind(
        "bits of the weights flip in memory", "worker", needs="policies.canary"
    ),
    "rank-kill": FaultKind(
        "one rank of a tensor-parallel engine dies", "worker", needs="engine_shim.elastic_tp"
    ),
    "reload-fails": FaultKind(
        "the next starts of an engine fail", "worker", amount=("starts", 20.0)
    ),
    "draft-mismatch": FaultKind(
        "the draft model proposes other tokens", "worker", "must", needs="engine_shim.proposer"
    ),
    "holder-kill": FaultKind("kill -9 of a host's state daemon", "worker"),
    "holder-stop": FaultKind("SIGSTOP to a host's state daemon, then CONT", "worker", "must"),
    "primary-and-holder-kill": FaultKind(
        "an engine and the daemon that holds its blocks die together", "worker"
    ),
    "block-corrupt": FaultKind(
        "bits flip in blocks a daemon holds", "worker", amount=("blocks", 100_000.0)
    ),
    "dram-budget": FaultKind(
        "a daemon's budget shrinks to a share", "worker", "must", ("share left", 1.0)
    ),
    "disk-full": FaultKind(
        "a daemon that holds blocks in a file cannot write any more of them there",
        "worker", "must",
    ),
    "stream-loss": FaultKind("KV streams lose messages", "worker", "must", ("share", 1.0)),
    "stream-duplicate": FaultKind("KV streams repeat messages", "worker", "must", ("share", 1.0)),
    "stream-reorder": FaultKind("KV streams reorder messages", "worker", "must", ("share", 1.0)),
    "domain-loss": FaultKind("every process of a failure domain dies", "domain"),
    "cut": FaultKind("a link carries nothing", "worker", "must", peers=_LINKS),
    "cut-one-way": FaultKind(
        "a link carries nothing from the target to the peer", "worker", "must", peers=_LINKS
    ),
    "link-slow": FaultKind(
        "what a link carries comes later", "worker", "must", ("milliseconds", 60_000.0),
        peers=("etcd", "gateway"),
    ),
    "gateway-kill": FaultKind("kill -9 of a control plane replica", "control plane", roles=_ENDS),
    "leader-stop": FaultKind(
        "SIGSTOP to the leader beyond its lease, then CONT: two leaders for a while",
        "control plane", "must", roles=_ENDS,
    ),
    "gateway-cpu-limit": FaultKind(
        "a control plane replica gets a share of a core", "control plane", "must",
        ("share of a core", 1.0), (), _ENDS,
    ),
    "etcd-kill": FaultKind("kill -9 of a member, started again", "etcd", "may", roles=_ENDS),
    "etcd-stop": FaultKind("SIGSTOP to a member, then CONT", "etcd", "must", roles=_ENDS),
    "etcd-quota": FaultKind("etcd is out of space", "etcd", "must"),
    "disk-slow": FaultKind(
        "each fsync of a member takes longer", "etcd", "must", ("milliseconds", 60_000.0), (), _ENDS
    ),
    "clock-jump": FaultKind(
        "the wall clock of a host jumps forward", "worker", "no", ("seconds", 1e6)
    ),
    "clock-back": FaultKind(
        "the wall clock of a host jumps backward", "worker", "no", ("seconds", 1e6)
    ),
    "client-gone": FaultKind("a client hangs up", "request"),
}  # fmt: skip
"""By name. The order is the one in which they are listed."""

PHASES: Mapping[str, tuple[str, str]] = {
    "prefill": ("RequestAdmitted", "FirstToken"),
    "decode": ("FirstToken", "EngineFinished"),
    "restore": ("RestoreStarted", "RestoreDone"),
    "recovery": ("RecoveryPlanned", "FirstToken"),
    "checkpoint": ("HolderChosen", "CheckpointAcknowledged"),
    "engine-start": ("EngineStarted", "EngineReady"),
    "effect": ("EffectsDecided", "EffectApplied"),
}
"""What a fault may be in the middle of: the event that begins it and the one that ends it."""

FIGURES: Mapping[str, str] = {
    "requests": "requests that clients sent",
    "faults_fired": "faults that really happened",
    "broken_streams": "streams that ended otherwise than they should",
    "refused_streams": "requests refused before their first token, with the time to come back",
    "lost_streams": "broken streams that were not refused",
    "moved_streams": "streams that went on on another worker",
    "ttft_ms_mean": "time to first token",
    "ttft_ms_p99": "time to first token",
    "ttft_ms_p99_interactive": "time to first token of requests of tier interactive",
    "ttft_ms_p99_batch": "time to first token of requests of tier batch",
    "tenant_fairness": "tokens served to the tenant worst off, to its equal part or all it asked",
    "tpot_ms_mean": "time per output token after the first",
    "gap_ms_p99": "longest time between two tokens of a stream",
    "recovery_ms_p99": "from a worker's death to the next token of a stream it had",
    "makespan_s": "from the first arrival to the last token",
}

PROMISES = tuple(f"I{number}" for number in range(1, 17))

PROMISE_NEEDS: Mapping[str, str] = {"I9": "policies.breaker", "I11": "policies.degradation"}
"""The module of the feature without which a promise says nothing."""

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
    """Whether `module` can be found; its package is imported, itself not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
