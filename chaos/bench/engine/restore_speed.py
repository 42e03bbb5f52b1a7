"""How fast checkpointed blocks come back, and what that saves a request.

First blocks alone: a state daemon holds some, and one reader brings them into an engine's cache in
host memory, as engines do, over each transport: shared memory, plain ZeroMQ with the fleet's secret,
and CURVE. Interleaved with it, a bare transfer moves as many bytes with the same transport security. For
shared memory it is a copy between two mappings. For ZeroMQ, one process sends chunks of the same
size to another, which discards them.

Then a request of 2,000 prompt tokens on the `wide` model (deploy/dev/make_model.py) whose first
token is delivered: time until the next token with a restore, against recomputation.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import itertools
import mmap
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import zmq

from relume.chaos.bench.bench_figures import figure, interval
from relume.chaos.bench.engine.checkpoint_parts import (
    ENGINE_ARGS,
    Daemon,
    complete,
    connector_args,
    state_daemon,
)
from relume.chaos.bench.engine.engine_processes import Engine, engines
from relume.chaos.bench.failover.failover_parts import wide_model
from relume.controlplane.local.child_processes import Child, free_port
from relume.engine_shim.checkpoints.link.block_stream import (
    REQUESTED_BYTES,
    BlockIn,
    BlockOut,
    gather,
    scatter,
)
from relume.engine_shim.checkpoints.link.channel import Channel, LocalChannel, Wake
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.engine_shim.checkpoints.link.zmq_channel import (
    HIGH_WATER,
    READ_BYTES,
    CurveKeys,
    ZmqChannel,
)
from relume.events.wire import frames
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import Fingerprint

if TYPE_CHECKING:
    from relume.engine_shim.checkpoints.staging.staged_cache import StagedCache

DESCRIPTION = "restored bytes per second against a bare transfer, and time to the next token"
TRANSFER_GOAL = 0.8
RESUME_GOAL = 5.0
BLOCK = 32
LAYERS = 4
PIECE_BYTES = 64 << 10
"""A block of the wide model: 32 tokens, 8 heads of 32 channels, keys and values, 4 bytes."""
SECRET = "a secret of the bench"
CACHE = (
    *ENGINE_ARGS, "--max-model-len", "4096", "--max-num-batched-tokens", "2048",
    "--kv-cache-memory-bytes", "134217728",
)  # fmt: skip
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
"""For /reset_prefix_cache."""
_numbers = itertools.count()


class Cache:
    """A paged cache of plain memory, one mapping a layer, every page touched."""

    def __init__(self, blocks: int, seed: int) -> None:
        self._layers = []
        for layer in range(LAYERS):
            memory = mmap.mmap(-1, blocks * PIECE_BYTES)
            memory[:] = random.Random(seed + layer).randbytes(PIECE_BYTES) * blocks
            for block in range(blocks):  # so that no two blocks are equal
                memory[block * PIECE_BYTES : block * PIECE_BYTES + 4] = block.to_bytes(4, "big")
            self._layers.append(memoryview(memory))

    def pieces(self, block_id: int) -> list[memoryview]:
        at = block_id * PIECE_BYTES
        return [layer[at : at + PIECE_BYTES] for layer in self._layers]


def engine_cache(blocks: int) -> StagedCache:
    """A paged cache as an engine on CPUs has it, every page touched."""
    import torch  # slow, and for this bench alone

    from relume.engine_shim.checkpoints.staging.copies import HostCopies
    from relume.engine_shim.checkpoints.staging.staged_cache import StagedCache

    torch.set_num_threads(1)  # as ENGINE_ENV has it
    layers = {
        f"layer{number}": torch.ones((blocks, PIECE_BYTES), dtype=torch.uint8)
        for number in range(LAYERS)
    }
    return StagedCache(layers, blocks, lambda device: HostCopies())


class Keys:
    """CURVE pairs of both ends of a link."""

    def __init__(self) -> None:
        self.server = zmq.curve_keypair()
        self.client = zmq.curve_keypair()
        self.of_client = CurveKeys(*self.client, self.server[0])


def tokens_of(index: int) -> tuple[int, ...]:
    return tuple(range(index * BLOCK, (index + 1) * BLOCK))


@contextmanager
def peer_of(role: str, connect: Callable[[Wake], Channel]) -> Iterator[Peer]:
    fingerprint = Fingerprint(
        model="m",
        build="b",
        dtype="float32",
        block_size=BLOCK,
        layers=LAYERS,
        kv_heads=8,
        head_size=32,
        piece_bytes=PIECE_BYTES,
    )
    hello = m.Hello(
        version=m.VERSION,
        worker="bench",
        epoch=0,
        incarnation=0,
        role=role,
        nonce=b"",
        fingerprint=fingerprint,
    )
    peer = Peer("bench", connect, hello, SECRET.encode())
    try:
        yield peer
    finally:
        peer.close()


# --- bare transfers ------------------------------------------------------------------------


def serve_bare(arguments: list[str]) -> None:
    """The sending end, in a process of its own: answers each request with one chunk."""
    address, public, secret = arguments
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    if public:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = public.encode(), secret.encode()
    socket.bind(address)
    chunk = secrets.token_bytes(READ_BYTES)
    print("ready", flush=True)
    while True:
        name, size = socket.recv_multipart()
        socket.send_multipart([name, memoryview(chunk)[: int(size)]], copy=False)


@asynccontextmanager
async def bare_server(folder: str, keys: Keys | None) -> AsyncIterator[zmq.Socket[bytes]]:
    """A socket that is connected to `serve_bare`."""
    name = f"bare{next(_numbers)}"
    address = f"tcp://127.0.0.1:{free_port()}"
    pair = [key.decode() for key in keys.server] if keys else ["", ""]
    code = f"from relume.chaos.bench.engine.restore_speed import serve_bare; serve_bare({[address, *pair]!r})"
    child = Child.start(name, [sys.executable, "-c", code], Path(folder) / f"{name}.log")
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    try:
        while "ready" not in child.tail():
            if not child.alive:
                raise RuntimeError(child.tail())
            await asyncio.sleep(0.05)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        if keys:
            socket.curve_publickey, socket.curve_secretkey = keys.client
            socket.curve_serverkey = keys.server[0]
        socket.connect(address)
        yield socket
    finally:
        socket.close(0)
        await child.stop()


def bare_zmq(socket: zmq.Socket[bytes], size: int) -> float:
    """Bytes per second of `size` bytes, with as many requests in flight as `gather` has."""
    began = time.perf_counter()
    requested = got = 0
    while got < size:
        while requested < size and requested - got < REQUESTED_BYTES:
            part = min(READ_BYTES, size - requested)
            socket.send(b"%d" % part)
            requested += part
        got += len(socket.recv(copy=False).buffer)
    return size / (time.perf_counter() - began)


class BareMemory:
    """A copy between two mappings; each reader's mapping exists already."""

    def __init__(self, size: int) -> None:
        self._source, self._target = mmap.mmap(-1, size), mmap.mmap(-1, size)
        self._source[:] = self._target[:] = secrets.token_bytes(1 << 20) * (size >> 20)

    def copy(self) -> float:
        """Bytes per second, in pieces of the size `gather` copies."""
        source, target = memoryview(self._source), memoryview(self._target)
        began = time.perf_counter()
        for at in range(0, len(source), PIECE_BYTES):
            target[at : at + PIECE_BYTES] = source[at : at + PIECE_BYTES]
        return len(source) / (time.perf_counter() - began)


# --- blocks --------------------------------------------------------------------------------


def restored(peer: Peer, cache: StagedCache, blocks: int) -> float:
    """Bytes per second of one restore. Raises RuntimeError when it is not whole."""
    wanted = [BlockIn(index, index, tokens_of(index)) for index in range(blocks)]
    began = time.perf_counter()
    loading = cache.loading()()
    try:
        loaded = gather(loading, wanted, peer, "bench", 0, 0, 20.0, loading.landed)
    finally:
        loading.finish()
    took_s = time.perf_counter() - began
    if loaded.blocks != blocks:
        raise RuntimeError(f"{loaded.blocks} of {blocks} blocks came: {loaded.failure}")
    return loaded.bytes / took_s


@asynccontextmanager
async def holder(folder: str, source: Cache, blocks: int, **options: Any) -> AsyncIterator[Daemon]:
    """A daemon that holds the first `blocks` of `source`."""
    name = f"holder{next(_numbers)}"
    async with state_daemon(folder, name, **options) as daemon:
        with peer_of("writer", lambda wake: LocalChannel(daemon.socket, wake)) as writer:
            at = 0
            while at < blocks:
                out = [
                    BlockOut(
                        request="bench",
                        child=0,
                        rank=0,
                        index=index,
                        attempt=1,
                        block_id=index,
                        tokens=tokens_of(index),
                    )
                    for index in range(at, blocks)
                ]
                at += scatter(source, out, writer)
                if not writer.drained(20):
                    raise RuntimeError("the holder accepts no blocks")
        yield daemon


async def transfers(folder: str, blocks: int, count: int) -> dict[str, Any]:
    """Figures of each transport."""
    source, target = Cache(blocks, 1), engine_cache(blocks)
    secret = Path(folder) / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    size = blocks * LAYERS * PIECE_BYTES
    figures: dict[str, Any] = {}
    async with holder(folder, source, blocks) as daemon:
        memory = BareMemory(size)
        with peer_of("reader", lambda wake: LocalChannel(daemon.socket, wake)) as peer:
            figures |= paired("memory", lambda: restored(peer, target, blocks), memory.copy, count)
    for link, keys in (("plain", None), ("curve", Keys())):
        port = free_port()
        remote: dict[str, Any] = {"host": "127.0.0.1", "port": port}
        if keys:
            remote |= {
                "curve_public": keys.server[0].decode(), "curve_secret": keys.server[1].decode(),
                "curve_clients": [keys.client[0].decode()],
            }  # fmt: skip
        options = {"remote": remote, "secret_file": str(secret)}
        pair = keys.of_client if keys else None
        async with (
            holder(folder, source, blocks, **options),
            bare_server(folder, keys) as socket,
        ):
            connect = _connecting(f"tcp://127.0.0.1:{port}", pair)
            with peer_of("reader", connect) as peer:
                figures |= paired(
                    link, lambda: restored(peer, target, blocks), lambda: bare_zmq(socket, size),
                    count,
                )  # fmt: skip
    return figures


def _connecting(address: str, keys: CurveKeys | None) -> Callable[[Wake], Channel]:
    return lambda wake: ZmqChannel(address, wake, keys)


def paired(
    name: str, ours: Callable[[], float], bare: Callable[[], float], count: int
) -> dict[str, Any]:
    """Figures of `count` pairs after one for warm-up; every other pair has the reverse order."""
    ours(), bare()
    rates: tuple[list[float], list[float]] = ([], [])
    for index in range(count):
        for which in (0, 1) if index % 2 == 0 else (1, 0):
            rates[which].append((ours, bare)[which]() / 2**30)
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    low, high = interval(ratios)
    print(f"{name}: {statistics.median(ratios):.3f} of a bare transfer", flush=True)
    return {
        f"{name}_to_bare": figure(statistics.median(ratios), "ratio", TRANSFER_GOAL),
        f"{name}_to_bare_ci95_low": figure(low, "ratio"),
        f"{name}_to_bare_ci95_high": figure(high, "ratio"),
        f"{name}_restored": figure(statistics.median(rates[0]), "GiB/s", digits=2),
        f"{name}_bare": figure(statistics.median(rates[1]), "GiB/s", digits=2),
    }


# --- a request -----------------------------------------------------------------------------


async def resume(folder: str, model: str, prompt_tokens: int, count: int) -> dict[str, Any]:
    """Figures of a request that continues on another engine."""
    variants = {name: (*CACHE, *connector_args(lookup_timeout_s=2.0)) for name in ("first", "then")}
    rng = random.Random(0)
    times: tuple[list[float], list[float]] = ([], [])
    async with (
        state_daemon(folder) as daemon,
        engines(folder, model, variants, dict.fromkeys(variants, DEV_MODE)) as running,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        first, then = running["first"], running["then"]
        for index in range(count + 1):
            name = f"resumed{index}"
            prompt = rng.choices(range(300, 3000), k=prompt_tokens)
            held = asyncio.Event()
            streaming = asyncio.create_task(
                complete(session, first, name, prompt, 1500, checkpoint=daemon.endpoint, stop=held)
            )
            while daemon.held_blocks(name) < prompt_tokens // BLOCK:
                if streaming.done():
                    raise RuntimeError(f"the holder has {daemon.held_blocks(name)} blocks only")
                await asyncio.sleep(0.02)
            held.set()
            answer = await streaming
            ids = tokens_in(answer.body)
            for by in (0, 1) if index % 2 == 0 else (1, 0):
                more = {"restore": daemon.endpoint} if by == 0 else {}
                took_s, token = await next_token(session, then, f"{name}-{by}" if by else name,
                                                 prompt, ids[0], more)  # fmt: skip
                if token != ids[1]:
                    raise RuntimeError(f"token {token} is not {ids[1]}")
                if index:  # the first is the warm-up
                    times[by].append(took_s)
            print(f"{name}: {1000 * times[0][-1]:.0f} ms restored, {1000 * times[1][-1]:.0f} ms "
                  "computed" if index else "warm", flush=True)  # fmt: skip
    ratios = [computed / restored for restored, computed in zip(*times, strict=True)]
    low, high = interval(ratios)
    return {
        "recompute_to_restore": figure(statistics.median(ratios), "ratio", RESUME_GOAL, 2),
        "recompute_to_restore_ci95_low": figure(low, "ratio", digits=2),
        "recompute_to_restore_ci95_high": figure(high, "ratio", digits=2),
        "restore_next_token": figure(1000 * statistics.median(times[0]), "ms", digits=1),
        "recompute_next_token": figure(1000 * statistics.median(times[1]), "ms", digits=1),
    }


async def next_token(
    session: aiohttp.ClientSession,
    engine: Engine,
    request: str,
    prompt: list[int],
    delivered: int,
    headers: dict[str, Any],
) -> tuple[float, int]:
    """Seconds to the token after the delivered one, and that token; no cache has the prompt."""
    async with session.post(f"http://127.0.0.1:{engine.port}/reset_prefix_cache") as response:
        response.raise_for_status()
    answer = await complete(
        session, engine, request, prompt, 4, array.array("I", [delivered]).tobytes(),
        attempt="2", resume="continue 1", **headers,
    )  # fmt: skip
    found = tokens_in(answer.body)
    return answer.at_s[0], found[0]


def tokens_in(body: bytes) -> list[int]:
    """Token ids in frames of the worker protocol."""
    parts = frames.FrameReader().feed(body)
    return [token for part in parts if isinstance(part, frames.Tokens) for token in part.ids]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both parts."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.pairs:
            figures |= await transfers(folder, args.blocks, args.pairs)
        if args.requests:
            figures |= await resume(
                folder, str(args.model.absolute()), args.prompt_tokens, args.requests
            )
    return figures


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench restore", description=DESCRIPTION)
    parser.add_argument(
        "--pairs", type=int, default=24, help="number of transfers per transport; 0: none"
    )
    parser.add_argument(
        "--blocks", type=int, default=512, help="number of blocks (256 KiB) per transfer"
    )
    parser.add_argument("--requests", type=int, default=10, help="0: none")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--model", type=Path, default=Path(".relume/models/wide"))
    args = parser.parse_args(argv)
    if args.requests:
        wide_model(args.model)
    figures = asyncio.run(measure(args))
    met = all(f["value"] >= f["goal"] for f in figures.values() if f["goal"] is not None)
    return {"bench": "restore", "met": met, "figures": figures}
