"""Faults of replicas, of etcd's members, of the ways to them, and of clocks, on real processes; a part
of `live_faults.Faults`.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from relume.chaos.damaged_bytes import corrupt, tear
from relume.chaos.live.errors import CannotStrike
from relume.chaos.live.faults.spools import last_record, spools_of
from relume.chaos.live.faults.tcp_links import Link
from relume.chaos.live.faults.wall_clocks import WallClocks
from relume.chaos.live.processes import signals
from relume.chaos.live.processes.fleet_host import Host
from relume.chaos.scenario.schedule import PlannedFault
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.reader.scan import Scan
from relume.events.log.errors import LogError

Undo = Callable[[], Awaitable[None]]
Struck = tuple[Undo | None, str]
"""The function that undoes it, and a detail for the report."""

AHEAD = 4
"""How far ahead of its last segment a worker's stream is damaged: nothing is being written there yet."""
STRAY = 1 << 40
"""Smallest number of a stray key: no writer comes to it."""
REVOKE_S = 0.25
"""Period in which leases end that a fast clock of etcd would have ended."""
RESTART_S = 0.5
HANG_MS = 3_600_000.0
"""More than any run lasts."""


async def stopped(pids: dict[str, int]) -> Struck:
    """SIGSTOP to these processes, by name. Raises CannotStrike if none runs (pid 0: gone)."""
    found = {name: pid for name, pid in pids.items() if pid and await signals.stop(pid)}
    if not found:
        raise CannotStrike(f"nothing runs at {', '.join(pids)}")

    async def undo() -> None:
        for pid in found.values():
            signals.go_on(pid)

    return undo, ", ".join(f"{name} {pid}" for name, pid in found.items())


def cut(links: Sequence[Link], ways: Sequence[str]) -> Undo:
    """Nothing passes in these directions (none named: in both) until the undo."""
    for link in links:
        link.cut(*ways)

    async def undo() -> None:
        for link in links:
            link.mend()

    return undo


class LogFaults:
    """Strikes the control plane, its etcd, spools and the clocks of one run's fleet."""

    def __init__(self, host: Host, seed: int) -> None:
        self._host = host
        self._rng = random.Random(f"{seed}:faults")
        self._clocks = WallClocks(host.clock_of)
        self._dead: set[int] = set()

    def _killed(self, pids: dict[str, int]) -> str:
        """Kill these, each once: a process killed before may still be exiting."""
        alive = {name: pid for name, pid in pids.items() if pid and pid not in self._dead}
        struck = {name: pid for name, pid in alive.items() if signals.kill(pid)}
        if not struck:
            raise CannotStrike(f"nothing runs at {', '.join(pids)}")
        self._dead.update(struck.values())
        return ", ".join(f"{name} {pid}" for name, pid in struck.items())

    # --- replicas ---------------------------------------------------------------------------

    def _replica(self, name: str) -> int:
        child = self._host.children[name]
        return child.pid if child.alive else 0

    async def _gateway_kill(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return None, self._killed({r: self._replica(r) for r in targets})

    async def _leader_stop(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await stopped({r: self._replica(r) for r in targets})

    async def _replica_cut(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return self._cut_replicas(targets)

    async def _replica_calls_lost(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return self._cut_replicas(targets, "to")

    async def _replica_answers_lost(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return self._cut_replicas(targets, "fro")

    def _cut_replicas(self, targets: Sequence[str], *ways: str) -> Struck:
        links = [link for replica in targets for link in self._host.etcd_links[replica]]
        return cut(links, ways), f"{len(links)} links to etcd"

    # --- spools -------------------------------------------------------------------------------

    async def _replica_spool_torn(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await self._spools_damaged({r: self._replica(r) for r in targets}, self._tear)

    async def _replica_spool_corrupt(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await self._spools_damaged({r: self._replica(r) for r in targets}, corrupt)

    async def _agent_spool_torn(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        pids = {w: self._host.agent_pid(w) for w in targets}
        return await self._spools_damaged(pids, self._tear)

    async def _agent_spool_corrupt(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        pids = {w: self._host.agent_pid(w) for w in targets}
        return await self._spools_damaged(pids, corrupt)

    async def _spools_damaged(
        self, pids: dict[str, int], damage: Callable[[Path, random.Random], str]
    ) -> Struck:
        """Kill these. Before their successors start, the ends of their spools are damaged: none of them
        runs meanwhile."""
        await stopped(pids)
        spools = {name: spools_of(pid) for name, pid in pids.items()}
        if not any(spools.values()):
            for pid in filter(None, pids.values()):
                signals.go_on(pid)
            raise CannotStrike(f"nothing is spooled at {', '.join(pids)}")
        done = [damage(spool, self._rng) for paths in spools.values() for spool in paths]
        return None, "; ".join((self._killed(pids), *done))

    def _tear(self, spool: Path, rng: random.Random) -> str:
        """What a dead process would have written next is not known: it is like its last record."""
        return tear(spool, [last_record(spool)] if rng.random() < 0.5 else [], rng)

    # --- what stands in the log ---------------------------------------------------------------

    async def _segment_damaged(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        config = EtcdConfig(endpoints=tuple(self._host.etcd.endpoints), prefix=self._host.prefix)
        keys, put = Keys(config.prefix), dict[str, int]()
        try:
            async with EtcdLog(config, "chaos") as log:
                for worker in targets:
                    last = (await Scan(log.client, keys, 0).extent(f"w.{worker}")).last
                    put[worker] = last + AHEAD
                    await log.client.put(keys.segment(f"w.{worker}", last + AHEAD), b"no segment")
                    self._host.out_of_log.add(worker)
        except LogError as error:
            raise CannotStrike(str(error)) from None
        return None, ", ".join(f"{worker}: segment {number}" for worker, number in put.items())

    async def _stray_key(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        config = EtcdConfig(endpoints=tuple(self._host.etcd.endpoints), prefix=self._host.prefix)
        number = STRAY + self._rng.randrange(STRAY)
        streams = (*(f"r.{replica}" for replica in targets), "fleet")
        try:
            async with EtcdLog(config, "chaos") as log:
                for stream in streams:
                    await log.client.put(Keys(config.prefix).segment(stream, number), b"no segment")
        except LogError as error:
            raise CannotStrike(str(error)) from None
        return None, f"segment {number} of {', '.join(streams)}"

    # --- clocks -----------------------------------------------------------------------------

    async def _clock_jump(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return self._jump(targets, planned.amount or 0.0)

    async def _clock_back(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return self._jump(targets, -(planned.amount or 0.0))

    def _jump(self, targets: Sequence[str], seconds: float) -> Struck:
        for name in targets:
            self._clocks.jump(name, seconds)
        return None, f"{seconds:+g} s, for its agent or replica"

    async def _clock_drift(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        ppm = planned.amount or 0.0
        drifts = [asyncio.create_task(self._clocks.drift(name, ppm)) for name in targets]

        async def undo() -> None:
            for drift in drifts:
                drift.cancel()
            await asyncio.gather(*drifts, return_exceptions=True)

        return undo, f"{ppm:g} parts per million fast, for its agent or replica"

    _replica_clock_jump, _replica_clock_back = _clock_jump, _clock_back
    _replica_clock_drift = _clock_drift

    # --- etcd -------------------------------------------------------------------------------

    async def _etcd_kill(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        etcd = self._host.etcd
        for member in targets:
            etcd.kill(member)

        async def undo() -> None:
            await asyncio.gather(*(etcd.restart(member) for member in targets))

        if planned.for_ns is None:
            # As etcd's supervisor would.
            await asyncio.sleep(RESTART_S)
            await undo()
            return None, f"started again after {RESTART_S} s"
        return undo, ""

    async def _etcd_stop(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await stopped({m: self._host.etcd.pid(m) for m in targets})

    async def _etcd_defragment(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        """One after the other, as an operator should."""
        for member in targets:
            try:
                await self._host.etcd.defragment(member)
            except LogError as error:
                raise CannotStrike(f"{member} does not defragment: {error}") from None
        return None, ", ".join(targets)

    async def _etcd_replace(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        etcd = self._host.etcd
        if 2 * (len(etcd.names) - len(targets)) <= len(etcd.names):
            raise CannotStrike(f"there is no majority without {', '.join(targets)}")
        for member in targets:
            try:
                await etcd.replace(member)
            except LogError as error:
                raise CannotStrike(f"{member} is not replaced: {error}") from None
        return None, ", ".join(targets)

    async def _etcd_quota(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        """The control plane may lift the alarm by itself before `undo`."""
        etcd = self._host.etcd
        try:
            await etcd.fill()
        except LogError as error:
            raise CannotStrike(f"etcd does not answer: {error}") from None

        async def undo() -> None:
            with suppress(LogError):
                await etcd.empty()

        return undo, "by the alarm of a full database"

    async def _etcd_cut(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        links = self._host.etcd.links
        if links is None or len(self._host.etcd.names) == 1:
            raise CannotStrike("this etcd has no links between members")
        for member in targets:
            links.cut(member)

        async def undo() -> None:
            for member in targets:
                links.mend(member)

        return undo, ", ".join(targets)

    async def _etcd_clock_jump(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        """Only leases show what time it is for etcd."""
        try:
            revoked = await self._host.etcd.age_leases(self._host.prefix, planned.amount or 0.0)
        except LogError as error:
            raise CannotStrike(f"etcd does not answer: {error}") from None
        if not revoked:
            raise CannotStrike("no lease has so little time left")
        return None, f"{revoked} leases ended"

    async def _etcd_clock_drift(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        """While a lease counts down, a clock that is `rate` too fast ends it when this share of its time
        is left."""
        ppm = planned.amount or 0.0
        rate = ppm / 1e6
        revoking = asyncio.create_task(self._revoke(rate / (1 + rate)))

        async def undo() -> None:
            revoking.cancel()
            await asyncio.gather(revoking, return_exceptions=True)

        return undo, f"{ppm:g} parts per million fast, for leases"

    async def _revoke(self, share: float) -> None:
        while True:
            with suppress(LogError):
                await self._host.etcd.age_leases(self._host.prefix, share=share)
            await asyncio.sleep(REVOKE_S)

    async def _disk_slow(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await self._delayed(planned.amount or 0.0, targets)

    async def _disk_hangs(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await self._delayed(HANG_MS, targets)

    async def _delayed(self, delay_ms: float, targets: Sequence[str]) -> Struck:
        strace = shutil.which("strace")
        if strace is None:
            raise CannotStrike("no strace")
        delay_us = round(1000 * delay_ms)
        calls = "fsync,fdatasync"
        tracers = [
            await asyncio.create_subprocess_exec(
                strace, "-f", "-qq", "-e", f"trace={calls}",
                "-e", f"inject={calls}:delay_enter={delay_us}",
                "-o", "/dev/null", "-p", str(self._host.etcd.pid(member)),
            )
            for member in targets
        ]  # fmt: skip

        async def undo() -> None:
            for tracer in tracers:
                with suppress(ProcessLookupError):
                    tracer.terminate()
            for tracer in tracers:
                await tracer.wait()

        await asyncio.sleep(0.2)
        if any(tracer.returncode is not None for tracer in tracers):
            await undo()
            raise CannotStrike("strace may not follow etcd")
        return undo, f"{delay_ms:g} ms a call"
