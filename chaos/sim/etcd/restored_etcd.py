"""A simulated etcd that is restored from a backup, and the operator who begins a new log.

The operator is a process of its own, and uses the product's `begin_log`. It waits until every replica has said
that its log is gone, and takes its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Protocol

from relume.chaos.sim.etcd.key_store import Range
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.world.virtual_loop import VirtualLoop
from relume.events.etcd.keys import Keys
from relume.events.etcd.new_log import begin_log
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state.fleet import Fleet

NOTICED_S = 30.0
"""Maximum time in which replicas say that their log is gone."""
OPERATOR_S = 8.0
"""Maximum time that the operator takes then."""
ADOPTED_S = 60.0
"""Maximum time until every worker is ready in the new log."""
LOOK_S = 0.1


class Replica(Protocol):
    """What is read of a replica (`relume.chaos.sim.replica_process.Plane`)."""

    losses: int

    @property
    def fleet(self) -> Fleet:
        """Its fold; empty while it does not run."""
        ...


class RestoredEtcd:
    """One backup of a run's etcd, and what follows from it."""

    def __init__(
        self,
        loop: VirtualLoop,
        etcd: SimEtcd,
        planes: Mapping[str, Replica],
        workers: Mapping[str, object],
        random: Random,
    ) -> None:
        self._loop = loop
        self._etcd = etcd
        self._planes = planes
        self._workers = workers
        self._random = random
        self._operator = loop.process("operator")
        key = Keys(etcd.config.prefix).identity
        found = etcd.store.range(Range(key=key)).kvs
        self.log_id = found[0].value.decode() if found else ""
        """Id of the log; empty: it has none yet."""
        self.trouble = ""
        """Why the new log is none that serves."""
        self._backup = etcd.back_up()

    def renew(self) -> asyncio.Task[int]:
        """Restore etcd and begin a new log, which the fleet then adopts. Its result: when (ns) it began."""
        before = {name: plane.losses for name, plane in self._planes.items()}
        self._etcd.restore(self._backup)
        return self._operator.spawn(self._renew(before))

    async def _renew(self, before: Mapping[str, int]) -> int:
        planes = self._planes
        await self._until(lambda: all(planes[n].losses > c for n, c in before.items()), NOTICED_S)
        await asyncio.sleep(self._random.uniform(0.0, OPERATOR_S))
        fresh = f"{self._random.getrandbits(64):016x}"
        await begin_log(self._etcd.log(self._operator).client, self.log_id, fresh)
        self._etcd.log_begins()
        begun_ns = self._loop.now_ns
        if not await self._until(self._is_adopted, ADOPTED_S):
            self.trouble = f"not every worker is ready in the new log after {ADOPTED_S:g} s"
        return begun_ns

    def _is_adopted(self) -> bool:
        return all(
            len(fold.workers) == len(self._workers)
            and all(worker.engine == EnginePhase.READY for worker in fold.workers.values())
            for fold in (plane.fleet for plane in self._planes.values())
        )

    async def _until(self, found: Callable[[], bool], most_s: float) -> bool:
        until = self._loop.time() + most_s
        while not found():
            if self._loop.time() > until:
                return False
            await asyncio.sleep(LOOK_S)
        return True
