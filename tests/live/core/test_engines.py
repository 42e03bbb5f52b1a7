"""Engines, agents and hosts die or hang at a chosen token; clients do not notice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from relume.chaos.live.faults.garbled_reports import GarbledReports
from relume.chaos.traffic import Stream
from relume.events import vocabulary as v
from relume.events.failpoints.points import Action, Failpoint
from relume.events.vocabulary.enums import HealthState
from tests.live.checkpoints.test_checkpoints import daemon_of
from tests.live.conftest import HANG_S, same, whole
from tests.live.core.core_fleet import CORE, CoreFleet
from tests.signals import stop

pytestmark = CORE
TOKENS = 96
LONG = " ".join(f"word{n} and" for n in range(150))
"""A prompt of several prefill chunks."""


async def paths(fleet: CoreFleet, streams: dict[str, Stream]) -> list[list[str]]:
    """The workers of each stream, in order."""
    return [[d.worker for d in made] for made in (await fleet.routes(streams)).values()]


async def test_streams_continue_when_their_engine_is_killed_in_decode(fleet: CoreFleet) -> None:
    calm = await fleet.calm(4, TOKENS)

    async def kill(streams: dict[str, Stream]) -> None:
        hit = await point.reached()
        await fleet.open_all()
        os.kill(hit.pid, signal.SIGKILL)

    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point:
        struck = await fleet.streams(4, TOKENS, fleet.named("decode"), kill)
    assert not whole(struck)
    await fleet.until_ended(struck)
    assert same(calm, struck) == []
    assert min(len(set(s.tokens)) for s in struck.values()) >= 30
    routes = await fleet.routes(struck)
    assert all(made[0].worker == "w0" and len(made) == 2 for made in routes.values())
    assert all(0 < made[1].delivered <= 20 for made in routes.values())


async def test_streams_continue_when_their_engine_is_killed_in_prefill(fleet: CoreFleet) -> None:
    async def kill(streams: dict[str, Stream]) -> None:
        await fleet.until_routed(streams)
        hit = await point.reached()
        await fleet.open_all()
        os.kill(hit.pid, signal.SIGKILL)

    async with fleet.at(Failpoint.ENGINE_PREFILL, "w0") as point:
        struck = await fleet.streams(3, 24, fleet.named("prefill"), kill, padding=LONG)
    assert not whole(struck)
    await fleet.until_ended(struck)
    again = [made[1] for made in (await fleet.routes(struck)).values()]
    assert all(d.delivered == 0 and d.mode == "new" for d in again)
    assert same(await fleet.calm(3, 24, LONG), struck) == []


async def test_streams_continue_when_every_engine_that_takes_them_dies(fleet: CoreFleet) -> None:
    """The first engine dies at token 20, both others when one that took streams over is at 40."""
    calm = await fleet.calm(4, TOKENS)

    async def kill(streams: dict[str, Stream]) -> None:
        hit = await point.reached()
        await fleet.open_all()
        os.kill(hit.pid, signal.SIGKILL)

        await second.reached()
        for worker in ("w1", "w2"):
            os.kill((await fleet.worker(worker))["engine_pid"], signal.SIGKILL)
        await second.release()

    others = fleet.failpoints.armed(Failpoint.ENGINE_DECODE, process="engine w[12]", tokens=40)
    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point, others as second:
        struck = await fleet.streams(4, TOKENS, fleet.named("every"), kill)
    assert not whole(struck)
    await fleet.until_ended(struck)
    assert same(calm, struck) == []
    assert max(map(len, await paths(fleet, struck))) >= 3


async def test_streams_continue_when_their_engine_hangs_and_it_rejoins(fleet: CoreFleet) -> None:
    """Meanwhile no replica sends it requests, also the one that saw nothing of it."""
    calm = await fleet.calm(4, TOKENS)
    before = await fleet.worker("w0")

    async def hang(streams: dict[str, Stream]) -> None:
        hit = await point.reached()
        await fleet.open_all()
        await asyncio.to_thread(stop, hit.pid)

    try:
        async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point:
            struck = await fleet.streams(4, TOKENS, fleet.named("hang"), hang)
        await fleet.until_told(v.HealthDecided)
        elsewhere, url = fleet.named("elsewhere"), fleet.fleet.gateways[1]
        others = await fleet.streams(6, 16, elsewhere, url=url)
    finally:
        os.kill(before["engine_pid"], signal.SIGCONT)
    assert not whole(struck) and not whole(others)
    await fleet.until_ended([*struck, *others])
    assert same(calm, struck) == []
    made = [d for routes in (await fleet.routes(others)).values() for d in routes]
    assert {(d.attempt, d.worker == "w0") for d in made} == {(1, False)}, "r1's clients pay nothing"
    assert all(path[0] == "w0" and len(path) > 1 for path in await paths(fleet, struck))
    assert "w0" in {e.worker for e in await fleet.hung()}, "by its agent or r0, who was first"
    await fleet.until_serving("w0")
    assert (await fleet.worker("w0"))["incarnation"] == before["incarnation"]


async def test_streams_continue_when_an_agent_is_killed(fleet: CoreFleet) -> None:
    """Its engine follows; a new agent starts another incarnation."""
    calm = await fleet.calm(4, TOKENS)
    before = await fleet.worker("w0")

    async def kill(streams: dict[str, Stream]) -> None:
        await point.reached()
        await fleet.open_all()
        fleet.fleet.children["w0"].kill()

    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point:
        struck = await fleet.streams(4, TOKENS, fleet.named("agent"), kill)
    assert not whole(struck)
    await fleet.until_ended(struck)
    assert same(calm, struck) == []
    deadline = time.monotonic() + HANG_S
    while Path(f"/proc/{before['engine_pid']}").exists():
        assert time.monotonic() < deadline, "the engine outlives its agent"
        await asyncio.sleep(0.05)
    fleet.fleet.children["w0"].process.wait()
    fleet.fleet.restart("w0")
    await fleet.until_ready("w0", before["incarnation"] + 1)


async def test_streams_continue_when_a_worker_host_is_lost(fleet: CoreFleet) -> None:
    """Engine, agent and state daemon die at once, and none of them reports it: the lease ends the worker."""
    calm = await fleet.calm(4, TOKENS)

    async def kill(streams: dict[str, Stream]) -> None:
        hit = await point.reached()
        await fleet.open_all()
        fleet.fleet.children["w0"].kill()
        os.kill(hit.pid, signal.SIGKILL)
        os.kill(daemon_of(fleet, "w0"), signal.SIGKILL)

    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=20) as point:
        struck = await fleet.streams(4, TOKENS, fleet.named("host"), kill)
    assert not whole(struck)
    await fleet.until_ended(struck)
    assert same(calm, struck) == []
    await fleet.until_told(v.WorkerLost)


async def test_a_stream_whose_tokens_stay_within_its_engine_moves_alone(fleet: CoreFleet) -> None:
    """The engine computes it to its end; its HTTP server sends nothing more of it."""
    calm = await fleet.calm(4, 400)

    async def hold(streams: dict[str, Stream]) -> None:
        await point.reached()
        await fleet.open_all()

    async with fleet.at(Failpoint.ENGINE_FRAME, "w0", tokens=20) as point:
        struck = await fleet.streams(4, 400, fleet.named("stuck"), hold)
    assert not whole(struck)
    await fleet.until_ended(struck)
    assert same(calm, struck) == []
    (judged,) = [e for e in await fleet.events() if type(e) is v.StreamJudged]
    assert judged.stuck and judged.worker == "w0" and judged.silent_us < 3_000_000
    made = await fleet.routes(struck)
    assert sorted(len(routes) for routes in made.values()) == [1, 1, 1, 2]
    (moved,) = [routes[1] for routes in made.values() if len(routes) == 2]
    assert (moved.request, moved.cause, moved.mode) == (judged.request, "stuck", "continue")
    assert moved.delivered < 20 and moved.worker != "w0"


async def test_a_worker_that_answers_with_errors_draws_few_requests_and_serves_again(
    fleet: CoreFleet,
) -> None:
    """Its breaker opens; after its hold one request at a time probes it, and it closes."""
    await fleet.calm(12, 16)
    async with fleet.failpoints.armed(
        Failpoint.ENGINE_REQUEST, Action.FAIL, process="engine w1", times=0
    ):
        await decided(fleet, HealthState.UNHEALTHY)
        failed = [e for e in await fleet.events() if type(e) is v.TransportObserved]
        assert {(e.worker, e.kind, e.status) for e in failed} == {("w1", "engine_error", 500)}
        while_open = await fleet.streams(6, 16, fleet.named("open"))
        assert not whole(while_open)
    await decided(fleet, HealthState.PROBING)
    await decided(fleet, HealthState.HEALTHY)


async def decided(fleet: CoreFleet, state: HealthState) -> None:
    """Send requests until the leader has decided that w1 is in this state; none may break."""
    deadline, sent = time.monotonic() + HANG_S, 0
    while not any(
        type(e) is v.HealthDecided and (e.worker, e.state) == ("w1", state)
        for e in await fleet.events()
    ):
        assert time.monotonic() < deadline, [
            e for e in await fleet.events() if type(e) is v.HealthDecided
        ]
        sent += 1
        asked = await fleet.streams(12, 16, fleet.named(f"{state}{sent}"))
        assert not whole(asked)
        await fleet.until_ended(asked)


async def test_an_engine_whose_reports_nobody_can_read_gets_no_requests_until_they_can(
    fleet: CoreFleet,
) -> None:
    """Malformed steps come to the socket of its agent beside its own. No process ends by them."""
    calm = await fleet.calm(6, 24)
    pids = {name: child.pid for name, child in fleet.fleet.children.items()}
    worker = fleet.state.workers["w1"]
    socket = fleet.fleet.dir / "run" / "w1" / "agent.sock"
    garbled = GarbledReports({socket: worker.incarnation}, 1.0)
    await fleet.configure("health", window_ticks="6", dropped_ticks="2")
    try:
        await garbled.begin()
        try:
            await decided(fleet, HealthState.UNHEALTHY)
            meanwhile = await fleet.streams(6, 24, fleet.named("unread"))
        finally:
            await garbled.end()
        assert not whole(meanwhile)
        assert same(calm, meanwhile) == []
        await fleet.until_ended(meanwhile)
        decisions = [d for made in (await fleet.routes(meanwhile)).values() for d in made]
        assert "w1" not in {d.worker for d in decisions}
        dropped = [e for e in await fleet.events() if type(e) is v.ReportsDropped]
        assert {e.worker for e in dropped} == {"w1"} and "malformed" in dropped[0].reason
        await decided(fleet, HealthState.HEALTHY)
    finally:
        await fleet.configure("health", window_ticks="30", dropped_ticks="3")
    assert pids == {name: child.pid for name, child in fleet.fleet.children.items()}
    assert fleet.state.workers["w1"].incarnation == worker.incarnation


async def test_an_idle_engine_that_hangs_is_found_by_its_agent_and_restarted(
    fleet: CoreFleet,
) -> None:
    """The agent of w2 gives a hung engine two seconds to return, the others thirty."""
    calm = await fleet.calm(6, 24)
    worker = fleet.state.workers["w2"]
    incarnation = worker.incarnation
    stop(worker.engine_pid)
    await fleet.until_told(v.EngineHung)
    (hung,) = [e for e in await fleet.events() if type(e) is v.EngineHung]
    assert (hung.worker, hung.incarnation, hung.process_state) == ("w2", incarnation, "T")
    assert (hung.running, hung.step_age_us) == (0, 0)
    assert "the process is stopped" in Path(hung.stacks).read_text()
    meanwhile = await fleet.streams(6, 24, fleet.named("meanwhile"))
    assert not whole(meanwhile)
    assert same(calm, meanwhile) == []
    await fleet.until_told(v.EngineReady)
    (died,) = [e for e in await fleet.events() if type(e) is v.EngineDied]
    assert (died.worker, died.reason) == ("w2", "hung")
    await fleet.until_ended(meanwhile)
    assert "w2" not in {d.worker for made in (await fleet.routes(meanwhile)).values() for d in made}
