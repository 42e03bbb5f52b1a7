"""What a level of degradation does to arrivals at a replica, and what the log has of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.interface import StreamWriter
from relume.policies.degradation.degradation_settings import DegradationConfig, settings_of
from tests.controlplane.test_waiting import Plane, plane
from tests.replay.tamper import places, replaced

SHORT = DegradationConfig(mode="on", max_tokens=20, fall_ticks=7)


@asynccontextmanager
async def short_of_capacity(
    level: int, config: DegradationConfig = SHORT
) -> AsyncIterator[tuple[Plane, StreamWriter]]:
    """A replica on a log whose leader decided this level, and the leader's stream."""
    async with plane() as p, p.log.writer("fleet") as leader:
        for key, value in settings_of(config):
            leader.append(v.ConfigChanged(key, value))
        leader.append(
            v.DegradationDecided(
                model="m", level=level, was=0, since=0, due_ticks=3, share=400, workers=1, wanted=3,
                sequences=50, requests_per_ks=2222, tokens_per_s=900, usable_per_ks=2000,
                demand_per_ks=5000, prompt_tokens=100, output_tokens=50,
            )
        )  # fmt: skip
        p.follow()
        yield p, leader
        p.follow()


def sheds(p: Plane) -> list[Any]:
    return [(e.request, e.reason) for e in p.own(v.RequestShed)]


async def test_a_level_refuses_the_tiers_it_sheds_and_no_other() -> None:
    async with short_of_capacity(level=2) as (p, _):
        low, usual, high = (
            p.ask(name, tier=tier)
            for name, tier in (("low", "batch"), ("usual", ""), ("high", "interactive"))
        )
        assert low.why is not None
        assert (low.why.status, low.why.code) == (503, "capacity_short")
        assert low.why.retry_after_s == 7, "the level falls in 7 ticks at the earliest"
        assert usual.why is None and high.why is None
        assert sheds(p) == [("low", "degraded")]
    found = verify(p.log.groups)
    assert found.waits == 1 and not found.divergences
    chain = why(p.log.groups, "low")
    assert chain is not None
    text = "\n".join(lines_of(chain))
    assert "m: degradation level 2 (requests of tier batch are refused), was 0" in text
    assert "5.00 requests/s arrive" in text and "40 % are served" in text
    assert "refused on arrival: degraded" in text


async def test_the_last_level_refuses_every_arrival_and_ends_no_stream() -> None:
    async with short_of_capacity(level=0) as (p, leader):
        p.ask("before")
        leader.append(
            v.DegradationDecided(model="m", level=4, was=0, since=1, due_ticks=3, share=0)
        )
        p.follow()
        late = p.ask("late", tier="interactive")
        assert late.why is not None and late.why.status == 503
        assert p.sent == ["before"] and "before" in p.scheduler.live
        assert sheds(p) == [("late", "degraded")]


@pytest.mark.parametrize("level", [0, 1])
async def test_no_request_is_refused_at_the_first_levels(level: int) -> None:
    async with short_of_capacity(level) as (p, _):
        assert p.ask("low", tier="batch").why is None
        assert sheds(p) == []
        assert p.scheduler.waiting.output_limit("m") == (20 if level else 0)
        assert p.scheduler.waiting.output_limit("another") == 0


async def test_nothing_is_refused_while_levels_are_only_observed() -> None:
    async with short_of_capacity(4, replace(SHORT, mode="observe")) as (p, _):
        assert p.ask("low", tier="batch").why is None
        assert p.scheduler.waiting.output_limit("m") == 0


@pytest.mark.parametrize(
    "change", [{"retry_after_s": 8}, {"tier": "interactive"}, {"model": "other"}]
)
async def test_replay_finds_a_refusal_that_no_level_explains(change: dict[str, Any]) -> None:
    async with short_of_capacity(level=2) as (p, _):
        p.ask("low", tier="batch")
    groups = p.log.groups
    for place, segment in places(groups, "r.r0"):
        event = codec.decode(segment.records[place[2]])
        if type(event) is v.RequestShed:
            other = codec.encode(replace(event, **change))
            assert verify(replaced(groups, place, other)).divergences
            return
    pytest.fail("none was refused")


async def test_goals_of_tiers_count_twice_where_late_requests_are_refused() -> None:
    deadlines = {}
    for level in (2, 3):
        async with short_of_capacity(level) as (p, leader):
            leader.append(v.ConfigChanged("routing.shed", "on"))
            leader.append(v.ConfigChanged("routing.slo_standard_ms", "4000"))
            p.follow()
            for name in ("a", "b", "waits"):
                p.ask(name)
            deadlines[level] = [e.deadline_us - e.at_us for e in p.own(v.RequestHeld)]
    assert deadlines == {2: [4_000_000], 3: [8_000_000]}
