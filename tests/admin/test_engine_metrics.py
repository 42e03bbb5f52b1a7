"""One page with the metrics of all engines: their samples by worker, whatever an engine answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from relume.controlplane.telemetry import engine_metrics
from relume.controlplane.telemetry.engine_metrics import merged
from tests.admin.scene import VIEWER, Scene
from tests.policies.story import ready, started


def engine_page(running: int) -> bytes:
    """As vLLM's."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Running", ["model_name"], registry=registry).labels(
        'a "b", \\ c} d'
    ).set(running)
    Counter("vllm:prompt_tokens", "Prompt\ntokens", registry=registry).inc(7)
    histogram = Histogram("vllm:ttft", "TTFT", ["worker"], registry=registry, buckets=(1, 2))
    histogram.labels("rank0").observe(1.5)
    return generate_latest(registry)


def families(text: bytes) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    return {
        family.name: [(s.name, s.labels, s.value) for s in family.samples]
        for family in text_string_to_metric_families(text.decode())
    }


def test_samples_have_the_worker_and_are_otherwise_what_they_were() -> None:
    pages = {"w0": engine_page(3), "w1": engine_page(5)}
    found = families(merged({**pages, "w2": None}))
    assert found.pop("relume_engine_scraped") == [
        ("relume_engine_scraped", {"worker": name}, value)
        for name, value in (("w0", 1), ("w1", 1), ("w2", 0))
    ]
    expected: dict[str, list[tuple[str, dict[str, str], float]]] = {}
    for worker, page in pages.items():
        for name, samples in families(page).items():
            for sample, labels, value in samples:
                own = {"exported_worker" if k == "worker" else k: t for k, t in labels.items()}
                expected.setdefault(name, []).append((sample, {"worker": worker, **own}, value))
    assert found == expected


def test_samples_of_a_metric_stand_together_below_one_head() -> None:
    text = merged({"w0": engine_page(3), "w1": engine_page(5)}).decode()
    assert text.count("# TYPE vllm:num_requests_running gauge\n") == 1
    names = [line.split("{")[0] for line in text.splitlines() if not line.startswith("#")]
    groups = [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
    assert groups.count("vllm:num_requests_running") == 1


@pytest.mark.parametrize(
    "text",
    [
        b"<html>no metrics</html>",
        b"\xff\xfe\n{} 3\n",
        b'x{worker="w9"} \nx 1 2 3\n',
        b"# TYPE\n#\n\n",
    ],
)
def test_what_is_no_sample_is_left_out(text: bytes) -> None:
    found = families(merged({"w0": text}))
    assert found == {"relume_engine_scraped": [("relume_engine_scraped", {"worker": "w0"}, 1.0)]}


@asynccontextmanager
async def engine(handler: object) -> AsyncIterator[int]:
    """A server with this /metrics; its port."""
    app = web.Application()
    app.router.add_get("/metrics", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    finally:
        await runner.cleanup()


async def test_the_admin_api_shows_those_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One answers, one hangs, one is too long, one is gone; a worker without an engine is not asked."""
    monkeypatch.setattr(engine_metrics, "MOST_BYTES", 100_000)

    async def good(_: web.Request) -> web.Response:
        return web.Response(body=engine_page(3))

    async def hangs(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    async def long(_: web.Request) -> web.Response:
        return web.Response(body=b"x 1\n" * 50_000)

    async with Scene() as scene, engine(good) as a, engine(hangs) as b, engine(long) as c:
        for name, port in (("w0", a), ("w1", b), ("w2", c), ("w3", 9)):
            writer = await scene.worker(name)
            writer.append(started(name, 2), replace(ready(name, 2), port=port))
        await scene.until(
            lambda: all(w.incarnation == 2 for w in scene.replica.fleet.workers.values())
        )
        url = f"{scene.admin.url}/metrics/engines"
        async with scene.session.get(url) as answer:
            assert answer.status == 401
        headers = {"Authorization": f"Bearer {VIEWER}"}
        async with asyncio.timeout(20), scene.session.get(url, headers=headers) as answer:
            found = families(await answer.read())
    scraped = {s[1]["worker"]: s[2] for s in found["relume_engine_scraped"]}
    assert scraped == {"w0": 1, "w1": 0, "w2": 0, "w3": 0}
    assert {s[1]["worker"] for s in found["vllm:num_requests_running"]} == {"w0"}
