"""Checkpoints and their recovery: facts in worker streams, decisions in replica streams."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.enums import (
    DropReason,
    Exclusion,
    PlacementCause,
    RecoveryKind,
    RestoreFailure,
    Tier,
)


class StateDaemonStarted(Event, frozen=True, tag="state_daemon_started/1", kw_only=True):
    """The state daemon of `worker`'s host serves, and earlier reports about it are void: what it
    has, if its new agent found it running, is acknowledged again after this. `boot` names this life
    of it, `budget_bytes` is its maximum (LUMEN Eq. 5), `family` the fingerprint family of the
    blocks its worker can use. `address` (tcp://...) is for other hosts, empty when it listens to
    none; `local` (unix:...) for engines on the same `machine`. `file_bytes` may be held in files
    beside the budget of memory."""

    worker: str
    boot: str
    epoch: int
    address: str
    budget_bytes: int
    family: str = ""
    local: str = ""
    machine: str = ""
    file_bytes: int = 0


class StateDaemonLost(Event, frozen=True, tag="state_daemon_lost/1"):
    """That life of the daemon is over, and all it held with it."""

    worker: str
    boot: str
    reason: str


class StateDaemonReported(Event, frozen=True, tag="state_daemon_reported/1"):
    """Statistics of the daemon by name, at a low rate, for people: bytes, blocks, counts."""

    worker: str
    boot: str
    figures: tuple[tuple[str, int], ...]


class CheckpointAcknowledged(Event, frozen=True, tag="checkpoint_acknowledged/1", kw_only=True):
    """`holder` holds the first `tokens` (`blocks` whole blocks on every rank, `bytes` in
    all) of a request's child, written by `attempt`: the checkpointed prefix |C_r|. The only
    source of coverage. A later record of the same boot replaces an earlier one."""

    holder: str
    boot: str
    request: str
    child: int
    attempt: int
    blocks: int
    tokens: int
    bytes: int


class HeldPrefix(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """The content of one `CheckpointAcknowledged`, without its holder and boot."""

    request: str
    child: int
    attempt: int
    blocks: int
    tokens: int
    bytes: int


class CheckpointsAcknowledged(Event, frozen=True, tag="checkpoints_acknowledged/1"):
    """Several `CheckpointAcknowledged` of one holder in one record: positions since the last poll,
    of each request the newest only."""

    holder: str
    boot: str
    held: tuple[HeldPrefix, ...]


class CheckpointEvicted(Event, frozen=True, tag="checkpoint_evicted/1", kw_only=True):
    """`holder` needed the room: `tokens` of the prefix are left, `bytes` in all."""

    holder: str
    boot: str
    request: str
    child: int
    tokens: int
    bytes: int


class CheckpointDropped(Event, frozen=True, tag="checkpoint_dropped/1", kw_only=True):
    """`holder` holds nothing of the request any more."""

    holder: str
    boot: str
    request: str
    child: int
    reason: DropReason


class RestoreStarted(Event, frozen=True, tag="restore_started/1", kw_only=True):
    """The engine fetches `tokens` of the attempt's prefix from `holder`, from token `first`
    on: it has the tokens before them itself. `lender`: the other request whose identical prefix
    they are; empty: its own."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    first: int = 0
    lender: str = ""


class RestoreDone(Event, frozen=True, tag="restore_done/1", kw_only=True):
    """They are in its cache, each block verified; the rest is computed."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    bytes: int
    duration_us: int


class LinkMeasured(Event, frozen=True, tag="link_measured/1"):
    """What an engine read from `holder`, of blocks it has there, to measure the link; the bytes
    themselves were discarded."""

    incarnation: int
    holder: str
    bytes: int
    duration_us: int


class RestoreFailed(Event, frozen=True, tag="restore_failed/1", kw_only=True):
    """Only `tokens` could be used; all after them is recomputed."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    reason: RestoreFailure


class HolderCandidate(Struct, frozen=True, array_like=True, gc=False):
    """One worker a placement looked at. `load`: its expected recovery load (LUMEN Eq. 4) in
    blocks; `free_bytes` of its budget (Eq. 5). `excluded` says why not; empty when it could."""

    worker: str
    load: int
    free_bytes: int
    excluded: Exclusion = Exclusion.NONE


class HolderChosen(Event, frozen=True, tag="holder_chosen/1", kw_only=True):
    """Decision: where a request's checkpoint goes (LUMEN Algorithm 1). `holders` may be
    fewer than wanted, or none: `reason` says why (budget, alone, policy). `expected_bytes` is what
    was reserved."""

    decision: str
    basis: Basis
    request: str
    attempt: int
    cause: PlacementCause
    primary: str
    holders: tuple[str, ...]
    policy: str
    wanted: int
    expected_blocks: int
    expected_bytes: int
    reason: str = ""
    candidates: tuple[HolderCandidate, ...] = ()


class RecoveryOption(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """One way a recovery looked at: on `worker`, from
    `holder`'s checkpoint of `restored` tokens. Microseconds: until the worker is free,
    moving the blocks, computing the rest; `done_us` is their end together."""

    worker: str
    kind: RecoveryKind
    holder: str
    restored: int
    wait_us: int
    move_us: int
    compute_us: int
    done_us: int
    excluded: Exclusion = Exclusion.NONE


class RecoveryChoice(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """What was chosen for one request (`chosen` indexes `options`; -1: none was left).
    `tokens` of it must be in a cache. `avoid`: `worker:incarnation` that failed it before.
    Requests of a higher `tier` chose before it."""

    request: str
    attempt: int
    tokens: int
    chosen: int
    options: tuple[RecoveryOption, ...]
    avoid: tuple[str, ...] = ()
    tier: Tier = Tier.NONE


class RecoveryPlanned(Event, frozen=True, tag="recovery_planned/1", kw_only=True):
    """Decision: where the interrupted requests of one failure go (LUMEN Algorithm 2),
    together, with all that was looked at."""

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    policy: str
    choices: tuple[RecoveryChoice, ...]
