"""A client of resumable streams by hand: every event's id and data as they came."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from msgspec import Struct, field

from relume.chaos.traffic import Stream, take_event
from tests.live.conftest import HANG_S

ASKING = {"x-relume-resumable": "1", "content-type": "application/json"}


class Reader(Struct, kw_only=True):
    """What a client has of one stream, over all of its connections."""

    name: str
    events: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    status: int = 0
    answer: str = ""
    request: str = ""
    resumable: str = ""
    done: bool = False

    @property
    def last_id(self) -> str:
        return self.ids[-1] if self.ids else ""

    @property
    def error(self) -> str:
        """The error event it got, if any."""
        return next((e for e in self.events if e.startswith('{"error"')), "")

    def stream(self, prompt: str) -> Stream:
        """The same as the traffic's clients tell it."""
        found = Stream(request=self.name, prompt=prompt, status=200, done=self.done)
        for event in self.events:
            if event == "[DONE]":
                continue
            if event.startswith('{"error"'):
                found.error = event
            else:
                take_event(found, json.loads(event))
        return found

    async def read(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: dict[str, Any] | None = None,
        until: Callable[[Reader], bool] = lambda reader: False,
    ) -> None:
        """Post `body`, or come back with the last id, and read until the end, until `until`
        says so (then the connection is closed) or the connection breaks."""
        headers = {**ASKING, "x-request-id": self.name}
        if body is None:
            headers["last-event-id"] = self.last_id
        try:
            async with (
                asyncio.timeout(HANG_S),
                session.post(url, json=body, headers=headers) as answer,
            ):
                self.status = answer.status
                self.request = answer.headers.get("x-relume-request", self.request)
                self.resumable = answer.headers.get("x-relume-resumable", "")
                if answer.status != 200:
                    self.answer = await answer.text()
                    return
                await self._events(answer, until)
        except (aiohttp.ClientError, OSError):
            return

    async def read_a_part(self, url: str, body: dict[str, Any], count: int) -> socket.socket:
        """Post `body`, take `count` events or more and read no further. The connection."""
        loop, place = asyncio.get_running_loop(), urlsplit(url)
        content = json.dumps(body).encode()
        lines = [f"POST {place.path} HTTP/1.1", f"host: {place.netloc}"]
        headers = {**ASKING, "x-request-id": self.name, "content-length": len(content)}
        lines += [f"{name}: {value}" for name, value in headers.items()]
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what is unread stays there
        sock.setblocking(False)
        async with asyncio.timeout(HANG_S):
            await loop.sock_connect(sock, (place.hostname, place.port))
            await loop.sock_sendall(sock, ("\r\n".join(lines) + "\r\n\r\n").encode() + content)
            answer = b""
            while len(found := re.findall(r"id: (\S+)\ndata: (.*)\n\n", answer.decode())) < count:
                more = await loop.sock_recv(sock, 1024)
                assert more, answer
                answer += more
        self.ids = [event_id for event_id, _ in found]
        self.events = [data for _, data in found]
        self.request = re.findall(r"x-relume-request: (\S+)", answer.decode())[0]
        return sock

    async def _events(
        self, answer: aiohttp.ClientResponse, until: Callable[[Reader], bool]
    ) -> None:
        shown = ""
        async for line in answer.content:
            text = line.decode().rstrip("\n")
            if text.startswith("id: "):
                shown = text[4:]
            elif text.startswith("data: "):
                self.events.append(text[6:])
                if shown:
                    self.ids.append(shown)
                shown = ""
                if text == "data: [DONE]":
                    self.done = True
                if until(self):
                    return
