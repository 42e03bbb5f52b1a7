"""Live migration: running requests that go on elsewhere though nothing has failed."""

from __future__ import annotations

from msgspec import Struct

from relume.events.vocabulary.base import Basis, Event
from relume.events.vocabulary.checkpoints import RecoveryOption


class MigrationChoice(Struct, frozen=True, array_like=True, gc=False):
    """What was chosen for one running request (`chosen` indexes `options`; -1: it stays, and
    `reason` says why). `tokens` of it must be in a cache, `left` more are expected; `stay_us`
    these take where it runs, `go_us` with the best option (its move and pause included).
    `avoid`: `worker:incarnation` that failed it before."""

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


class MigrationPlanned(Event, frozen=True, tag="migration_planned/1"):
    """Decision: which requests of this replica's leave `worker`, and where they go on, all
    together. `cause`: drain, or imbalance (it has had more to do than others for long). `tick`
    is the one it was taken after."""

    decision: str
    basis: Basis
    worker: str
    incarnation: int
    cause: str
    tick: int
    choices: tuple[MigrationChoice, ...]


class MigrationAbandoned(Event, frozen=True, tag="migration_abandoned/1"):
    """A planned move was not made: the attempt stays on `worker`, as far as is known."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    reason: str
