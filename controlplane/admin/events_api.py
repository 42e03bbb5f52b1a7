"""Events over HTTP: pages with filters, and a stream that can be resumed."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

from relume.controlplane.admin.errors import BadRequest, TooManyFollowers
from relume.controlplane.admin.models import EventInfo, EventPage, event_info
from relume.controlplane.admin.recent_events import Cursor, History, parse_cursor
from relume.controlplane.replay import rendering
from relume.events import vocabulary as v
from relume.events.log.codec import TAGS, UnreadableRecord
from relume.events.log.entries import KINDS, Entry

TYPES: dict[str, type] = {
    **{tag.partition("/")[0]: kind for tag, kind in TAGS.items()},
    KINDS[UnreadableRecord]: UnreadableRecord,
}
DECISIONS = (
    v.RouteDecided,
    v.StallJudged,
    v.StreamJudged,
    v.EffectsDecided,
    v.DetailDecided,
    v.RequestHeld,
    v.RequestShed,
    v.DegradationDecided,
    v.RolloutDecided,
    v.FeatureLevelRaised,
    v.SparesDecided,
)
PAGE_BUDGET_S = 5.0
"""A page that has to read the log stops after this and returns a cursor to continue from."""
HEARTBEAT_S = 10.0
WRITE_TIMEOUT_S = 30.0
"""A follower that reads nothing for this long is disconnected; it can resume by its cursor."""
MAX_FOLLOWERS = 64
MAX_LIMIT = 1000
Infos = Callable[[Entry], EventInfo]


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller wants to see; empty means everything."""

    kinds: tuple[type, ...] = ()
    exclude: tuple[type, ...] = ()
    request: str = ""
    worker: str = ""
    stream: str = ""

    def __call__(self, entry: Entry) -> bool:
        kind = type(entry.event)
        if (self.kinds and kind not in self.kinds) or kind in self.exclude:
            return False
        if self.stream and entry.stream != self.stream:
            return False
        if self.worker and self.worker not in entry.workers:
            return False
        return not self.request or self.request in entry.requests


def parse_filter(query: Mapping[str, str]) -> Filter:
    """The filter in a query string. Raises BadRequest."""
    return Filter(
        kinds=_kinds(query.get("type", ""), "type"),
        exclude=_kinds(query.get("exclude", ""), "exclude"),
        request=query.get("request", ""),
        worker=query.get("worker", ""),
        stream=query.get("stream", ""),
    )


def _kinds(text: str, param: str) -> tuple[type, ...]:
    kinds = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in TYPES:
            close = difflib.get_close_matches(name, TYPES, 1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(TYPES)}"
            raise BadRequest(f"{name!r} is no type of event; {hint}", param)
        kinds.append(TYPES[name])
    return tuple(kinds)


def _number(query: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not text.isdigit() or not 1 <= int(text) <= most:
        raise BadRequest(f"{name}={text!r} is not a number from 1 to {most}", name)
    return int(text)


def _start(query: Mapping[str, str], last_event_id: str = "") -> Cursor | None:
    """Where to begin: after a cursor, or with revision `from`; None: not said."""
    if last_event_id:
        return parse_cursor(last_event_id, "Last-Event-ID")
    if query.get("after"):
        return parse_cursor(query["after"], "after")
    if query.get("from"):
        if not query["from"].isdigit():
            raise BadRequest(f"from={query['from']!r} is not a revision", "from")
        return (max(int(query["from"]) - 1, 0), 1 << 62)
    return None


def _infos(query: Mapping[str, str]) -> Infos:
    """How events are shown: with their lines if the caller wants `text`."""
    if query.get("text", "0") in ("", "0", "false"):
        return event_info
    return lambda entry: event_info(entry, rendering.brief(entry.event))


def cursor_text(cursor: Cursor) -> str:
    """A cursor as `parse_cursor` reads it."""
    return f"{cursor[0]}" if cursor[1] >= 1 << 61 else f"{cursor[0]}.{cursor[1]}"


class EventsApi:
    """Handlers of the event routes. `closing` ends all followers."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._followers = 0
        self.closing = False

    async def events(self, request: web.Request) -> EventPage | web.StreamResponse:
        """GET events, as a page or, with follow=1, as server-sent events."""
        wanted = parse_filter(request.query)
        if request.query.get("follow", "0") not in ("", "0", "false"):
            return await self._follow(request, wanted)
        return await self.page(request.query, wanted)

    async def decisions(self, request: web.Request) -> EventPage:
        """GET decisions: the same for the types that record a choice."""
        wanted = parse_filter(request.query)
        if wanted.kinds and not set(wanted.kinds) <= set(DECISIONS):
            raise BadRequest("type: only route_decided, stall_judged, effects_decided", "type")
        wanted = msgspec.structs.replace(wanted, kinds=wanted.kinds or DECISIONS)
        return await self.page(request.query, wanted)

    async def page(self, query: Mapping[str, str], wanted: Callable[[Entry], bool]) -> EventPage:
        """A page: from a cursor on, or the newest in memory when none is given."""
        limit = _number(query, "limit", 100, MAX_LIMIT)
        cursor = _start(query)
        info = _infos(query)
        if cursor is None:
            found = self._history.last(limit, wanted)
            return EventPage([info(e) for e in found], cursor_text(self._history.end), True)
        return await self._read(cursor, limit, wanted, info)

    async def _read(
        self, cursor: Cursor, limit: int, wanted: Callable[[Entry], bool], info: Infos
    ) -> EventPage:
        deadline = asyncio.get_running_loop().time() + PAGE_BUDGET_S
        found: list[EventInfo] = []
        while cursor < self._history.end:
            entries, following = await self._history.after(cursor)
            for entry in entries:
                if wanted(entry):
                    found.append(info(entry))
                    if len(found) == limit:
                        cursor = (entry.revision, entry.index)
                        return EventPage(found, cursor_text(cursor), cursor >= self._history.end)
            cursor = following
            if asyncio.get_running_loop().time() > deadline:
                break
        return EventPage(found, cursor_text(cursor), cursor >= self._history.end)

    # --- following ---------------------------------------------------------------------

    async def _follow(
        self, request: web.Request, wanted: Callable[[Entry], bool]
    ) -> web.StreamResponse:
        if self._followers >= MAX_FOLLOWERS:
            raise TooManyFollowers(f"{MAX_FOLLOWERS} streams are open; close one or use pages")
        cursor = _start(request.query, request.headers.get("Last-Event-ID", ""))
        first: list[Entry] = []
        if cursor is None:
            tail = _number(request.query, "tail", 0, MAX_LIMIT)
            first = self._history.last(tail, wanted) if tail else []
            cursor = self._history.end
        answer = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        self._followers += 1
        try:
            await answer.prepare(request)
            info = _infos(request.query)
            await self._send(answer, b"retry: 1000\n\n" + b"".join(sse(info(e)) for e in first))
            await self._feed(answer, cursor, wanted, info)
        except (ConnectionResetError, TimeoutError):
            pass  # the follower left, or takes nothing: its cursor lets it come back
        finally:
            self._followers -= 1
        return answer

    async def _feed(
        self,
        answer: web.StreamResponse,
        cursor: Cursor,
        wanted: Callable[[Entry], bool],
        info: Infos,
    ) -> None:
        clock = asyncio.get_running_loop().time
        spoke = clock()
        while not self.closing:
            entries, cursor = await self._history.after(cursor)
            data = b"".join(sse(info(e)) for e in entries if wanted(e))
            if not data and clock() - spoke >= HEARTBEAT_S:
                data = b": still here\n\n"
            if data:
                await self._send(answer, data)
                spoke = clock()
            if cursor >= self._history.end:
                await self._history.news(cursor, HEARTBEAT_S / 2)

    @staticmethod
    async def _send(answer: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await answer.write(data)


def sse(info: EventInfo) -> bytes:
    """One server-sent event; its id is the cursor to come back with."""
    return (
        b"id: "
        + info.id.encode()
        + b"\nevent: "
        + info.event["type"].encode()
        + b"\ndata: "
        + msgspec.json.encode(info)
        + b"\n\n"
    )
