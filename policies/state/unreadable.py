"""Records of the log that this build cannot read: known as facts, and folded as nothing else.

A replica cannot stop for one bad record: it would stop at it again after each restart, and so would
every other one. So the fold goes on. What it knows is how many records of which stream were
unreadable, and where the last one is. The worker whose agent wrote one gets no requests until an
operator has looked at it (`relume trust`): its other records still count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UnsetType

from relume.events import vocabulary as v
from relume.events.log.codec import UnreadableRecord
from relume.policies.state import dirty_set
from relume.policies.state.fleet import Fleet, UnreadableRecords


def note(fleet: Fleet, stream: str, position: int, record: UnreadableRecord) -> None:
    """Fold an unreadable record."""
    _count(fleet, stream, position, record.digest, record.reason)


def _on_skipped(fleet: Fleet, stream: str, epoch: int, event: v.SegmentSkipped) -> None:
    """A whole segment is unreadable."""
    head = fleet.streams.get(event.stream)
    reason = f"segment {event.segment}: {event.reason}"
    known = _count(fleet, event.stream, head.position if head is not None else 0, "", reason)
    known.segment = event.segment


def _count(fleet: Fleet, stream: str, position: int, digest: str, reason: str) -> UnreadableRecords:
    if isinstance(fleet.unreadable, UnsetType):
        fleet.unreadable = {}
    known = fleet.unreadable.setdefault(stream, UnreadableRecords())
    known.count += 1
    known.position, known.digest, known.reason = position, digest, reason
    if stream.startswith("w."):
        dirty_set.changed(fleet, stream[2:])
    return known


def skipped_of(fleet: Fleet, stream: str) -> int:
    """Number of the last segment of the stream that the log says is skipped (-1: it says so of none)."""
    unreadable = fleet.unreadable
    known = None if isinstance(unreadable, UnsetType) else unreadable.get(stream)
    return -1 if known is None or isinstance(known.segment, UnsetType) else known.segment


def acknowledge(fleet: Fleet, worker: str, command: str) -> None:
    """An operator's command: the worker may get requests again."""
    known = _of(fleet, worker)
    if known is not None and known.count > known.acknowledged:
        known.acknowledged, known.command = known.count, command
        dirty_set.changed(fleet, worker)


def has_unacknowledged(fleet: Fleet, worker: str) -> bool:
    """Whether the stream of the worker has unreadable records that nobody has acknowledged."""
    known = _of(fleet, worker)
    return known is not None and known.count > known.acknowledged


def why(fleet: Fleet, worker: str) -> str:
    """What its unreadable records are; empty if there are none that nobody has acknowledged."""
    known = _of(fleet, worker)
    if known is None or known.count <= known.acknowledged:
        return ""
    return _in_words(f"w.{worker}", known)


def in_words(fleet: Fleet) -> list[str]:
    """All unreadable records, also those that are acknowledged: a line per stream."""
    unreadable = fleet.unreadable
    if isinstance(unreadable, UnsetType):
        return []
    return [_in_words(stream, known) for stream, known in unreadable.items()]


def _in_words(stream: str, known: UnreadableRecords) -> str:
    what = "1 record" if known.count == 1 else f"{known.count} records"
    return f"{what} of {stream} unreadable, the last at {known.position}: {known.reason}"


def is_acknowledged_by(fleet: Fleet, worker: str, command: str) -> bool:
    """Whether it was that command."""
    known = _of(fleet, worker)
    return known is not None and known.command == command


def _of(fleet: Fleet, worker: str) -> UnreadableRecords | None:
    unreadable = fleet.unreadable
    return None if isinstance(unreadable, UnsetType) else unreadable.get(f"w.{worker}")


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {v.SegmentSkipped: _on_skipped}
