"""Handlers that the page needs beside the other routes of the admin API: moments, and stories."""

from __future__ import annotations

import asyncio

from aiohttp import web

from relume.controlplane.admin.fleet_api import SEARCH_BUDGET_S, FleetApi
from relume.controlplane.admin.recent_events import Cursor, History
from relume.controlplane.replay.story import Story, story_of
from relume.controlplane.replay.why import ChainCollector
from relume.controlplane.ui.moment import Moment
from relume.controlplane.ui.moment_feed import MomentFeed
from relume.controlplane.ui.static_files import StaticFiles


class UiApi:
    """The page's files, its moments, and why requests went where they went."""

    def __init__(self, feed: MomentFeed, requests: FleetApi, history: History) -> None:
        self.feed = feed
        self.files = StaticFiles()
        self._requests = requests
        self._history = history

    async def moment(self, request: web.Request) -> Moment | web.StreamResponse:
        """GET moment, as one answer or, with follow=1, as server-sent events."""
        if request.query.get("follow", "0") not in ("", "0", "false"):
            return await self.feed.follow(request)
        return self.feed.current()

    async def why(self, request: web.Request) -> Story:
        """GET requests/{id}/why: `relume why` over what this replica remembers, and over the log from
        the request's arrival on. Raises NotFound, Compacted, LogUnavailable."""
        name, course = await self._requests.course(request.match_info["id"])
        since = min(course.entries[0].revision, self._history.begins)
        chain = ChainCollector(name)
        cursor: Cursor = (since - 1, 1 << 62)
        end, clock = self._history.end, asyncio.get_running_loop().time
        deadline = clock() + SEARCH_BUDGET_S
        while cursor < end and clock() < deadline:
            entries, cursor = await self._history.after(cursor)
            for entry in entries:
                chain.take(entry)
            await asyncio.sleep(0)  # streams of clients go first
        return story_of(chain.result(), since, complete=cursor >= end)
