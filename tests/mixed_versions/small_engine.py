"""A scripted engine as a process that an agent of any build starts, with the report protocol of the
build that runs it.

python -m tests.mixed_versions.small_engine SOCKET    a zygote at SOCKET, which forks this engine
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import types
from collections.abc import Sequence

from relume.engine_shim.engine.hosts.zygote import Zygote
from relume.engine_shim.engine.reporter import Reporter
from relume.events.log.codec import encode
from relume.events.vocabulary import (
    AnyChange,
    EngineFinished,
    EngineStep,
    FirstToken,
    RequestAdmitted,
    RequestQueued,
)
from relume.events.wire import headers as h
from relume.events.wire.reports import Hello, Ready, frame, ready_frame
from relume.events.wire.worker_calls import ATTACH_PATH, RELEASE_PATH
from tests.gateway.peers import Behaviour, Engine, Seen, _EngineConnection, frames

HOST = "relume.engine_shim.engine.hosts.inproc_host"
PAUSE_S = 0.04
"""Between two tokens: a stream lasts half a second."""
PROMPT_TOKENS = 1
STEP_US = 20_000


class SmallEngine(Engine):
    """It reports the life of each request. A stream with a grace runs on without its connection; who
    attaches to it gets it from its beginning."""

    def __init__(self, name: str, incarnation: int) -> None:
        super().__init__(name, incarnation)
        self.default = Behaviour(pause_s=PAUSE_S)
        self.reporter: Reporter | None = None
        self.streams: dict[tuple[str, int], Seen] = {}
        self.running = 0
        self.steps = 0

    async def __aenter__(self) -> SmallEngine:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Connection(self), "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def state(self) -> bytes:
        known = {"worker": self.name, "incarnation": self.incarnation, "running": self.running}
        body = json.dumps({**known, "waiting": 0}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        return head + b"content-length: %d\r\n\r\n" % len(body) + body

    def report(self, *changes: AnyChange) -> None:
        assert self.reporter is not None
        self.steps += 1
        step = EngineStep(
            incarnation=self.incarnation, step=self.steps, duration_us=STEP_US, batch=self.running,
            sum_context=0, prefill_tokens=0, waiting=0, kv_used=self.running, changes=changes,
        )  # fmt: skip
        self.reporter.send(frame(encode(step)))


class Connection(_EngineConnection):
    """Of a gateway."""

    engine: SmallEngine

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.connections.discard(self)
        if self.seen is not None and h.GRACE in self.seen.headers:
            return
        super().connection_lost(exc)

    async def answer(self, how: Behaviour, seen: Seen) -> None:
        if h.REQUEST not in seen.headers or seen.path in (ATTACH_PATH, RELEASE_PATH):
            await super().answer(how, seen)
            return
        engine = self.engine
        request, attempt = key = seen.headers[h.REQUEST], int(seen.headers[h.ATTEMPT])
        engine.streams[key] = seen
        engine.running += 1
        dispatch = h.decode_dispatch(seen.headers[h.DISPATCH])
        engine.report(
            RequestQueued(request, attempt, PROMPT_TOKENS, dispatch),
            RequestAdmitted(request, attempt, 0, 1),
            FirstToken(request, attempt),
        )
        ends = EngineFinished(request, attempt, "abort", 0)
        try:
            await super().answer(how, seen)
            ends = EngineFinished(request, attempt, "length", how.tokens)
        finally:
            engine.running -= 1
            engine.report(ends)

    def render(self, how: Behaviour, seen: Seen) -> list[bytes]:
        if seen.path == RELEASE_PATH:
            return super().render(how, Seen(path=seen.path, headers={}, body=b""))
        if seen.path != ATTACH_PATH:
            return super().render(how, seen)
        call = json.loads(seen.body)
        of = self.engine.streams.get((call["request"], call["attempt"]))
        if of is None or call["incarnation"] != self.engine.incarnation:
            return [b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\ngone"]
        response, created = of.headers["x-request-id"], of.headers[h.CREATED]
        envelope = json.dumps({"path": of.path, "id": response, "created": created}).encode()
        envelope += b"\n" + of.body
        known = frames(
            body=of.body, response_id=f"cmpl-{response}", created=created, n=how.tokens, start=0,
            chat=False, stream=True, size=how.text_bytes,
        )  # fmt: skip
        sent = [b":v %d\n%b" % (len(envelope), envelope), *known]
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/x-relume-frames\r\n"
            b"x-relume-from: 0\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        return [head, *(b"%x\r\n%b\r\n" % (len(f), f) for f in sent), b"0\r\n\r\n"]


async def serve(port: int, model: str) -> None:
    worker, incarnation = os.environ["RELUME_WORKER"], int(os.environ["RELUME_INCARNATION"])
    engine = SmallEngine(worker, incarnation)
    engine.port = port
    hello = Hello(os.getpid(), "core", incarnation)
    engine.reporter = Reporter(os.environ["RELUME_AGENT_SOCKET"], hello)
    async with engine:
        ready = Ready(
            port=engine.port, max_model_len=4096, block_size=16, kv_blocks=512, model=model,
            vllm="0", exact={"greedy": True},
        )  # fmt: skip
        engine.reporter.send(ready_frame(ready))
        await asyncio.Event().wait()


def main(argv: Sequence[str]) -> None:
    """As the zygote's fork calls the host of an engine: with vLLM's flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default="m")
    parser.add_argument("--served-model-name", default="")
    known, _ = parser.parse_known_args(argv)
    asyncio.run(serve(known.port, known.served_model_name or known.model))


def zygote(path: str) -> None:
    """The build's own, with this engine in the place of vLLM's."""
    host = types.ModuleType(HOST)
    host.main = main  # type: ignore[attr-defined]
    sys.modules[HOST] = host
    Zygote(path).run()


if __name__ == "__main__":
    zygote(sys.argv[1])
