"""The page over a stored log: `relume replay --ui`. It serves this machine only, and reads only.

The routes are those of the admin API that the page uses, each with `place`: the transaction that the
answer is about. Handlers await nothing between moving the timeline and reading it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Any, Self

from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from relume.controlplane.admin import models as m
from relume.controlplane.admin import principals
from relume.controlplane.admin.errors import BadRequest, NotFound, answer_errors, json_answer
from relume.controlplane.admin.events_api import MAX_LIMIT, Filter, parse_filter
from relume.controlplane.admin.route_table import PREFIX
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.sentences import find, whole
from relume.controlplane.replay import rendering
from relume.controlplane.replay.story import Story
from relume.controlplane.ui.moment import Moment
from relume.controlplane.ui.recorded_fleet import FREQUENT, RecordedFleet, Recording
from relume.controlplane.ui.static_files import StaticFiles

HOST = "127.0.0.1"
STEPS = {"next": True, "previous": False}


class RecordingServer:
    """Async context manager: inside, the page answers at `url`. `port` 0: a free one. `report`: what
    the page shows of the run that made the log (of chaos runs; `static/report.js` reads it).

    Raises OSError (port in use).
    """

    def __init__(
        self, recorded: RecordedFleet, port: int = 0, report: Struct | None = None
    ) -> None:
        self.recorded = recorded
        self._report = report
        self._port = port
        self._auth = principals.Authenticator({})
        self._files = StaticFiles(recording=True)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where the page is."""
        assert self._runner is not None
        return f"http://{HOST}:{self._runner.addresses[0][1]}/ui/"

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[answer_errors])
        for path, answer in (
            ("/recording", self._recording),
            ("/report", self._report_of_run),
            ("/moment", self._moment),
            ("/requests", self._requests),
            ("/requests/{id}/why", self._why),
            ("/incidents/{id}", self._incident),
            ("/events", self._events),
        ):
            app.router.add_get(PREFIX + path, self._handler(answer))
        app.router.add_get("/ui", self._files.redirect)
        app.router.add_get("/ui/", self._files.document)
        app.router.add_get("/ui/{file}", self._files.file)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, self._port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _handler(
        self, answer: Callable[[web.Request], Any]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            headers = request.headers
            self._auth.principal("", headers.get("Host", ""), headers.get("Origin", ""))
            response = json_answer(answer(request))
            response.enable_compression()
            return response

        return handle

    # --- handlers ------------------------------------------------------------------------

    def _recording(self, request: web.Request) -> Recording:
        return replace(self.recorded.recording(), has_report=self._report is not None)

    def _report_of_run(self, request: web.Request) -> Struct:
        if self._report is None:
            raise NotFound("this log has no report of a run")
        return self._report

    def _moment(self, request: web.Request) -> Moment:
        """At `place`, at `revision`, at the time `at_ms`, or at the `next` or `previous` decision from
        `place`."""
        query = request.query
        if "at_ms" in query:
            return self.recorded.moment(self.recorded.place_at(_number(query, "at_ms")))
        if "revision" in query:
            return self.recorded.moment(self.recorded.timeline.place(_number(query, "revision")))
        place = _number(query, "place")
        step = query.get("step", "")
        if step:
            if step not in STEPS:
                raise BadRequest(f"step={step!r} is not one of {', '.join(STEPS)}", "step")
            place = self.recorded.step(place, STEPS[step])
        return self.recorded.moment(place)

    def _seek(self, query: Mapping[str, str]) -> None:
        self.recorded.timeline.seek(_number(query, "place", self.recorded.timeline.end))

    def _requests(self, request: web.Request) -> m.RequestList:
        query = request.query
        self._seek(query)
        found = self.recorded.requests(query.get("search", ""))
        if state := query.get("state"):
            found = (r for r in found if r.state == state)
        if worker := query.get("worker"):
            found = (r for r in found if worker in r.workers)
        shown = list(islice(found, min(_number(query, "limit", 100), MAX_LIMIT)))
        return m.RequestList(self.recorded.timeline.revision, shown[::-1])

    def _why(self, request: web.Request) -> Story:
        name = request.match_info["id"]
        story = self.recorded.story(name)
        if story is None:
            raise NotFound(f"no request {name!r} in this log", "id")
        return story

    def _incident(self, request: web.Request) -> Incident:
        name = request.match_info["id"]
        record = find(self.recorded.incidents, name)
        if record is None:
            raise NotFound(f"no incident {name!r} in this log", "id")
        return whole(record)

    def _events(self, request: web.Request) -> m.EventPage:
        """The newest up to the place, oldest first."""
        query = request.query
        wanted = parse_filter(query)
        self._seek(query)
        limit = min(_number(query, "limit", 100), MAX_LIMIT)
        found = self.recorded.events(limit, wanted, _is_seldom(wanted))
        shown = [m.event_info(entry, rendering.brief(entry.event)) for entry in found]
        return m.EventPage(shown, str(self.recorded.timeline.revision), True)


def _is_seldom(wanted: Filter) -> bool:
    """Whether no frequent type of event is wanted."""
    if wanted.kinds:
        return FREQUENT.isdisjoint(wanted.kinds)
    return set(wanted.exclude) >= FREQUENT


def _number(query: Mapping[str, str], name: str, default: int = 0) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise BadRequest(f"{name}={text!r} is not a number from 0 on", name)
    return int(text)
