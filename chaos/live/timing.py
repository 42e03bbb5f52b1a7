"""When each fault of a schedule strikes, its target, and its duration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from relume.chaos.live.errors import CannotStrike
from relume.chaos.live.failpoint_server import FailpointError
from relume.chaos.live.faults.live_faults import Faults
from relume.chaos.live.faults.log_faults import Undo
from relume.chaos.live.live_clients import Clients
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes.fleet_host import Host
from relume.chaos.outcome import FiredFault
from relume.chaos.phases import MIDDLE, Seen, is_at_failpoint
from relume.chaos.scenario.catalogue import FAULTS
from relume.chaos.scenario.schedule import PlannedFault, Schedule
from relume.events.failpoints.points import PLACES, Failpoint

AGAIN_S = 0.1
"""Time after which a fault that found nothing to strike is tried again, while there is traffic. A
fault that waits for an event is tried at the next such event."""

WAITED_S = 40.0
RARE_S = 5.0
MOST_MISSES = 20
"""Number of phases that a fault in the middle of a phase may miss because they ended before it
struck."""

NEVER_CAME = "its event never came"
TRAFFIC_S = 150.0
"""Maximum time of the traffic of a run."""

T = TypeVar("T")


class _Standing(NamedTuple):
    """Where a process stands: what `Watch.subject` needs of an event."""

    worker: str
    request: str


class _Struck(NamedTuple):
    targets: list[str]
    undo: Undo | None
    detail: str


class Plan:
    """`fired`: the faults that struck so far."""

    def __init__(
        self,
        schedule: Schedule,
        host: Host,
        watch: Watch,
        clients: Clients,
        faults: Faults,
        say: Callable[[str], None],
    ) -> None:
        self.fired: list[FiredFault] = []
        self._schedule = schedule
        self._host = host
        self._watch = watch
        self._clients = clients
        self._faults = faults
        self._say = say
        self._began_s = 0.0
        self._over = asyncio.Event()
        self._undo: dict[str, Undo] = {}
        self._undoing = 0
        self._left = len(schedule.faults)

    async def run(self) -> None:
        """Run until every fault has struck and passed, or can no longer strike."""
        self._began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for planned in self._schedule.faults:
                tasks.create_task(self._one(planned))

    def pending(self) -> bool:
        """Whether faults are pending or active. After `WAITED_S`, only active ones count: others
        may wait for an event that never comes."""
        if time.monotonic() - self._began_s < WAITED_S:
            return self._left > 0
        return bool(self._undo) or self._undoing > 0

    def no_more(self) -> None:
        """The traffic is over: faults that have not struck will not."""
        self._over.set()

    async def mend(self) -> None:
        """Undo active faults; safe to call twice."""
        for name in list(self._undo):
            await self._undo.pop(name)()

    async def _one(self, planned: PlannedFault) -> None:
        try:
            await self._strike(planned)
        finally:
            self._left -= 1

    async def _strike(self, planned: PlannedFault) -> None:
        struck = await (self._at_failpoint if is_at_failpoint(planned) else self._in_time)(planned)
        if isinstance(struck, str):
            self._say(f"{planned.name} {planned.what} has not struck: {struck}")
            return
        at_ns = self._now_ns()
        names = ",".join(struck.targets)
        self._say(f"{planned.name} {planned.what} {names} at {at_ns / 1e9:.2f} s {struck.detail}")
        until_ns = None
        if struck.undo is not None:
            self._undo[planned.name] = struck.undo
            if planned.for_ns is not None:
                await self._lasts(planned)
                if undo := self._undo.pop(planned.name, None):
                    self._undoing += 1
                    try:
                        await undo()
                    finally:
                        self._undoing -= 1
                until_ns = self._now_ns()
        self.fired.append(
            FiredFault(
                name=planned.name,
                what=planned.what,
                target=names,
                at_ns=at_ns,
                until_ns=until_ns,
                detail=struck.detail,
            )
        )

    async def _at_failpoint(self, planned: PlannedFault) -> _Struck | str:
        """Strike while a process stands in the middle of the phase. Returns why not, if it cannot."""
        assert planned.phase is not None and self._host.failpoints is not None
        point = MIDDLE[planned.phase]
        if planned.nth > 1:
            before = msgspec.structs.replace(planned, nth=planned.nth - 1, fraction=0.0)
            if not (await self._due(before))[0]:
                return NEVER_CAME
        facts: dict[str, Any] = {}
        if point == Failpoint.ENGINE_DECODE:
            shortest = min(request.output_tokens for request in self._schedule.requests)
            facts["tokens"] = max(min(round(planned.fraction * shortest), shortest - 1), 1)
        process, why = f"{PLACES[point].process} *", NEVER_CAME
        while not self._over.is_set():
            try:
                async with self._host.failpoints.armed(point, process=process, **facts) as armed:
                    if (hit := await self._unless_over(armed.reached(TRAFFIC_S))) is None:
                        return why
                    if FAULTS[planned.what].target not in ("worker", "request"):
                        await armed.release()  # carrying it out may take seconds
                    worker = hit.facts.get("worker", hit.process.rpartition(" ")[2])
                    place = _Standing(worker=worker, request=hit.facts["request"])
                    return await self._hit(planned, Seen(f"w.{worker}", place, time.monotonic()))
            except (CannotStrike, FailpointError) as nothing:
                why = str(nothing)
            await self._unless_over(asyncio.sleep(AGAIN_S))
        return why

    async def _in_time(self, planned: PlannedFault) -> _Struck | str:
        """Strike when it is due by events and times. Returns why not, if it cannot."""
        due, seen = await self._due(planned)
        if not due:
            return NEVER_CAME
        misses = 0
        while True:
            try:
                late = self._late(planned, seen)
                if late and (misses := misses + 1) <= MOST_MISSES:
                    raise CannotStrike(late)
                return await self._hit(planned, seen, late)
            except CannotStrike as nothing:
                if self._over.is_set():
                    return str(nothing)
                if planned.event is None:
                    await asyncio.sleep(AGAIN_S)
                    continue
                again = msgspec.structs.replace(planned, nth=1)
                # Events that came meanwhile count, unless their phase is over.
                behind = None if planned.phase else seen
                try:
                    async with asyncio.timeout(RARE_S if misses else None):
                        due, seen = await self._due(again, behind)
                except TimeoutError:
                    misses = MOST_MISSES  # too few such events: strike at the next one
                    continue
                if not due:
                    return str(nothing)

    async def _hit(self, planned: PlannedFault, seen: Seen | None, late: str = "") -> _Struck:
        targets = await self._targets(planned, seen)
        undo, detail = await self._faults.strike(planned, targets)
        return _Struck(targets, undo, "; ".join(filter(None, (detail, late))))

    async def _unless_over(self, waiting: Awaitable[T]) -> T | None:
        """Its result, or None if the traffic is over first."""
        over = asyncio.create_task(self._over.wait())
        task = asyncio.ensure_future(waiting)
        try:
            await asyncio.wait({over, task}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for one in (over, task):
                one.cancel()
            await asyncio.gather(over, task, return_exceptions=True)

    async def _lasts(self, planned: PlannedFault) -> None:
        """Wait for its duration; the alarm of a full etcd ends earlier if the control plane lifts it."""
        assert planned.for_ns is not None
        deadline = time.monotonic() + planned.for_ns / 1e9
        while (left := deadline - time.monotonic()) > 0:
            if planned.what == "etcd-quota" and not await self._host.etcd.full():
                self._say(f"{planned.name}: the control plane has made room")
                return
            await asyncio.sleep(min(left, 0.5) if planned.what == "etcd-quota" else left)

    async def _due(
        self, planned: PlannedFault, behind: Seen | None = None
    ) -> tuple[bool, Seen | None]:
        """Wait until it is due. Returns whether it became due, and the event that it waited for,
        if any (from now on, or after event `behind`)."""
        if planned.at_ns is not None:
            wait = self._began_s + planned.at_ns / 1e9 - time.monotonic()
            return await self._unless_over(asyncio.sleep(max(wait, 0), True)) is True, None
        seen = await self._unless_over(self._watch.due(planned, behind))
        if seen is None:
            return False, None
        wait = planned.after_ns / 1e9
        if planned.phase:
            wait = planned.fraction * self._watch.phases.length_s(planned.phase)
        await asyncio.sleep(max(seen.at_s + wait - time.monotonic(), 0))
        return True, seen

    def _late(self, planned: PlannedFault, seen: Seen | None) -> str:
        if seen is None or not planned.phase or self._watch.phases.is_in(planned.phase, seen.event):
            return ""
        return f"the {planned.phase} was over by then"

    async def _targets(self, planned: PlannedFault, seen: Seen | None) -> list[str]:
        """Its target, by name. Raises CannotStrike if no process has a role now."""
        kind, fleet = FAULTS[planned.what].target, self._watch.fleet
        names = {
            "worker": list(self._schedule.workers),
            "domain": sorted(set(self._schedule.workers.values())),
            "control plane": list(self._schedule.control_planes),
            "etcd": list(self._schedule.etcd),
            "request": self._clients.under_way,
        }.get(kind, [])
        if planned.target == "all":
            return names
        if planned.target in names:
            return [planned.target]
        found = ""
        if planned.target == "subject" and seen is not None:
            found = self._watch.subject("worker" if kind == "domain" else kind, seen)
            if kind == "domain":
                found = self._schedule.workers.get(found, "")
        elif kind == "etcd":
            leader = await self._host.etcd.leader()
            others = [name for name in names if name != leader]
            found = leader if planned.target != "follower" else next(iter(others), "")
        elif planned.target == "follower":
            found = next((name for name in names if name != fleet.leader), "")
        elif planned.target == "leader":
            found = fleet.leader
        elif planned.target == "any" and names:
            found = names[0]
        if not found:
            raise CannotStrike(f"there is no {planned.target}")
        return [found]

    def _now_ns(self) -> int:
        return round((time.monotonic() - self._began_s) * 1e9)
