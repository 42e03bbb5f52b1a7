"""One recorded run of a real fleet: its log with receive times, the load of its engines at
arbitrary times, and a gateway's view of each request. All times are microseconds of this host's
monotonic clock.

The load comes in bursts at random times. Some prompts begin with one of a few common prefixes.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
from msgspec import Struct, field

from relume.chaos.bench.failover.failover_parts import TimedStream, until
from relume.chaos.memory_folder import memory_folder
from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.engine_shim.engine.progress import Progress
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group

ARGS = (
    "--dtype", "float32", "--max-model-len", "4096", "--block-size", "32",
    "--kv-cache-memory-bytes", "268435456", "--max-num-seqs", "64", "--enforce-eager",
    "--max-num-batched-tokens", "512",
)  # fmt: skip
SAMPLE_S = 0.006
"""Mean time between two reads of an engine's load."""
COMMON = 4
COMMON_TOKENS = 384
SHARE_COMMON = 0.4


class Sample(Struct, frozen=True, kw_only=True):
    """Load of an engine: prompt tokens not computed, requests that decode, their tokens; and
    the prompt tokens that have ever arrived there."""

    at_us: int
    uncomputed: int
    decoding: int
    context: int
    arrived: int = 0


class Seen(Struct, kw_only=True):
    """A request as its gateway sees it; `ended_us` 0: it has not ended."""

    request: str
    prompt: int
    sent_us: int = 0
    ended_us: int = 0
    token_us: list[int] = field(default_factory=list)


class Run(Struct, kw_only=True):
    """The recording. `groups` are (receive time, group)."""

    groups: list[tuple[int, RevisionGroup]] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    began_us: int = 0
    ended_us: int = 0
    failed: int = 0


class Load(Struct, frozen=True, kw_only=True):
    """`seconds` of bursts, `each` requests in one and `every_s` between two, on average."""

    seconds: float = 60.0
    every_s: float = 2.5
    each: float = 5.0
    prompt: tuple[int, int] = (64, 1400)
    output: tuple[int, int] = (16, 160)


def now_us() -> int:
    """Microseconds on the clock of all recorded times."""
    return time.monotonic_ns() // 1000


class Sampler:
    """Reads the engines' progress pages at arbitrary times, on a thread."""

    def __init__(self, pages: dict[str, Path], run: Run, seed: int) -> None:
        missing = [str(path) for path in pages.values() if not path.exists()]
        if missing:
            raise RuntimeError(f"engines write no state at {', '.join(missing)}")
        self._pages = {name: Progress(str(path)) for name, path in pages.items()}
        self._run = run
        self._rng = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stopping.wait(self._rng.expovariate(1 / SAMPLE_S)):
            for name, page in self._pages.items():
                at_us = now_us()
                uncomputed, decoding, context, arrived = page.load()
                found = Sample(
                    at_us=at_us,
                    uncomputed=uncomputed,
                    decoding=decoding,
                    context=context,
                    arrived=arrived,
                )
                self._run.samples.setdefault(name, []).append(found)


async def record(
    model: str, workers: int, load: Load, seed: int, apart: bool = False, tokenizer: bool = False
) -> Run:
    """Start a fleet, warm it, load it, wait until it is idle. `apart`: engines have the last core
    and everything else the others. `tokenizer`: the gateway knows the prompts' common prefixes."""
    run = Run()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        options = FleetOptions(
            workers=workers, state_dir=folder, port=0, admin_port=0, model=model,
            tokenizer=tokenizer, engine_args=ARGS,
        )  # fmt: skip
        if apart:
            os.sched_setaffinity(0, cores[:-1] or cores)
        try:
            async with LocalFleet(options) as fleet:
                async with EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))) as etcd:
                    following = asyncio.create_task(_follow(etcd, run))
                    try:
                        await until(
                            lambda: (
                                sum(
                                    w.engine == EnginePhase.READY
                                    for w in folded(run).workers.values()
                                )
                                == workers
                            ),
                            "the log has all engines",
                        )
                        if apart:
                            _settle(folded(run), cores[-1])
                        await _through(fleet, run, load, seed, following)
                    finally:
                        following.cancel()
        finally:
            os.sched_setaffinity(0, cores)
    return run


def _settle(fleet: Fleet, core: int) -> None:
    """Pin all threads of the engines to these cores."""
    for worker in fleet.workers.values():
        for thread in os.listdir(f"/proc/{worker.engine_pid}/task"):
            os.sched_setaffinity(int(thread), {core})


async def _follow(etcd: EtcdLog, run: Run) -> None:
    async for group in etcd.reader().follow(0):
        run.groups.append((now_us(), group))


async def _through(
    fleet: LocalFleet, run: Run, load: Load, seed: int, following: asyncio.Task[None]
) -> None:
    rng = random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        warm = Load(every_s=0.0, each=1.0, prompt=(16, 1400), output=(16, 64))
        for _ in range(12):
            await asyncio.gather(*(_ask(session, fleet, run, _drawn(rng, warm)) for _ in range(4)))
        await asyncio.sleep(0.5)
        names = [f"w{n}" for n in range(fleet.options.workers)]
        pages = {name: fleet.dir / "run" / name / "progress" for name in names}
        with Sampler(pages, run, seed):
            run.began_us = now_us()
            await _bursts(session, fleet, run, load, rng)
            await until(
                lambda: all(not (s[-1].decoding or s[-1].uncomputed) for s in run.samples.values()),
                "engines are idle",
            )
            await asyncio.sleep(0.3)
            run.ended_us = now_us()
    if following.done():
        following.result()


async def _bursts(
    session: aiohttp.ClientSession, fleet: LocalFleet, run: Run, load: Load, rng: random.Random
) -> None:
    until_us = now_us() + int(load.seconds * 1e6)
    async with asyncio.TaskGroup() as tasks:
        while now_us() < until_us:
            for _ in range(1 + int(rng.expovariate(1 / load.each))):
                tasks.create_task(_ask(session, fleet, run, _drawn(rng, load)))
                await asyncio.sleep(rng.expovariate(1 / 0.01))
            await asyncio.sleep(rng.expovariate(1 / load.every_s))


_COMMON = [random.Random(n).choices(range(300, 3000), k=COMMON_TOKENS) for n in range(COMMON)]


def _drawn(rng: random.Random, load: Load) -> tuple[list[int], int]:
    prompt = rng.choices(range(300, 3000), k=rng.randint(*load.prompt))
    if rng.random() < SHARE_COMMON:
        prompt[:COMMON_TOKENS] = rng.choice(_COMMON)[: len(prompt) - 1]
    return prompt, rng.randint(*load.output)


async def _ask(
    session: aiohttp.ClientSession, fleet: LocalFleet, run: Run, what: tuple[Sequence[int], int]
) -> None:
    prompt, output = what
    name = f"load-{len(run.seen)}"
    seen = run.seen[name] = Seen(request=name, prompt=len(prompt))
    one = TimedStream(stream=Stream(request=name, prompt=""), prompt=list(prompt), output=output)
    seen.sent_us = now_us()
    await one.run(session, fleet.gateways[0])
    seen.ended_us = now_us()
    seen.token_us = [int(at * 1e6) for at in one.at]
    run.failed += not one.stream.whole


def folded(run: Run) -> Fleet:
    """The whole log, folded."""
    fleet = Fleet()
    for _, group in run.groups:
        apply_group(fleet, group)
    return fleet
