"""What the benches of checkpoints share: state daemons, engines with the connector, and a
client of the worker protocol that notes when tokens come."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct, field

from relume.chaos.bench.shim_overhead import fork, until_healthy
from relume.controlplane.local_fleet import ENGINE_ENV
from relume.controlplane.processes import Child, free_port
from relume.engine_shim.kv_stream import messages as m
from relume.engine_shim.kv_stream.channel import LocalChannel
from relume.engine_shim.kv_stream.peer import Peer

START_TIMEOUT_S = 90.0
ENGINE_ARGS = (
    "--served-model-name", "tiny", "--dtype", "float32", "--block-size", "32",
    "--max-num-seqs", "64", "--enforce-eager",
)  # fmt: skip


def connector_args(**extra: Any) -> tuple[str, ...]:
    """Arguments that make an engine take part; `extra` is `checkpoint_links.LinkConfig`."""
    config = {
        "kv_connector": "RelumeConnector",
        "kv_connector_module_path": "relume.engine_shim.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return ("--kv-transfer-config", json.dumps(config))


@asynccontextmanager
async def state_daemon(folder: str, name: str = "state", **options: Any) -> AsyncIterator[Daemon]:
    """A state daemon of its own process with a socket `<folder>/<name>.sock`."""
    config = {
        "host": name, "socket": f"{folder}/{name}.sock", "budget_bytes": 512 << 20,
        "reserve_bytes": 0, "allow_unlocked": True, **options,
    }  # fmt: skip
    path = Path(folder) / f"{name}.json"
    path.write_text(json.dumps(config))
    argv = [sys.executable, "-m", "relume.engine_shim.state_daemon", "--config", str(path)]
    child = Child.start(name, argv, Path(folder) / f"{name}.log")
    try:
        await _until(lambda: '"ready"' in child.tail(), child)
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
        """One question as the host's agent asks it. Raises Refusal, Unreachable."""
        hello = m.Hello(m.VERSION, "bench", 0, 0, "control", b"", None)
        peer = Peer(self.socket, lambda wake: LocalChannel(self.socket, wake), hello)
        try:
            return peer.ask(message, 5.0)[0]
        finally:
            peer.close()

    def stats(self) -> dict[str, int]:
        return self.ask(m.StatsAsk(0)).figures

    def held_blocks(self, request: str) -> int:
        """The least that any choice or rank of the request has."""
        positions = self.ask(m.Ask(0, (request,))).positions
        return min((p.blocks for p in positions), default=0)


async def _until(condition: Any, child: Child) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline or not child.alive:
            raise RuntimeError(f"{child.name} did not come up:\n{child.tail()}")
        await asyncio.sleep(0.05)


class Engine(Struct, frozen=True):
    """A running engine."""

    pid: int
    port: int


@asynccontextmanager
async def engines(
    folder: str, model: str, variants: Mapping[str, Sequence[str]], **env: str
) -> AsyncIterator[dict[str, Engine]]:
    """One engine a variant (name to further arguments), all forked from one zygote."""
    zygote = f"{folder}/zygote.sock"
    argv = [sys.executable, "-m", "relume.engine_shim.zygote", "--socket", zygote]
    child = Child.start("zygote", argv, Path(folder) / "zygote.log", ENGINE_ENV)
    found: dict[str, Engine] = {}
    try:
        await _until(lambda: os.path.exists(zygote), child)
        for name, more in variants.items():
            port = free_port()
            argv = ["--model", model, "--port", str(port), *ENGINE_ARGS, *more]
            known = dict(ENGINE_ENV, RELUME_WORKER=name, RELUME_INCARNATION="1", **env)
            pid = await fork(zygote, argv, known, f"{folder}/{name}.log")
            found[name] = Engine(pid, port)
        for engine in found.values():
            await until_healthy(engine.port)
        yield found
    finally:
        for engine in found.values():
            try:
                os.kill(engine.pid, 9)
            except ProcessLookupError:
                continue
        await child.stop()


class Answer(Struct):
    """When an answer's bytes came, in seconds after the request left, and the bytes."""

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
    without their prefix. `stop`: hangs up with the next bytes after it was set.

    Raises aiohttp.ClientError.
    """
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    known = {"request": request, "attempt": "1", "incarnation": "1", **headers}
    sent = {"content-type": "application/json", "x-request-id": request}
    sent |= {f"x-relume-{name}": value for name, value in known.items()}
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
