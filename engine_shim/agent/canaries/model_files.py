"""The files of the model that an engine loads, as the agent reads them beside its event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from relume.engine_shim.agent.canaries.weights_digest import (
    FileStamp,
    KnownFiles,
    ModelDigest,
    Reading,
    read_files,
    stamps_of,
    weights_digest,
)

NICE = 10
"""The reader gives way to the engine and the agent by so much."""
NOT_LOCAL = "the model is no local directory that the agent can read"
T = TypeVar("T")


class ModelFiles(Protocol):
    """The files of a model, for one engine."""

    async def note(self) -> int:
        """Note how the files are now, because the engine is about to load them; returns their size in bytes.
        Raises OSError."""
        ...

    async def short(self) -> str:
        """The short digest of them, empty if it is unknown."""
        ...

    async def read(self, anew: bool, reading: Reading) -> ModelDigest:
        """The digest of every byte, of the files as they were noted. `anew`: what was read before
        does not count. Raises OSError."""
        ...


class LocalModelFiles:
    """See ModelFiles: of a directory of this host. What was read before is remembered in the file
    `known`."""

    def __init__(self, model: str, known: Path) -> None:
        self._model = model
        self._known = KnownFiles(known)
        self._noted: dict[str, FileStamp] = {}

    async def note(self) -> int:
        """See ModelFiles."""
        try:
            self._noted = await in_thread(partial(stamps_of, self._model))
        except OSError:
            raise OSError(NOT_LOCAL) from None
        return sum(stamp.size for stamp in self._noted.values())

    async def short(self) -> str:
        """See ModelFiles."""
        return await in_thread(partial(weights_digest, self._model))

    async def read(self, anew: bool, reading: Reading) -> ModelDigest:
        """See ModelFiles."""
        work = partial(read_files, self._model, self._noted, self._known, anew, reading)
        try:
            return await in_thread(work)
        finally:
            reading.stop()


async def in_thread(work: Callable[[], T]) -> T:
    """The result of `work`, in a thread of low priority. A disk that does not answer holds up neither the
    loop nor the agent's end, so this is no thread of a pool."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def run() -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            outcome = partial(done.set_result, work())
        except Exception as error:  # noqa: BLE001 - the task that waits gets it
            outcome = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name="model files", daemon=True).start()
    return await done
