"""Telling engines which kept streams nobody will come back for.

Streams whose clients have all of them are told together, once a sweep: an engine that is not
told keeps them for their grace.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from relume.controlplane.gateway.context import Context
from relume.controlplane.gateway.errors import UpstreamError
from relume.controlplane.gateway.ports import Assignment
from relume.controlplane.gateway.replies import JSON
from relume.controlplane.gateway.upstream import Upstream

AT_ONCE = 256

Place = tuple[str, int]  # worker, incarnation
Told = tuple[str, int, str]  # request, attempt, claim


class Releases:
    """Of one gateway."""

    def __init__(self) -> None:
        self._due: dict[Place, tuple[Assignment, list[Told]]] = {}

    def add(self, to: Assignment, claim: str) -> None:
        """The client has all of this attempt's stream."""
        _, due = self._due.setdefault((to.worker, to.incarnation), (to, []))
        due.append((to.request, to.attempt, claim))

    def flush(self, ctx: Context) -> None:
        """Tell the engines."""
        told, self._due = self._due, {}
        for to, due in told.values():
            for first in range(0, len(due), AT_ONCE):
                ctx.spawn(_told(ctx, to, due[first : first + AT_ONCE]))


async def _told(ctx: Context, to: Assignment, streams: list[Told]) -> None:
    (request, attempt, claim), *also = streams
    body = {"request": request, "attempt": attempt, "claim": claim, "also": also}
    await post(ctx, to, "release", {**body, "incarnation": to.incarnation})


async def post(ctx: Context, to: Assignment, what: str, body: dict[str, Any]) -> None:
    """Ask the engine for what needs no answer; nothing when it cannot be reached."""
    try:
        upstream = ctx.pool.take(to) or await ctx.pool.open(to)
    except UpstreamError:
        return  # it ends by itself
    upstream.send(Unheard(upstream), *asking(to, what, body), generates=False)


def asking(to: Assignment, what: str, body: dict[str, Any]) -> Iterable[bytes]:
    """Head and body of `POST /relume/<what>`."""
    content = msgspec.json.encode(body)
    head = (
        f"POST /relume/{what} HTTP/1.1\r\nhost: {to.host}:{to.port}\r\n"
        f"content-type: {JSON}\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode(), content


class Unheard:
    """Takes an answer nobody needs."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...
    def take_chunk(self, data: bytes, now: float) -> bool:
        return False

    def on_data(self, data: bytes) -> None: ...
    def on_complete(self) -> None:
        self._upstream.release()

    def on_lost(self, kind: str, detail: str) -> None: ...
    def on_fault(self, error: Exception) -> None: ...
