"""What the fold knows of the spares of a model. Data only; part of the fleet's state."""

from __future__ import annotations

from msgspec import Struct, field


class ModelSpares(Struct, kw_only=True):
    """One model. `workers`: its spares as last decided, at tick `since`, the longest-serving first.
    `short_since`: tick from which on there was a spare too few at each tick (-1: there is not).
    `lost`: workers whose host was lost, and the tick of that; each counts as failed for a time.
    `promoted`: workers that ceased to be spares although they were open, and the tick of that."""

    workers: tuple[str, ...] = ()
    since: int = 0
    short_since: int = -1
    lost: dict[str, int] = field(default_factory=dict)
    promoted: dict[str, int] = field(default_factory=dict)
