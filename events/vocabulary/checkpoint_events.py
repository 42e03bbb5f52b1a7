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
    """The state daemon of a worker's host serves, and earlier reports about it are void. What
    it has, if its new agent found it running, is acknowledged again after this."""

    worker: str
    boot: str
    """This life of the daemon."""
    epoch: int
    address: str
    """`tcp://` address for other hosts; empty: none."""
    budget_bytes: int
    """Memory budget (LUMEN Eq. 5)."""
    family: str = ""
    """Fingerprint family of the blocks that its worker can use; empty: no checkpoints."""
    local: str = ""
    """`unix:` address for engines on the same machine."""
    machine: str = ""
    """Id of the machine."""
    file_bytes: int = 0
    """Additional budget in files."""


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
    """A holder has the first tokens of a request's child: the checkpointed prefix |C_r|. The
    only source of coverage. A later record of the same boot replaces an earlier one."""

    holder: str
    boot: str
    request: str
    child: int
    attempt: int
    """The attempt that wrote it."""
    blocks: int
    """Whole blocks on every rank."""
    tokens: int
    """Length of the prefix that the holder has."""
    bytes: int


class HeldPrefix(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """The content of one `CheckpointAcknowledged`, without its holder and boot."""

    request: str
    child: int
    attempt: int
    blocks: int
    """Whole blocks on every rank."""
    tokens: int
    """Length of the prefix that the holder has."""
    bytes: int


class CheckpointsAcknowledged(Event, frozen=True, tag="checkpoints_acknowledged/1"):
    """Several `CheckpointAcknowledged` of one holder in one record: positions since the last poll,
    of each request the newest only."""

    holder: str
    boot: str
    held: tuple[HeldPrefix, ...]
    """The newest position of each request."""


class CheckpointEvicted(Event, frozen=True, tag="checkpoint_evicted/1", kw_only=True):
    """A holder needed the room."""

    holder: str
    boot: str
    request: str
    child: int
    tokens: int
    """Tokens of the prefix that are left."""
    bytes: int
    """Bytes that are left."""


class CheckpointDropped(Event, frozen=True, tag="checkpoint_dropped/1", kw_only=True):
    """A holder has nothing of the request any more."""

    holder: str
    boot: str
    request: str
    child: int
    reason: DropReason
    """Why."""


class RestoreStarted(Event, frozen=True, tag="restore_started/1", kw_only=True):
    """The engine fetches a part of the attempt's prefix."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    """Length of the prefix that is fetched."""
    first: int = 0
    """First token that is fetched; the engine has those before it."""
    lender: str = ""
    """Another request whose identical prefix is used; empty: its own."""


class RestoreDone(Event, frozen=True, tag="restore_done/1", kw_only=True):
    """The fetched blocks are in the engine's cache, each verified; the rest is computed."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    """Length of the restored prefix."""
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
    """Only `tokens` of the prefix could be used; the engine computes what its own cache does not have.
    Without a `RestoreStarted`: a holder did not say what it has, and no other one has anything."""

    incarnation: int
    request: str
    child: int
    attempt: int
    holder: str
    tokens: int
    """Length of the prefix that could be used."""
    reason: RestoreFailure
    """Why the restore stopped; also what the holder refused with."""


class HolderCandidate(Struct, frozen=True, array_like=True, gc=False):
    """One worker that a placement looked at."""

    worker: str
    load: int
    """Expected recovery load in blocks (LUMEN Eq. 4)."""
    free_bytes: int
    """Free budget (LUMEN Eq. 5)."""
    excluded: Exclusion = Exclusion.NONE


class HolderChosen(Event, frozen=True, tag="holder_chosen/1", kw_only=True):
    """Decision: where a request's checkpoint goes (LUMEN Algorithm 1)."""

    decision: str
    basis: Basis
    request: str
    attempt: int
    cause: PlacementCause
    """Arrival, recovered, moved, holder_lost, draining, holder_joined."""
    primary: str
    """The worker that computes the request."""
    holders: tuple[str, ...]
    """The chosen holders."""
    policy: str
    wanted: int
    """Number of holders wanted."""
    expected_blocks: int
    """Blocks that the request is expected to need."""
    expected_bytes: int
    """Bytes that were reserved."""
    reason: str = ""
    """Why there are fewer holders than wanted: budget, alone, policy."""
    candidates: tuple[HolderCandidate, ...] = ()


class RecoveryOption(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """One way that a recovery looked at."""

    worker: str
    kind: RecoveryKind
    """Restore or recompute."""
    holder: str
    restored: int
    """Tokens of the checkpoint."""
    wait_us: int
    """Time until the worker is free."""
    move_us: int
    """Time to move the blocks."""
    compute_us: int
    """Time to compute the rest."""
    done_us: int
    """End of the three together."""
    excluded: Exclusion = Exclusion.NONE


class RecoveryChoice(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """What was chosen for one request."""

    request: str
    attempt: int
    tokens: int
    """Tokens that must be in a cache."""
    chosen: int
    """Index into `options`; -1: none."""
    options: tuple[RecoveryOption, ...]
    avoid: tuple[str, ...] = ()
    """Incarnations (`worker:incarnation`) that failed it before."""
    tier: Tier = Tier.NONE
    """Requests of a higher tier chose before it."""


class RecoveryPlanned(Event, frozen=True, tag="recovery_planned/1", kw_only=True):
    """Decision: where the interrupted requests of one failure go (LUMEN Algorithm 2),
    together, with all that was looked at."""

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    policy: str
    choices: tuple[RecoveryChoice, ...]
