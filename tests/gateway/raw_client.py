"""A client connection of which a test sees every byte."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool

    def json(self) -> dict:
        return json.loads(self.body)


class RawClient:
    """One client connection under full control."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def __aenter__(self) -> RawClient:
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self.port, limit=1 << 24
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.writer.transport.abort()

    def send(self, path: str, body: bytes = b"", method: str = "POST", headers: str = "") -> None:
        length = f"content-length: {len(body)}\r\n" if body or method == "POST" else ""
        self.writer.write(
            f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"{length}{headers}\r\n".encode()
            + body
        )

    async def answer(self, head_only: bool = False) -> Answer:
        """Read one whole response (after 100 Continue, if any)."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100"):
            head = await self.reader.readuntil(b"\r\n\r\n")
        status = int(head.split(b" ")[1])
        headers = {
            k.lower(): v
            for k, _, v in (line.partition(": ") for line in head.decode().split("\r\n")[1:-2])
        }
        if head_only:
            return Answer(status, headers, b"", True)
        if headers.get("transfer-encoding") == "chunked":
            chunks: list[bytes] = []
            try:
                while size := int(await self.reader.readuntil(b"\r\n"), 16):
                    chunks.append((await self.reader.readexactly(size + 2))[:-2])
                await self.reader.readexactly(2)
                return Answer(status, headers, b"".join(chunks), True)
            except (asyncio.IncompleteReadError, ConnectionError):
                return Answer(status, headers, b"".join(chunks), False)
        if "content-length" not in headers and headers.get("connection") == "close":
            return Answer(status, headers, await self.reader.read(), True)
        length = int(headers.get("content-length", 0))
        return Answer(status, headers, await self.reader.readexactly(length), True)

    async def ask(
        self, path: str, body: bytes = b"", method: str = "POST", headers: str = ""
    ) -> Answer:
        self.send(path, body, method, headers)
        async with asyncio.timeout(20):
            return await self.answer(head_only=method == "HEAD")


def is_openai_error(answer, status, code=None):
    error = answer.json()["error"]
    assert answer.status == status
    assert error["message"] and error["type"] and "param" in error
    assert answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    return code is None or error["code"] == code
