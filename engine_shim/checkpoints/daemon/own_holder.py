"""A state daemon on a thread of this process, for the process's own self-test."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from relume.engine_shim.checkpoints.daemon.local_server import LocalServer
from relume.engine_shim.checkpoints.daemon.service import Service
from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.daemon.store.block_store import BlockStore
from relume.events.wire.kv import kv_messages as m

BOUND_S = 5.0


class OwnHolder:
    """`endpoint` is where this process's engine reaches it. See `own_holder`."""

    def __init__(self, directory: str, budget_bytes: int) -> None:
        path = str(Path(directory) / "own.sock")
        self.endpoint = f"unix:{path}"
        self._store = BlockStore(Arena(budget_bytes, allow_unlocked=True))
        service = Service(self._store, "own", 0, b"", time.monotonic)
        self._server = LocalServer(service, path)
        self._server.bind()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="relume-own-holder", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._serving = self._loop.create_task(self._server.serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()
        self._store.close()

    async def ask(self, question: Callable[[BlockStore], Any]) -> Any:
        """The answer of the store, on its thread."""
        future: Future[Any] = Future()
        self._loop.call_soon_threadsafe(lambda: future.set_result(question(self._store)))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Closes every link to it for good, without reconnects."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(BOUND_S)

    def _end(self) -> None:
        self._server.turn_away(m.RefusalAnswer(0, "fenced", "it was there for a moment only"))
        self._serving.cancel()


@contextlib.contextmanager
def own_holder(budget_bytes: int) -> Iterator[OwnHolder]:
    """Raises OSError, CannotHold."""
    with tempfile.TemporaryDirectory(prefix="relume-") as directory:
        holder = OwnHolder(directory, budget_bytes)
        try:
            yield holder
        finally:
            holder.close()
