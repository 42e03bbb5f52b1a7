"""Finds an engine that hangs, has its stacks written, and ends it if it stays so.

It reads the page on which the engine counts its steps. An engine that made none since the last look
is probed: an HTTP request that is answered when the engine's loop has taken a turn. An engine that
steps is never probed, an idle one once in LOOK_US. `hang_rule` judges.

A hung engine gets no requests (`EngineHung`), but it has some time to return: what blocks it may
end, and loading it again takes longer. While the worker is held it is left alone.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.engine_process.hang_rule import LOOK_US, PROBE_US, HangRule, Look
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.events.vocabulary import EngineHung, EngineRecovered
from relume.events.vocabulary.enums import DeathReason

PAUSE_S, PROBE_S = LOOK_US / 1e6, PROBE_US / 1e6


class WatchedEngine(Protocol):
    """An engine as its watch sees it."""

    def read(self) -> dict[str, int]:
        """Its counters, see `Progress.read`, and `front_us`: the time for which the thread that
        answers HTTP waited for a CPU."""
        ...

    async def turned(self, timeout_s: float) -> bool:
        """Whether its loop takes a turn within that time."""
        ...

    def process_state(self) -> str:
        """That of /proc."""
        ...

    async def dump(self) -> str:
        """Have the stacks of its threads written; returns the path, empty if that failed."""
        ...

    def condemn(self, reason: DeathReason, detail: str) -> None:
        """Kill it, and let the log say why."""
        ...


class HangWatch:
    """Of one engine."""

    def __init__(
        self,
        engine: WatchedEngine,
        incarnation: int,
        config: AgentConfig,
        directory: RunDirectory,
        journal: Journal,
        logger: Logger,
    ) -> None:
        self._engine = engine
        self._incarnation = incarnation
        self._config = config
        self._directory = directory
        self._journal = journal
        self._logger = logger
        self._now = asyncio.get_running_loop().time
        self._rule = HangRule()
        self._state = engine.read()
        self._turned_at = self._now()
        self._hung_at = 0.0
        self._waited_us = 0

    async def run(self) -> None:
        """Watch until cancelled, or until the engine was ended for its hang."""
        pause_s, ended = PAUSE_S, False
        while not ended:
            began = self._now()
            await asyncio.sleep(pause_s)
            look = await self._look(began, self._now() - began - pause_s)
            self._rule.take(look)
            if look.turned:
                self._turned()
                pause_s = PAUSE_S
            else:
                # A server that refuses connections answers at once.
                pause_s = max(pause_s + PROBE_S - (self._now() - began), 0.0)
                self._waited_us += max(look.wait_us, 0)
                ended = self._rule.hung and await self._hangs()

    async def _look(self, began: float, late_s: float) -> Look:
        before, state = self._state, self._engine.read()
        turned = (state["steps"], state["turns"]) != (before["steps"], before["turns"])
        if not turned:
            probed_s = self._now()
            turned = await self._engine.turned(PROBE_S)
            late_s = max(late_s, self._now() - probed_s - PROBE_S)
            state = self._engine.read()
        self._state = state
        cpu_us = wait_us = -1
        if before["cpu_us"] >= 0 and state["cpu_us"] >= 0:
            cpu_us = state["cpu_us"] - before["cpu_us"]
            of_front = state["front_us"] - before["front_us"]
            wait_us = max(state["wait_us"] - before["wait_us"], of_front)
        return Look(
            turned=turned,
            took_us=int((self._now() - began) * 1e6),
            late_us=int(late_s * 1e6),
            step_age_us=state["step_age_us"],
            expected_us=state["expected_us"],
            cpu_us=cpu_us,
            wait_us=wait_us,
        )

    def _turned(self) -> None:
        now = self._now()
        if self._hung_at:
            hung_us = int((now - self._turned_at) * 1e6)
            self._journal.record(EngineRecovered(self._config.worker, self._incarnation, hung_us))
            self._logger.warning("engine recovered", hung_s=hung_us / 1e6)
        self._turned_at, self._hung_at, self._waited_us = now, 0.0, 0

    async def _hangs(self) -> bool:
        """Say so, the first time; whether it was ended."""
        now = self._now()
        if not self._hung_at:
            self._hung_at = now
            await self._report(now)
        if now - self._hung_at < self._config.hang_restart_s or self._directory.state.held:
            return False
        silent_s = now - self._turned_at
        self._engine.condemn(DeathReason.HUNG, f"no turn of its loop for {silent_s:.1f} s")
        return True

    async def _report(self, now: float) -> None:
        state, rule, process_state = self._state, self._rule, self._engine.process_state()
        event = EngineHung(
            worker=self._config.worker,
            incarnation=self._incarnation,
            silent_us=int((now - self._turned_at) * 1e6),
            looks=rule.counted,
            steps=state["steps"],
            step_age_us=state["step_age_us"],
            expected_us=state["expected_us"],
            cpu_us=rule.spent_us if state["cpu_us"] >= 0 else -1,
            wait_us=self._waited_us,
            running=state["running"],
            waiting=state["waiting"],
            process_state=process_state,
            stacks=await self._engine.dump(),
        )
        self._journal.record(event)
        self._logger.error(
            "engine hung",
            incarnation=self._incarnation,
            silent_s=event.silent_us / 1e6,
            process_state=process_state,
            stacks=event.stacks,
            remedy=f"it is restarted if it does not return within {self._config.hang_restart_s:g} s",
        )
