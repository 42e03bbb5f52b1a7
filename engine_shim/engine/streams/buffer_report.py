"""Reports to the log the streams that this engine buffers for clients that may resume."""

from __future__ import annotations

from collections.abc import Callable

from relume.engine_shim.engine import plugin
from relume.events.log.codec import encode
from relume.events.vocabulary import StreamsReported

REPORT_S = 5.0
"""Minimum time between two reports; unchanged statistics are not reported."""


class BufferReport:
    """`figures` returns the statistics, `tell` sends a finished record."""

    def __init__(
        self,
        incarnation: int,
        figures: Callable[[], dict[str, int]],
        tell: Callable[[bytes], None] = plugin.tell,
    ) -> None:
        self._incarnation = incarnation
        self._figures = figures
        self._tell = tell
        self._reported = figures()
        self._due_s = 0.0

    def look(self, now_s: float) -> None:
        """Report what changed, if it is time."""
        if now_s < self._due_s:
            return
        figures = self._figures()
        if figures == self._reported:
            return
        self._reported, self._due_s = figures, now_s + REPORT_S
        self._tell(encode(StreamsReported(self._incarnation, tuple(figures.items()))))
