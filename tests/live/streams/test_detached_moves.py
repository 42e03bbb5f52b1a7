"""A worker drains while a client is away from its stream: the stream leaves as well, the
operator's wait ends, and the client finds its stream whole."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import aiohttp
import pytest

from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.policies.state.coverage import covered_tokens
from relume.policies.state.fleet import Fleet
from tests.live.checkpoints.test_checkpoints import Victim, padding, until_daemons, with_checkpoints
from tests.live.conftest import Scene, scene_of
from tests.live.resuming import Reader
from tests.live.streams.test_migration import sliced, troubles
from tests.live.streams.test_resumable import TEXT, asking
from tests.signals import let_work, stop

GRACE_S = 600
"""Far longer than this test: no wait ends because a client has been given up."""
TOKENS = 1500


@pytest.mark.usefixtures("patient")
async def test_stream_of_an_absent_client_leaves_a_draining_worker(options: FleetOptions) -> None:
    args = ("--resume-grace-s", str(GRACE_S))
    async with (
        scene_of(with_checkpoints(options, replica_args=args)) as scene,
        aiohttp.ClientSession() as session,
    ):
        await until_daemons(scene)
        url = f"{scene.url}/v1/completions"
        calm, away = Reader(name="calm"), Reader(name="away")
        body = asking(TOKENS, ignore_eos=True, prompt=TEXT + padding("away"))
        worker = await scene.until_ready("w0")
        for name in ("w1", "w2"):  # nobody else is to have the beginning in its prefix cache
            await scene.drain(name)
        await calm.read(session, url, body)

        stop(worker["engine_pid"])
        reading = asyncio.create_task(
            away.read(session, url, body, lambda reader: len(reader.events) >= 40)
        )
        while not reading.done():  # a moment at a time: it must not end before its client leaves
            await asyncio.to_thread(let_work, worker["engine_pid"])
            await asyncio.sleep(0.05)
        await reading
        for name in ("w1", "w2"):
            await scene.drain(name, "undrain")
        happened = await _drained(scene, worker, away)
        assert not away.done
        assert not [e for e in happened if type(e) is v.RequestEnded and e.request == away.request]
        await away.read(session, url)
        assert away.done and not away.error, (away.status, away.answer, away.events[-1:])
        assert len(set(away.ids)) == len(away.ids) == len(away.events)
        restored = {e.request for e in await scene.events() if type(e) is v.RestoreDone}
        assert restored == {away.request}, troubles(happened)
        left, right = calm.stream(TEXT), away.stream(TEXT)
        for name in ("tokens", "text", "finish", "usage"):
            assert getattr(left, name) == getattr(right, name), name
        scene.note(left, "one", undisturbed=True)
        scene.note(right, "one")
        await scene.drain("w0", "undrain")
        await scene.sound()


async def _drained(scene: Scene, worker: dict[str, Any], away: Reader) -> list[Any]:
    """`relume drain --wait` while the engine is run a moment at a time; what the log has then."""

    def moved(fleet: Fleet) -> bool:
        return away.request in fleet.requests and fleet.requests[away.request].attempt > 1

    def covered(fleet: Fleet) -> bool:
        placed = fleet.placed.get(away.request)
        return placed is not None and any(
            covered_tokens(fleet, h, away.request) >= 320 for h in placed.holders
        )

    victim = Victim(scene, worker)
    await victim.run_until(covered)
    command = ["-m", "relume.controlplane.cli.relume_command", "drain", "w0", "--force"]
    command += ["--wait", "240"]
    environ = {**os.environ, "RELUME_ADMIN_TOKEN": scene.fleet.admin_token}
    drain = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--admin", scene.fleet.admins[0],
        env=environ, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await sliced(victim, lambda fleet: fleet.workers["w0"].draining, 0.5)
        await sliced(victim, moved, 0.03)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    said, _ = await drain.communicate()
    happened = await scene.events()
    assert drain.returncode == 0 and b"w0 is empty" in said, (said, troubles(happened))
    plans = [e for e in happened if type(e) is v.MigrationPlanned]
    goes = [c for p in plans for c in p.choices if c.chosen >= 0]
    assert [c.request for c in goes] == [away.request] and plans[-1].cause == "drain"
    routes = [e for e in happened if type(e) is v.RouteDecided and e.request == away.request]
    assert [(e.cause, e.mode) for e in routes][1:] == [("moved", "continue")]
    seen = [e for e in happened if type(e) is v.TransportObserved]
    assert [(e.kind, e.request) for e in seen] == [("moved", away.request)]
    return happened
