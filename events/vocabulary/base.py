"""What every event is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from msgspec import Struct


class Event(Struct, frozen=True, array_like=True, gc=False):
    """Base of all events; array_like keeps a record near 40 bytes."""

    tag_level: ClassVar[int] = 1
    """Feature level since which the tag exists (`relume.events.log.feature_levels`)."""
    field_levels: ClassVar[Mapping[str, int]] = {}
    """Fields that were added later, and the level since which each exists."""


class Basis(Struct, frozen=True, array_like=True, gc=False):
    """The basis of a decision: the canonical fold at `revision` (etcd's), plus the
    replica's own events up to `position` (1-based, its stream) that it did not hold yet."""

    revision: int
    """etcd revision of the canonical fold."""
    position: int
    """Number of the replica's last own event that the fold did not hold yet."""
