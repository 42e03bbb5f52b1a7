"""Has every byte of the files of an engine's model read once, and writes their digest into the log.

The leader compares it when the worker is to leave quarantine: an engine that loaded damaged files may
answer all canaries rightly. Every worker reads its files once after its first start, at a bounded rate,
so that there is something to compare with. A worker in quarantine serves nothing: it reads them again, at
full speed.

`WeightsReadStarted` is in the log before the engine's first answer to a canary, so the leader knows that
a digest will follow. Both events wait until every replica reads them (`Journal.record_when_readable`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.canaries.model_files import ModelFiles
from relume.engine_shim.agent.canaries.weights_digest import Reading
from relume.engine_shim.agent.journal import Journal
from relume.events.vocabulary import WeightsDigested, WeightsReadStarted

SHOW_S = 30.0
"""Pause between two messages about a long read."""
MIB = 1 << 20


class WeightsWatch:
    """Of one engine. `note` before it loads, `begin` when it is ready, then `run`. `is_quarantined()`:
    whether its worker is."""

    def __init__(
        self,
        files: ModelFiles,
        incarnation: int,
        config: AgentConfig,
        journal: Journal,
        logger: Logger,
        is_quarantined: Callable[[], bool],
    ) -> None:
        self._files = files
        self._incarnation = incarnation
        self._config = config
        self._journal = journal
        self._logger = logger
        self._is_quarantined = is_quarantined
        self._reading = Reading()
        self._anew = False
        self._quarantined = asyncio.Event()
        self._size_bytes = 0
        self._weights = ""
        self._events: list[WeightsReadStarted | WeightsDigested] = []

    async def note(self) -> None:
        """Note how the files are before the engine loads them."""
        try:
            self._size_bytes = await self._files.note()
        except OSError as error:
            self._report(self._digested(error=str(error)))

    def read_anew(self) -> None:
        """The leader quarantined the worker for an earlier engine, and the agent hears of it only now."""
        self._quarantined.set()

    async def begin(self) -> None:
        """Say in the log that the files are being read."""
        if self._is_over:
            return
        self._anew = self._is_quarantined()
        self._reading = Reading(0 if self._anew else self._config.weights_read_mb_s * MIB)
        self._weights = await self._files.short()
        self._report(
            WeightsReadStarted(
                worker=self._config.worker,
                incarnation=self._incarnation,
                weights=self._weights,
                size_bytes=self._size_bytes,
            )
        )

    async def run(self) -> None:
        """Read the files, and write their digest into the log; again in quarantine, if remembered digests
        are part of it."""
        if self._is_over:
            return
        await self._read()
        while not self._anew:
            await self._quarantined.wait()
            self._events.clear()
            await self.begin()
            await self._read()

    async def _read(self) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        showing = asyncio.create_task(self._show())
        try:
            found = await self._files.read(self._anew, self._reading)
        except OSError as error:
            self._report(self._digested(error=str(error)))
        else:
            self._report(
                self._digested(
                    digest=found.digest,
                    files=found.files,
                    size_bytes=found.size_bytes,
                    reread=found.reread,
                    took_ms=round((now() - began) * 1000),
                )
            )
        finally:
            showing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await showing

    def state_again(self) -> None:
        """Write what is known into a log that has nothing of it."""
        for event in self._events:
            self._journal.record_when_readable(event)

    @property
    def _is_over(self) -> bool:
        return any(type(event) is WeightsDigested for event in self._events)

    def _digested(self, **found: Any) -> WeightsDigested:
        worker, incarnation = self._config.worker, self._incarnation
        return WeightsDigested(
            worker=worker, incarnation=incarnation, weights=self._weights, **found
        )

    def _report(self, event: WeightsReadStarted | WeightsDigested) -> None:
        self._events.append(event)
        self._journal.record_when_readable(event)
        if type(event) is WeightsDigested:
            self._logger.info("the model's files: read", **self.describe())

    async def _show(self) -> None:
        while True:
            await asyncio.sleep(SHOW_S)
            self._logger.info("the model's files: being read", **self.describe())

    def describe(self) -> dict[str, Any]:
        """For the status page and messages."""
        last = self._events[-1] if self._events else None
        found = last if isinstance(last, WeightsDigested) else None
        return {
            "incarnation": self._incarnation,
            "read_mb": self._reading.done_bytes // MIB,
            "size_mb": self._size_bytes // MIB,
            "anew": self._anew,
            "digest": found.digest if found is not None else "",
            "error": found.error if found is not None else "",
        }
