"""Handlers of the admin API that show incidents."""

from __future__ import annotations

from aiohttp import web
from msgspec import Struct

from relume.controlplane.admin.errors import BadRequest, NotFound
from relume.controlplane.incidents.incident import Incident, IncidentInfo
from relume.controlplane.incidents.incident_fold import IncidentObserver
from relume.controlplane.incidents.sentences import find, info, whole

MAX_LIMIT = 1000


class IncidentList(Struct, frozen=True):
    """Incidents, oldest first. The replica has those of the log from revision `since` on, and
    remembers a bounded number."""

    since: int
    incidents: list[IncidentInfo]


class IncidentsApi:
    """Read-only handlers over the incidents of one replica."""

    def __init__(self, observer: IncidentObserver) -> None:
        self._observer = observer

    async def incidents(self, request: web.Request) -> IncidentList:
        """GET incidents; `worker`, `open` and `limit` narrow it."""
        query = request.query
        found = self._observer.incidents
        if query.get("worker"):
            found = [r for r in found if r.name == query["worker"]]
        if query.get("open", "0") not in ("", "0", "false"):
            found = [r for r in found if r.open]
        limit = query.get("limit") or "100"
        if not limit.isdecimal() or not 1 <= int(limit) <= MAX_LIMIT:
            raise BadRequest(f"limit={limit!r} is not a number from 1 to {MAX_LIMIT}", "limit")
        return IncidentList(self._observer.since, [info(r) for r in found[-int(limit) :]])

    async def incident(self, request: web.Request) -> Incident:
        """GET incidents/{id}."""
        wanted = request.match_info["id"]
        record = find(self._observer.incidents, wanted)
        if record is None:
            raise NotFound(
                f"no incident {wanted!r} since revision {self._observer.since}; "
                "see /admin/v1/incidents",
                "id",
            )
        return whole(record)
