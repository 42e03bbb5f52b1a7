"""Time in tests.

A test waits for facts, with a bound. Three things are no facts, and have a name here: the turns of
the loop in which something could happen that must not, the pace of a load, and a clock of another
process that has to run past a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")


async def turns(count: int = 200) -> None:
    """Let the loop run: what is ready in this process, sockets included, happens meanwhile."""
    for _ in range(count):
        await asyncio.sleep(0)


async def paced(items: Iterable[T], every_s: float) -> AsyncIterator[T]:
    """The items of a load, one every so many seconds."""
    for item in items:
        yield item
        await asyncio.sleep(every_s)


async def outlast(seconds: float, limit: str) -> None:
    """Wait until `limit` has passed, which a real process measures by its own clock."""
    assert limit, "name the limit: a lease, a token's lifetime"
    await asyncio.sleep(seconds)
