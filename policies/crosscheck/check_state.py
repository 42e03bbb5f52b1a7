"""What the fold knows of cross-checks. Data only; part of the fleet's state."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field


class CheckRecord(Struct, kw_only=True):
    """Of one incarnation of a worker. `busy_until`: tick up to which its engine may answer a check;
    `rests_until_ms`: time of the leader's clock up to which what it saved for checks is spent
    (`check_budget`); before version 2 of `cross_check`, before which it gets no further one. `is_paid`:
    the check that it answers is one of the budget (not before that version).
    `disputed`: by request, tick at which an answer of it was found to differ from another engine's;
    `owed`: right answers to canaries that end the doubt about these. `hurried`: tick at which its
    canaries were last due because of one. `outvoted`: by request, tick at which a majority
    contradicted it."""

    incarnation: int
    busy_until: int = -1
    rests_until_ms: int = 0
    disputed: dict[str, int] = field(default_factory=dict)
    owed: int = 0
    hurried: int = -1
    outvoted: dict[str, int] = field(default_factory=dict)
    is_paid: bool | UnsetType = UNSET


class Opinion(Struct, frozen=True):
    """What the engine of an incarnation answers, as a digest."""

    incarnation: int
    answer: bytes


class Dispute(Struct, kw_only=True):
    """Two engines answered one request differently, first at `tick`. `worker` and `incarnation` gave
    the client's answer; `again`: what they gave when they answered once more; `others`: what other
    workers gave. `hurried`: workers whose canaries are due because of it."""

    worker: str
    incarnation: int
    tick: int
    again: Opinion | None = None
    others: dict[str, Opinion] = field(default_factory=dict)
    hurried: tuple[str, ...] = ()
