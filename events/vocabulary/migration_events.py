"""Live migration: running requests that continue elsewhere although nothing has failed."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.checkpoint_events import RecoveryOption
from relume.events.vocabulary.enums import MigrationCause, Tier


class MigrationChoice(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """What was chosen for one running request."""

    request: str
    attempt: int
    tokens: int
    """Tokens that must be in a cache."""
    left: int
    """Tokens that are still expected."""
    chosen: int
    """Index into `options`; -1: it stays, and `reason` says why."""
    options: tuple[RecoveryOption, ...]
    stay_us: int = 0
    """Time for the rest where it runs."""
    go_us: int = 0
    """Time for the rest on the best other worker, with move and pause."""
    reason: str = ""
    """Why it stays; empty: it moves."""
    avoid: tuple[str, ...] = ()
    """Incarnations (`worker:incarnation`) that failed it before."""
    tier: Tier = Tier.NONE
    """When a worker drains, requests of a higher tier choose first."""


class MigrationPlanned(Event, frozen=True, tag="migration_planned/1", kw_only=True):
    """Decision: which requests of this replica leave a worker, and where they continue, all
    together."""

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    cause: MigrationCause
    """Drain or imbalance."""
    tick: int
    """The tick after which it was taken."""
    choices: tuple[MigrationChoice, ...]


class MigrationAbandoned(Event, frozen=True, tag="migration_abandoned/1", kw_only=True):
    """A planned move was not made: the attempt stays on `worker`, as far as is known."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    reason: str
