"""Cross-checks: finished requests that an idle engine answers again, one at a time per replica.

`relume.policies.crosscheck.choice` says whether a request is answered again and by which engine. The
replica writes the decision, sends the request, compares the token ids and writes what came of it. The
engine's answer goes nowhere else.

An engine that gets a request meanwhile is left alone: the check ends without a result. Without the
log there are no checks.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import aiohttp
import msgspec
import structlog

from relume.controlplane.replica.crosscheck.check_queue import PATIENCE_S, Offer
from relume.controlplane.replica.engine_calls import UNUSABLE, url_of
from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.wire.token_digest import digest_of
from relume.events.wire.worker_calls import (
    CROSS_CHECK_PATH,
    CrossCheckAnswered,
    CrossCheckRequest,
)
from relume.policies.crosscheck import choice
from relume.policies.crosscheck.choice import CheckChoice
from relume.policies.state.fleet import Worker

DISPUTE_S = 90.0
"""Maximum time that a request stays in memory from the beginning of a check on, also while its answer is
in dispute."""
CHECK_S = 30.0
"""Maximum time of one check."""
TRIES = 3
"""A check that is given up is made again, so often in all."""
GIVEN_UP = "given up: the engine got a request"
LOOK_S = 0.25
WATCH_S = 0.05
"""Pause between two looks at whether the engine that answers got a request."""
LANDED_S = 10.0
"""Pause between two looks at whether the result is in the log, without news of it."""

log = structlog.get_logger("relume.crosscheck")


class CrossCheckWatch:
    """One for a replica."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue = scheduler.cross_checks
        self._news = asyncio.Event()

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with each event folded: nothing to do."""

    def folded(self, group: RevisionGroup) -> None:
        """Called when a whole group was folded."""
        self._news.set()

    async def run(self) -> None:
        """Check for ever; the caller owns the task."""
        timeout = aiohttp.ClientTimeout(total=CHECK_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await self._queue.until_filled()
                await asyncio.sleep(LOOK_S)
                try:
                    if (due := self._next()) is not None:
                        await self._check(session, *due)
                except LogError as error:
                    log.warning("cross_check_not_written", reason=str(error))

    def _next(self) -> tuple[Offer, v.CrossCheckDecided, Worker] | None:
        """The next check, whose decision is written. Raises LogError."""
        scheduler, offers = self._scheduler, self._queue.offers
        view = scheduler.view
        if not scheduler.decisions.healthy:
            return None
        for offer in list(offers):
            if choice.cause_of(view, offer.finished) is None:
                offers.remove(offer)
            elif choice.choose(view, offer.finished) is not None:
                basis = scheduler.decisions.basis()
                found = choice.choose(view, offer.finished)
                if found is not None:
                    offers.remove(offer)
                    return offer, self._decided(offer, found, basis), view.fleet.workers[found.by]
        return None

    def _decided(self, offer: Offer, found: CheckChoice, basis: v.Basis) -> v.CrossCheckDecided:
        finished = offer.finished
        event = v.CrossCheckDecided(
            decision=self._scheduler.decisions.decision_id(),
            basis=basis,
            request=finished.request,
            worker=finished.worker,
            incarnation=finished.incarnation,
            by=found.by,
            by_incarnation=found.incarnation,
            cause=found.cause,
            tokens=finished.tokens,
            answer=finished.answer,
        )
        self._scheduler.emit(event)
        return event

    async def _check(
        self, session: aiohttp.ClientSession, offer: Offer, decided: v.CrossCheckDecided, by: Worker
    ) -> None:
        """Have it answered, and write what came of it. Raises LogError."""
        self._queue.limit(offer, DISPUTE_S)
        now = asyncio.get_running_loop().time
        began = now()
        answer = await self._answer(session, offer, decided, by)
        took_us = int((now() - began) * 1e6)
        result = v.CrossChecked(
            decision=decided.decision,
            request=decided.request,
            worker=decided.worker,
            incarnation=decided.incarnation,
            by=decided.by,
            by_incarnation=decided.by_incarnation,
            took_us=answer.took_us or took_us,
            error=answer.error,
        )
        if not answer.error:
            result = msgspec.structs.replace(
                result,
                answer=digest_of(answer.tokens),
                differs=first_difference(offer.tokens, answer.tokens),
            )
        position = self._scheduler.emit(result)
        if result.differs >= 0:
            log.error(
                "engines_answer_differently",
                request=decided.request,
                workers=[decided.worker, decided.by],
                token=result.differs,
                remedy="their canaries follow; `relume why` and `relume workers` show what is decided",
            )
        await self._until_folded(position)
        offer.tries += 1
        if not offer.body:
            return  # the log took too long
        if choice.dispute_of(self._scheduler.view, decided.request) is not None:
            self._queue.offers.appendleft(offer)
        elif answer.error == GIVEN_UP and offer.tries < TRIES:
            self._queue.limit(offer, PATIENCE_S)
            self._queue.offers.append(offer)
        else:
            self._queue.limit(offer, 0)

    async def _answer(
        self, session: aiohttp.ClientSession, offer: Offer, decided: v.CrossCheckDecided, by: Worker
    ) -> CrossCheckAnswered:
        """The engine's answer. It is broken off when the engine gets a request."""
        asking = asyncio.create_task(self._ask(session, offer, decided, by))
        try:
            while not asking.done():
                await asyncio.wait((asking,), timeout=WATCH_S)
                if not asking.done() and self._scheduler.view.load(by)[1]:
                    return CrossCheckAnswered(error=GIVEN_UP)
            return asking.result()
        finally:
            asking.cancel()

    async def _ask(
        self, session: aiohttp.ClientSession, offer: Offer, decided: v.CrossCheckDecided, by: Worker
    ) -> CrossCheckAnswered:
        check = CrossCheckRequest(
            request=decided.request,
            incarnation=decided.by_incarnation,
            path=offer.path,
            body=offer.body.decode(),
        )
        try:
            async with session.post(
                url_of(by, CROSS_CHECK_PATH), json=msgspec.to_builtins(check)
            ) as answer:
                if answer.status != 200:
                    return CrossCheckAnswered(error=f"status {answer.status}")
                found = msgspec.json.decode(await answer.read(), type=CrossCheckAnswered)
                digest_of(found.tokens)
                return found
        except TimeoutError:
            return CrossCheckAnswered(error=f"no answer within {CHECK_S:g} s")
        except OverflowError:
            return CrossCheckAnswered(error="a token id is out of range")
        except UNUSABLE as error:
            return CrossCheckAnswered(error=(str(error) or type(error).__name__)[:200])

    async def _until_folded(self, position: int) -> None:
        """The next choice is made when the fold has the result of this one."""
        fleet, stream = self._scheduler.view.fleet, self._scheduler.view.stream
        while (head := fleet.streams.get(stream)) is None or head.position < position:
            self._news.clear()
            try:
                async with asyncio.timeout(LANDED_S):
                    await self._news.wait()
            except TimeoutError:
                log.info("cross_check_waits_for_the_log", position=position)


def first_difference(tokens: array[int], others: tuple[int, ...]) -> int:
    """Index of the first token in which two answers differ; -1: none."""
    for at, (one, other) in enumerate(zip(tokens, others, strict=False)):
        if one != other:
            return at
    return -1 if len(tokens) == len(others) else min(len(tokens), len(others))
