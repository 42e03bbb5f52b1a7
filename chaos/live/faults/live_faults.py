"""The faults of the catalogue on real processes: one method each, by the fault's name.

A method strikes and returns a function that undoes the fault (None: nothing to undo). It raises
CannotStrike if there was nothing to strike; then the fault has not fired.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from relume.chaos.damaged_bytes import ABSURD_EPOCHS, UNREADABLE
from relume.chaos.live.errors import CannotStrike
from relume.chaos.live.failpoint_server import FailpointError
from relume.chaos.live.faults import daemon_memory as memory
from relume.chaos.live.faults import flipped_weights, unreadable_records
from relume.chaos.live.faults.cpu_limit import Limit
from relume.chaos.live.faults.failing_engines import FailingEngines
from relume.chaos.live.faults.garbled_reports import PERIOD_S, GarbledReports
from relume.chaos.live.faults.log_faults import LogFaults, Struck, cut, stopped
from relume.chaos.live.faults.lossy_messages import Disturbance
from relume.chaos.live.faults.restored_etcd import RestoredEtcd
from relume.chaos.live.faults.tcp_links import Link
from relume.chaos.live.live_clients import Clients
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes import signals
from relume.chaos.live.processes.fleet_host import Host
from relume.chaos.scenario.schedule import PlannedFault
from relume.events.failpoints.points import Action, Failpoint
from relume.events.wire.notices import DeathNotice


class Faults(LogFaults):
    """Strikes one run's fleet. `targets`: names of the targets, with roles resolved."""

    def __init__(self, host: Host, watch: Watch, clients: Clients, seed: int) -> None:
        super().__init__(host, seed)
        self._watch = watch
        self._clients = clients

    async def strike(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        """Raises CannotStrike."""
        act = getattr(self, "_" + planned.what.replace("-", "_"))
        return await act(planned, targets)

    # --- processes of a worker -----------------------------------------------------------

    async def _engine_kill(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return None, self._killed({w: self._host.engine_pid(w) for w in targets})

    async def _agent_kill(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return None, self._killed({w: self._host.agent_pid(w) for w in targets})

    async def _agent_terminate(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        pids = {w: self._host.agent_pid(w) for w in targets}
        struck = {name: pid for name, pid in pids.items() if pid and signals.terminate(pid)}
        if not struck:
            raise CannotStrike(f"nothing runs at {', '.join(pids)}")
        return None, ", ".join(f"{name} {pid}" for name, pid in struck.items())

    async def _holder_kill(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return None, self._killed({w: self._host.daemon_pid(w) for w in targets})

    async def _engine_stop(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await stopped({w: self._host.engine_pid(w) for w in targets})

    async def _agent_stop(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await stopped({w: self._host.agent_pid(w) for w in targets})

    async def _domain_loss(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        """The agent first: no process is left to record the death of the rest."""
        host = self._host
        lost = [w for w, domain in host.schedule.workers.items() if domain in targets]
        killed = [
            self._killed({w: pid for w in lost if (pid := of(w))})
            for of in (host.agent_pid, host.engine_pid, host.daemon_pid)
            if any(map(of, lost))
        ]
        if not killed:
            raise CannotStrike(f"nothing runs in {', '.join(targets)}")
        return None, f"{', '.join(lost)}: pids {'; '.join(killed)}"

    async def _primary_and_holder_kill(
        self, planned: PlannedFault, targets: Sequence[str]
    ) -> Struck:
        fleet = self._watch.fleet
        holders: Counter[str] = Counter()
        for name, placed in fleet.placed.items():
            request = fleet.requests.get(name)
            if request is not None and request.worker in targets:
                holders.update(placed.holders)
        if not holders:
            raise CannotStrike(f"no worker holds a block of {', '.join(targets)}")
        holder = holders.most_common(1)[0][0]
        dead = self._killed({f"holder {holder}": self._host.daemon_pid(holder)})
        return None, f"{self._killed({w: self._host.engine_pid(w) for w in targets})}; {dead}"

    async def _worker_slow(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        pids = {worker: self._host.engine_pid(worker) for worker in targets}
        if without := [worker for worker, pid in pids.items() if not pid]:
            raise CannotStrike(f"{without[0]} has no engine")
        times, pause_s = planned.amount or 1.0, (planned.pause_ms or 0.0) / 1000
        pauses, tasks = AsyncExitStack(), []
        for worker, pid in pids.items():
            if pause_s:
                await pauses.enter_async_context(self._paused(worker, pause_s))
            if times > 1:
                tasks.append(asyncio.create_task(signals.slow(pid, times)))

        async def undo() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await pauses.aclose()

        return undo, f"{times:g} times as long, {pause_s * 1000:g} ms before each step"

    def _paused(self, worker: str, pause_s: float) -> AbstractAsyncContextManager[object]:
        """Inside, the worker's engine waits before each step."""
        assert self._host.failpoints is not None
        return self._host.failpoints.armed(
            Failpoint.ENGINE_STEP,
            Action.DELAY,
            process=f"engine {worker}",
            times=0,
            seconds=pause_s,
        )

    async def _cpu_limit(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        def pids() -> list[int]:
            host = self._host
            found = [of(w) for w in targets for of in (host.engine_pid, host.agent_pid)]
            return [pid for pid in (*found, *map(host.daemon_pid, targets)) if pid]

        return await self._limited(planned, targets, pids)

    async def _gateway_cpu_limit(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        def pids() -> list[int]:
            return [pid for pid in map(self._replica, targets) if pid]

        return await self._limited(planned, targets, pids)

    async def _limited(
        self, planned: PlannedFault, targets: Sequence[str], pids: Callable[[], list[int]]
    ) -> Struck:
        limit = Limit(planned.amount or 1.0, pids)
        if not (held := await limit.begin()):
            await limit.end()
            raise CannotStrike(f"nothing runs at {', '.join(targets)}")
        return limit.end, f"{planned.amount:g} of a core each: pids {' '.join(map(str, held))}"

    async def _engine_errors(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        assert self._host.failpoints is not None
        if not any(self._host.engine_pid(worker) for worker in targets):
            raise CannotStrike(f"no engine runs at {', '.join(targets)}")
        share = planned.amount or 1.0
        failing = FailingEngines(self._host.failpoints, targets, share)
        try:
            await failing.begin()
        except FailpointError as error:
            raise CannotStrike(
                f"{error}; connected: {sorted(self._host.failpoints.processes)}"
            ) from None
        return failing.end, f"{share:g} of the time"

    async def _reports_unreadable(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        workers, share = self._watch.fleet.workers, planned.amount or 1.0
        sockets = {
            self._host.dir / "run" / name / "agent.sock": workers[name].incarnation
            for name in targets
            if name in workers
        }
        if not sockets:
            raise CannotStrike(f"the log names no engine of {', '.join(targets)}")
        garbled = GarbledReports(sockets, share)
        try:
            await garbled.begin()
        except OSError as error:
            await garbled.end()
            raise CannotStrike(f"no agent listens at {', '.join(targets)}: {error}") from None
        return (
            garbled.end,
            f"{share / PERIOD_S:g} malformed steps a second beside those of the engine",
        )

    async def _record_unreadable(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        assert self._host.failpoints is not None
        written = {}
        for worker in targets:
            known = self._watch.fleet.workers.get(worker)
            if known is None:
                raise CannotStrike(f"the log names no engine of {worker}")
            record = written[worker] = self._rng.choice(UNREADABLE)
            socket = self._host.dir / "run" / worker / "agent.sock"
            try:
                await unreadable_records.write(
                    self._host.failpoints, worker, socket, known.incarnation, record
                )
            except (FailpointError, OSError) as error:
                raise CannotStrike(f"the agent of {worker} takes no report: {error}") from None
        return None, ", ".join(f"{worker}: {record!r}" for worker, record in written.items())

    async def _notice_absurd(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        sent = {}
        for worker in targets:
            known = self._watch.fleet.workers.get(worker)
            if known is None:
                raise CannotStrike(f"the log names no engine of {worker}")
            notice = DeathNotice(self._rng.choice(ABSURD_EPOCHS), known.incarnation)
            if not self._host.gateway_links[worker][1].send(notice.line()):
                raise CannotStrike(f"no replica listens to the agent of {worker}")
            sent[worker] = notice
        return None, ", ".join(f"{w}: epoch {n.epoch}" for w, n in sent.items())

    async def _etcd_restored(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        restored = RestoredEtcd(self._host, self._watch)
        return restored.renew, await restored.back_up()

    async def _reload_fails(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        assert self._host.forks is not None
        for worker in targets:
            self._host.forks.fail[worker] += round(planned.amount or 1)
        return None, f"the next {planned.amount:g} starts"

    # --- checkpoints -----------------------------------------------------------------------

    def _daemons(self, targets: Sequence[str]) -> dict[str, int]:
        found = {w: pid for w in targets if (pid := self._host.daemon_pid(w))}
        if not found:
            raise CannotStrike(f"no state daemon at {', '.join(targets)}")
        return found

    async def _holder_stop(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return await stopped(self._daemons(targets))

    async def _disk_full(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        """Strikes daemons that have written to their file; they can still read it."""
        daemons = self._daemons(targets)
        sizes = {worker: memory.filed(pid) for worker, pid in daemons.items()}
        if not any(sizes.values()):
            raise CannotStrike(f"no daemon of {', '.join(targets)} has anything in a file")
        full = [pid for worker, pid in daemons.items() if sizes[worker]]
        for pid in full:
            memory.fill(pid)

        async def undo() -> None:
            for pid in full:
                memory.allow_writes(pid)

        return undo, ", ".join(f"{worker}: {size} bytes" for worker, size in sizes.items() if size)

    async def _block_corrupt(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        flipped = {
            worker: memory.flip(pid, round(planned.amount or 1), self._rng)
            for worker, pid in self._daemons(targets).items()
        }
        if not any(flipped.values()):
            raise CannotStrike(f"no daemon of {', '.join(targets)} holds anything")
        return None, f"bits of {_counted(flipped)} pages"

    async def _weights_flipped(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        model = self._host.options.model
        pids = {worker: self._host.engine_pid(worker) for worker in targets}
        flipped = {
            worker: await asyncio.to_thread(flipped_weights.flip, pid, model)
            for worker, pid in pids.items()
            if pid
        }
        if not any(flipped.values()):
            raise CannotStrike(f"no engine of {', '.join(targets)} has the weights in its memory")
        return None, f"one bit in {_counted(flipped)} copies of a tensor"

    async def _dram_budget(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        share = planned.amount or 1.0
        daemons = self._daemons(targets)
        for worker, pid in daemons.items():
            memory.shrink(self._host.dir / "run" / worker / "daemon.json", pid, share)

        async def undo() -> None:
            for worker, pid in daemons.items():
                memory.shrink(self._host.dir / "run" / worker / "daemon.json", pid, 1.0)

        return undo, f"{share:g} of it left"

    async def _stream_loss(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return self._disturb(targets, "lost", planned.amount or 0.0)

    async def _stream_duplicate(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return self._disturb(targets, "twice", planned.amount or 0.0)

    async def _stream_reorder(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        return self._disturb(targets, "late", planned.amount or 0.0)

    def _disturb(self, targets: Sequence[str], what: str, value: object) -> Struck:
        off = getattr(Disturbance(), what)
        chosen = [self._host.disturbers[w] for w in targets]
        for disturber in chosen:
            setattr(disturber.disturb, what, value)

        async def undo() -> None:
            for disturber in chosen:
                setattr(disturber.disturb, what, off)

        return undo, f"{value} of the messages with blocks {what}"

    # --- links ----------------------------------------------------------------------------

    async def _cut(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        """One way means the bytes that the target sends. The target opens the link to etcd; the
        gateway opens the link to the target."""
        one_way = planned.what == "cut-one-way"
        if planned.peer == "holder":
            return self._disturb(targets, "cut", ("to",) if one_way else ("to", "fro"))
        links = self._links(planned, targets)
        ways = ("to" if planned.peer == "etcd" else "fro",) if one_way else ()
        return cut(links, ways), f"to {planned.peer}"

    _cut_one_way = _cut

    async def _link_slow(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        links = self._links(planned, targets)
        for link in links:
            link.delay_s = (planned.amount or 0.0) / 1000

        async def undo() -> None:
            for link in links:
                link.delay_s = 0.0

        return undo, f"to {planned.peer}, {planned.amount:g} ms each way"

    async def _frame_cut(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        for worker in targets:
            self._host.gateway_links[worker][0].tear(self._rng.randrange)
        return None, "within the next frame"

    def _links(self, planned: PlannedFault, targets: Sequence[str]) -> list[Link]:
        named = self._host.etcd_links if planned.peer == "etcd" else self._host.gateway_links
        return [link for worker in targets for link in named[worker]]

    # --- clients ---------------------------------------------------------------------------

    async def _client_gone(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        known = self._watch.clients
        left = [name for name in targets if self._clients.hang_up(known.get(name, name))]
        if not left:
            raise CannotStrike("its client has its answer already")
        return None, ""


def _counted(flipped: dict[str, int]) -> str:
    return ", ".join(f"{count} at {worker}" for worker, count in flipped.items())
