"""Handlers that show the fold: fleet, workers, requests, leader, streams, settings, health."""

from __future__ import annotations

import time
from itertools import dropwhile, islice
from pathlib import Path

from aiohttp import web

from relume.controlplane.admin import models as m
from relume.controlplane.admin.errors import NotFound, UnhealthyReply
from relume.controlplane.admin.recent_events import Cursor, History
from relume.controlplane.admin.request_book import (
    RequestBook,
    RequestHistory,
    decisions_of,
    newest_requests,
    request_info,
)
from relume.controlplane.admin.settings import settings_of
from relume.controlplane.replay.why import RESPONSE_PREFIXES
from relume.controlplane.replica.loop import Replica
from relume.controlplane.serve_settings import ServeConfig, masked
from relume.events import vocabulary as v
from relume.policies.routing.routing_settings import POLICY
from relume.policies.state.fleet import state_hash

SEARCH_BUDGET_S = 5.0
"""A request that is not in memory is looked for in the log this long."""


class FleetApi:
    """Read-only handlers over one replica."""

    def __init__(
        self, replica: Replica, config: ServeConfig, history: History, book: RequestBook
    ) -> None:
        self._replica = replica
        self._config = config
        self._history = history
        self._book = book

    # --- the fleet -----------------------------------------------------------------

    async def fleet(self, request: web.Request) -> m.FleetInfo:
        """GET fleet."""
        fleet = self._replica.fleet
        scheduler = self._replica.scheduler
        return m.FleetInfo(
            replica=self._replica.config.name,
            revision=fleet.revision,
            models=scheduler.models(),
            serving=scheduler.ready(),
            leader=await self.leader(request),
            log=self._log(),
            workers=self._workers(),
            replicas=[
                m.ReplicaInfo(
                    name=r.name,
                    alive=r.alive,
                    leader=r.name == fleet.leader,
                    boot=r.boot,
                    host=r.host,
                    port=r.port,
                    pid=r.pid,
                    policy=fleet.config.get(POLICY, r.policy),
                    suspects=dict(r.suspects),
                )
                for r in fleet.replicas.values()
            ],
            live_requests=len(fleet.requests),
            arrived=fleet.arrived,
            ended=fleet.ended,
            decisions=fleet.decisions,
            open_commands=len(fleet.open_commands),
            pending_effects=len(fleet.pending_effects),
        )

    def _log(self) -> m.LogInfo:
        replica = self._replica
        writer = replica.writer
        return m.LogInfo(
            revision=replica.fleet.revision,
            position=writer.position,
            durable=writer.durable,
            pending=writer.position - writer.durable,
            healthy=writer.healthy,
            silent_ms=int((time.monotonic() - replica.last_group_at) * 1000),
            spool_bytes=spool_bytes(self._config),
            detail=replica.fleet.detail,
        )

    def _workers(self) -> list[m.WorkerInfo]:
        view = self._replica.view
        return [m.worker_info(view, worker) for worker in view.fleet.workers.values()]

    async def workers(self, request: web.Request) -> m.WorkerList:
        """GET workers."""
        return m.WorkerList(self._replica.fleet.revision, self._workers())

    async def worker(self, request: web.Request) -> m.WorkerInfo:
        """GET workers/{name}."""
        name = request.match_info["name"]
        worker = self._replica.fleet.workers.get(name)
        if worker is None:
            raise NotFound(f"no worker {name!r}; see /admin/v1/workers", "name")
        return m.worker_info(self._replica.view, worker)

    async def degradation(self, request: web.Request) -> m.DegradationList:
        """GET degradation."""
        return m.degradation_of(self._replica.fleet, request.query.get("model", ""))

    async def rollout(self, request: web.Request) -> m.RolloutInfo:
        """GET rollout."""
        return m.rollout_of(self._replica.fleet)

    async def leader(self, request: web.Request) -> m.LeaderInfo:
        """GET leader."""
        fleet = self._replica.fleet
        return m.LeaderInfo(
            leader=fleet.leader,
            epoch=fleet.owners.get("fleet", 0),
            tick=fleet.tick,
            tick_unix_ms=fleet.tick_unix_ms,
            healthy_since_tick=fleet.healthy_since_tick,
            answered_by=self._replica.config.name,
            answered_by_leads=self._replica.leadership.leading,
        )

    async def streams(self, request: web.Request) -> m.StreamList:
        """GET streams."""
        fleet = self._replica.fleet
        return m.streams_of(fleet, state_hash(fleet))

    async def config(self, request: web.Request) -> m.SettingList:
        """GET config."""
        return m.SettingList(settings_of(self._replica.view), masked(self._config))

    async def health(self, request: web.Request) -> m.Health:
        """GET /health: 200 while the fleet can accept a request, else 503."""
        health = self._health()
        if not health.serving:
            raise UnhealthyReply(health.status, health)
        return health

    async def live(self, request: web.Request) -> m.Health:
        """GET /live: 200 while the process answers, also while it drains."""
        return self._health()

    def _health(self) -> m.Health:
        replica = self._replica
        serving = replica.scheduler.ready()
        healthy = replica.writer.healthy
        status = "ok" if serving and healthy else "log away" if serving else "no worker"
        return m.Health(status, replica.fleet.revision, serving, healthy)

    # --- requests --------------------------------------------------------------------

    async def requests(self, request: web.Request) -> m.RequestList:
        """GET requests; `state`, `worker`, `model`, `search`, `limit` narrow it, and `before`: those that
        came before this request. Raises NotFound."""
        query = request.query
        found = newest_requests(self._book, self._replica.fleet, query.get("search", ""))
        if before := query.get("before"):
            name = self._book.find(before) or before
            older = dropwhile(
                lambda r: r.request != name, newest_requests(self._book, self._replica.fleet)
            )
            if next(older, None) is None:
                raise NotFound(f"no request {before!r} in memory", "before")
            search = query.get("search", "")
            found = (r for r in older if search in r.request or search in r.client_id)
        if state := query.get("state"):
            found = (r for r in found if r.state == state)
        if worker := query.get("worker"):
            found = (r for r in found if worker in r.workers)
        if model := query.get("model"):
            found = (r for r in found if r.model == model)
        limit = query.get("limit", "")
        shown = int(limit) if limit.isdigit() and int(limit) else 100
        rows = list(islice(found, shown + 1))
        return m.RequestList(self._replica.fleet.revision, rows[:shown][::-1], len(rows) > shown)

    async def request(self, request: web.Request) -> m.RequestDetail:
        """GET requests/{id}."""
        name, course = await self.course(request.match_info["id"])
        live = self._replica.fleet.requests.get(name)
        return m.RequestDetail(
            request_info(name, course, live), [m.event_info(entry) for entry in course.entries]
        )

    async def decisions(self, request: web.Request) -> m.DecisionList:
        """GET requests/{id}/decisions."""
        name, course = await self.course(request.match_info["id"])
        return m.DecisionList(name, decisions_of(course, self._replica.view.stream))

    async def course(self, wanted: str) -> tuple[str, RequestHistory]:
        """The request that `wanted` names, and its course. Raises NotFound."""
        name = self._book.find(wanted)
        if name and self._book.courses[name].arrived is not None:
            return name, self._book.courses[name]
        name, found = await self._search(name or wanted)
        if found is None:
            raise NotFound(f"no request {wanted!r} in memory or in the log searched", "id")
        self._book.keep(name, found)
        return name, found

    async def _search(self, wanted: str) -> tuple[str, RequestHistory | None]:
        """Look for a request in the whole log, within the budget."""
        book = RequestBook()
        names = {wanted, *(wanted.removeprefix(prefix) for prefix in RESPONSE_PREFIXES)}
        cursor: Cursor = (0, 1 << 62)
        deadline = time.monotonic() + SEARCH_BUDGET_S
        while cursor < self._history.end and time.monotonic() < deadline:
            entries, cursor = await self._history.after(cursor)
            for entry in entries:
                event = entry.event
                if type(event) is v.RequestArrived and event.client_id in names:
                    names.add(event.request)
                if not names.isdisjoint(entry.requests):
                    book.note(entry)
        name = book.find(wanted)
        return name, book.courses.get(name)


def spool_bytes(config: ServeConfig) -> int:
    """Bytes of this replica's events that wait on disk for etcd."""
    folder = Path(config.spool_dir) / config.name
    try:
        return sum(entry.stat().st_size for entry in folder.iterdir() if entry.is_file())
    except OSError:
        return 0
