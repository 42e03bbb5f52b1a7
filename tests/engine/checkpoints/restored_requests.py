"""A request that one engine begins and another continues from its checkpoint."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relume.events.vocabulary import RestoreStarted
from relume.events.wire import frames
from relume.events.wire.kv import kv_messages as m
from tests.engine import client
from tests.engine.fleet import Engine, wait_until
from tests.signals import stepped
from tests.state_daemon.daemon import Daemon, hello, local, peer_of, stats

PATH = "/v1/completions"
BLOCK = 32
PROMPT = " ".join(f"Block {i} of the lease is held by worker {i * 7 % 13}." for i in range(14))
TOKENS = 600
LOOKUP_S = 6.0
"""Within it a holder on a busy machine answers; a stopped one costs it."""
LONG = {"max_tokens": 1500, "ignore_eos": True}
"""What no core ends while it is let run a moment at a time."""


def connector(
    named: str = "RelumeConnector",
    module: str = "relume.engine_shim.checkpoints.connector",
    **extra: Any,
) -> list[str]:
    config = {
        "kv_connector": named,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lookup_timeout_s": LOOKUP_S, **extra},
    }
    return ["--kv-transfer-config", json.dumps(config)]


def body_for(**options: Any) -> dict[str, Any]:
    usual = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "stream": True}
    return {**usual, "prompt": PROMPT, **options}


def held_blocks(daemon: Daemon, request: str) -> int:
    with peer_of(local(daemon.socket), hello=hello("control")) as control:
        answer, _ = control.ask(m.Ask(0, (request,)), 5.0)
        return min((p.blocks for p in answer.positions), default=0)


def endpoint(daemon: Daemon) -> str:
    return f"unix:{daemon.socket}"


def full_blocks(engine: Engine, tokens: int) -> int:
    """Whole blocks of the prompt and `tokens` generated ones; one token is left to compute."""
    body = {"model": "tiny", "prompt": PROMPT}
    prompt = json.loads(client.post(engine.port, "/tokenize", body).body)["count"]
    return (prompt + tokens - 1) // BLOCK


def run_until_killed(engine: Engine, daemon: Daemon, name: str, tokens: int) -> list[int]:
    """Reads `tokens` of a stream, waits until the holder has their full blocks, and kills
    the engine; the ids that were delivered. The engine runs a moment at a time, so that it does
    not end the request first."""
    blocks = full_blocks(engine, tokens)
    headers = client.headers_for(request=name, checkpoint=endpoint(daemon))
    with ThreadPoolExecutor(1) as pool, stepped(engine.pid) as until:
        reading = pool.submit(stream_until, engine.port, headers, tokens)
        until(reading.done, "the client has its tokens")
        connection, ids = reading.result()
        until(lambda: held_blocks(daemon, name) >= blocks, "the blocks are held")
        os.kill(engine.pid, signal.SIGKILL)
    connection.close()
    wait_until(lambda: not engine.alive(), "killed")
    return ids[:tokens]


def stream_until(
    port: int, headers: dict[str, str], tokens: int, body: dict[str, Any] | None = None
) -> tuple[Any, list[int]]:
    """A connection on which `tokens` or more of a stream are read, and their ids."""
    connection, response = client.open_stream(port, PATH, body or body_for(), headers)
    reader, ids = frames.FrameReader(), []
    while len(ids) < tokens:
        data = response.read1(65536)
        assert data, "the stream ended early"
        for part in reader.feed(data):
            assert isinstance(part, frames.Tokens), part
            ids += part.ids
    return connection, ids


def forget_prefixes(engine: Engine) -> None:
    """What earlier tests computed here must not help."""
    assert client.post(engine.port, "/reset_prefix_cache", {}).status == 200


def whole(engine: Engine, name: str) -> client.Framed:
    return client.ask(engine.port, PATH, body_for(), request=name)


def resumed(engine: Engine, daemon: Daemon, name: str, ids: list[int], created: bytes) -> Any:
    return client.ask(
        engine.port, PATH, body_for(), attempt=2, request=name, resume=("continue", ids),
        created=created, response_id=name, restore=endpoint(daemon),
    )  # fmt: skip


def outcome(engine: Engine, name: str) -> list[Any]:
    wait_until(
        lambda: any(
            e.request == name and not isinstance(e, RestoreStarted) for e in engine.agent.events
        ),
        "the restore is reported",
    )
    return [e for e in engine.agent.events if e.request == name]


def flip(daemon: Daemon, number: int) -> None:
    """A bit of the `number`-th image of the daemon's memory."""
    assert daemon.process is not None
    figures = stats(daemon)
    size = figures["memory_used"] // figures["contents"]
    for fd in os.listdir(f"/proc/{daemon.process.pid}/fd"):
        link = f"/proc/{daemon.process.pid}/fd/{fd}"
        if "relume-checkpoints" in os.readlink(link):
            file = os.open(link, os.O_RDWR)
            at = number * size + size // 3
            old = os.pread(file, 1, at)
            os.pwrite(file, bytes([old[0] ^ 64]), at)
            os.close(file)
            return
    raise AssertionError("no arena")
