"""Engines of a bench: forked from one zygote, without an agent."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
from msgspec import Struct

from relume.controlplane.local.child_processes import Child, free_port
from relume.controlplane.local.local_fleet import ENGINE_ENV, zygote_argv

START_TIMEOUT_S = 90.0


class Engine(Struct, frozen=True):
    """A running engine."""

    pid: int
    port: int


@asynccontextmanager
async def engines(
    folder: str,
    model: str,
    variants: Mapping[str, Sequence[str]],
    environments: Mapping[str, Mapping[str, str]] = {},
) -> AsyncIterator[dict[str, Engine]]:
    """One engine per variant. The mappings give, by name, further arguments for vLLM and further
    environment variables."""
    zygote = f"{folder}/zygote.sock"
    child = Child.start("zygote", zygote_argv(zygote, 0), Path(folder) / "zygote.log", ENGINE_ENV)
    found: dict[str, Engine] = {}
    try:
        await until(lambda: os.path.exists(zygote), child)
        for name, more in variants.items():
            port = free_port()
            argv = ["--model", model, "--served-model-name", "tiny", "--port", str(port), *more]
            env = {**ENGINE_ENV, "RELUME_WORKER": name, "RELUME_INCARNATION": "1"}
            env |= environments.get(name, {})
            found[name] = Engine(await _fork(zygote, argv, env, f"{folder}/{name}.log"), port)
        for engine in found.values():
            await _until_healthy(engine.port)
        yield found
    finally:
        for engine in found.values():
            with suppress(ProcessLookupError):
                os.kill(engine.pid, 9)
        await child.stop()


async def until(condition: Callable[[], bool], child: Child) -> None:
    """Wait until `child` is up. Raises RuntimeError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline or not child.alive:
            raise RuntimeError(f"{child.name} did not come up:\n{child.tail()}")
        await asyncio.sleep(0.05)


async def _fork(zygote: str, argv: list[str], env: dict[str, str], log: str) -> int:
    """Have the zygote fork an engine; return its pid."""
    reader, writer = await asyncio.open_unix_connection(zygote)
    line = json.dumps({"cmd": "fork", "env": env, "argv": argv, "log": log}) + "\n"
    writer.write(line.encode())
    await writer.drain()
    answer = json.loads(await asyncio.wait_for(reader.readline(), 30))
    writer.close()
    if "pid" not in answer:
        raise RuntimeError(f"zygote refused: {answer}")
    return answer["pid"]


async def _until_healthy(port: int) -> None:
    """Wait for the engine's HTTP server."""
    deadline = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            try:
                async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise TimeoutError(f"engine on port {port} did not come up")
