"""An engine computes wrong results: another one's answer shows it, canaries convict it, and it returns."""

from __future__ import annotations

import asyncio
import time

from relume.chaos.live.faults.flipped_weights import flip
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from tests.live.conftest import HANG_S, MODEL, same, whole
from tests.live.core.core_fleet import CORE, CoreFleet

pytestmark = CORE
BIT = 22
"""The highest of a mantissa."""
UNIQUE = "and nobody else asks this"
"""Of prompts whose right answers no test knows: some clients get wrong ones."""


async def share(fleet: CoreFleet, share_ppm: int, budget_ppm: int) -> None:
    """What part of the requests is answered again."""
    for key, value in (("share_ppm", share_ppm), ("budget_ppm", budget_ppm)):
        body = {"key": f"crosscheck.{key}", "value": str(value)}
        answer = await fleet.fleet.admin("config", "PUT", body=body)
        assert answer.get("state") == "decided", answer


async def test_an_engine_with_a_flipped_bit_is_found_and_replaced(fleet: CoreFleet) -> None:
    calm = await fleet.calm(4, 96)
    before = await fleet.worker("w2")
    usual = CrossCheckConfig()
    await share(fleet, 1_000_000, 1_000_000)
    try:
        assert flip(before["engine_pid"], MODEL, bit=BIT)
        deadline, turn = time.monotonic() + HANG_S, 0
        while not (verdicts := await quarantined(fleet)):
            assert time.monotonic() < deadline, await fleet.events("r.r0")
            await fleet.streams(4, 24, fleet.named(f"wrong{turn}"), padding=UNIQUE)
            turn += 1
            await asyncio.sleep(0.3)
        await until_checked(fleet)
    finally:
        await share(fleet, usual.share_ppm, usual.budget_ppm)
    assert {e.worker for e in verdicts} == {"w2"}
    assert {e.failure for e in verdicts} == {FailureClass.CORRUPTION}
    events = await fleet.events()
    differences = [e for e in events if type(e) is v.CrossChecked and e.differs >= 0]
    assert all("w2" in (e.worker, e.by) for e in differences)
    effects = [x for e in events if type(e) is v.EffectsDecided for x in e.effects]
    hurried = {x.worker for x in effects if x.kind == EffectKind.CANARY}
    assert ("w2" in hurried) == bool(differences)
    again = await fleet.until_ready("w2", before["incarnation"] + 1)
    assert again["incarnation"] == before["incarnation"] + 1
    await until_healthy(fleet)
    struck = await fleet.streams(4, 96, fleet.named("after"))
    assert not whole(struck) and same(calm, struck) == []


async def until_checked(fleet: CoreFleet) -> None:
    """Another engine answered a request again. A canary may have convicted the worker before."""
    deadline, turn = time.monotonic() + HANG_S, 0
    while not any(type(e) is v.CrossChecked for e in await fleet.events()):
        assert time.monotonic() < deadline, "no request was answered again"
        await fleet.streams(2, 24, fleet.named(f"checked{turn}"), padding=UNIQUE)
        turn += 1
        await asyncio.sleep(0.3)


async def quarantined(fleet: CoreFleet) -> list[v.HealthDecided]:
    events = await fleet.events("fleet")
    decided = [e for e in events if type(e) is v.HealthDecided]
    return [e for e in decided if e.state == HealthState.QUARANTINED]


async def until_healthy(fleet: CoreFleet) -> None:
    """Its engine's first answers to canaries are right; then requests are its probes."""
    await until(fleet, HealthState.PROBING, HealthState.HEALTHY)
    await fleet.only("w2")
    await fleet.streams(3, 8, fleet.named("probe"), padding=UNIQUE)
    await fleet.open_all()
    await until(fleet, HealthState.HEALTHY)


async def until(fleet: CoreFleet, *states: HealthState) -> None:
    deadline = time.monotonic() + HANG_S
    while (worker := await fleet.worker("w2"))["health"] not in states:
        assert time.monotonic() < deadline, worker
        await asyncio.sleep(0.1)
