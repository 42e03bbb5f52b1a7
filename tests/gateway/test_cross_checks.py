"""Finished requests are answered again by idle engines: real replicas, scripted engines."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import msgspec
import pytest

from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.why import why
from relume.controlplane.replica.crosscheck import check_queue, check_watch
from relume.controlplane.replica.crosscheck.check_watch import first_difference
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import CheckCause, HealthState
from relume.events.wire.token_digest import digest_of
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from tests.gateway.peers import Behaviour, Engine, token_ids
from tests.gateway.raw_client import RawClient
from tests.gateway.replica_scene import BODY, GATEWAY, INCARNATION, TEXT, Scene, scene, until

ALL = CrossCheckConfig(share_ppm=1_000_000, budget_ppm=1_000_000)
IDS = token_ids(BODY, 12)
EXACT = ("greedy", "seeded")
"""What the engines passed of their self-test."""


def decided(s: Scene) -> list[v.CrossCheckDecided]:
    return [e for e in s.told() if type(e) is v.CrossCheckDecided]


def results(s: Scene) -> list[v.CrossChecked]:
    return [e for e in s.told() if type(e) is v.CrossChecked]


def engines(s: Scene) -> dict[str, Engine]:
    return {worker.engine.name: worker.engine for worker in s.workers}


async def ask(s: Scene, **more: object) -> None:
    """A request whose body has these fields, too."""
    body = json.dumps({**json.loads(BODY), **more}).encode()
    async with RawClient(s.gateways[0].port) as client:
        assert (await client.ask(TEXT, body)).status == 200


async def test_a_finished_request_is_answered_again_by_the_other_engine() -> None:
    async with scene(exact=EXACT) as s:
        await s.replica(cross_checks=ALL)
        await s.ask()
        await until(lambda: results(s))
        (made,), (found,) = decided(s), results(s)
        assert made.by != made.worker and made.cause == CheckCause.SHARE
        assert (made.tokens, made.answer) == (12, digest_of(IDS))
        assert (found.differs, found.error, found.answer) == (-1, "", made.answer)
        (check,) = engines(s)[made.by].checks
        assert check.asked == {
            "request": made.request, "incarnation": INCARNATION, "path": TEXT, "body": BODY.decode()
        }  # fmt: skip
        assert not engines(s)[made.worker].checks
        await s.proven()
        text = "\n".join(lines_of(why(s.log.groups, made.request)))
        assert f"the idle engine {made.by}:3 answers it again" in text
        assert f"{made.by}:3 gave the same tokens" in text


async def test_two_engines_that_differ_are_suspects_and_a_third_one_decides() -> None:
    async with scene(workers=3, exact=EXACT) as s:
        await s.replica(cross_checks=ALL)
        wrong = [*IDS[:7], 1, *IDS[8:]]
        engines(s)["w2"].check_reply = 200, {"tokens": wrong, "took_us": 1000}
        fleet = s.replicas[0].fleet

        def is_quarantined() -> bool:
            return getattr(fleet.workers["w2"].health, "state", "") == HealthState.QUARANTINED

        async with asyncio.timeout(30):
            while not is_quarantined():
                await s.ask()
                await asyncio.sleep(0.1)
        first = next(found for found in results(s) if found.differs >= 0)
        assert first.differs == 7 and "w2" in (first.by, first.worker)
        assert CheckCause.DISPUTE in {made.cause for made in decided(s)}
        states = [getattr(fleet.workers[n].health, "state", "healthy") for n in ("w0", "w1")]
        assert HealthState.QUARANTINED not in states
        await s.proven()


@pytest.mark.parametrize(
    "more",
    [
        {"store": False},
        {"cache_salt": "mine"},
        {"temperature": 1},
        {"n": 2},
        {"suffix": "x"},
    ],
)
async def test_prompts_that_may_not_be_kept_and_inexact_answers_are_not_checked(
    more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_watch, "LOOK_S", 0.01)
    async with scene(exact=EXACT) as s:
        await s.replica(cross_checks=ALL)
        await ask(s, **more)
        assert not s.replicas[0].scheduler.cross_checks.offers
        await s.ask()  # this one is
        await until(lambda: results(s))
        assert len(decided(s)) == 1


async def test_tenants_can_be_left_out() -> None:
    async with scene(exact=EXACT) as s:
        config = msgspec.structs.replace(GATEWAY, unkept_tenants=frozenset({"acme"}))
        await s.replica(cross_checks=ALL, gateway=config)
        async with RawClient(s.gateways[0].port) as client:
            mine = await client.ask(TEXT, BODY, headers="x-tenant-id: acme\r\n")
            assert mine.status == 200 and not s.replicas[0].scheduler.cross_checks.offers
            await client.ask(TEXT, BODY, headers="x-tenant-id: other\r\n")
            assert s.replicas[0].scheduler.cross_checks.offers or decided(s)


async def test_an_engine_that_gets_a_request_is_left_alone() -> None:
    async with AsyncExitStack() as stack:
        s = await stack.enter_async_context(scene(w0_registers=False, exact=EXACT))
        await s.replica(cross_checks=ALL)
        other, served = s.workers
        await s.ask()
        other.engine.check_s = 60.0
        other.register(other.board.address)
        await until(lambda: other.engine.checks)
        other.engine.default = served.engine.default = Behaviour(pause_s=0.3)
        asking = [asyncio.create_task(s.answer()) for _ in range(2)]
        await until(lambda: results(s))
        assert results(s)[0].error == "given up: the engine got a request"
        await until(lambda: other.engine.checks[0].gone)
        answers = await asyncio.gather(*asking)
        assert all(answer.complete for answer in answers)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((404, {}), "status 404"),
        ((200, {"tokens": "none"}), "Expected `array`"),
        ((200, {"tokens": [-1]}), "a token id is out of range"),
        ((200, {"error": "internal: it broke"}), "internal: it broke"),
    ],
)
async def test_no_answer_is_no_difference(reply: tuple[int, object], error: str) -> None:
    async with scene(exact=EXACT) as s:
        await s.replica(cross_checks=ALL)
        for engine in engines(s).values():
            engine.check_reply = reply
        await s.ask()
        await until(lambda: results(s))
        assert error in results(s)[0].error
        await s.folded()
        assert not [e for e in s.told("fleet") if type(e) is v.HealthDecided]


async def test_few_requests_wait_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other engine is there."""
    monkeypatch.setattr(check_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(check_queue, "PATIENCE_S", 0.2)
    async with scene(w0_registers=False, exact=EXACT) as s:
        await s.replica(cross_checks=ALL)
        offers = s.replicas[0].scheduler.cross_checks.offers
        for _ in range(check_queue.MOST_WAITING + 3):
            await s.ask()
            assert len(offers) <= check_queue.MOST_WAITING
        await until(lambda: not offers)
        assert not decided(s)


async def test_no_prompt_stays_in_memory_while_the_log_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log goes away while an engine answers; neither that request stays nor one behind it."""
    monkeypatch.setattr(check_watch, "LOOK_S", 0.01)
    monkeypatch.setattr(check_watch, "DISPUTE_S", 0.5)
    monkeypatch.setattr(check_queue, "PATIENCE_S", 0.5)
    stored: list[check_queue.Offer] = []
    limit = check_queue.CrossCheckQueue.limit

    def noted(self: check_queue.CrossCheckQueue, offer: check_queue.Offer, seconds: float) -> None:
        stored.append(offer)
        limit(self, offer, seconds)

    monkeypatch.setattr(check_queue.CrossCheckQueue, "limit", noted)
    async with scene(exact=EXACT) as s:
        await s.replica(cross_checks=ALL)
        for engine in engines(s).values():
            engine.check_s = 0.2
        await s.ask()
        await until(lambda: any(engine.checks for engine in engines(s).values()))
        await s.ask()
        offers = s.replicas[0].scheduler.cross_checks.offers
        s.log.pause()
        assert offers and all(offer.body for offer in stored)
        await until(lambda: not offers and not any(offer.body for offer in stored))
        assert not results(s)
        s.log.resume()
        await until(lambda: results(s))
        assert results(s)[0].differs == -1 and len({id(offer) for offer in stored}) == 2


def test_the_first_difference() -> None:
    tokens = check_queue.array("I", [1, 2, 3])
    assert first_difference(tokens, (1, 2, 3)) == -1
    assert first_difference(tokens, (1, 9, 3)) == 1
    assert first_difference(tokens, (1, 2)) == 2
    assert first_difference(tokens, (1, 2, 3, 4)) == 3
    assert digest_of([1, 2, 3]) != digest_of([1, 2]) and len(digest_of([])) == 8
