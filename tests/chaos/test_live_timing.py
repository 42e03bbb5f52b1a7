"""A live fault in the middle of a phase strikes while the process stands there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from relume.chaos.live.errors import CannotStrike
from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.live.faults.live_faults import Struck
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.timing import Plan
from relume.chaos.scenario.schedule import PlannedFault, Request, Schedule
from tests.chaos.test_failpoints import Passing, passing

FAULT = PlannedFault(
    name="f0",
    what="engine-kill",
    target="subject",
    event="FirstToken",
    phase="decode",
    fraction=0.5,
)
SCHEDULE = Schedule(
    scenario="s",
    seed=0,
    workers={"w0": "d0", "w1": "d1"},
    control_planes=("r0",),
    etcd=("e0",),
    requests=(Request(name="q", at_ns=0, prompt_tokens=1, output_tokens=8),),
    faults=(FAULT,),
)


class Strikes:
    """Faults that only note whether the process stood still; the first finds nothing to strike."""

    def __init__(self) -> None:
        self.targets: list[Sequence[str]] = []
        self.stood: list[bool] = []
        self.passage: asyncio.Task[str] | None = None

    async def strike(self, planned: PlannedFault, targets: Sequence[str]) -> Struck:
        assert self.passage is not None
        done, _ = await asyncio.wait({self.passage}, timeout=0.1)
        self.targets.append(targets)
        self.stood.append(not done)
        if len(self.targets) == 1:
            raise CannotStrike("nothing runs there")
        return None, "struck"

    async def pass_by(self, process: Passing, tokens: int) -> None:
        process.go(tokens)
        self.passage = asyncio.create_task(process.said())
        assert await self.passage == f"passed {tokens}"


def plan_of(server: FailpointServer, faults: Strikes, said: list[str]) -> Plan:
    host = SimpleNamespace(failpoints=server)
    clients = SimpleNamespace(under_way=[])
    parts: tuple[Any, ...] = (host, Watch(), clients, faults, said.append)
    return Plan(SCHEDULE, *cast(Any, parts))


async def test_it_strikes_while_the_engine_stands_there_and_tries_again(tmp_path: Path) -> None:
    said: list[str] = []
    faults = Strikes()
    async with FailpointServer(tmp_path / "s") as server:
        with passing("engine w1", server.path) as process:
            assert await process.said() == "active True"
            plan = plan_of(server, faults, said)
            running = asyncio.create_task(plan.run())
            async with asyncio.timeout(30):
                while not plan.fired:
                    for tokens in (3, 4, 5):
                        await faults.pass_by(process, tokens)
                await running
    assert faults.targets == [["w1"], ["w1"]] and faults.stood == [True, True]
    assert [(fired.target, fired.detail) for fired in plan.fired] == [("w1", "struck")]


async def test_it_does_not_strike_when_the_traffic_is_over(tmp_path: Path) -> None:
    said: list[str] = []
    async with FailpointServer(tmp_path / "s") as server:
        plan = plan_of(server, Strikes(), said)
        running = asyncio.create_task(plan.run())
        await asyncio.sleep(0)
        plan.no_more()
        async with asyncio.timeout(5):
            await running
    assert plan.fired == [] and said == ["f0 engine-kill has not struck: its event never came"]
