"""Tells the log how far an engine is that reads the files of its model.

Only Relume's loader says so (`--keep-weights-mb`), on the page on which the engine counts its steps.
"""

from __future__ import annotations

import asyncio

from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.engine.progress import Progress
from relume.events.vocabulary import WeightsLoading

LOOK_S = 2.0


class LoadingWatch:
    """Of one engine, until it is `serving`."""

    def __init__(
        self,
        worker: str,
        incarnation: int,
        page: Progress,
        journal: Journal,
        serving: asyncio.Event,
    ) -> None:
        self._worker, self._incarnation = worker, incarnation
        self._page = page
        self._journal = journal
        self._serving = serving
        self._written = 0, 0

    async def run(self) -> None:
        """Until it serves, all is read, or it is cancelled."""
        size = read = 0
        while not self._serving.is_set() and (not size or read < size):
            await asyncio.sleep(LOOK_S)
            size, read = now = self._page.loading()
            if now != self._written:
                self._written = now
                event = WeightsLoading(
                    worker=self._worker, incarnation=self._incarnation, bytes=size, read_bytes=read
                )
                self._journal.record_when_readable(event)
