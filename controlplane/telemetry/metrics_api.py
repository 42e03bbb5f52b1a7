"""Handlers of the admin API's pages of metrics: the replica's own, and those of the engines."""

from __future__ import annotations

from aiohttp import web

from relume.controlplane.replica.loop import Replica
from relume.controlplane.telemetry import engine_metrics
from relume.controlplane.telemetry.metrics_page import CONTENT_TYPE, Metrics


class MetricsApi:
    """Both pages are in Prometheus' text format."""

    def __init__(self, replica: Replica, metrics: Metrics) -> None:
        self._replica = replica
        self._metrics = metrics

    async def own(self, _: web.Request) -> web.Response:
        """See `relume.controlplane.telemetry.metric_table`."""
        return web.Response(body=self._metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    async def engines(self, _: web.Request) -> web.Response:
        """See `relume.controlplane.telemetry.engine_metrics`."""
        text = await engine_metrics.page(self._replica.fleet)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})
