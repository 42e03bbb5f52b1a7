"""Two synthetic engines in one process, for the relay bench.

The engine answers a request that carries the gateway's identity headers in frames, and every
other one in plain SSE, with the same events. `paced`: the first event at once, then one
every TICK_S, each stream at its own times: a real frontend renders the events of a decode
step one after another too. `burst`: the whole answer at once. `max_tokens` of a request selects
the mode and the number of events: `1000 * is_paced + events`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import cast

import httptools
import uvloop

from relume.events.wire import frames
from relume.events.wire.headers import REQUEST
from relume.events.wire.worker_calls import STATE_PATH

TICK_S = 0.01  # 100 tokens per second and stream
_MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)').search
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
SSE_HEAD = _HEAD % b"text/event-stream; charset=utf-8"
FRAMES_HEAD = _HEAD % frames.CONTENT_TYPE
MODEL = "bench-model"


def event(index: int, last: bool) -> bytes:
    """An event as vLLM writes it for one token of a completion."""
    body = {
        "id": "cmpl-5f0c2b7ad1e04c7f9f4a6c1f6d0e7b52",
        "object": "text_completion",
        "created": 1753000000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": f" tok{index % 7}",
                "logprobs": None,
                "finish_reason": "length" if last else None,
                "stop_reason": None,
            }
        ],
        "usage": None,
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """`data` as one HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Answers:
    """Rendered once: the chunks of an answer of `events` events, in both forms."""

    def __init__(self, events: int) -> None:
        shown = [event(i, i == events - 1) for i in range(events)]
        shown[-1] += b"data: [DONE]\n\n"
        self.sse = [chunk(data) for data in shown]
        self.frames = [
            chunk(frames.encode_tokens(i, [1000 + i * 37 % 30000], data))
            for i, data in enumerate(shown)
        ]
        self.sse[-1] += b"0\r\n\r\n"
        self.frames[-1] += chunk(frames.encode_end("length")) + b"0\r\n\r\n"


class Engines:
    """The rendered answers, which the connections share."""

    def __init__(self) -> None:
        self.answers: dict[int, Answers] = {}

    def answers_of(self, events: int) -> Answers:
        """The answer of `events` events."""
        if events not in self.answers:
            self.answers[events] = Answers(events)
        return self.answers[events]


class Connection(asyncio.Protocol):
    """One connection from a router."""

    def __init__(self, engines: Engines) -> None:
        self.engines = engines
        self.parser = httptools.HttpRequestParser(self)
        self.loop = asyncio.get_running_loop()
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.url = b""
        self.body = b""
        self.frames = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == REQUEST.encode():
            self.frames = True

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.url not in (b"/v1/completions", b"/v1/chat/completions"):
            self._local()
            return
        given = _MAX_TOKENS(self.body)
        assert given is not None
        max_tokens = int(given[1])
        answers = self.engines.answers_of(max_tokens % 1000)
        chunks = answers.frames if self.frames else answers.sse
        head = FRAMES_HEAD if self.frames else SSE_HEAD
        if max_tokens >= 1000:
            self.transport.writelines([head, chunks[0]])
            self._schedule(chunks, 1, self.loop.time() + TICK_S)
        else:
            self.transport.writelines([head, *chunks])

    def _schedule(self, chunks: list[bytes], at: int, due: float) -> None:
        self.timer = self.loop.call_at(due, self._tick, chunks, at, due)

    def _tick(self, chunks: list[bytes], at: int, due: float) -> None:
        self.transport.write(chunks[at])
        if at + 1 < len(chunks):
            self._schedule(chunks, at + 1, due + TICK_S)

    def _local(self) -> None:
        """Answers probes, the model list, and routers' requests for token ids."""
        if self.url.startswith(STATE_PATH.encode()):
            body = b'{"incarnation":1,"running":1,"waiting":0,"steps":-1,"step_age_us":0}'
        elif self.url.endswith(b"/render"):
            rendered = {"request_id": "bench", "token_ids": list(range(100, 160)), "model": MODEL}
            body = json.dumps(rendered if b"chat" in self.url else [rendered]).encode()
        else:
            model = {"id": MODEL, "object": "model", "owned_by": "vllm"}
            body = json.dumps({"object": "list", "data": [model]}).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)


async def serve(ports: list[int]) -> None:
    """Listen on the ports until killed."""
    engines = Engines()
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: Connection(engines), "127.0.0.1", port)
    print("ready", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Entry of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ports", type=int, nargs="+")
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()
