"""The agent's part in checkpoints: it keeps the host's state daemon running and reports its coverage.

It replaces `engine_shim/agent/host_daemon/coverage_events.py`, which polls a daemon five times per
second; this one acts only on changes. The same code makes the events (`state_daemon/coverage.py`).
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from relume.chaos.sim.daemon import DaemonSlot, SimDaemon
from relume.chaos.sim.world.virtual_loop import Process
from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.engine_process.supervisor import Backoff
from relume.engine_shim.agent.host_daemon.coverage_events import LAST_ATTEMPT, POLL_S, REPORT_EVERY
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.checkpoints.daemon.coverage_changes import CoverageReports, together
from relume.events import vocabulary as v
from relume.events.vocabulary import StateDaemonLost, StateDaemonReported, StateDaemonStarted
from relume.events.wire.kv import kv_messages as m

STARTS_S = 0.3


class SimKeeper:
    """One for an agent. `run` until cancelled, then `leave`."""

    def __init__(
        self, slot: DaemonSlot, config: AgentConfig, process: Process, journal: Journal
    ) -> None:
        self._slot = slot
        self._machine = slot.machine
        self._process = process
        self._journal = journal
        self._backoff = Backoff((0.1, *config.backoff_s[1:]), config.stable_after_s)
        self._released: dict[str, None] = {}
        self._voided: dict[str, int] = {}
        self._news = asyncio.Event()
        self._anew = False
        self._boot = ""
        self._figures: dict[str, int] = {}
        journal.on_epoch(lambda _: self._renew())

    def release(self, requests: tuple[str, ...]) -> None:
        """These requests ended: the daemon drops their blocks."""
        self._released.update(dict.fromkeys(requests))
        self._news.set()

    def void(self, attempts: tuple[tuple[str, int], ...]) -> None:
        """What these attempts wrote is wrong: the daemon drops it."""
        for request, attempt in attempts:
            self._voided[request] = max(attempt, self._voided.get(request, 0))
        self._news.set()

    def _renew(self) -> None:
        self._anew = True
        self._news.set()

    async def run(self) -> None:
        """Run one life of a daemon after another."""
        loop = self._machine.loop
        while True:
            began = loop.time()
            await self._live()
            await asyncio.sleep(self._backoff.after(loop.time() - began))

    async def _live(self) -> None:
        """One life of the daemon."""
        daemon = self._slot.daemon
        if daemon is None or not daemon.process.alive:
            daemon = self._slot.start(self._journal.epoch)
            await asyncio.sleep(STARTS_S)
        dead = asyncio.Event()
        tell = self._process.call_soon

        def died() -> None:
            if self._process.alive:
                tell(dead.set)
                tell(self._news.set)

        daemon.process.at_death.append(died)

        def changed() -> None:
            if not self._news.is_set():
                tell(self._news.set)

        daemon.on_change = changed
        reports = CoverageReports(self._machine.name)
        self._boot = ""
        reported = self._machine.loop.time() + POLL_S * REPORT_EVERY
        while daemon.process.alive and not dead.is_set():
            if not self._boot or self._anew:
                reports = CoverageReports(self._machine.name)
                self._introduce(daemon, reports)
            else:
                self._drop_released(daemon)
                self._changes(daemon, reports)
            if self._machine.loop.time() >= reported:
                self._report(daemon)
                reported += POLL_S * REPORT_EVERY
            self._news.clear()
            if self._released or self._voided:
                self._news.set()  # it has just registered
            try:
                async with asyncio.timeout_at(reported):
                    await self._news.wait()
            except TimeoutError:
                continue
            await self._next_look()
        if self._boot:
            self._journal.record(StateDaemonLost(self._machine.name, self._boot, "killed signal 9"))
        self._boot, self._figures = "", {}

    async def _next_look(self) -> None:
        """Check it five times per second."""
        now = self._machine.loop.time()
        await asyncio.sleep((math.floor(now / POLL_S) + 1) * POLL_S - now)

    def _taken(self, daemon: SimDaemon, reports: CoverageReports) -> list[Any]:
        ledger = daemon.store.ledger
        found: list[Any] = []
        more = True
        while more:
            cursor, changes, more = ledger.since(reports.cursor, m.MAX_REQUESTS)
            changed = m.ChangesAnswer(
                seq=0, cursor=cursor, boot=daemon.boot, changes=tuple(changes), more=more
            )
            found += together(reports.take(changed))
        return found

    def _introduce(self, daemon: SimDaemon, reports: CoverageReports) -> None:
        machine = self._machine
        held = self._taken(daemon, reports)
        started = StateDaemonStarted(
            worker=machine.name,
            boot=daemon.boot,
            epoch=daemon.service.epoch,
            address=self._slot.address,
            budget_bytes=daemon.arena.budget,
            machine=machine.name,
            file_bytes=daemon.file_budget,
        )
        self._anew = False
        self._journal.record(started, *held)
        self._note(daemon, held[-1] if held else started)
        self._boot = daemon.boot

    def _changes(self, daemon: SimDaemon, reports: CoverageReports) -> None:
        if found := self._taken(daemon, reports):
            self._journal.record(*found)
            self._note(daemon, found[-1])

    def _note(self, daemon: SimDaemon, last: v.Event) -> None:
        if self._machine.truth is not None:
            self._machine.truth.daemon_reports(daemon, self._journal, last)

    def _drop_released(self, daemon: SimDaemon) -> None:
        for name in self._released:
            daemon.store.drop(name, LAST_ATTEMPT)
        self._released.clear()
        for request, attempt in self._voided.items():
            daemon.store.void(request, attempt)
        self._voided.clear()

    def _report(self, daemon: SimDaemon) -> None:
        figures = daemon.store.stats()
        if figures != self._figures:
            self._figures = figures
            statistics = tuple(figures.items())
            self._journal.record(StateDaemonReported(self._machine.name, self._boot, statistics))

    async def leave(self, reason: str) -> None:
        """End the daemon: the worker leaves, or is fenced."""
        daemon = self._slot.daemon
        if daemon is not None and daemon.process.alive:
            daemon.kill()
        if self._boot:
            self._journal.record(StateDaemonLost(self._machine.name, self._boot, reason))
        self._boot = ""

    def describe(self) -> dict[str, Any]:
        """For people."""
        return {"boot": self._boot}
