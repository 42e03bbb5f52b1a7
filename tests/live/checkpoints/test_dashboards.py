"""A real Prometheus scrapes a fleet and its engines, and every panel of the dashboards shows something."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from deploy.docs.monitoring.dashboard_table import DASHBOARDS
from relume.controlplane.local.local_fleet import FleetOptions
from tests.deploy.test_alerts import DEPLOY
from tests.etcd_server import free_port
from tests.live.checkpoints.test_checkpoints import padding, until_daemons, with_checkpoints
from tests.live.conftest import HANG_S, Scene, scene_of

pytestmark = pytest.mark.usefixtures("patient")
PANELS = [panel for of in DASHBOARDS.values() for row in of.rows.values() for panel in row]
SEEN = {
    "Failures of attempts", "How requests continued", "Latest recovery of each worker",
    "Bytes of that recovery", "Demand and capacity",
}  # fmt: skip
"""Panels that are empty until something happens that happens here."""


@contextmanager
def prometheus(scene: Scene, path: Path) -> Iterator[str]:
    """One that scrapes the replica each second; its URL."""
    script = DEPLOY / "dev/get-prometheus.sh"
    found = subprocess.run([str(script), "prometheus"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    scrape = {
        "job_name": "relume",
        "authorization": {"credentials": scene.fleet.viewer_token},
        "static_configs": [{"targets": [scene.fleet.admins[0].removeprefix("http://")]}],
    }
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(DEPLOY / "prometheus/relume-rules.yaml")],
        "scrape_configs": [
            scrape,
            {**scrape, "job_name": "relume-engines", "metrics_path": "/metrics/engines"},
        ],
    }
    (path / "prometheus.json").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    argv = (
        found.stdout.strip(), f"--config.file={path}/prometheus.json", f"--web.listen-address={address}",
        f"--storage.tsdb.path={path}/tsdb",
    )  # fmt: skip
    with open(path / "prometheus.log", "ab") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output)
    try:
        yield f"http://{address}/api/v1/query"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.full
@pytest.mark.timeout(240)
async def test_every_panel_of_the_dashboards_shows_something(
    options: FleetOptions, tmp_path: Path
) -> None:
    """Full, since Prometheus and three engines share the cores for half a minute."""
    more = with_checkpoints(options, replica_args=("--degradation", "observe"))
    async with scene_of(more) as scene:
        await until_daemons(scene)
        with prometheus(scene, tmp_path) as url:

            async def kill(streams: dict) -> None:
                await scene.ripe(streams, 8)
                victim = await scene.worker("w0")
                os.kill(victim["engine_pid"], signal.SIGKILL)

            for tag in ("first", "second"):
                await scene.streams(6, 120, tag, padding=padding(tag))
            await scene.streams(9, 200, "killed", kill, padding=padding("killed"))
            await scene.until_ready("w0", 2)
            await scene.streams(6, 120, "last", padding=padding("last"))
            await shown(url)
            async with aiohttp.ClientSession() as session:
                query = {"query": "count by (worker) (vllm:num_requests_running)"}
                async with session.get(url, params=query) as answer:
                    found = (await answer.json())["data"]["result"]
            assert {series["metric"]["worker"] for series in found} == {"w0", "w1", "w2"}


async def shown(url: str) -> None:
    """Wait until each panel that can show something does, and ask all queries."""
    deadline = time.monotonic() + HANG_S
    async with aiohttp.ClientSession() as session:
        for panel in PANELS:
            for expr, _ in panel.queries:
                query = expr.replace("$__rate_interval", "2m").replace("$job", "relume")
                while True:
                    async with session.get(url, params={"query": query}) as answer:
                        assert answer.status == 200, f"{panel.title}: {await answer.text()}"
                        found = (await answer.json())["data"]["result"]
                    if found or (panel.when and panel.title not in SEEN):
                        break
                    assert time.monotonic() < deadline, f"{panel.title} is empty: {query}"
                    await asyncio.sleep(0.5)
