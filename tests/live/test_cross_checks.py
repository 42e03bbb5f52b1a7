"""Idle engines answer finished requests again; an engine that computes wrong results is found so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from relume.chaos.live.faults.flipped_weights import flip
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import CheckCause, EffectKind, HealthState
from tests.live.conftest import EVENLY, HANG_S, MODEL, Scene, scene_of

ALL = ("--crosscheck-limits", "share_ppm=1000000,budget_ppm=1000000")
BIT = 22
"""The highest of a mantissa: the weight differs by a third or more, and tokens of some answers do."""


@pytest.fixture
def checked(options: FleetOptions) -> FleetOptions:
    """Three workers; every finished request is answered again."""
    return msgspec.structs.replace(options, workers=3, replica_args=(*EVENLY, *ALL))


def canaries(monkeypatch: pytest.MonkeyPatch, every_s: float) -> None:
    """Agents send canaries so often (0: never), beside those after the start."""
    agent_env = LocalFleet.agent_env
    monkeypatch.setattr(
        LocalFleet,
        "agent_env",
        lambda self, index: {**agent_env(self, index), "RELUME_CANARY_INTERVAL_S": str(every_s)},
    )


async def serve(scene: Scene, enough: Callable[[list[Any]], bool], tag: str) -> list[Any]:
    """Send requests, a few at a time, until the events of the log are enough."""
    deadline, turn = time.monotonic() + HANG_S, 0
    while not enough(events := await scene.events()):
        assert time.monotonic() < deadline, [e for e in events if type(e) is v.CrossChecked][-9:]
        await scene.streams(3, 24, f"{tag}{turn}")
        turn += 1
        await asyncio.sleep(0.5)
    return events


def results(events: list[Any]) -> list[v.CrossChecked]:
    return [event for event in events if type(event) is v.CrossChecked]


async def test_equal_answers_hold_nothing_against_anybody(checked: FleetOptions) -> None:
    async with scene_of(checked) as scene:
        found = await serve(
            scene, lambda events: sum(not e.error for e in results(events)) >= 6, "calm"
        )
        assert {e.differs for e in results(found) if not e.error} == {-1}
        for check in results(found):
            assert check.by != check.worker
        assert not [e for e in found if type(e) is v.HealthDecided]
        await scene.sound()


async def test_a_majority_finds_an_engine_that_no_canary_checks(
    checked: FleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    canaries(monkeypatch, 0)
    async with scene_of(checked) as scene:
        await serve(scene, lambda events: any(not e.error for e in results(events)), "calm")
        worker = await scene.worker("w1")
        assert flip(worker["engine_pid"], MODEL, bit=BIT)
        found = await serve(
            scene, lambda events: any(is_quarantined(e, "w1") for e in events), "wrong"
        )
        verdict = next(e for e in found if is_quarantined(e, "w1"))
        assert "differ from what most engines answer" in verdict.evidence
        causes = {e.cause for e in found if type(e) is v.CrossCheckDecided}
        assert CheckCause.DISPUTE in causes
        assert not [e for e in found if is_quarantined(e, "w0") or is_quarantined(e, "w2")]
        assert await restarted(scene, "w1", worker["incarnation"])
        await scene.sound(but=("I2", "I14"))


async def test_a_difference_has_canaries_sent_at_once(
    checked: FleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    canaries(monkeypatch, 3600)
    async with scene_of(checked) as scene:
        await serve(scene, lambda events: any(not e.error for e in results(events)), "calm")
        worker = await scene.worker("w1")
        assert flip(worker["engine_pid"], MODEL, bit=BIT)
        found = await serve(
            scene, lambda events: any(is_quarantined(e, "w1") for e in events), "wrong"
        )
        effects = [e for e in found if type(e) is v.EffectsDecided]
        hurried = {x.worker for e in effects for x in e.effects if x.kind == EffectKind.CANARY}
        assert "w1" in hurried and len(hurried) >= 2
        verdict = next(e for e in found if is_quarantined(e, "w1"))
        assert "wrong answer to" in verdict.evidence
        others = [(await scene.worker(name))["health"] for name in ("w0", "w2")]
        assert HealthState.QUARANTINED not in others


def is_quarantined(event: Any, worker: str) -> bool:
    return (
        type(event) is v.HealthDecided
        and event.worker == worker
        and event.state == HealthState.QUARANTINED
    )


async def restarted(scene: Scene, worker: str, incarnation: int) -> bool:
    return bool(await scene.until_ready(worker, incarnation + 1))
