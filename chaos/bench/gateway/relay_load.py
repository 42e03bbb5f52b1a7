"""The load client of the relay bench: one process, commands on stdin, results on stdout.

Each line in is a JSON object {port, streams, events, paced, seconds, requests_per_s,
resumable}; each line out is {requests, events, errors, ttfb_us}. Paced: every stream sends its
next request as soon as its answer is complete; streams start at different times. Burst: all
streams send at the same moment, wave after wave, `requests_per_s` in all. Resumable: the client
requests resumable streams, so every event has an id. An answer that is not whole, or has a wrong
number of events or ids, counts as an error.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import cast

import httptools
import uvloop

from relume.events.wire.headers import RESUMABLE

PATH = "/v1/completions"
MAX_SAMPLES = 20_000


class Stream(asyncio.Protocol):
    """One client connection that sends requests until it is stopped."""

    def __init__(self, request: bytes, events: int, paced: bool, resumable: bool) -> None:
        self.request = request
        self.expected = events + 1  # and [DONE]
        self.expected_ids = self.expected * resumable
        self.paced = paced
        self.requests = 0
        self.events = 0
        self.errors = 0
        self.ttfb_us: list[int] = []
        self.busy = False
        self.stopping = False
        self.idle = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpResponseParser(self)

    def ask(self) -> None:
        """Send a request if the last one has its answer."""
        if self.stopping or self.busy or self.transport.is_closing():
            return
        self.busy = True
        self.idle.clear()
        self.seen = self.seen_ids = 0
        self.tail = b"     \n"
        self.first = False
        self.sent_at = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.errors += self.busy
        self.idle.set()

    def on_body(self, data: bytes) -> None:
        if not self.first:
            self.first = True
            if len(self.ttfb_us) < MAX_SAMPLES:
                self.ttfb_us.append(int((time.perf_counter() - self.sent_at) * 1e6))
        joined = self.tail + data
        self.seen += joined.count(b"\ndata: ")
        self.seen_ids += joined.count(b"\nid: ", 2)
        self.tail = joined[-6:]

    def on_message_complete(self) -> None:
        right = self.seen == self.expected and self.seen_ids == self.expected_ids
        self.errors += self.parser.get_status_code() != 200 or not right
        self.requests += 1
        self.events += self.seen
        self.busy = False
        self.idle.set()
        if self.paced:
            self.ask()


def request_of(port: int, events: int, paced: bool, resumable: bool) -> bytes:
    """The bytes of one request."""
    body = json.dumps(
        {
            "model": "bench-model",
            "prompt": "the same few words that every request of this bench begins with " * 4,
            "temperature": 0,
            "stream": True,
            "max_tokens": events + 1000 * paced,
        }
    ).encode()
    asks = f"{RESUMABLE}: 1\r\n" if resumable else ""
    head = (
        f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"accept: */*\r\n{asks}user-agent: relume-bench\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(
    port: int,
    streams: int,
    events: int,
    paced: bool,
    seconds: float,
    requests_per_s: float,
    resumable: bool,
) -> dict:
    """Run one point and return its counts."""
    loop = asyncio.get_running_loop()
    request = request_of(port, events, paced, resumable)
    clients = []
    for _ in range(streams):
        _, client = await loop.create_connection(
            lambda: Stream(request, events, paced, resumable), "127.0.0.1", port
        )
        clients.append(client)
    until = loop.time() + seconds
    if paced:
        for client in clients:
            client.ask()
            await asyncio.sleep(min(1.0, seconds / 2) / streams)
        await asyncio.sleep(until - loop.time())
    else:
        due = loop.time()
        while due < until:
            for client in clients:
                client.ask()
            due += streams / requests_per_s
            await asyncio.sleep(due - loop.time())
    for client in clients:
        client.stopping = True
    async with asyncio.timeout(30):
        for client in clients:
            if client.busy:
                await client.idle.wait()
            client.transport.close()
    return {
        "requests": sum(c.requests for c in clients),
        "events": sum(c.events for c in clients),
        "errors": sum(c.errors for c in clients),
        "ttfb_us": [sample for c in clients for sample in c.ttfb_us],
    }


def main() -> None:
    """Entry of the process."""
    for line in sys.stdin:
        print(json.dumps(uvloop.run(load(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
