"""Sends canaries to the agent's engine and writes what it answers into the log.

An engine that becomes ready answers all canaries, first one by one and then together. If every bit is
the same, it is exact: the answers that it gives while it computes nothing else are compared bit by
bit later. So an engine whose weights were
loaded wrongly differs from its class in all canaries at once. From then on one canary follows another
in turn (`canary_schedule`). An answer that differs from this engine's own first one is confirmed at
once by another canary. The leader judges (`relume.policies.canary`). When it says so (`hurry`), all
canaries follow at once: another engine answered a client's request differently.

A server without canaries is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import count
from typing import Protocol

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.canaries.canary_schedule import CanarySchedule
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.canary_prompts import COUNT, PROMPTS
from relume.events.vocabulary import CanaryReported
from relume.events.wire.worker_calls import CanaryAnswered

LOOK_S = 0.25
"""Pause between two looks at whether the engine is idle."""
DIFFERS = 0.05
"""Of an engine that is not exact, or was busy: difference of a log probability that is worth another
canary."""


class NoCanaries(Exception):
    """The engine's server does not know canaries."""


class CanaryEngine(Protocol):
    """An engine as its canaries see it."""

    def read(self) -> dict[str, int]:
        """Its counters, see `Progress.read`."""
        ...

    async def weights(self) -> str:
        """A digest of its model's files, empty if it is unknown."""
        ...

    async def canary(self, number: int) -> CanaryAnswered | str:
        """Its answer, or why there is none. Raises NoCanaries."""
        ...


class CanaryWatch:
    """Of one engine."""

    def __init__(
        self,
        engine: CanaryEngine,
        incarnation: int,
        config: AgentConfig,
        journal: Journal,
        logger: Logger,
    ) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._config = config
        self._journal = journal
        self._logger = logger
        seed = f"{config.worker}:{incarnation}"
        interval_s, budget = config.canary_interval_s, config.canary_budget_ppm
        self._schedule = CanarySchedule(interval_s, budget, seed)
        self._first: dict[int, CanaryAnswered] = {}
        self._exact = False
        self._weights = ""
        self._hurried = asyncio.Event()
        self._unknown = False

    @property
    def is_answered(self) -> bool:
        """Whether the engine has answered each of them, or knows none."""
        return self._unknown or len(self._first) == COUNT

    def hurry(self) -> None:
        """Send all canaries now, or when those under way are answered."""
        self._hurried.set()

    async def run(self) -> None:
        """Send canaries until cancelled, or until the engine turns out not to know them."""
        self._weights = await self._engine.weights()
        try:
            await self._begin()
            for number in count():
                await self._until_due(self._schedule.pause_s(number % COUNT))
                if self._hurried.is_set():
                    self._hurried.clear()
                    for each in range(COUNT):
                        await self._check(each)
                else:
                    await self._check(number % COUNT)
        except NoCanaries:
            self._unknown = True
            self._logger.info("the engine knows no canaries", incarnation=self._incarnation)

    async def _begin(self) -> None:
        """All of them, alone and together."""
        answers = [await self._engine.canary(number) for number in range(COUNT)]
        together = await asyncio.gather(*map(self._engine.canary, range(COUNT)))
        pairs = list(zip(answers, together, strict=True))
        same = [
            (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
            for one, other in pairs
            if isinstance(one, CanaryAnswered) and isinstance(other, CanaryAnswered)
        ]  # one without an answer says nothing about bits
        self._exact = bool(same) and all(same)
        for number, answer in enumerate(answers):
            self._report(number, answer)

    async def _until_due(self, pause_s: float) -> None:
        """Until the pause is over and the engine is idle, within the patience; or until hurried."""
        now = asyncio.get_running_loop().time
        await self._pause(pause_s)
        latest = now() + self._schedule.patience_s
        while now() < latest and not self._hurried.is_set():
            state = self._engine.read()
            if not state["running"] and not state["waiting"]:
                return
            await self._pause(LOOK_S)

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurried.wait()

    async def _check(self, number: int) -> None:
        """One canary, and another one if it differs."""
        answer = await self._engine.canary(number)
        self._report(number, answer)
        if isinstance(answer, CanaryAnswered) and self._differs(number, answer):
            self._logger.error(
                "a canary's answer differs from this engine's first one",
                incarnation=self._incarnation,
                canary=number,
                remedy="another one follows; if it differs too, the worker is quarantined",
            )
            other = (number + 1) % COUNT
            self._report(other, await self._engine.canary(other), confirms=True)
        elif isinstance(answer, CanaryAnswered) and answer.alone > self._first[number].alone:
            self._first[number] = answer  # bits of a busy engine are no measure

    def _differs(self, number: int, answer: CanaryAnswered) -> bool:
        first = self._first.get(number)
        if first is None:
            return False
        if self._exact and answer.alone and first.alone:
            return (answer.tokens, answer.logprobs) != (first.tokens, first.logprobs)
        pairs = zip(answer.logprobs, first.logprobs, strict=False)
        near = all(abs(one - other) <= DIFFERS for one, other in pairs)
        return answer.tokens != first.tokens or not near

    def _report(self, number: int, outcome: CanaryAnswered | str, confirms: bool = False) -> None:
        """Write it into the log, and note what it cost."""
        error = outcome if isinstance(outcome, str) else ""
        answer = CanaryAnswered() if isinstance(outcome, str) else outcome
        self._schedule.note_cost(number, answer.took_us)
        if not error:
            self._first.setdefault(number, answer)
        self._journal.record(
            CanaryReported(
                worker=self._config.worker,
                incarnation=self._incarnation,
                canary=number,
                prompts=PROMPTS,
                tokens=answer.tokens,
                logprobs=answer.logprobs,
                took_us=answer.took_us,
                wait_us=answer.wait_us,
                alone=answer.alone,
                exact=self._exact,
                weights=self._weights,
                confirms=confirms,
                error=error,
            )
        )
