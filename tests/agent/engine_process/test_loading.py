"""How far an engine is that reads the files of its model, and at which rate it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from relume.engine_shim.agent.engine_process import loading_watch
from relume.engine_shim.agent.engine_process.loading_watch import LoadingWatch
from relume.engine_shim.engine.progress import Progress
from relume.engine_shim.pools.read_pace import ReadPace
from relume.events.settings.config_error import ConfigError
from relume.events.vocabulary import WeightsLoading
from tests.agent.stage import make_config

MIB = 1 << 20


class Written:
    """A journal that keeps what is written."""

    def __init__(self) -> None:
        self.events: list[WeightsLoading] = []

    def record_when_readable(self, event: WeightsLoading) -> None:
        self.events.append(event)


class SeenPage(Progress):
    """Counts how often it is read."""

    reads = 0

    def loading(self) -> tuple[int, int]:
        self.reads += 1
        return super().loading()


async def test_the_log_is_told_while_files_are_read_and_not_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading_watch, "LOOK_S", 0.005)
    page, journal, serving = SeenPage(), Written(), asyncio.Event()
    watch = asyncio.create_task(LoadingWatch("w0", 3, page, journal, serving).run())  # type: ignore[arg-type]

    async def until(found: Callable[[], Any]) -> None:
        async with asyncio.timeout(30):
            while not found():
                await asyncio.sleep(0.002)

    await until(lambda: page.reads > 3)
    assert not journal.events, "it reads nothing"
    for read in (0, 40):
        page.write_loading(100, read)
        await until(lambda: journal.events and journal.events[-1].read_bytes == read)  # noqa: B023
    page.write_loading(100, 100)
    async with asyncio.timeout(30):
        await watch
    assert [(e.worker, e.incarnation, e.bytes, e.read_bytes) for e in journal.events] == [
        ("w0", 3, 100, 0),
        ("w0", 3, 100, 40),
        ("w0", 3, 100, 100),
    ]


async def test_the_watch_ends_when_the_engine_serves_without_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading_watch, "LOOK_S", 0.005)
    journal, serving = Written(), asyncio.Event()
    serving.set()
    async with asyncio.timeout(30):
        await LoadingWatch("w0", 1, Progress(), journal, serving).run()  # type: ignore[arg-type]
    assert not journal.events


class Clock:
    """Time that passes by sleeping."""

    def __init__(self) -> None:
        self.s = 0.0

    def sleep(self, seconds: float) -> None:
        self.s += seconds


def paced(limit_mb_s: int, size: int = 100 * MIB) -> tuple[ReadPace, Clock, list[Any]]:
    clock, reported = Clock(), []
    pace = ReadPace(
        size, limit_mb_s, lambda *how_far: reported.append(how_far), lambda: clock.s, clock.sleep
    )
    return pace, clock, reported


def test_files_are_read_at_the_rate_and_no_slower() -> None:
    pace, clock, reported = paced(50)
    pace.read(25 * MIB)
    assert clock.s == 0.5
    clock.s = 3.0  # the storage was slower than the limit
    pace.read(25 * MIB)
    assert clock.s == 3.0
    pace.read(150 * MIB)
    assert clock.s == 4.0
    pace.done()
    sizes = [0, 25, 50, 100, 100]
    assert reported == [(100 * MIB, read * MIB) for read in sizes]


def test_without_a_limit_nothing_waits() -> None:
    pace, clock, _ = paced(0)
    pace.read(10_000 * MIB)
    assert clock.s == 0.0


def test_a_rate_needs_the_loader(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="keep-weights-mb"):
        make_config(tmp_path, weights_load_mb_s=50)
