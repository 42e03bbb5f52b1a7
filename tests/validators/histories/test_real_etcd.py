"""Histories of owner keys and manifests on a real etcd of three members, while faults strike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from relume.chaos.call_recorder import CallRecorder
from relume.chaos.live.applicable import why_not
from relume.chaos.live.faults.live_faults import Faults
from relume.chaos.live.faults.tcp_links import Link
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes.etcd_members import Etcd
from relume.chaos.scenario.schedule import PlannedFault
from relume.chaos.validators.linearizability import NEVER
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import LogUnavailable
from tests.etcd_server import etcd_binary
from tests.events.conftest import config_for
from tests.pace import outlast
from tests.validators.histories.contenders import Contenders

pytestmark = [
    pytest.mark.full,
    pytest.mark.etcd,
    pytest.mark.skipif(etcd_binary() is None, reason="no etcd on PATH"),
]

CLIENTS = ("c0", "c1", "c2")
ROUNDS = 2
QUIET_S, FAULT_S = 1.0, 2.0
"""FAULT_S: more than an election, and than the lease of an owner."""


class Case(NamedTuple):
    """A fault, whom it strikes, and whether it leaves calls without an answer."""

    what: str
    target: str
    is_unanswered: bool
    amount: float | None = None


CASES = {
    "leader stopped": Case("etcd-stop", "leader", True),
    "leader killed": Case("etcd-kill", "leader", True),
    "leader isolated": Case("etcd-cut", "leader", True),
    "follower isolated": Case("etcd-cut", "follower", True),
    "leader's fsync hangs": Case("disk-hangs", "leader", True),
    "leader's fsync is slow": Case("disk-slow", "leader", False, 300.0),
    "leases end early": Case("etcd-clock-drift", "leader", False, 9e6),
    "leader defragments": Case("etcd-defragment", "leader", False),
    "a client is cut off": Case("replica-cut", "c0", True),
    "calls of a client are lost": Case("replica-calls-lost", "c0", True),
    "answers to a client are lost": Case("replica-answers-lost", "c0", True),
}


class Cluster:
    """Three members that links connect, and clients, each with links of its own to the members."""

    def __init__(self, etcd: Etcd, links: dict[str, list[Link]]) -> None:
        self.etcd = etcd
        self.config = config_for(etcd)  # type: ignore[arg-type]  # it has endpoints too
        self.recorder = CallRecorder(asyncio.get_running_loop().time, self.config.prefix)
        self._links = links
        host: Any = SimpleNamespace(
            etcd=etcd, etcd_links=links, prefix=self.config.prefix, clock_of=Path
        )
        self._faults = Faults(host, Watch(), SimpleNamespace(), 0)  # type: ignore[arg-type]

    def config_of(self, client: str) -> EtcdConfig:
        """Each client begins at another member, so that a fault of any member strikes one."""
        first = CLIENTS.index(client)
        links = [*self._links[client][first:], *self._links[client][:first]]
        return config_for(SimpleNamespace(endpoints=tuple(x.endpoint for x in links)))  # type: ignore[arg-type]

    async def target(self, role: str) -> str:
        if role in self._links:
            return role
        leader = await self.etcd.leader()
        return leader if role == "leader" else next(n for n in self.etcd.names if n != leader)

    @asynccontextmanager
    async def struck(self, case: Case) -> AsyncIterator[str]:
        """Inside, the fault is on; its target."""
        target = await self.target(case.target)
        planned = PlannedFault(
            name="f0", what=case.what, target=target, amount=case.amount, for_ns=1
        )
        undo, _ = await self._faults.strike(planned, [target])
        try:
            yield target
        finally:
            if undo is not None:
                await undo()


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with Etcd(3, linked=True) as etcd, AsyncExitStack() as stack:
        links = {
            name: [await stack.enter_async_context(Link(at)) for at in etcd.endpoints]
            for name in CLIENTS
        }
        yield Cluster(etcd, links)


@pytest.mark.parametrize("name", CASES)
async def test_no_history_is_impossible_while(name: str, seed: int) -> None:
    case = CASES[name]
    if why := why_not(case.what):
        pytest.skip(why)
    async with cluster() as found:
        contenders = Contenders(found.config, found.recorder, seed)
        for_s = (ROUNDS + 0.5) * (QUIET_S + FAULT_S)

        async def fight(client: str) -> None:
            async with EtcdLog(found.config_of(client)) as log:
                await contenders.fight(log, client, for_s)

        async with asyncio.TaskGroup() as tasks:
            for client in CLIENTS:
                tasks.create_task(fight(client))
            for _ in range(ROUNDS):
                await outlast(QUIET_S, "the time in which contenders write undisturbed")
                async with found.struck(case):
                    await outlast(FAULT_S, "the lease of an owner, and an election")
        keys = found.recorder.judge_keys()
        wrong = {key: one.stuck for key, one in keys.items() if not one.is_possible}
        assert wrong == {} and len(keys) == 4, "an owner key and three manifests"
        calls = found.recorder.calls
        assert len(calls) > 100 and {call.client for call in calls} == {*CLIENTS}
        assert not case.is_unanswered or any(call.answered == NEVER for call in calls)


async def test_what_an_isolated_member_remembers_is_no_present_state() -> None:
    """etcd answers a read that need not be linearizable from one member's own state: the judgement finds
    that."""
    async with cluster() as found, EtcdLog(found.config) as log:
        async with found.struck(CASES["follower isolated"]) as apart:
            await _commits_and_reads(found, log, apart, is_linearizable=False)
    keys = found.recorder.judge_keys()
    manifest = Keys(found.config.prefix).snapshot(1)
    assert keys[manifest].is_possible is False
    stuck = keys[manifest].stuck
    assert stuck is not None and stuck.client == "reader"


async def test_an_isolated_member_answers_no_linearizable_read() -> None:
    async with cluster() as found, EtcdLog(found.config) as log:
        async with found.struck(CASES["follower isolated"]) as apart:
            with pytest.raises(LogUnavailable):
                await _commits_and_reads(found, log, apart, is_linearizable=True)
    assert all(one.is_possible for one in found.recorder.judge_keys().values())


async def _commits_and_reads(
    found: Cluster, log: EtcdLog, apart: str, *, is_linearizable: bool
) -> None:
    """Commit a manifest by way of the others, then read it from the member that is apart."""
    found.recorder.watch(log.client, "writer")
    async with log.writer("fleet", wait_s=20) as writer:
        await Maintenance(log.client, "fleet").commit(1, b"manifest", writer.epoch)
    config = config_for(SimpleNamespace(endpoints=(found.etcd.endpoint(apart),)))  # type: ignore[arg-type]
    async with EtcdClient(config) as reader:
        found.recorder.watch(reader, "reader")
        key = Keys(config.prefix).snapshot(1)
        await reader.range(key, serializable=not is_linearizable)
