"""The admin server of one replica: binds, authenticates, answers, and closes cleanly."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any, Self

import structlog
from aiohttp import web

from relume.controlplane.admin import openapi, principals
from relume.controlplane.admin.change_handlers import ChangesApi
from relume.controlplane.admin.checkpoints_api import CheckpointsApi
from relume.controlplane.admin.commands import CommandBook
from relume.controlplane.admin.errors import answer_errors, json_answer
from relume.controlplane.admin.events_api import EventsApi
from relume.controlplane.admin.fleet_api import FleetApi
from relume.controlplane.admin.models import CommandInfo
from relume.controlplane.admin.recent_events import History, OlderLog
from relume.controlplane.admin.request_book import RequestBook
from relume.controlplane.admin.route_table import PUBLIC, Route, routes
from relume.controlplane.incidents.incidents_api import IncidentsApi
from relume.controlplane.replica.loop import Replica
from relume.controlplane.serve_settings import ServeConfig, check
from relume.controlplane.telemetry.metrics_api import MetricsApi
from relume.controlplane.telemetry.metrics_page import Metrics
from relume.controlplane.ui.live_moments import LiveMoments
from relume.controlplane.ui.moment_feed import MomentFeed
from relume.controlplane.ui.ui_api import UiApi
from relume.events.log.interface import LogReader, RevisionGroup
from relume.events.vocabulary.enums import CommandState

MAX_BODY_BYTES = 64 * 1024
log = structlog.get_logger("relume.admin")


class AdminServer:
    """Async context manager: inside, the admin API answers on admin_host:admin_port.

    Create it after `replica.catch_up()` and before `replica.run()`: its memory of events begins at
    the fold's revision. `log_id` names the log in the archive (see Maintenance.identity). Raises
    ConfigError (unsafe), OSError (port in use).
    """

    def __init__(
        self,
        replica: Replica,
        config: ServeConfig,
        log_reader: LogReader,
        log_id: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        check(config)
        self.config = config
        self._replica = replica
        older = OlderLog(log_reader, config.archive_dir, log_id)
        self.history = History(older, replica.fleet.revision)
        self.book = RequestBook(clock=replica.scheduler.decisions.now_us)
        self.commands = CommandBook(replica, self.history)
        self.metrics = Metrics(replica, config)
        self._auth = principals.Authenticator(config.admin_tokens)
        self._events = EventsApi(self.history)
        fleet = FleetApi(replica, config, self.history, self.book)
        self.feed = MomentFeed(LiveMoments(replica, self.book).moment)
        self.routes = routes(
            fleet,
            CheckpointsApi(replica),
            IncidentsApi(replica.incidents),
            self._events,
            ChangesApi(replica, self.commands),
            UiApi(self.feed, fleet, self.history),
            self._openapi,
            MetricsApi(replica, self.metrics),
        )
        self._document = openapi.document(self.routes, _version())
        self._runner: web.AppRunner | None = None
        self.history.listen(self.book.note)
        self.history.listen(self.commands.note)
        self.history.listen(self.metrics.note)
        replica.observe(self.history.seen)
        replica.observe_groups(self._folded)

    @property
    def url(self) -> str:
        """Where it listens."""
        host = self.config.admin_host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.config.admin_port}"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[answer_errors], client_max_size=MAX_BODY_BYTES)
        for route in self.routes:
            app.router.add_route(route.method, route.path, self._handler(route))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.config.admin_host, self.config.admin_port)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        log.info("admin_listening", url=self.url, tokens=len(self.config.admin_tokens))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._events.closing = self.feed.closing = True
        self.history.wake()
        if self._runner is not None:
            await self._runner.cleanup()

    def metrics_page(self) -> bytes:
        """The metrics in Prometheus' text format, for another port to show."""
        return self.metrics.page()

    # --- inside ------------------------------------------------------------------------

    def _folded(self, group: RevisionGroup) -> None:
        if self._replica.covered > self.history.revision:
            self.history.restart(self._replica.covered)
        self.history.folded(group)

    async def _openapi(self, request: web.Request) -> dict[str, Any]:
        return self._document

    def _handler(self, route: Route):
        async def handle(request: web.Request) -> web.StreamResponse:
            arguments: tuple[Any, ...] = (request,)
            if route.role != PUBLIC:
                principal = self._auth.principal(
                    request.headers.get("Authorization", ""),
                    request.headers.get("Host", ""),
                    request.headers.get("Origin", ""),
                )
                principals.require(principal, route.role)
                if route.changes:
                    arguments = (request, principal)
            answer = await route.handler(*arguments)
            if isinstance(answer, web.StreamResponse):
                return answer
            pending = isinstance(answer, CommandInfo) and answer.state == CommandState.ACCEPTED
            return json_answer(answer, 202 if pending else 200)

        return handle


def _version() -> str:
    try:
        return metadata.version("relume")
    except metadata.PackageNotFoundError:
        return "0+checkout"
