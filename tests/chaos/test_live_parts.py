"""The parts of live runs that need no fleet: what is scaled, how links are cut, starts fail,
memory is struck, and when a fault is due."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from relume.chaos.live import applicable, sets
from relume.chaos.live.errors import CannotStrike
from relume.chaos.live.faults import daemon_memory
from relume.chaos.live.faults.live_faults import Faults
from relume.chaos.live.faults.lossy_messages import Disturbance, Disturber
from relume.chaos.live.faults.tcp_links import Link
from relume.chaos.live.live_clients import TOKENS, body_of
from relume.chaos.live.log_watch import PHASE_S, Watch
from relume.chaos.live.processes import signals
from relume.chaos.live.processes.engine_forks import Forks
from relume.chaos.live.processes.fleet_host import CLOCK
from relume.chaos.live.processes.settings_flags import flags_of, without_flag
from relume.chaos.live.scale import LEASE_S, MOST_CLIENTS, MOST_WORKERS, TIMES, scaled
from relume.chaos.phases import Seen
from relume.chaos.scenario import scenario_reader
from relume.chaos.scenario.catalogue import FAULTS, PHASES
from relume.chaos.scenario.schedule import PlannedFault, Request, expand
from relume.chaos.sim.world.replica_settings import PARTS, replica_config
from relume.controlplane.admin.settings import KNOWN
from relume.controlplane.replica.loop import ReplicaConfig
from relume.controlplane.replica.serve import _replica_config
from relume.controlplane.serve_settings import ServeConfig, load
from relume.engine_shim.checkpoints.link.block_stream import BlockOut, gather, scatter
from relume.events import vocabulary as v
from relume.events.log.memory import MemoryLog
from relume.events.settings.flags import add_flags
from relume.policies.state.fleet import Request as Live
from tests.kv_stream.transports import SECRET, ins, outs, served
from tests.pace import turns
from tests.state_daemon.daemon import (
    Cache,
    daemon_in,
    local,
    peer_of,
    remote,
    stats,
    tokens_of,
)
from tests.state_daemon.pieces import scatter_in_pieces

IMAGE = 16384
"""Bytes of a block of `Cache`."""


async def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not found():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_every_fault_has_a_method_or_a_reason() -> None:
    for what in FAULTS:
        has = hasattr(Faults, "_" + what.replace("-", "_"))
        assert has or applicable.why_not(what), f"{what} strikes nothing live and has no reason"


@pytest.mark.full
def test_what_cannot_run_is_reported_and_left_out() -> None:
    impossible = sets.impossible()
    assert "elastic_tp" in impossible["rank-killed"][0]
    assert not set(impossible) & set(sets.names_of("nightly"))
    assert set(sets.names_of("ci")) == set(sets.CI) - set(impossible)
    struck = {
        fault.what for name in sets.names_of("nightly") for fault in sets.scenario_of(name).faults
    }
    assert struck == {what for what in FAULTS if not applicable.why_not(what)}


def test_settings_of_a_fleet_become_flags_of_its_replicas() -> None:
    """Those without a flag are a reason not to run live."""
    given = {
        key: setting.choices[0] if setting.choices else int(setting.least or 0)
        for key, setting in KNOWN.items()
    }
    given["routing.policy"] = "round_robin"
    left = [*without_flag(given)]
    assert {key.partition(".")[0] for key in left} == {"stall", "checkpoints", "routing"}
    assert "routing.overfill" in left and "checkpoints.alpha" in left
    calm = scenario_reader.load(scenario_reader.find("calm"))
    fleet = msgspec.structs.replace(
        calm.fleet, settings={key: value for key, value in given.items() if key not in left}
    )
    parser = ArgumentParser()
    add_flags(parser, ServeConfig)
    flags = vars(parser.parse_args(flags_of(fleet.settings)))
    live = _replica_config(load({**flags, "config": None}, {}))
    simulated = replica_config(fleet, ReplicaConfig())
    assert simulated.policy == live.policy != ReplicaConfig().policy
    for part in PARTS.values():
        assert getattr(simulated, part) == getattr(live, part) or part == "stall", part

    for settings, why in (({"waiting.queued": 2}, ()), (given, (", ".join(left),))):
        fleet = msgspec.structs.replace(calm.fleet, settings=settings)
        found = applicable.obstacles(msgspec.structs.replace(calm, fleet=fleet))
        assert [one.rpartition(": ")[2] for one in found] == [*why]


def test_a_schedule_is_cut_to_the_machine_and_says_so() -> None:
    scenario = scenario_reader.load(scenario_reader.find("agent-stopped"))
    more = msgspec.structs.replace(scenario.fleet, workers=MOST_WORKERS + 2)
    scenario = msgspec.structs.replace(scenario, fleet=more)
    schedule = expand(scenario, 3)
    small, fitted, notes = scaled(scenario, schedule)
    assert small.fleet.workers == len(fitted.workers) == MOST_WORKERS < len(schedule.workers)
    assert len(fitted.requests) == 48 and len(schedule.requests) == 96
    assert set(fitted.requests) < set(schedule.requests)
    names = {request.name for request in fitted.requests}
    assert sum(r.after is None for r in fitted.requests) == MOST_CLIENTS
    assert {r.after for r in fitted.requests} - {None} < names
    assert next(b for b in small.expect if b.figure == "requests").least == 48
    (was,), (now,) = schedule.faults, fitted.faults
    assert was.at_ns and was.for_ns
    assert (now.at_ns, now.for_ns) == (round(was.at_ns * TIMES), round(was.for_ns * TIMES))
    assert now.for_ns > LEASE_S * 1e9, "it still lasts longer than a lease"
    assert now.target in fitted.workers
    assert notes and all(note in small.about for note in notes)


def test_where_clients_are_fewer_fewer_events_are_waited_for() -> None:
    """Of a dead engine fewer streams go on elsewhere: the fifth may never come."""
    scenario = scenario_reader.load(scenario_reader.find("cascade"))
    schedule = expand(scenario, 0)
    _, fitted, notes = scaled(scenario, schedule)
    assert [planned.nth for planned in schedule.faults][2] in (4, 5)
    assert [planned.nth for planned in fitted.faults][1:] == [1, 2]
    assert fitted.faults[0].nth < schedule.faults[0].nth
    assert any("x 0.33" in note for note in notes)


def test_equal_requests_get_equal_bodies_and_shared_prefixes() -> None:
    one = Request(
        name="q0", at_ns=0, prompt_tokens=40, output_tokens=9, prefix=(1, 2), prefix_block=16
    )
    other = Request(
        name="q1", at_ns=0, prompt_tokens=40, output_tokens=9, prefix=(1, 3), prefix_block=16
    )
    assert body_of(one, 5, "m") == body_of(one, 5, "m")
    a, b = body_of(one, 5, "m")["prompt"], body_of(other, 5, "m")["prompt"]
    assert len(a) == len(b) == 40 and set(a) <= set(TOKENS)
    assert a[:16] == b[:16] and a[16:32] != b[16:32]


async def test_a_cut_link_holds_what_it_takes_in_the_direction_that_is_cut() -> None:
    got: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            got.append(data)
            writer.write(data)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with Link(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"1")
        assert await reader.read(9) == b"1"
        link.cut("fro")
        writer.write(b"2")
        await until(lambda: got[-1] == b"2")
        back = asyncio.create_task(reader.read(9))
        await turns()
        assert not back.done()
        link.mend()
        assert await back == b"2"
        link.cut()
        writer.write(b"3")
        await turns()
        assert got[-1] == b"2"
        link.mend()
        assert await reader.read(9) == b"3"
        link.delay_s = 0.2
        began = time.monotonic()
        writer.write(b"4")
        assert await reader.read(9) == b"4"
        assert time.monotonic() - began > 0.4, "late in both directions"
        writer.close()
    server.close()


async def test_a_torn_link_breaks_the_next_frame_and_nothing_else() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with Link(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        link.tear(lambda size: size - 3)
        writer.write(b"no frame")
        assert await reader.readexactly(8) == b"no frame"
        writer.write(b":r 0 2 7\nab")
        assert await reader.read() == b":r 0 2 7"
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b":r 0 2 7\nab")
        assert await reader.readexactly(11) == b":r 0 2 7\nab"
        writer.close()
    server.close()


async def test_a_link_sends_what_its_target_has_not_sent() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with Link(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as link:
        assert link.send(b"to no client") == 0
        ends = [await asyncio.open_connection("127.0.0.1", link.port) for _ in range(2)]
        for reader, writer in ends:
            writer.write(b"mine")
            assert await reader.readexactly(4) == b"mine"
        assert link.send(b"forged") == 2
        for reader, writer in ends:
            assert await reader.readexactly(6) == b"forged"
            writer.close()
            await reader.read()
        while link.send(b"to no client"):
            await asyncio.sleep(0.01)
    server.close()


async def test_a_fixed_number_of_starts_of_one_worker_fails(tmp_path: Path) -> None:
    orders: list[dict[str, Any]] = []

    async def zygote(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        orders.append(json.loads(await reader.readline()))
        writer.write(b'{"pid":1}\n')
        writer.close()

    server = await asyncio.start_unix_server(zygote, tmp_path / "z")
    async with Forks(tmp_path / "f", str(tmp_path / "z")) as forks:
        forks.fail["w1"] = 1
        for worker in ("w0", "w1", "w1"):
            reader, writer = await asyncio.open_unix_connection(forks.path)
            order = {"cmd": "fork", "env": {"RELUME_WORKER": worker}, "argv": ["--model", "m"]}
            writer.write(json.dumps(order).encode() + b"\n")
            assert await reader.readline() == b'{"pid":1}\n'
            writer.close()
    server.close()
    assert [order["argv"][1] for order in orders] == ["m", "m.gone", "m"]


def test_flipped_blocks_are_found_out_and_a_shrunken_budget_is_kept(tmp_path: Path) -> None:
    count = 60
    cache = Cache(count, seed=3)
    with daemon_in(tmp_path) as daemon:
        with peer_of(local(daemon.socket)) as peer:
            assert daemon.process is not None
            pid = daemon.process.pid
            assert daemon_memory.flip(pid, 5, Random(1)) == 0, "it holds nothing"
            assert scatter(cache, outs(count), peer) == count and peer.drained(10)
            before = stats(daemon)
            config = next(tmp_path.rglob("*.json"))
            daemon_memory.shrink(config, pid, before["memory_used"] / 2 / before["memory_budget"])
            deadline = time.monotonic() + 20
            while (after := stats(daemon))["memory_used"] > before["memory_used"] // 2:
                assert time.monotonic() < deadline, after
                time.sleep(0.05)
            assert 0 < after["blocks"] < count and after["evicted"]
            assert after["memory_budget"] < before["memory_budget"]
            daemon_memory.shrink(config, pid, 1.0)
            while stats(daemon)["memory_budget"] != before["memory_budget"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert daemon_memory.flip(pid, 10_000, Random(1)) > 0
            found = gather(Cache(count, seed=4), ins(after["blocks"]), peer, "a", 0, 0, 5.0)
            assert found.failure == "corrupt" and found.blocks == 0


@pytest.mark.full
def test_a_full_disk_takes_nothing_gives_what_it_has_and_takes_again(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir()
    options = {
        "budget_bytes": 8 * IMAGE, "file_directory": str(tmp_path / "cold"),
        "file_budget_bytes": 64 * IMAGE, "cold_after_s": 0.0,
    }  # fmt: skip
    refused: list[str] = []
    with daemon_in(tmp_path / "daemon", **options) as daemon:
        assert daemon.process is not None
        pid = daemon.process.pid

        def note(piece: Any, code: str) -> None:
            refused.append(code)

        with peer_of(local(daemon.socket), on_refused=note) as peer:
            assert daemon_memory.filed(pid) == 0

            def put(request: str, count: int) -> dict[str, int]:
                for index in range(count):
                    block = BlockOut(
                        request=request,
                        child=0,
                        rank=0,
                        index=index,
                        attempt=1,
                        block_id=index,
                        tokens=tokens_of(index),
                    )
                    assert scatter(Cache(24, seed=len(request)), [block], peer) == 1
                    assert peer.drained(10)
                return stats(daemon)

            put("a", 8)
            before = put("bb", 3)
            assert before["demoted"] == 3 and daemon_memory.filed(pid) > 2 * IMAGE and not refused
            daemon_memory.fill(pid)
            during = put("ccc", 4)
            assert during["demoted"] == 3 and set(refused) == {"budget"}
            loaded = gather(Cache(24, seed=9), ins(8), peer, "a", 0, 0, 10.0)
            assert loaded.blocks == 8 and loaded.failure == ""
            daemon_memory.allow_writes(pid)
            assert put("dddd", 4)["demoted"] > 3


@pytest.mark.full
async def test_messages_with_blocks_are_repeated_reordered_and_lost(tmp_path: Path) -> None:
    count = 120
    source, target = Cache(count, seed=3), Cache(count, seed=4)
    with served(tmp_path, "plain") as (daemon, fleet):
        async with Disturber() as disturber:
            disturber.target = fleet.plain_port
            with peer_of(remote(disturber.port), secret=SECRET) as peer:
                await until(lambda: bool(peer.boot))
                disturber.disturb = Disturbance(twice=0.5, late=0.5)
                # Piece by piece, in a thread: many messages, and the link's loop goes on.
                half = outs(count // 2)
                done = await asyncio.to_thread(scatter_in_pieces, source, half, peer)
                assert done == count // 2 and await asyncio.to_thread(peer.drained, 20)
                assert disturber.done["twice"] and stats(daemon)["blocks"] == count // 2
                disturber.disturb = Disturbance(lost=1.0)
                rest = outs(count - count // 2, first=count // 2)
                await asyncio.to_thread(scatter, source, rest, peer)
                await until(lambda: disturber.done["lost"] > 0)
                assert stats(daemon)["blocks"] == count // 2, "they are lost"
                disturber.disturb = Disturbance()
                loaded = await asyncio.to_thread(
                    gather, target, ins(count // 2), peer, "a", 0, 0, 10.0
                )
                assert loaded.blocks == count // 2


def test_a_clock_is_wrong_by_what_its_file_says_and_only_where_that_is_named(
    tmp_path: Path,
) -> None:
    file = tmp_path / "clock"
    file.write_text("3600")
    code = "import time; print(time.time(), time.time_ns() / 1e9)"
    for named, wrong in (({"RELUME_CLOCK": str(file)}, 3600), ({}, 0)):
        env = {**os.environ, "PYTHONPATH": str(CLOCK), **named}
        said = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert all(abs(float(told) - time.time() - wrong) < 300 for told in said.stdout.split())


async def test_a_stopped_process_stands_and_a_slow_one_is_let_go() -> None:
    child = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        assert await signals.stop(child.pid)
        assert signals.state_of(Path(f"/proc/{child.pid}")) == "T"
        slowing = asyncio.create_task(signals.slow(child.pid, 4))
        for state in "STST":
            await until(lambda: signals.state_of(Path(f"/proc/{child.pid}")) == state)  # noqa: B023
        slowing.cancel()
        await asyncio.gather(slowing, return_exceptions=True)
        await until(lambda: signals.state_of(Path(f"/proc/{child.pid}")) == "S")
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        assert not await signals.stop(child.pid) and not signals.there(child.pid)
    finally:
        if child.returncode is None:
            child.kill()


async def test_a_fault_is_due_at_the_nth_matching_event_and_knows_its_subject() -> None:
    log = MemoryLog()
    watch = Watch()
    following = asyncio.create_task(watch.follow(log))
    planned = PlannedFault(
        name="f0",
        what="engine-kill",
        target="subject",
        event="EngineReady",
        where={"port": 7},
        nth=2,
    )
    due = watch.due(planned)
    async with log.writer("w.w3") as writer:
        for incarnation, port in ((1, 7), (2, 8), (3, 7)):
            writer.append(v.EngineStarted("w3", incarnation, 5, 6))
            writer.append(
                v.EngineReady(
                    worker="w3",
                    incarnation=incarnation,
                    host="h",
                    port=port,
                    model="m",
                    max_model_len=9,
                    block_size=16,
                    kv_blocks=4,
                )
            )
            await writer.flush(5)
    async with asyncio.timeout(20):
        seen = await due
    following.cancel()
    assert seen.event.incarnation == 3
    assert watch.subject("worker", seen) == "w3"
    assert watch.phases.length_s("engine-start") < PHASE_S["engine-start"], "those seen count"
    assert not watch.phases.is_in("engine-start", seen.event)


async def test_what_came_while_a_fault_found_nothing_to_strike_is_not_missed() -> None:
    """Found by cascade 0 on real processes: whom it waited for was dead by then, and those whose
    requests moved on had been told of meanwhile."""
    log = MemoryLog()
    watch = Watch()
    following = asyncio.create_task(watch.follow(log))
    planned = PlannedFault(
        name="f0", what="engine-kill", target="subject", event="EngineReady", where={"port": 7}
    )
    due = watch.due(planned)
    async with log.writer("w.w3") as writer:
        for incarnation, port in ((1, 7), (2, 8), (3, 7)):
            writer.append(
                v.EngineReady(
                    worker="w3",
                    incarnation=incarnation,
                    host="h",
                    port=port,
                    model="m",
                    max_model_len=9,
                    block_size=16,
                    kv_blocks=4,
                )
            )
        await writer.flush(5)
        await until(lambda: watch.count("EngineReady") == 3)
        assert (await due).event.incarnation == 1
        again = watch.due(planned, behind=due.result())
        assert again.result().event.incarnation == 3
        third = watch.due(planned, behind=again.result())
        assert not third.done()
        writer.append(
            v.EngineReady(
                worker="w3",
                incarnation=4,
                host="h",
                port=7,
                model="m",
                max_model_len=9,
                block_size=16,
                kv_blocks=4,
            )
        )
        await writer.flush(5)
        async with asyncio.timeout(20):
            assert (await third).event.incarnation == 4
    following.cancel()


async def test_who_was_killed_is_not_killed_again() -> None:
    """Found by cascade 2 on real processes: the third death was the second one once more."""
    process = subprocess.Popen(["sleep", "60"])
    host: Any = SimpleNamespace(engine_pid=lambda worker: process.pid, clock_of=Path)
    faults = Faults(host, Watch(), None, 0)  # type: ignore[arg-type]
    planned = PlannedFault(name="f0", what="engine-kill", target="w0")
    assert await faults.strike(planned, ["w0"]) == (None, f"w0 {process.pid}")
    with pytest.raises(CannotStrike):
        await faults.strike(planned, ["w0"])  # a zombie: nobody has waited for it yet
    assert process.wait() == -signal.SIGKILL


def test_the_subject_of_a_plan_is_who_takes_over() -> None:
    options = tuple(
        v.RecoveryOption(
            worker=w,
            kind="recompute",
            holder="",
            restored=0,
            wait_us=0,
            move_us=0,
            compute_us=0,
            done_us=0,
        )
        for w in ("w1", "w2")
    )
    choice = v.RecoveryChoice(request="q", attempt=1, tokens=10, chosen=1, options=options)
    plan = v.RecoveryPlanned(
        decision="d",
        basis=v.Basis(1, 0),
        worker="w0",
        incarnation=1,
        policy="completion",
        choices=(choice,),
    )
    assert Watch().subject("worker", Seen("r.r0", plan, 0.0)) == "w2"
    assert set(PHASE_S) == set(PHASES)


def test_the_subject_of_what_is_held_is_who_runs_it_and_not_the_holder() -> None:
    watch = Watch()
    for name, worker in (("long", "w1"), ("short", "w2")):
        watch.fleet.requests[name] = Live(
            request=name,
            owner="r0",
            boot="",
            model="m",
            stream=True,
            prompt_tokens=9,
            verdict="exact",
            worker=worker,
        )
    held = tuple(
        v.HeldPrefix(request=name, child=0, attempt=1, blocks=tokens // 32, tokens=tokens, bytes=9)
        for name, tokens in (("gone", 32), ("long", 640), ("short", 64))
    )
    told = v.CheckpointsAcknowledged("w3", "boot", held)
    assert watch.subject("worker", Seen("w.w3", told, 0.0)) == "w2"
    nobody = v.CheckpointsAcknowledged("w3", "boot", held[:1])
    assert watch.subject("worker", Seen("w.w3", nobody, 0.0)) == ""
