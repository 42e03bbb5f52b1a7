"""Counts prompt tokens through the tokenising process; a request never waits long for it.

The process starts with the gateway and restarts when it ends, after a delay that grows each time. A
count without an answer within `wait_s` is estimated, as without a tokenizer. So is one that comes
while the process starts, while too many questions are pending, or while pending questions had no
answer for `wait_s`: a hung tokenizer delays a few requests, not all.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from relume.events.decode_errors import UNREADABLE
from relume.events.wire.tokenizer_messages import HEADER, CountReply, CountRequest, frame

log = structlog.get_logger("relume.gateway")

MAX_BODY_BYTES = 4 << 20
"""Longer ones are estimated: no model's context holds them."""
MAX_PENDING = 256
MAX_PENDING_BYTES = 32 << 20
MAX_REPLY_BYTES = 1 << 20
HUNG_S = 10.0
"""After this time without an answer the process is ended."""
PAUSES_S = (0.5, 2.0, 10.0, 60.0)
STEADY_S = 60.0
"""A process that ran at least this long restarts without a delay."""


class TokenCounters(Struct, kw_only=True):
    """Since start, by how prompts were counted: by the tokenizer, or estimated because it
    could not, had not answered in time, or was not there or overloaded; restarts of it."""

    counted: int = 0
    unusable: int = 0
    late: int = 0
    away: int = 0
    restarts: int = 0


class Tokens:
    """An async context manager: the process lives within it. `spec` as of
    `relume.controlplane.gateway.openai.tokenizing`; `wait_s` a request waits for its answer at
    most."""

    def __init__(self, spec: str, wait_s: float, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.wait_s = wait_s
        self.counters = TokenCounters()
        self.pid = 0
        """Of the process; 0 while none answers."""
        self._clock = clock
        self._pending: dict[int, tuple[asyncio.Future[CountReply | None], int]] = {}
        """By number, the questions that the process has not answered, including those whose request
        no longer waits; and the sizes of their bodies. None: the process ended."""
        self._pending_bytes = 0
        self._number = 0
        self._waiting_since = 0.0
        self._writer: asyncio.StreamWriter | None = None
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Tokens:
        self._task = asyncio.create_task(self._run(), name="tokenizer")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def ready(self) -> None:
        """Wait until the process answers."""
        await self._ready.wait()

    async def count(
        self, model: str, chat: bool, block_tokens: int, body: bytes
    ) -> CountReply | None:
        """The answer for a body; None: estimate it."""
        if len(body) > MAX_BODY_BYTES:
            self.counters.unusable += 1
            return None
        future = self._ask(model, chat, block_tokens, body)
        if future is None:
            self.counters.away += 1
            return None
        try:
            async with asyncio.timeout(self.wait_s):
                answer = await future
        except TimeoutError:
            self.counters.late += 1
            return None
        if answer is None:
            self.counters.away += 1
            return None
        if answer.tokens < 0:
            self.counters.unusable += 1
            return None
        self.counters.counted += 1
        return answer

    def _ask(
        self, model: str, chat: bool, block_tokens: int, body: bytes
    ) -> asyncio.Future[CountReply | None] | None:
        writer, size = self._writer, len(body)
        if writer is None or len(self._pending) >= MAX_PENDING:
            return None
        if self._pending_bytes + size > MAX_PENDING_BYTES or self._silent_s() > self.wait_s:
            return None
        if not self._pending:
            self._waiting_since = self._clock()
        self._number += 1
        future: asyncio.Future[CountReply | None] = asyncio.get_running_loop().create_future()
        self._pending[self._number] = future, size
        self._pending_bytes += size
        writer.write(
            frame(
                CountRequest(
                    number=self._number,
                    model=model,
                    chat=chat,
                    block_tokens=block_tokens,
                    body=body,
                )
            )
        )
        return future

    def _silent_s(self) -> float:
        """The time without an answer while a question is pending."""
        return self._clock() - self._waiting_since if self._pending else 0.0

    # --- the process

    async def _run(self) -> None:
        fails = 0
        while True:
            began = self._clock()
            why = await self._life()
            if self._clock() - began > STEADY_S:
                fails = 0
            pause_s = PAUSES_S[min(fails, len(PAUSES_S) - 1)]
            fails += 1
            self.counters.restarts += 1
            log.error("tokenizer_ended", reason=why, again_in_s=pause_s)
            await asyncio.sleep(pause_s)

    async def _life(self) -> str:
        """One process from start to end; why it ended."""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "relume.controlplane.gateway.openai.tokenizing", self.spec),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            return str(error)
        reader, writer = process.stdout, process.stdin
        assert reader is not None and writer is not None
        watch = asyncio.create_task(self._watch(process))
        try:
            return await self._read(reader, writer, process.pid)
        except (asyncio.IncompleteReadError, ConnectionError):
            if watch.done():
                return f"the gateway killed it: no answer for {HUNG_S:.0f} s"
            return "it ended by itself; what it said is above"
        except (ValueError, *UNREADABLE) as error:
            return f"it answered garbage: {error}"
        finally:
            watch.cancel()
            self._writer, self.pid = None, 0
            self._ready.clear()
            for future, _ in self._pending.values():
                if not future.done():
                    future.set_result(None)
            self._pending.clear()
            self._pending_bytes = 0
            writer.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pid: int
    ) -> str:
        decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(CountReply).decode
        while True:
            (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            if length > MAX_REPLY_BYTES:
                raise ValueError(f"a frame of {length} bytes")
            answer = decode(await reader.readexactly(length))
            if not answer.number:
                self._writer, self.pid = writer, pid
                self._ready.set()
                continue
            if answer.number not in self._pending:
                raise ValueError(f"an answer to question {answer.number}, which is not pending")
            self._waiting_since = self._clock()
            future, size = self._pending.pop(answer.number)
            self._pending_bytes -= size
            if not future.done():
                future.set_result(answer)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """A process that answers nothing is ended."""
        while True:
            await asyncio.sleep(1.0)
            if self._silent_s() > HUNG_S:
                log.error("tokenizer_hangs", pid=process.pid)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return
