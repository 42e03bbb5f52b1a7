"""The one table of routes: the server, the roles and the OpenAPI document come from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from relume.controlplane.admin import models as m
from relume.controlplane.admin.change_handlers import ChangesApi
from relume.controlplane.admin.checkpoints_api import CheckpointsApi
from relume.controlplane.admin.commands import WORKER_COMMANDS
from relume.controlplane.admin.events_api import EventsApi
from relume.controlplane.admin.fleet_api import FleetApi
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.incidents_api import IncidentList, IncidentsApi
from relume.controlplane.replay.story import Story
from relume.controlplane.telemetry.metrics_api import MetricsApi
from relume.controlplane.ui.moment import Moment
from relume.controlplane.ui.static_files import StaticFiles
from relume.controlplane.ui.ui_api import UiApi

PREFIX = "/admin/v1"
PUBLIC = "public"
"""The role of routes that need no token: probes only."""

Handler = Callable[..., Awaitable[Any]]
"""Takes the request, and the principal when the route changes something."""


class Param(Struct, frozen=True):
    """A parameter. `where`: path, query, header."""

    name: str
    where: str
    description: str
    kind: str = "string"


class Route(Struct, frozen=True, kw_only=True):
    """One operation. `answer` is the 200 body; `text` instead says its media type. `statuses`
    are the others it may give, beside 401 and 403."""

    method: str
    path: str
    handler: Handler
    role: str
    summary: str
    answer: type | None = None
    text: str = ""
    params: tuple[Param, ...] = ()
    body: type | None = None
    body_required: bool = True
    statuses: tuple[int, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether it changes the fleet: then its handler is given the principal."""
        return self.method != "GET"

    @property
    def operation(self) -> str:
        """The operation's id, unique in the table."""
        path = self.path + "index" * self.path.endswith("/")
        words = path.removeprefix(PREFIX).replace("{", "").replace("}", "").split("/")
        return "_".join([self.method.lower(), *(w.replace(".", "_") for w in words if w)])


_NAME = Param("name", "path", "worker's name")
_ID = Param("id", "path", "request id, the id in its response, or its x-request-id")
_KEY = Param("Idempotency-Key", "header", "resent with the same key, a change happens once")
_FILTERS = (
    Param("type", "query", "types of event, comma-separated"),
    Param("exclude", "query", "types to leave out, comma-separated"),
    Param("request", "query", "only events about this request"),
    Param("worker", "query", "only events of or about this worker"),
    Param("stream", "query", "only events of this stream, e.g. r.r0"),
    Param("from", "query", "begin with this revision, in the log if need be", "integer"),
    Param("after", "query", "begin after this cursor (REVISION.INDEX)"),
    Param("limit", "query", "maximum number of events, up to 1000 (default 100)", "integer"),
    Param("text", "query", "1: with each event in one line of plain words"),
)
_FOLLOW = (
    Param("follow", "query", "1: server-sent events, without end"),
    Param("tail", "query", "with follow: begin with this number of newest events", "integer"),
    Param("Last-Event-ID", "header", "with follow: continue after this event's id"),
)


def routes(
    fleet: FleetApi,
    checkpoints: CheckpointsApi,
    incidents: IncidentsApi,
    events: EventsApi,
    changes: ChangesApi,
    ui: UiApi,
    openapi: Handler,
    metrics: MetricsApi,
) -> tuple[Route, ...]:
    """Every route of the admin port."""

    def get(
        path: str,
        handler: Handler,
        answer: type,
        summary: str,
        *params: Param,
        statuses: tuple[int, ...] = (),
    ) -> Route:
        missing = (404,) if "{" in path else ()
        return Route(
            method="GET",
            path=PREFIX + path,
            handler=handler,
            role="viewer",
            summary=summary,
            answer=answer,
            params=params,
            statuses=statuses + missing,
        )

    table = [
        get("/fleet", fleet.fleet, m.FleetInfo, "The fleet in one answer"),
        get("/workers", fleet.workers, m.WorkerList, "All workers with pids and load"),
        get("/workers/{name}", fleet.worker, m.WorkerInfo, "One worker", _NAME),
        get(
            "/requests",
            fleet.requests,
            m.RequestList,
            "Live requests and the last that ended",
            Param("state", "query", "live, completed, cancelled, failed, rejected"),
            Param("worker", "query", "only requests with an attempt on this worker"),
            Param("model", "query", "only requests for this model"),
            Param("search", "query", "only requests whose id or client's id contains this"),
            Param("before", "query", "only requests that came before this one"),
            Param(
                "limit",
                "query",
                "maximum number of requests, newest first (default 100)",
                "integer",
            ),
        ),
        get("/requests/{id}", fleet.request, m.RequestDetail, "The course of one request", _ID),
        get(
            "/requests/{id}/decisions",
            fleet.decisions,
            m.DecisionList,
            "Every decision about one request, with its basis",
            _ID,
        ),
        get(
            "/requests/{id}/why",
            ui.why,
            Story,
            "Why a request went where it went, as `relume why` says it",
            _ID,
            statuses=(410, 503),
        ),
        get(
            "/moment",
            ui.moment,
            Moment,
            "All that the page shows: once, or with follow=1 a moment and then its changes",
            Param("follow", "query", "1: server-sent events, without end"),
            statuses=(429,),
        ),
        get(
            "/checkpoints",
            checkpoints.checkpoints,
            m.CheckpointList,
            "Holders of KV checkpoints, and what they have of live requests",
            Param("request", "query", "only this request"),
            Param("worker", "query", "only requests that run on this worker"),
        ),
        get(
            "/incidents",
            incidents.incidents,
            IncidentList,
            "Failures, what clients felt of them, and when capacity was back",
            Param("worker", "query", "only those of this worker, or of this gateway"),
            Param("open", "query", "1: only those whose capacity is not back"),
            Param(
                "limit",
                "query",
                "maximum number of incidents, newest first, up to 1000 (default 100)",
                "integer",
            ),
            statuses=(400,),
        ),
        get(
            "/incidents/{id}",
            incidents.incident,
            Incident,
            "One failure with the streams it touched and its causal chain",
            Param("id", "path", "incident id, or the latest of w0, w0:1, daemon:w0, stream:w0, r0"),
        ),
        get(
            "/events",
            events.events,
            m.EventPage,
            "Events of the log: a page, or a stream with follow=1",
            *_FILTERS,
            *_FOLLOW,
            statuses=(400, 410, 429, 503),
        ),
        get(
            "/decisions",
            events.decisions,
            m.EventPage,
            "Events that record a choice, with their basis",
            *_FILTERS,
            statuses=(400, 410, 503),
        ),
        get(
            "/degradation",
            fleet.degradation,
            m.DegradationList,
            "Demand, capacity, wanted workers and level of degradation by model",
            Param("model", "query", "only this model"),
        ),
        get("/rollout", fleet.rollout, m.RolloutInfo, "The last rolling restart"),
        Route(
            method="POST",
            path=f"{PREFIX}/rollout",
            handler=changes.begin_rollout,
            role="operator",
            summary="Restart the engines of a model, one failure domain after the other",
            answer=m.CommandInfo,
            params=(_KEY,),
            body=m.RolloutRequest,
            statuses=(202, 400, 409, 503),
        ),
        Route(
            method="POST",
            path=f"{PREFIX}/rollout/cancel",
            handler=changes.cancel_rollout,
            role="operator",
            summary="End the rolling restart; its workers get requests again",
            answer=m.CommandInfo,
            params=(_KEY,),
            statuses=(202, 409, 503),
        ),
        get("/leader", fleet.leader, m.LeaderInfo, "The leader"),
        Route(
            method="POST",
            path=f"{PREFIX}/leader/resign",
            handler=changes.resign,
            role="admin",
            summary="Have the leader step down for another replica",
            answer=m.CommandInfo,
            params=(_KEY,),
            statuses=(202, 409, 503),
        ),
        get("/streams", fleet.streams, m.StreamList, "Streams of the log and the state hash"),
        get("/config", fleet.config, m.SettingList, "Settings of the fleet and of this process"),
        Route(
            method="PUT",
            path=f"{PREFIX}/config",
            handler=changes.set_config,
            role="admin",
            summary="Change one setting of the fleet",
            answer=m.CommandInfo,
            params=(_KEY,),
            body=m.SettingChange,
            statuses=(202, 400, 409, 503),
        ),
        get(
            "/commands/{id}",
            changes.command,
            m.CommandDetail,
            "A change and what became of it",
            Param("id", "path", "command_id of the change's answer"),
        ),
        get("/openapi.json", openapi, dict, "This document"),
        Route(
            method="GET",
            path="/metrics",
            handler=metrics.own,
            role="viewer",
            summary="Prometheus metrics",
            text="text/plain",
        ),
        Route(
            method="GET",
            path="/metrics/engines",
            handler=metrics.engines,
            role="viewer",
            summary="Prometheus metrics of the engines, with the label worker",
            text="text/plain",
        ),
        Route(
            method="GET",
            path="/health",
            handler=fleet.health,
            role=PUBLIC,
            summary="Whether the fleet accepts requests",
            answer=m.Health,
            statuses=(503,),
        ),
        Route(
            method="GET",
            path="/live",
            handler=fleet.live,
            role=PUBLIC,
            summary="Whether the process answers",
            answer=m.Health,
        ),
    ]
    commands = [
        Route(
            method="POST",
            path=f"{PREFIX}/workers/{{name}}/{command}",
            handler=changes.worker_command(command),
            role="operator",
            summary=SUMMARIES[command],
            answer=m.CommandInfo,
            params=(_NAME, _KEY),
            body=m.DrainRequest if command == "drain" else None,
            body_required=False,
            statuses=(202, 400, 404, 409, 503),
        )
        for command in WORKER_COMMANDS
    ]
    return (*table, *commands, *_page(ui.files))


def _page(files: StaticFiles) -> tuple[Route, ...]:
    """The files of the page. They are public; its data are not."""

    def get(path: str, handler: Handler, summary: str, *params: Param, status: int) -> Route:
        return Route(
            method="GET",
            path=path,
            handler=handler,
            role=PUBLIC,
            summary=summary,
            text="text/html" if path == "/ui/" else "*/*",
            params=params,
            statuses=(status,),
        )

    name = Param("file", "path", "name of the file")
    return (
        get("/ui", files.redirect, "The page's address without its slash", status=307),
        get("/ui/", files.document, "The page that shows the fleet", status=304),
        get("/ui/{file}", files.file, "A file of the page", name, status=304),
    )


SUMMARIES = {
    "drain": "Give the worker nothing new; what runs there moves to others, or ends there",
    "undrain": "Give the worker requests again",
    "restart": "Have the worker's agent restart its engine now",
    "hold": "Do not restart the worker's engine when it ends",
    "release": "Let the worker's engine be restarted again",
    "trust": "End the worker's quarantine: it is probed, and serves again if it answers rightly. Or acknowledge "
    "records of its agent that cannot be read: it gets requests again",
}
