"""The agent's part in checkpoints: keeps the host's state daemon running and speaks for it.

As `engine_shim/agent_coverage.py`, which it takes the place of because that one asks a daemon
five times a second; here nobody is asked while nothing changed. What is written is made by the
same code (`state_daemon/coverage.py`).
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from relume.chaos.sim.daemon import SimDaemon
from relume.engine_shim.agent_coverage import LAST_ATTEMPT, POLL_S, REPORT_EVERY
from relume.engine_shim.agent_engine import Backoff
from relume.engine_shim.agent_journal import Journal
from relume.engine_shim.kv_stream import messages as m
from relume.engine_shim.state_daemon.coverage import CoverageReports, together
from relume.events.vocabulary import StateDaemonLost, StateDaemonReported, StateDaemonStarted

if TYPE_CHECKING:
    from relume.chaos.sim.loop import Process
    from relume.chaos.sim.worker import Host

STARTS_S = 0.3


class SimKeeper:
    """One for an agent. `run` until cancelled, then `leave`."""

    def __init__(self, host: Host, process: Process, journal: Journal) -> None:
        self._host = host
        self._process = process
        self._journal = journal
        self._backoff = Backoff((0.1, *host.config.backoff_s[1:]), host.config.stable_after_s)
        self._released: dict[str, None] = {}
        self._news = asyncio.Event()
        self._anew = False
        self._boot = ""
        self._figures: dict[str, int] = {}
        journal.on_epoch(lambda _: self._renew())

    def release(self, requests: tuple[str, ...]) -> None:
        """They ended: the daemon drops what it holds of them."""
        self._released.update(dict.fromkeys(requests))
        self._news.set()

    def _renew(self) -> None:
        self._anew = True
        self._news.set()

    async def run(self) -> None:
        """One life of a daemon after another, for ever."""
        loop = self._host.loop
        while True:
            began = loop.time()
            await self._live()
            await asyncio.sleep(self._backoff.after(loop.time() - began))

    async def _live(self) -> None:
        """One life of the daemon."""
        daemon = self._host.daemon
        if daemon is None or not daemon.process.alive:
            daemon = self._host.start_daemon(self._journal.epoch)
            await asyncio.sleep(STARTS_S)
        dead = asyncio.Event()
        tell = self._process.call_soon

        def died() -> None:
            if self._process.alive:
                tell(dead.set)
                tell(self._news.set)

        daemon.process.at_death.append(died)
        daemon.on_change = lambda: tell(self._news.set) if not self._news.is_set() else None
        reports = CoverageReports(self._host.name)
        self._boot = ""
        reported = self._host.loop.time() + POLL_S * REPORT_EVERY
        while daemon.process.alive and not dead.is_set():
            if not self._boot or self._anew:
                reports = CoverageReports(self._host.name)
                self._introduce(daemon, reports)
            else:
                self._drop_released(daemon)
                self._changes(daemon, reports)
            if self._host.loop.time() >= reported:
                self._report(daemon)
                reported += POLL_S * REPORT_EVERY
            self._news.clear()
            try:
                async with asyncio.timeout_at(reported):
                    await self._news.wait()
            except TimeoutError:
                continue
            await self._next_look()
        if self._boot:
            self._journal.record(StateDaemonLost(self._host.name, self._boot, "killed signal 9"))
        self._boot, self._figures = "", {}

    async def _next_look(self) -> None:
        """It is looked at five times a second."""
        now = self._host.loop.time()
        await asyncio.sleep((math.floor(now / POLL_S) + 1) * POLL_S - now)

    def _taken(self, daemon: SimDaemon, reports: CoverageReports) -> list[Any]:
        ledger = daemon.store.ledger
        found: list[Any] = []
        more = True
        while more:
            cursor, changes, more = ledger.since(reports.cursor, m.MAX_REQUESTS)
            changed = m.Changed(0, cursor, daemon.boot, tuple(changes), more)
            found += together(reports.take(changed))
        return found

    def _introduce(self, daemon: SimDaemon, reports: CoverageReports) -> None:
        host = self._host
        held = self._taken(daemon, reports)
        started = StateDaemonStarted(
            host.name,
            daemon.boot,
            daemon.service.epoch,
            host.holder_address,
            daemon.arena.budget,
            machine=host.name,
            file_bytes=daemon.file_budget,
        )
        self._anew = False
        self._journal.record(started, *held)
        self._boot = daemon.boot

    def _changes(self, daemon: SimDaemon, reports: CoverageReports) -> None:
        if found := self._taken(daemon, reports):
            self._journal.record(*found)

    def _drop_released(self, daemon: SimDaemon) -> None:
        for name in self._released:
            daemon.store.drop(name, LAST_ATTEMPT)
        self._released.clear()

    def _report(self, daemon: SimDaemon) -> None:
        figures = daemon.store.stats()
        if figures != self._figures:
            self._figures = figures
            told = tuple(figures.items())
            self._journal.record(StateDaemonReported(self._host.name, self._boot, told))

    async def leave(self, reason: str) -> None:
        """End it: the worker leaves, or is fenced."""
        daemon = self._host.daemon
        if daemon is not None and daemon.process.alive:
            daemon.kill()
        if self._boot:
            self._journal.record(StateDaemonLost(self._host.name, self._boot, reason))
        self._boot = ""

    def describe(self) -> dict[str, Any]:
        """For people."""
        return {"boot": self._boot}
