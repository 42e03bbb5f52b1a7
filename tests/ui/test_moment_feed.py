"""One moment per tick for all viewers, compressed once, and bounded."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from relume.controlplane.ui import moment_feed
from relume.controlplane.ui.moment_feed import MomentFeed, deflated
from relume.events import vocabulary as v
from tests.admin.scene import VIEWER, Scene


class Viewer:
    """A page's stream: `next()` is its next event, as (type, data)."""

    def __init__(self, answer: Any, packed: bool) -> None:
        self.headers = answer.headers
        self.received = 0
        self._content = answer.content
        self._unpack = zlib.decompressobj(16 + zlib.MAX_WBITS) if packed else None
        self._text = b""

    async def next(self) -> tuple[str, Any]:
        async with asyncio.timeout(10):
            while b"\n\n" not in self._text:
                data = await self._content.readany()
                assert data, "the stream ended"
                self.received += len(data)
                self._text += self._unpack.decompress(data) if self._unpack else data
        event, self._text = self._text.split(b"\n\n", 1)
        kind, data = event.split(b"\n", 1)
        return kind.decode().removeprefix("event: "), msgspec.json.decode(data[len("data: ") :])

    async def until(self, wanted: Any) -> Any:
        """The first event whose data are as wanted."""
        while not wanted((event := await self.next())[1]):
            pass
        return event


@asynccontextmanager
async def viewer(scene: Scene, packed: bool = True) -> AsyncIterator[Viewer]:
    headers = {
        "Authorization": f"Bearer {VIEWER}",
        "Accept-Encoding": "gzip" if packed else "identity",
    }
    url = f"{scene.admin.url}/admin/v1/moment?follow=1"
    async with (
        asyncio.timeout(30),
        scene.session.get(url, headers=headers, auto_decompress=False) as answer,
    ):
        assert answer.status == 200
        yield Viewer(answer, packed)


async def test_a_viewer_gets_a_moment_and_then_changes_within_a_second():
    async with Scene() as scene:
        await scene.worker("w0")
        async with viewer(scene) as page:
            kind, moment = await page.next()
            assert kind == "moment" and moment["lanes"][0]["state"] == "serving"
            assert page.headers["Content-Encoding"] == "gzip"
            clock, delays = asyncio.get_running_loop().time, []
            for number in range(1, 4):
                began = clock()
                scene.worker_writers["w0"].append(v.EngineDied("w0", number, "killed"))
                kind, change = await page.until(lambda data: data["lanes"])
                delays.append(clock() - began)
                assert kind == "changes" and change["lanes"][0]["deaths"] == number
                scene.worker_writers["w0"].append(v.EngineStarted("w0", number + 1, 6000, 1))
                await page.until(lambda data: data["lanes"])
            assert min(delays) < 1.0, "on a busy machine one of three"
            assert change["lanes"][0]["state"] == "dead"


async def test_viewers_share_each_moment_whenever_they_came():
    async with Scene() as scene:
        await scene.worker("w0")
        feed = scene.admin.feed
        async with viewer(scene) as first, viewer(scene) as second, viewer(scene, False) as plain:
            for page in (first, second, plain):
                assert (await page.next())[0] == "moment"
            assert (await first.next())[0] == "changes"
            async with viewer(scene) as late:
                assert feed.viewers == 4
                assert (await late.next())[0] == "moment"
                built = feed.built
                seen = dict.fromkeys((first, second, plain, late), 0)
                for _ in range(3):
                    for page in seen:
                        kind, data = await page.next()
                        assert kind == "changes"
                        seen[page] = data["head"]["revision"]
                assert feed.built - built <= 5, "one per tick, not one per viewer"
        await scene.until(lambda: not feed.viewers)
        built = feed.built
        await asyncio.sleep(0)
        assert feed.built == built, "without viewers none is built"


async def test_a_viewer_that_missed_a_moment_gets_the_whole_one():
    async with Scene() as scene:
        await scene.worker("w0")
        feed = scene.admin.feed
        async with viewer(scene) as page:
            await page.next()
            feed._advance()
            feed._advance()
            kind, moment = await page.next()
            assert kind == "moment" and moment["lanes"]


async def test_streams_are_bounded_and_end_with_the_server(monkeypatch):
    async with Scene() as scene:
        monkeypatch.setattr(moment_feed, "MAX_VIEWERS", 2)
        async with viewer(scene), viewer(scene):
            status, refused = await scene.call("moment?follow=1")
            assert status == 429 and refused["error"]["code"] == "too_many_followers"
            began = asyncio.get_running_loop().time()
            await scene.admin.__aexit__()
            assert asyncio.get_running_loop().time() - began < 5.0
            assert scene.admin.feed.viewers == 0


async def test_a_moment_that_takes_long_is_built_less_often(monkeypatch):
    async with Scene() as scene:
        feed, now = scene.admin.feed, [100.0]
        monkeypatch.setattr(MomentFeed, "_now", staticmethod(lambda: now[0]))
        build = feed._build

        def slow() -> Any:
            now[0] += 0.2
            return build()

        feed._build = slow
        feed._advance()
        assert feed._due - now[0] >= 0.2 * (moment_feed.SHARE - 1)


def test_blocks_made_apart_fit_into_one_stream():
    parts = [deflated(text) for text in (b"one " * 500, b"two", b"one " * 500)]
    for order in ((0, 1, 2), (1, 2), (2, 2, 0)):
        stream = moment_feed.GZIP_HEAD + b"".join(parts[at] for at in order)
        text = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(stream)
        assert text == b"".join((b"one " * 500, b"two", b"one " * 500)[at] for at in order)
