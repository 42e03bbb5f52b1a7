"""A real engine as `hang_watch` and `canary_watch` see it: the page on which it counts its steps, its HTTP server, and
what /proc says of its threads."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Protocol

import msgspec

from relume.engine_shim.agent.agent_config import is_unspecified
from relume.engine_shim.agent.canaries.canary_watch import CanaryEngine, NoCanaries
from relume.engine_shim.agent.canaries.weights_digest import weights_digest
from relume.engine_shim.agent.engine_process import stack_dump
from relume.engine_shim.agent.engine_process.child import EngineProcesses
from relume.engine_shim.agent.engine_process.drain import UNKNOWN
from relume.engine_shim.agent.engine_process.hang_watch import WatchedEngine
from relume.engine_shim.agent.engine_process.process_identity import stat_of
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.engine_shim.canary_prompts import PROMPTS, TOKENS, TOP
from relume.engine_shim.engine.cpu_clocks import ThreadClock
from relume.engine_shim.engine.progress import Progress
from relume.events.decode_errors import UNREADABLE
from relume.events.vocabulary.enums import DeathReason
from relume.events.wire.worker_calls import (
    CANARY_PATH,
    PROBE_PATH,
    STATE_PATH,
    CanaryAnswered,
    CanaryRequest,
)

CANARY_S = 10.0
"""Maximum time of an answer to a canary."""
STATE_S = 2.0
"""Maximum time of an answer with its number of requests."""
MOST_BYTES = 1 << 16
END = b"\r\n\r\n"
"""Of an answer's head."""


class _Counts(msgspec.Struct):
    """The part of `/relume/state` that counts requests: those that its scheduler has, and those that
    its HTTP server waits for."""

    running: int
    waiting: int
    unfinished: int = 0


class WatchedServer(WatchedEngine, CanaryEngine, Protocol):
    """An engine as both of its watches see it, and as its drain does."""

    async def unfinished(self) -> int:
        """Number of requests that it has; `UNKNOWN` if it does not answer."""
        ...

    def limit_batch(self, percent: int) -> None:
        """Let it run at most this share of its maximum number of requests at once."""
        ...

    def reset_prefix_cache(self) -> None:
        """Let no further request read what its prefix cache holds now."""
        ...

    def request_statement(self) -> None:
        """Have it report all requests that it has."""
        ...


class ServingEngine:
    """See `WatchedServer`. It listens on `host:port` and serves `model`."""

    def __init__(
        self,
        engine: EngineProcesses,
        incarnation: int,
        host: str,
        port: int,
        directory: RunDirectory,
        model: str,
    ) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._host = "127.0.0.1" if is_unspecified(host) else host
        self._port = port
        self._model = model
        self._directory = directory
        self._page = Progress(str(directory.progress))
        self._front = ThreadClock()

    def read(self) -> dict[str, int]:
        """See WatchedEngine."""
        state, leader = self._page.read(), self._engine.leader.pid
        state["front_us"] = 0
        with suppress(OSError, ValueError, IndexError):
            state["front_us"] = self._front.own(leader, leader)[1]
        return state

    async def turned(self, timeout_s: float) -> bool:
        """See WatchedEngine."""
        place = f"{self._host}:{self._port}"
        request = f"GET {PROBE_PATH} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n"
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(request.encode())
                    return (await reader.readline()).startswith(b"HTTP/")
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return False

    async def weights(self) -> str:
        """See CanaryEngine."""
        return await asyncio.to_thread(weights_digest, self._model)

    async def canary(self, number: int) -> CanaryAnswered | str:
        """See CanaryEngine."""
        canary_request = CanaryRequest(number, PROMPTS, self._incarnation)
        body = msgspec.json.encode(canary_request)
        try:
            answer = await self._answer(f"POST {CANARY_PATH}", body, CANARY_S)
        except TimeoutError:
            return f"no answer within {CANARY_S:g} s"
        except OSError as error:
            return f"no connection: {error.strerror or type(error).__name__}"
        return _answered(answer)

    async def unfinished(self) -> int:
        """See WatchedServer."""
        try:
            head, _, body = (await self._answer(f"GET {STATE_PATH}", b"", STATE_S)).partition(END)
            state = msgspec.json.decode(body, type=_Counts)
        except (OSError, TimeoutError, *UNREADABLE):
            return UNKNOWN
        if head.split(b" ", 2)[1:2] != [b"200"]:
            return UNKNOWN
        return max(state.running + state.waiting, state.unfinished)

    def limit_batch(self, percent: int) -> None:
        """See WatchedServer."""
        self._page.limit_batch(percent)

    def reset_prefix_cache(self) -> None:
        """See WatchedServer."""
        self._page.reset_prefix_cache()

    def request_statement(self) -> None:
        """See WatchedServer."""
        self._page.request_statement()

    async def _answer(self, line: str, body: bytes, timeout_s: float) -> bytes:
        """The bytes of its answer to a request, cut at `MOST_BYTES`. Raises OSError, TimeoutError."""
        head = (
            f"{line} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            try:
                writer.write(head.encode() + body)
                answer = await reader.read(MOST_BYTES)
                while more := await reader.read(MOST_BYTES):
                    answer = (answer + more)[:MOST_BYTES]
                return answer
            finally:
                writer.close()

    def process_state(self) -> str:
        """See WatchedEngine: that of the first of its processes that is stopped, or of its first."""
        stats = [stat_of(process.pid) for process in (self._engine.leader, *self._engine.members)]
        states = [stat.state for stat in stats if stat is not None]
        return next((s for s in states if s in stack_dump.STOPPED), "".join(states[:1]))

    async def dump(self) -> str:
        """See WatchedEngine."""
        return await stack_dump.dump(self._engine, self._directory, self._incarnation)

    def condemn(self, reason: DeathReason, detail: str) -> None:
        """See WatchedEngine."""
        self._engine.condemn(reason, detail)


def _answered(answer: bytes) -> CanaryAnswered | str:
    """What an HTTP answer says about a canary. Raises NoCanaries."""
    head, _, body = answer.partition(END)
    status = head.split(b" ", 2)[1:2]
    if status and status[0] in (b"404", b"405", b"501"):
        raise NoCanaries
    if status != [b"200"]:
        return f"status {status[0].decode('latin-1')[:3]}" if status else "no answer"
    try:
        # Log probabilities that are no numbers are read as such: they are wrong, not missing.
        found = msgspec.convert(json.loads(body), CanaryAnswered)
    except (ValueError, *UNREADABLE):
        return "an answer that is none"
    too_long = len(found.tokens) > TOKENS or len(found.logprobs) > TOKENS * TOP
    return "an answer that is too long" if too_long else found
