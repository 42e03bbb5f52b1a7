"""Segments that this replica's reader skipped, and their record in the log.

Each replica skips them for itself (`relume.events.log.damaged_segment`). The leader writes that into its
stream, so all learn it at the same place of the log, also those that read it later and replay.
"""

from __future__ import annotations

import structlog

from relume.controlplane.replica.leader import Leadership
from relume.events import vocabulary as v
from relume.events.log.damaged_segment import DamagedSegment
from relume.policies.state import unreadable
from relume.policies.state.fleet import Fleet

log = structlog.get_logger("relume.replica")


class DamagedStreams:
    """The damaged segments that one replica knows of: of each end of a stream the first. Others behind
    it are skipped for the same reason."""

    def __init__(self, fleet: Fleet, leadership: Leadership) -> None:
        self._fleet = fleet
        self._leadership = leadership
        self._found: dict[str, DamagedSegment] = {}
        self._written: dict[str, tuple[int, int]] = {}  # segment, epoch of our leadership

    def note(self, damaged: DamagedSegment) -> None:
        """The reader skipped it."""
        known = self._found.get(damaged.stream)
        if known is not None and known.after == damaged.after:
            return
        self._found[damaged.stream] = damaged
        if known is not None and known.seq == damaged.seq:
            return  # met again, behind other segments
        log.error(
            "segment_skipped",
            stream=damaged.stream,
            segment=damaged.seq,
            reason=damaged.reason,
            remedy="relume doctor",
        )

    def record(self) -> None:
        """Write as the leader what the log does not say yet."""
        if not self._found or not self._leadership.acting:
            return
        epoch = self._leadership.epoch
        for stream, damaged in self._found.items():
            written = self._written.get(stream) == (damaged.seq, epoch)
            if not written and unreadable.skipped_of(self._fleet, stream) != damaged.seq:
                self._written[stream] = (damaged.seq, epoch)
                self._leadership.append(
                    v.SegmentSkipped(
                        stream=stream,
                        segment=damaged.seq,
                        after=damaged.after,
                        reason=damaged.reason,
                    )
                )
