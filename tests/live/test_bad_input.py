"""What clients do wrong: each is told clearly, at once, and no worker pays for it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import ProbeResult
from tests.live.cases import CHAT, TEXT
from tests.live.conftest import HANG_S, Scene, same, scene_of, whole
from tests.processes import cpu_time, starved
from tests.suite.outcomes import inconclusive

MB = 1 << 20
STALL_S = 6.0
"""Longer than an engine on a busy machine is silent."""

MALFORMED = (
    b"",
    b"{",
    b"[]",
    b'"text"',
    b"null",
    b'{"model": "tiny", "prompt": "a", "max_tokens": 4',
    b'{"model": "tiny", "prompt": "a", "max_tokens": 4}}',
    b'{"model": "tiny", "prompt": "\xff\xfe"}',
    b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
    b'{"model": "tiny", "prompt": "a", "stop": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b'{"model": "tiny", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    b"\x00" * 100,
)

WRONG: tuple[dict[str, Any], ...] = (
    *({"temperature": x} for x in (-1, -0.001, 3, 1e308, "hot", True, [])),
    *({"top_p": x} for x in (0, -1, 1.5, "x")),
    *({"top_k": x} for x in (-5, 1.5, "x")),
    *({"min_p": x} for x in (-1, 2)),
    *({"n": x} for x in (0, -1, 1.5, 10**9)),
    *({"max_tokens": x} for x in (0, -1, 1.5, "many", 10**12, 5000)),
    *({"min_tokens": x} for x in (-1, 100, "x")),
    *({"seed": x} for x in ("x", 2**70, 1.5)),
    *({"stop": x} for x in (5, [1], [[]], {})),
    *({"stop_token_ids": x} for x in (["a"], 5)),
    *({"logprobs": x} for x in (-3, 10**6, "x")),
    *({"prompt_logprobs": x} for x in (-5, 10**6)),
    *({"presence_penalty": x} for x in (3, -3, "x")),
    *({"frequency_penalty": x} for x in (3, -3)),
    *({"repetition_penalty": x} for x in (0, -1, "x")),
    *({"logit_bias": x} for x in ({"x": 1}, {"99999999": 1}, {"-5": 1}, 5, {"5": "x"})),
    *({"allowed_token_ids": x} for x in ([], [10**9], [-1], "x")),
    *({"bad_words": x} for x in ([5], "x")),
    *({"prompt": x} for x in ([], "", {}, 7, [[]], [-1], [99_999_999], [[1], "a"], True)),
    {"prompt": "word " * 3000},
    {"prompt": list(range(1, 3000))},
    *({"stream": x} for x in ("yes", 1)),
    {"stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": 5},
    *({"echo": x} for x in ("x", 5)),
    *({"ignore_eos": x} for x in ("x", 5)),
    *({"structured_outputs": {"regex": x}} for x in ("(", 5)),
    {"structured_outputs": {"json": {"type": "alien"}}},
    {"structured_outputs": {"grammar": "no grammar ::="}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    *({"response_format": x} for x in ({"type": "alien"}, 5, {"type": "json_schema"})),
    *({"truncate_prompt_tokens": x} for x in (-5, 10**9, "x")),
    *({"vllm_xargs": x} for x in ({"relume": "x"}, {"kv_transfer_params": "x"}, 5)),
    {"use_beam_search": True, "n": 0},
    {"model": 5},
    {"model": "x" * 5000},
)

WRONG_CHATS: tuple[dict[str, Any], ...] = (
    *({"messages": x} for x in ([], "hello", {}, [5], [{}], None)),
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    {"messages": [{"role": "user", "content": "word " * 3000}]},
    *({"tools": x} for x in ("x", [5], [{}])),
    {"tools": [], "tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "nowhere"}}},
    *({"top_logprobs": x} for x in (-1, 10**6)),
    {"top_logprobs": 3, "logprobs": False},
    *({"max_completion_tokens": x} for x in (-1, 10**12, "x")),
    {"chat_template": "{% for %}"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}},
)


async def test_bad_input_is_refused_and_harms_no_other_request(
    options: FleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("FLOOR", "CAP"):
        monkeypatch.setenv(f"RELUME_STALL_{bound}_MS", str(int(STALL_S * 1000)))
    args = (*options.engine_args, "--max-logprobs", "100")
    options = msgspec.structs.replace(options, engine_args=args)
    async with scene_of(options) as scene:
        calm = await scene.streams(4, 64, "calm")
        assert not whole(calm)
        await _idle(scene)
        before = await _lives(scene)
        engines = [w["engine_pid"] for w in await scene.fleet.workers()]
        since = cpu_time(engines)
        await _malformed(scene)
        await _wrong_values(scene)
        await _no_http(scene)
        await _huge_bodies(scene)
        await _idle_connections(scene, calm)
        await _slow_readers(scene, calm)
        await _leavers(scene)
        assert same(calm, await scene.streams(4, 64, "afterwards")) == []
        await _idle(scene)
        assert await _lives(scene) == before
        harm = await scene.unharmed()
        stalls = [e for e in harm if type(e) is v.StallJudged and e.probe == ProbeResult.SILENT]
        if stalls and starved(since, cpu_time(engines)):
            inconclusive(f"engines that waited for processors did not answer: {stalls}")
        assert harm == []
        await scene.sound()


async def _idle(scene: Scene) -> None:
    """Until the engines are done with what was left to them."""
    deadline = time.monotonic() + HANG_S
    while any(requests for *_, requests in await _lives(scene)):
        assert time.monotonic() < deadline, await _lives(scene)
        await asyncio.sleep(0.1)


async def _lives(scene: Scene) -> list[tuple[str, int, str, int]]:
    """Which engines live and what they hold."""
    found = await scene.fleet.workers()
    return [(w["name"], w["incarnation"], w["engine"], w["requests"]) for w in found]


def rss_bytes(scene: Scene) -> int:
    """Memory of the control plane replica."""
    status = Path(f"/proc/{scene.fleet.children['r0'].pid}/status").read_text()
    return next(int(x.split()[1]) << 10 for x in status.splitlines() if x.startswith("VmRSS"))


# --- what is wrong with one request ----------------------------------------------------


async def _malformed(scene: Scene) -> None:
    async with aiohttp.ClientSession() as session:
        for body in MALFORMED:
            for route in (TEXT, CHAT):
                told = await _refused(session, scene.url + route, body)
                assert not told, (body[:80], told)
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            headers = {"content-type": kind}
            good = b'{"model": "tiny", "prompt": "a", "max_tokens": 4}'
            assert not await _refused(session, scene.url + TEXT, good, headers)
        grown = rss_bytes(scene)
        for _ in range(30):
            for body in MALFORMED:
                await _refused(session, scene.url + TEXT, body)
        grown = rss_bytes(scene) - grown
    assert grown < 8 * MB, f"{len(MALFORMED) * 30} malformed bodies cost {grown} bytes"


async def _wrong_values(scene: Scene) -> None:
    prompt = {"model": "tiny", "prompt": "a", "max_tokens": 4, "temperature": 0}
    chat = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    chat["messages"] = [{"role": "user", "content": "a"}]
    wrong = []
    async with aiohttp.ClientSession() as session:
        for route, base, values in ((TEXT, prompt, WRONG), (CHAT, chat, WRONG_CHATS)):
            for value in values:
                body = json.dumps({**base, **value}).encode()
                if told := await _refused(session, scene.url + route, body):
                    wrong.append(f"{route} {str(value)[:80]}: {told}")
    assert not wrong, "\n".join(wrong)


async def _refused(
    session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str] | None = None
) -> str:
    """What is wrong with how `body` is refused; empty when it is told as OpenAI tells it."""
    headers = headers or {"content-type": "application/json"}
    timeout = aiohttp.ClientTimeout(total=HANG_S)
    try:
        async with session.post(url, data=body, headers=headers, timeout=timeout) as answer:
            return _judged(answer.status, await answer.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"


def _judged(status: int, answer: bytes) -> str:
    if not 400 <= status < 500:
        return f"status {status}: {answer[:300]!r}"
    try:
        error = json.loads(answer)["error"]
    except (ValueError, KeyError, TypeError):
        return f"status {status}, not an OpenAI error: {answer[:300]!r}"
    if not error.get("message") or not error.get("type") or not {"param", "code"} <= set(error):
        return f"status {status}, incomplete: {error}"
    if len(error["message"]) > 4000:
        return f"a message of {len(error['message'])} characters"
    return ""


async def _no_http(scene: Scene) -> None:
    """Bytes that are no HTTP request, and requests to nowhere."""
    for sent in (
        b"\x16\x03\x01\x02\x00" + os.urandom(200) + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * (80 << 10) + b"\r\n\r\n",
        b"GET /../etc/passwd HTTP/1.1\r\n\r\n",
        b"DELETE /v1/completions HTTP/1.1\r\n\r\n",
    ):
        reader, writer = await _connect(scene)
        writer.write(sent)
        async with asyncio.timeout(HANG_S):
            line = await reader.readline()
        assert line.startswith(b"HTTP/1.1 4"), (sent[:60], line)
        writer.close()


async def _connect(scene: Scene) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = scene.url.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


# --- too much ----------------------------------------------------------------------------


async def _huge_bodies(scene: Scene) -> None:
    """100 MB, announced and not: 413 at once, and the gateway keeps none of it."""
    before = rss_bytes(scene)
    for chunked in (False, True):
        status, sent = await _upload(scene, 100 * MB, chunked)
        assert status == 413
        assert sent < 60 * MB, "answered only after most of it was sent"
    assert rss_bytes(scene) - before < 24 * MB


async def _upload(scene: Scene, size: int, chunked: bool) -> tuple[int, int]:
    """The status a client reads that sends its body until it is answered, and what it sent."""
    reader, writer = await _connect(scene)
    length = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{length}\r\n\r\n"
    writer.write(head.encode())
    answered = asyncio.create_task(reader.readline())
    piece = b" " * 65536
    piece = b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece
    sent = 0
    try:
        while sent < size and not answered.done():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)  # else an answer is not read while the socket takes more
            sent += len(piece)
        async with asyncio.timeout(HANG_S):
            line = await answered
    except ConnectionError:
        line = await answered
    finally:
        writer.close()
    return int(line.split()[1]), sent


async def _idle_connections(scene: Scene, calm: dict[str, Stream]) -> None:
    """A thousand clients that say nothing, and some that stop in the middle of a head."""
    before = rss_bytes(scene)
    open_ = [await _connect(scene) for _ in range(1000)]
    for _, writer in open_[:50]:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-")
    hit = await scene.streams(4, 64, "beside-idle")
    assert not whole(hit)
    assert same(calm, hit) == []
    grown = rss_bytes(scene) - before
    assert grown < 24 * MB, f"1,000 idle connections cost {grown} bytes"
    for _, writer in open_:
        writer.close()


# --- clients that read slowly, or leave --------------------------------------------------


async def _slow_readers(scene: Scene, calm: dict[str, Stream]) -> None:
    """Answers of megabytes to clients that do not read: the gateway holds little of them,
    others are served, nobody is judged hung, and what one reads in the end is whole."""
    before = rss_bytes(scene)
    readers = [await _slow_reader(scene, number) for number in range(3)]
    peak = 0
    began, round_ = time.monotonic(), 0
    while time.monotonic() < began + 1.5 * STALL_S:
        round_ += 1
        hit = await scene.streams(4, 64, f"beside-slow{round_}")
        assert not whole(hit)
        assert same(calm, hit) == []
        await asyncio.sleep(1.0)
        peak = max(peak, rss_bytes(scene) - before)
    size = await _read_all(readers[0])
    print(f"{len(readers)} slow readers of {size / MB:.1f} MB each cost {peak / MB:.1f} MB")
    assert size > 8 * MB, "too little to mean anything"
    assert peak < 8 * MB
    for reader in readers[1:]:
        reader.close()


async def _slow_reader(scene: Scene, number: int) -> socket.socket:
    """A client with a small window that asks for much and reads nothing."""
    host, _, port = scene.url.removeprefix("http://").rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    wanted = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"slow {number}"}],
        "max_tokens": 1600,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 100,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(wanted).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-request-id: slow-{number}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    await asyncio.get_running_loop().sock_sendall(connection, head.encode() + body)
    return connection


async def _read_all(connection: socket.socket) -> int:
    """Size of the whole answer; it must end as a stream ends."""
    loop = asyncio.get_running_loop()
    size, end = 0, b""
    async with asyncio.timeout(HANG_S):
        while data := await loop.sock_recv(connection, 1 << 18):
            size += len(data)
            end = (end + data)[-40:]
    connection.close()
    assert b"data: [DONE]\n\n" in end, end
    return size


async def _leavers(scene: Scene) -> None:
    """Twenty clients leave at once: their engines stop computing, the log says 499."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(_leave(session, scene, number) for number in range(20)))
    names = {f"leaver-{number}" for number in range(20)}
    async for ended, finished in _told(scene):
        mine = [ended[name] for name in names if name in ended]
        if len(mine) == 20 and all(e.request in finished for e in mine):
            break
    assert {(e.outcome, e.status) for e in mine} == {("cancelled", 499)}
    assert {finished[e.request] for e in mine} == {"abort"}


async def _leave(session: aiohttp.ClientSession, scene: Scene, number: int) -> None:
    body = {"model": "tiny", "prompt": f"a {number}", "max_tokens": 1900, "stream": True,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    headers = {"x-request-id": f"leaver-{number}"}
    answer = await session.post(scene.url + TEXT, json=body, headers=headers)
    await answer.content.readline()
    answer.close()


async def _told(scene: Scene) -> AsyncIterator[tuple[dict[str, v.RequestEnded], dict[str, str]]]:
    """(terminal events by x-request-id, finish reason of the engine by request), again and
    again."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        finished = {
            c.request: c.reason
            for e in await scene.events()
            if type(e) is v.EngineStep
            for c in e.changes
            if type(c) is v.EngineFinished
        }
        yield await scene.ended(), finished
        await asyncio.sleep(0.1)
