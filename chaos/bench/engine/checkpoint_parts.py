"""Common parts of the benches of checkpoints: state daemons, the arguments of their engines, and a
client of the worker protocol that records arrival times of tokens."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct, field

from relume.chaos.bench.engine.engine_processes import Engine, until
from relume.controlplane.local.child_processes import Child
from relume.engine_shim.checkpoints.link.channel import LocalChannel
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.events.wire.headers import PREFIX
from relume.events.wire.kv import kv_messages as m

ENGINE_ARGS = (
    "--dtype", "float32", "--block-size", "32",
    "--max-num-seqs", "64", "--enforce-eager",
)  # fmt: skip


def connector_args(**extra: Any) -> tuple[str, ...]:
    """Arguments that make an engine take part; `extra` is `checkpoint_links.LinkConfig`."""
    config = {
        "kv_connector": "RelumeConnector",
        "kv_connector_module_path": "relume.engine_shim.checkpoints.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return ("--kv-transfer-config", json.dumps(config))


@asynccontextmanager
async def state_daemon(folder: str, name: str = "state", **options: Any) -> AsyncIterator[Daemon]:
    """A state daemon in a process of its own, with socket `<folder>/<name>.sock`."""
    config = {
        "host": name, "socket": f"{folder}/{name}.sock", "budget_bytes": 512 << 20,
        "reserve_bytes": 0, "allow_unlocked": True, **options,
    }  # fmt: skip
    path = Path(folder) / f"{name}.json"
    path.write_text(json.dumps(config))
    argv = [sys.executable, "-m", "relume.engine_shim.checkpoints.daemon", "--config", str(path)]
    child = Child.start(name, argv, Path(folder) / f"{name}.log")
    try:
        await until(lambda: '"ready"' in child.tail(), child)
        yield Daemon(child.pid, config["socket"])
    finally:
        await child.stop()


class Daemon(Struct, frozen=True):
    """A running state daemon."""

    pid: int
    socket: str

    @property
    def endpoint(self) -> str:
        return f"unix:{self.socket}"

    def ask(self, message: Any) -> Any:
        """Send one query as the host's agent does. Raises Refusal, Unreachable."""
        hello = m.Hello(
            version=m.VERSION,
            worker="bench",
            epoch=0,
            incarnation=0,
            role="control",
            nonce=b"",
            fingerprint=None,
        )
        peer = Peer(self.socket, lambda wake: LocalChannel(self.socket, wake), hello)
        try:
            return peer.ask(message, 5.0)[0]
        finally:
            peer.close()

    def stats(self) -> dict[str, int]:
        return self.ask(m.StatsAsk(0)).figures

    def held_blocks(self, request: str) -> int:
        """Number of blocks that every choice and rank of the request has."""
        positions = self.ask(m.Ask(0, (request,))).positions
        return min((p.blocks for p in positions), default=0)


class Answer(Struct):
    """An answer's bytes, and their arrival times in seconds after the request left."""

    at_s: list[float] = field(default_factory=list)
    body: bytes = b""

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)]


async def complete(
    session: aiohttp.ClientSession,
    engine: Engine,
    request: str,
    prompt: str | list[int],
    tokens: int,
    tail: bytes = b"",
    stop: asyncio.Event | None = None,
    **headers: str,
) -> Answer:
    """A greedy streamed completion of `tokens` tokens over the worker protocol; `headers`
    without their prefix. Once `stop` is set, the client hangs up at the next bytes.

    Raises aiohttp.ClientError.
    """
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    known = {"request": request, "attempt": "1", "incarnation": "1", **headers}
    sent = {"content-type": "application/json", "x-request-id": request}
    sent |= {PREFIX + name: value for name, value in known.items()}
    answer = Answer()
    began = time.monotonic()
    url = f"http://127.0.0.1:{engine.port}/v1/completions"
    content = json.dumps(body).encode() + tail
    async with session.post(url, data=content, headers=sent) as response:
        response.raise_for_status()
        parts = []
        async for part in response.content.iter_any():
            answer.at_s.append(time.monotonic() - began)
            parts.append(part)
            if stop is not None and stop.is_set():
                break
    answer.body = b"".join(parts)
    return answer
