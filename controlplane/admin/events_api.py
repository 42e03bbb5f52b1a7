"""Events over HTTP: pages with filters, and a stream that can be taken up again."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from relume.controlplane.admin.errors import BadRequest, TooManyFollowers
from relume.controlplane.admin.history import Cursor, Entry, History, parse_cursor
from relume.controlplane.admin.models import EventInfo, EventPage, event_info
from relume.events import vocabulary as v
from relume.events.codec import TAGS

TYPES: dict[str, type] = {tag.partition("/")[0]: kind for tag, kind in TAGS.items()}
DECISIONS = (
    v.RouteDecided,
    v.StallJudged,
    v.EffectsDecided,
    v.DetailDecided,
    v.RequestHeld,
    v.RequestShed,
)
PAGE_BUDGET_S = 5.0
"""A page that has to read the log stops after this and says where to go on."""
HEARTBEAT_S = 10.0
WRITE_TIMEOUT_S = 30.0
"""A follower that takes nothing for so long is cut off; it can come back by its cursor."""
MAX_FOLLOWERS = 64
MAX_LIMIT = 1000


class Filter(msgspec.Struct, frozen=True):
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
        if self.worker and not _concerns_worker(entry, self.worker):
            return False
        return not self.request or _concerns_request(entry, self.request)


def _concerns_worker(entry: Entry, worker: str) -> bool:
    event = entry.event
    return (
        entry.stream == f"w.{worker}"
        or getattr(event, "worker", "") == worker
        or (type(event) is v.AdminCommanded and event.target == worker)
        or (type(event) is v.EffectsDecided and any(e.worker == worker for e in event.effects))
    )


def _concerns_request(entry: Entry, request: str) -> bool:
    event = entry.event
    if type(event) is v.EngineStep:
        return any(change.request == request for change in event.changes)
    if type(event) is v.CheckpointsAcknowledged:
        return any(held.request == request for held in event.held)
    if type(event) is v.CheckpointsReleased:
        return request in event.requests
    return getattr(event, "request", "") == request


def parse_filter(query: Mapping[str, str]) -> Filter:
    """The filter in a query string. Raises BadRequest."""
    return Filter(
        _kinds(query.get("type", ""), "type"),
        _kinds(query.get("exclude", ""), "exclude"),
        query.get("request", ""),
        query.get("worker", ""),
        query.get("stream", ""),
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


def shown(entry: Entry) -> EventInfo:
    """The entry for people."""
    return event_info(
        entry.revision, entry.index, entry.stream, entry.position, entry.at_ms, entry.event
    )


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
        if cursor is None:
            found = self._history.last(limit, wanted)
            return EventPage([shown(e) for e in found], cursor_text(self._history.end), True)
        return await self._read(cursor, limit, wanted)

    async def _read(self, cursor: Cursor, limit: int, wanted: Callable[[Entry], bool]) -> EventPage:
        deadline = asyncio.get_running_loop().time() + PAGE_BUDGET_S
        found: list[EventInfo] = []
        while cursor < self._history.end:
            entries, following = await self._history.after(cursor)
            for entry in entries:
                if wanted(entry):
                    found.append(shown(entry))
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
            await self._send(answer, b"retry: 1000\n\n" + b"".join(map(sse, first)))
            await self._feed(answer, cursor, wanted)
        except (ConnectionResetError, TimeoutError):
            pass  # the follower left, or takes nothing: its cursor lets it come back
        finally:
            self._followers -= 1
        return answer

    async def _feed(
        self, answer: web.StreamResponse, cursor: Cursor, wanted: Callable[[Entry], bool]
    ) -> None:
        clock = asyncio.get_running_loop().time
        spoke = clock()
        while not self.closing:
            entries, cursor = await self._history.after(cursor)
            data = b"".join(sse(e) for e in entries if wanted(e))
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


def sse(entry: Entry) -> bytes:
    """One server-sent event; its id is the cursor to come back with."""
    info: Any = shown(entry)
    return (
        b"id: "
        + info.id.encode()
        + b"\nevent: "
        + info.event["type"].encode()
        + b"\ndata: "
        + msgspec.json.encode(info)
        + b"\n\n"
    )
