"""Live migration: running requests that continue elsewhere although nothing has failed."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.checkpoint_events import RecoveryOption
from relume.events.vocabulary.enums import MigrationCause, Tier


class MigrationChoice(Struct, frozen=True, array_like=True, gc=False, kw_only=True):
    """What was chosen for one running request (`chosen` indexes `options`; -1: it stays, and
    `reason` says why). `tokens` of it must be in a cache, `left` more are expected; `stay_us`
    these take where it runs, `go_us` with the best option (its move and pause included).
    `avoid`: `worker:incarnation` that failed it before. When a worker drains, requests of a higher
    `tier` chose before it."""

    request: str
    attempt: int
    tokens: int
    left: int
    chosen: int
    options: tuple[RecoveryOption, ...]
    stay_us: int = 0
    go_us: int = 0
    reason: str = ""
    avoid: tuple[str, ...] = ()
    tier: Tier = Tier.NONE


class MigrationPlanned(Event, frozen=True, tag="migration_planned/1", kw_only=True):
    """Decision: which requests of this replica leave `worker`, and where they continue, all
    together. `tick` is the last one before it."""

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    cause: MigrationCause
    tick: int
    choices: tuple[MigrationChoice, ...]


class MigrationAbandoned(Event, frozen=True, tag="migration_abandoned/1", kw_only=True):
    """A planned move was not made: the attempt stays on `worker`, as far as is known."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    reason: str
