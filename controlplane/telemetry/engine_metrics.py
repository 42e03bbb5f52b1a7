"""`/metrics/engines`: what the engines' own `/metrics` say, each sample with the label `worker`.

An engine has another port after each start. Here Prometheus finds all of them at one address, which also
says which of them answered (`relume_engine_scraped`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence

import aiohttp

from relume.controlplane.replica.engine_calls import LOST, session, url_of
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state.fleet import Fleet, Worker

MOST_BYTES = 8 << 20
"""Of one engine's page; a longer one counts as none."""
AT_ONCE = 16
UP = b"relume_engine_scraped"
_HEAD = re.compile(rb"# (?:HELP|TYPE) ([A-Za-z_:][A-Za-z0-9_:]*)(?: .*)?").fullmatch
_SAMPLE = re.compile(
    rb"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? ([-+0-9.eE]+|[+-]?Inf|NaN)(?: -?\d+)?"
).fullmatch
_OWN = re.compile(rb'(^|,)worker="').sub


async def page(fleet: Fleet) -> bytes:
    """The page, of engines that are ready. It ends within seconds, whatever they do."""
    workers = [w for w in fleet.workers.values() if w.present and w.engine == EnginePhase.READY]
    limit = asyncio.Semaphore(AT_ONCE)
    async with session() as calls:

        async def one(worker: Worker) -> bytes | None:
            async with limit:
                return await _page_of(calls, worker)

        pages = await asyncio.gather(*map(one, workers))
    found = {worker.name: text for worker, text in zip(workers, pages, strict=True)}
    return await asyncio.to_thread(merged, found)


async def _page_of(calls: aiohttp.ClientSession, worker: Worker) -> bytes | None:
    try:
        async with calls.get(url_of(worker, "/metrics")) as answer:
            if answer.status != 200:
                return None
            text = await answer.content.read(MOST_BYTES + 1)
            while len(text) <= MOST_BYTES and (more := await answer.content.read(MOST_BYTES)):
                text += more
    except LOST:
        return None
    return text if len(text) <= MOST_BYTES else None


def merged(pages: Mapping[str, bytes | None]) -> bytes:
    """One page in Prometheus' text format from those of workers, by name; None: it gave none. Samples of
    a metric stand together, as the format requires. Lines that are none of it are left out."""
    heads: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for worker, text in pages.items():
        of_worker = b'worker="%b"' % worker.encode()
        family = b""
        for line in (text or b"").splitlines():
            if head := _HEAD(line):
                family = head[1]
                known = heads.setdefault(family, [])
                if len(known) < 2 and line not in known:
                    known.append(line)
            elif sample := _SAMPLE(line):
                name, labels, value = sample.groups()
                if name != family and not name.startswith(family + b"_"):
                    family = name
                labels = _OWN(rb'\1exported_worker="', labels) if labels else b""
                labels = b"%b,%b" % (of_worker, labels) if labels else of_worker
                samples.setdefault(family, []).append(b"%b{%b} %b" % (name, labels, value))
    return b"".join(_lines(heads, samples)) + _scraped(pages)


def _lines(
    heads: Mapping[bytes, Sequence[bytes]], samples: Mapping[bytes, Sequence[bytes]]
) -> list[bytes]:
    return [
        b"\n".join((*heads.get(family, ()), *lines)) + b"\n" for family, lines in samples.items()
    ]


def _scraped(pages: Mapping[str, bytes | None]) -> bytes:
    lines = [
        b"# HELP %b 1 if the engine gave its metrics" % UP, b"# TYPE %b gauge" % UP,
        *(b'%b{worker="%b"} %d' % (UP, name.encode(), text is not None) for name, text in pages.items()),
    ]  # fmt: skip
    return b"\n".join(lines) + b"\n"
