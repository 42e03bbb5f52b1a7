"""Tells engines which buffered streams no client will resume.

Streams whose clients received everything are released together, once per sweep. Without a release
an engine keeps them for their grace time.
"""

from __future__ import annotations

from relume.controlplane.gateway.context import Context
from relume.controlplane.gateway.errors import UpstreamError
from relume.controlplane.gateway.http.upstream import Upstream
from relume.controlplane.stream.arrival import Assignment
from relume.controlplane.stream.worker_requests import worker_call
from relume.events.wire.worker_calls import RELEASE_PATH, Attach

AT_ONCE = 256

Place = tuple[str, int]  # worker, incarnation
Released = tuple[str, int, str]  # request, attempt, claim


class Releases:
    """Of one gateway."""

    def __init__(self) -> None:
        self._due: dict[Place, tuple[Assignment, list[Released]]] = {}

    def add(self, to: Assignment, claim: str) -> None:
        """The client has all of this attempt's stream."""
        _, due = self._due.setdefault((to.worker, to.incarnation), (to, []))
        due.append((to.request, to.attempt, claim))

    def flush(self, ctx: Context) -> None:
        """Send the releases to the engines."""
        batch, self._due = self._due, {}
        for to, due in batch.values():
            for first in range(0, len(due), AT_ONCE):
                ctx.spawn(_send(ctx, to, due[first : first + AT_ONCE]))


async def _send(ctx: Context, to: Assignment, streams: list[Released]) -> None:
    (request, attempt, claim), *also = streams
    call = Attach(
        request=request,
        attempt=attempt,
        incarnation=to.incarnation,
        claim=claim,
        also=tuple(also),
    )
    await release(ctx, to, call)


async def release(ctx: Context, to: Assignment, call: Attach) -> None:
    """Send a request that needs no answer; an unreachable engine is ignored."""
    try:
        upstream = ctx.pool.take(to) or await ctx.pool.open(to)
    except UpstreamError:
        return  # it ends by itself
    upstream.send(IgnoredAnswer(upstream), *worker_call(to, RELEASE_PATH, call), generates=False)


class IgnoredAnswer:
    """Discards an answer."""

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
