"""Small things the log's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from relume.events.log.codec import decode
from relume.events.log.interface import LogReader, RevisionGroup
from relume.events.vocabulary import Tick


def tick(number: int) -> Tick:
    """An event that is easy to tell from others."""
    return Tick(number, 0)


def events_of(groups: Iterable[RevisionGroup], stream: str) -> list[Any]:
    """The decoded events of one stream, in order."""
    segments = [s for g in groups for s in g.segments if s.stream == stream]
    return [decode(record) for s in segments for record in s.records]


def numbers(groups: Iterable[RevisionGroup], stream: str) -> list[int]:
    """The numbers of the ticks in a stream, in order."""
    return [e.number for e in events_of(groups, stream) if isinstance(e, Tick)]


def positions(groups: Iterable[RevisionGroup], stream: str) -> list[int]:
    """The positions a stream's segments claim, in order."""
    segments = [s for g in groups for s in g.segments if s.stream == stream]
    return [p for s in segments for p in range(s.first, s.last + 1)]


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


class Followed:
    """What a follower has seen so far."""

    def __init__(self) -> None:
        self.groups: list[RevisionGroup] = []


@asynccontextmanager
async def following(reader: LogReader, after: int = 0) -> AsyncIterator[Followed]:
    """Follow the log in the background; an error of the reader fails the test."""
    seen = Followed()

    async def follow() -> None:
        async for group in reader.follow(after):
            seen.groups.append(group)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follow())
        yield seen
        task.cancel()
