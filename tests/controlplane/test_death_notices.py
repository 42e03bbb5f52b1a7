"""Which notices of deaths a replica acts on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relume.controlplane.replica.death_notices import (
    MOST_REVISIONS_AHEAD,
    MOST_STARTS_AHEAD,
    NoticeWatch,
)
from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.events.wire.notices import DeathNotice
from relume.policies.state.overlay.view import View
from tests.controlplane.test_stall_watch import FullWriter
from tests.policies.story import Story, died, ready, started


class Streams:
    """A gateway whose streams can be broken."""

    def __init__(self) -> None:
        self.broken: list[tuple[str, int]] = []

    def break_streams(self, worker: str, incarnation: int, *_: Any) -> None:
        self.broken.append((worker, incarnation))


async def test_each_death_of_a_worker_is_noticed_and_each_once() -> None:
    story = Story()
    worker = story.worker()
    story.replica()
    writer: Any = FullWriter()
    writer.position = story.heads["r.r0"][2] - 1
    scheduler = Scheduler(View("r.r0", story.fleet), writer, "b", "least_load", lambda: 0)
    suspected: list[int] = []
    scheduler.decisions.observers.append(
        lambda _, event: (
            suspected.append(event.incarnation) if type(event) is v.WorkerSuspected else None
        )
    )
    gateway: Any = Streams()
    watch = NoticeWatch(scheduler, gateway)
    for incarnation in (1, 2, 3):
        for _ in range(2):
            watch.died("w0", DeathNotice(worker.epoch, incarnation))
            for _ in range(3):
                await asyncio.sleep(0)
        story.tell("w.w0", died("w0", incarnation))
        story.tell("w.w0", started("w0", incarnation + 1), ready("w0", incarnation + 1))
        scheduler.view.landed()
    assert gateway.broken == [("w0", 1), ("w0", 2), ("w0", 3)]
    assert suspected == [1, 2, 3]


@pytest.mark.parametrize("resumed", [False, True])
async def test_notices_far_ahead_of_the_log_are_refused(resumed: bool) -> None:
    """A wrong number breaks nothing, and hides no later notice. An agent that took its stream
    again is believed before the replica has read that."""
    story = Story()
    worker = story.worker()
    story.replica()
    writer: Any = FullWriter()
    writer.position = story.heads["r.r0"][2] - 1
    scheduler = Scheduler(View("r.r0", story.fleet), writer, "b", "least_load", lambda: 0)
    gateway: Any = Streams()
    watch = NoticeWatch(scheduler, gateway)
    farthest = story.revision + MOST_REVISIONS_AHEAD
    for epoch, incarnation, why in (
        (farthest + 1, 1, "is far ahead of the log, which is at revision"),
        (2**63 - 1, 1, "is far ahead of the log, which is at revision"),
        (worker.epoch, 2 + MOST_STARTS_AHEAD, "is far ahead of that in the log, 1"),
    ):
        assert why in watch.died("w0", DeathNotice(epoch, incarnation))
    assert watch.died("w0", DeathNotice(worker.epoch, 1 + MOST_STARTS_AHEAD)) == ""
    assert watch.died("w0", DeathNotice(worker.epoch - 1, 1)) == ""
    for _ in range(3):
        await asyncio.sleep(0)
    assert gateway.broken == [] and story.fleet.revision == story.revision
    assert watch.died("w0", DeathNotice(farthest if resumed else worker.epoch, 1)) == ""
    for _ in range(3):
        await asyncio.sleep(0)
    assert gateway.broken == [("w0", 1)]
