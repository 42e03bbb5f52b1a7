"""What the fold knows of canaries. Data only; part of the fleet's state."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field


class CanaryAnswer(Struct, frozen=True, kw_only=True):
    """A worker's latest answer to one canary. `exact`: its bits are compared, because its engine is
    exact and computed nothing else then. `tick`: when it was folded."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    exact: bool
    tick: int


class CanaryValues(Struct, frozen=True, kw_only=True):
    """The golden values of one canary for one class, see `CanaryValuesDecided`. `since`: tick from
    which these witnesses agree."""

    version: int
    tokens: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    exact: bool
    witnesses: tuple[str, ...]
    since: int | UnsetType = UNSET  # not before version 10 of `health`


class CanaryRecord(Struct, kw_only=True):
    """The canaries of one incarnation of a worker. `kind`: the class whose values apply to it.
    `wrong`: by canary, how many answers in a row were wrong; `doubtful`: the same where no majority
    says what is right, or since it says something else. `what`: what differed last. `good`: right answers in a row;
    `good_ticks`: by canary, tick of the last right one. `times`: by canary, microseconds of the latest that
    the engine computed alone, without waits for a CPU; `slow`: in how many of them in a row it was slow, tick
    and percent of the last (`relume.policies.health.canary_pace`)."""

    kind: str
    incarnation: int
    answers: dict[int, CanaryAnswer] = field(default_factory=dict)
    wrong: dict[int, int] = field(default_factory=dict)
    doubtful: dict[int, int] = field(default_factory=dict)
    what: str = ""
    good: int = 0
    good_ticks: dict[int, int] = field(default_factory=dict)
    times: dict[int, int] | UnsetType = UNSET  # not before version 11 of `health`
    slow: tuple[int, int, int] | UnsetType = UNSET


class ClassValues(Struct, kw_only=True):
    """The golden values of a class by canary, and the versions that the leader was found to owe."""

    values: dict[int, CanaryValues] = field(default_factory=dict)
    owed: dict[int, int] = field(default_factory=dict)
