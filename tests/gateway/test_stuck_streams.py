"""A stream that gets no more tokens while its engine makes steps: real replicas, scripted engines."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from relume.controlplane.replay.rendering import lines_of
from relume.controlplane.replay.why import why
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import TransportKind
from relume.policies.liveness.overdue import OverdueConfig
from tests.gateway.peers import Behaviour
from tests.gateway.raw_client import RawClient
from tests.gateway.replica_scene import (
    BODY,
    INCARNATION,
    TEXT,
    WANT,
    Scene,
    Worker,
    scene,
    until,
)

QUICK = OverdueConfig(floor_us=600_000, steps=16)
SLOW = Behaviour(pause_s=0.25)
STUCK = Behaviour(stuck_at=5)


class Steps:
    """Engine steps in a worker's stream, one each 10 ms, until they are `held`. Each attempt that
    its engine got is reported as decoding, unless `reports` is False."""

    def __init__(self, scene: Scene, worker: Worker, reports: bool = True) -> None:
        self._worker = worker
        self._reports = reports
        self._known = 0
        self.number = self.turns = 0
        self.held = False
        self._replica = scene.replicas[0]

    async def run(self) -> None:
        while True:
            seen = [s for s in self._worker.engine.seen if "x-relume-request" in s.headers]
            new, self._known = seen[self._known :], len(seen)
            changes: list[Any] = []
            for one in new if self._reports else ():
                of = one.headers["x-relume-request"], int(one.headers["x-relume-attempt"])
                changes += (v.RequestQueued(*of, 5), v.FirstToken(*of))
            self.turns += 1
            if not self.held:
                self.number += 1
                self._worker.writer.append(
                    v.EngineStep(
                        incarnation=INCARNATION,
                        step=self.number,
                        duration_us=9000,
                        batch=2,
                        sum_context=50,
                        prefill_tokens=0,
                        waiting=0,
                        kv_used=4,
                        changes=tuple(changes),
                    )
                )
            await asyncio.sleep(0.01)


@asynccontextmanager
async def stepping(s: Scene, worker: Worker, reports: bool = True):
    steps = Steps(s, worker, reports)
    task = asyncio.create_task(steps.run())
    try:
        yield steps
    finally:
        assert not task.done(), task
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def judged(s: Scene) -> list[v.StreamJudged]:
    return [e for e in s.told() if type(e) is v.StreamJudged]


def observed(s: Scene) -> list[v.TransportObserved]:
    return [e for e in s.told() if type(e) is v.TransportObserved]


async def test_a_stuck_stream_moves_and_the_others_of_its_engine_stay() -> None:
    async with scene(w0_registers=False) as s:
        await s.replica(overdue=QUICK)
        spare, worker = s.workers
        worker.engine.script += [SLOW, STUCK]
        async with stepping(s, worker):
            others = asyncio.create_task(s.answer())
            await until(lambda: len(worker.engine.seen) == 1)
            stuck = asyncio.create_task(s.answer())
            await until(lambda: len(worker.engine.seen) == 2)
            spare.register(spare.board.address)
            answer = await stuck
            assert answer.complete and answer.body == WANT
            assert (await others).body == WANT
        (found,) = judged(s)
        assert (found.worker, found.attempt, found.stuck) == ("w1", 1, True)
        assert found.steps >= QUICK.steps and found.silent_us < 3_000_000
        (lost,) = observed(s)
        assert (lost.kind, lost.request, lost.delivered) == ("stuck", found.request, 5)
        assert len(spare.engine.seen) == 1 and len(spare.engine.seen[0].ids) == 5
        assert not s.suspected() and "w1" not in s.replicas[0].fleet.replicas["r0"].suspects
        requests = [r for r in worker.engine.seen if "x-relume-request" in r.headers]
        await until(lambda: requests[1].gone)
        await until(lambda: requests[0].finished)
        assert not requests[0].gone
        assert await s.ask() == WANT
        await s.proven()
        course = why(s.log.groups, found.request)
        assert course is not None
        text = "\n".join(lines_of(course))
        assert "no token came from w1:3" in text and "judged stuck" in text
        assert "because of stuck" in text


async def test_a_first_token_that_the_log_has_and_no_client_gets_is_overdue_too() -> None:
    async with scene(w0_registers=False) as s:
        await s.replica(overdue=QUICK)
        spare, worker = s.workers
        worker.engine.script.append(Behaviour(stuck_at=0))
        async with stepping(s, worker):
            asking = asyncio.create_task(s.ask())
            await until(lambda: worker.engine.seen)
            spare.register(spare.board.address)
            assert await asking == WANT
        assert len(judged(s)) == 1 and observed(s)[0].delivered == 0


@pytest.mark.full
async def test_a_request_that_gets_stuck_at_one_token_everywhere_is_at_fault() -> None:
    async with scene(workers=3) as s:
        await s.replica(overdue=QUICK)
        s.script(STUCK)
        async with AsyncExitStack() as stack:
            for worker in s.workers:
                await stack.enter_async_context(stepping(s, worker))
            answer = await s.answer()
        assert answer.body.count(b'"text"') == 5
        assert b"2 idle workers failed on this request alike" in answer.body
        assert b"its next token is overdue after 5 tokens" in answer.body
        assert len(judged(s)) == 2
        (end,) = [e for e in s.told() if type(e) is v.RequestEnded]
        assert (end.outcome, end.attempts) == ("rejected", 2)


@pytest.mark.full
async def test_a_request_that_gets_stuck_ever_further_on_ends_within_its_budget() -> None:
    async with scene() as s:
        await s.replica(overdue=QUICK)
        for worker, first in zip(s.workers, (4, 2), strict=True):
            worker.engine.script += [Behaviour(stuck_at=first), Behaviour(stuck_at=6)]
        async with stepping(s, s.workers[0]), stepping(s, s.workers[1]):
            answer = await s.answer()
        assert len(judged(s)) == s.gateways[0].config.max_engine_errors
        assert b"workers failed on this request" in answer.body
        (end,) = [e for e in s.told() if type(e) is v.RequestEnded]
        assert end.outcome == "failed"


NO_VERDICT_S = 2.5
NO_VERDICT_STEPS = 250
"""A stuck stream would have moved by then."""


async def healthy(how: Behaviour, reports: bool = True, body: bytes = BODY) -> Scene:
    """Run one request that such an engine answers; nothing may be judged."""
    async with scene() as s:
        await s.replica(overdue=QUICK)
        s.script(how)
        async with stepping(s, s.workers[0], reports), stepping(s, s.workers[1], reports):
            async with RawClient(s.gateways[0].port) as client:
                answer = await client.ask(TEXT, body, headers="x-request-id: q\r\n")
        assert answer.complete and answer.status == 200
        assert judged(s) == [] and observed(s) == []
        return s


@pytest.mark.full
async def test_an_engine_that_waits_with_a_request_is_not_judged() -> None:
    await healthy(Behaviour(before_s=NO_VERDICT_S), reports=False)


@pytest.mark.full
async def test_an_answer_in_one_piece_may_come_with_its_end() -> None:
    whole = json.dumps({"model": "m", "prompt": "hi", "temperature": 0}).encode()
    await healthy(Behaviour(before_s=NO_VERDICT_S), body=whole)


@pytest.mark.full
async def test_frames_that_show_nothing_are_signs_of_life() -> None:
    """A parser withholds text; the engine's tokens come all the same."""
    await healthy(Behaviour(pause_s=0.3, shows=False))


@pytest.mark.full
@pytest.mark.parametrize("resumable", [False, True])
async def test_a_client_that_reads_too_slowly_is_not_stuck(resumable: bool) -> None:
    async with scene() as s:
        await s.replica(overdue=QUICK)
        s.script(Behaviour(tokens=12, text_bytes=1 << 20))
        async with stepping(s, s.workers[0]) as steps, stepping(s, s.workers[1]):
            async with RawClient(s.gateways[0].port) as client:
                client.reader._limit = 1 << 10
                more = "x-relume-resumable: 1\r\n" if resumable else ""
                client.send(TEXT, BODY, headers=f"x-request-id: q\r\n{more}")
                await until(lambda: any(w.engine.seen for w in s.workers))
                await until(lambda: steps.number > NO_VERDICT_STEPS)
                held = [a for group in s.gateways[0]._attempts.values() for a in group]
                assert [a.paused for a in held] == [True]
                assert judged(s) == []
                client.reader._limit = 1 << 24
                answer = await client.answer()
        assert answer.complete and judged(s) == [] and observed(s) == []


async def test_a_stream_that_waits_for_its_client_is_not_silent(rig) -> None:
    """Another one of its engine is."""
    async with rig(engines=1, stream_buffer_bytes=64 << 10) as r:
        r.engines[0].script += [Behaviour(tokens=3000, text_bytes=8000), STUCK]
        async with r.client() as slow, r.client() as other:
            slow.writer.transport.pause_reading()
            slow.send(TEXT, BODY)
            await until(
                lambda: [a.paused for a in r.gateway._attempts.get(("w0", 3), ())] == [True]
            )
            other.send(TEXT, BODY)
            await until(lambda: 5 in r.gateway.delivered_on("w0", 3).values())
            silent = r.gateway.silent_on("w0", 3, r.gateway.clock() + 60)
            stuck = r.engines[0].seen[1].headers["x-relume-request"]
            assert list(silent) == [(stuck, 1)]
        await until(lambda: len(r.scheduler.endings()) == 2)


async def test_the_judgement_of_an_attempt_that_is_over_moves_nothing(rig) -> None:
    async with rig() as r, r.client() as client:
        r.engines[0].script.append(STUCK)
        r.engines[1].script.append(Behaviour(pause_s=0.02))
        client.send(TEXT, BODY, headers="x-request-id: q\r\n")
        await until(lambda: 5 in r.gateway.delivered_on("w0", 3).values())
        (request,) = r.gateway.delivered_on("w0", 3)
        judgement = request, 1, TransportKind.STUCK
        assert r.gateway.break_stream("w0", 3, *judgement)
        await until(lambda: r.engines[1].seen)
        assert not r.gateway.break_stream("w1", 3, *judgement)
        assert (await client.answer()).body == WANT
        assert [entry[1] for entry in r.scheduler.log if entry[0] == "observed"] == ["stuck"]


@pytest.mark.full
async def test_an_engine_without_reports_has_no_stuck_streams() -> None:
    """Steps stand still: a plain worker, or a replica that is cut from the log."""
    async with scene() as s:
        await s.replica(overdue=QUICK)
        s.script(STUCK)
        async with stepping(s, s.workers[0]) as one, stepping(s, s.workers[1]) as other:
            asking = asyncio.create_task(s.answer())
            await until(lambda: any(w.engine.seen for w in s.workers))
            await until(lambda: one.number > 20)
            one.held = other.held = True
            await until(lambda: one.turns > NO_VERDICT_STEPS)
            assert judged(s) == [] and not asking.done()
            one.held = other.held = False
            s.script(Behaviour())
            assert (await asking).body == WANT


@pytest.mark.full
async def test_an_engine_whose_server_does_not_answer_is_not_judged() -> None:
    async with scene() as s:
        await s.replica(overdue=QUICK)
        s.script(STUCK)
        for worker in s.workers:
            worker.engine.answers_probes = False
        async with stepping(s, s.workers[0]) as steps, stepping(s, s.workers[1]):
            asking = asyncio.create_task(s.answer())
            await until(lambda: any(w.engine.seen for w in s.workers))
            await until(lambda: steps.number > NO_VERDICT_STEPS)
            assert judged(s) == []
            s.script(Behaviour())
            for worker in s.workers:
                worker.engine.answers_probes = True
            assert (await asking).body == WANT
