"""What the fold knows of a rolling restart. Data only; part of the fleet's state."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from relume.events.vocabulary.enums import RolloutStage


class Rollout(Struct, kw_only=True):
    """The last rolling restart, by the command that began it. `todo`: workers to come, in order.
    `workers`: those of the present step and the incarnation of each that is to end; `since`: tick of
    its stage. `drain_ticks`: time for which requests may leave. `paused`: why it waits; empty: it does
    not. `lost`: workers of the model whose host was lost since it began, and is not back."""

    rollout: str
    model: str
    principal: str
    stage: RolloutStage
    since: int
    drain_ticks: int
    todo: list[str] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=dict)
    paused: str = ""
    lost: list[str] | UnsetType = UNSET
