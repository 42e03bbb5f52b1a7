"""Records `logs/engine-killed.rlog` anew: `python -m tests.replay.record` in the repository's
root, with a model and etcd. To be done when the state's shape changed, since hashes of
another shape do not compare, and a stored log is then anchored by its footer alone.

Four workers with checkpoints; one engine is killed when all its streams have blocks
elsewhere, so that one plan takes them up, partly from these.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

import msgspec

from relume.chaos.traffic import Stream
from relume.controlplane.local_fleet import ENGINE_ENV
from relume.controlplane.processes import Child
from relume.controlplane.replay.store import save
from relume.events import vocabulary as v
from tests.live.conftest import scene_of, small_fleet, whole
from tests.live.test_checkpoints import Victim, padding, until_daemons

PATH = Path(__file__).parent / "logs" / "engine-killed.rlog"
COUNT = 56
TOKENS = 150
NOTE = "56 streams over four workers with checkpoints, one engine killed"


async def recorded(folder: Path, zygote: str) -> None:
    """Run the fleet and store its log. Raises AssertionError when it was not the run wanted."""
    options = msgspec.structs.replace(
        small_fleet(folder, zygote=zygote),
        workers=4,
        checkpoint_mb=64,
        # The victim is stopped at times, which on a busy machine is long enough to be noticed.
        replica_args=(
            "--policy",
            "least_load",
            "--stall-floor-ms",
            "60000",
            "--stall-cap-ms",
            "60000",
        ),
    )
    async with scene_of(options) as scene:
        await until_daemons(scene, 4)
        worker = await scene.until_ready("w0")

        async def kill(streams: dict[str, Stream]) -> None:
            victim = Victim(scene, worker)
            await victim.take(streams)
            await victim.run_until(victim.covered)
            os.kill(victim.pid, signal.SIGKILL)

        told = await scene.streams(COUNT, TOKENS, "hit", kill, padding=padding("hit"))
        assert not whole(told)
        await scene.until_ready("w0", worker["incarnation"] + 1)
        verdict = await scene.sound(but=("I2", "I14"))  # nothing to compare with
        assert verdict.hashes > 3, verdict
        events = await scene.events()
        for kind in (v.RecoveryPlanned, v.RestoreDone, v.EngineDied):
            assert any(type(e) is kind for e in events), f"no {kind.__name__}"
        PATH.unlink(missing_ok=True)
        footer = save(PATH, await scene.log(), None, "etcd", NOTE)
        print(
            f"{footer.records} records, {verdict.contested} decisions, {PATH.stat().st_size} bytes"
        )


async def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        socket = folder / "z.sock"
        command = [sys.executable, "-m", "relume.engine_shim.zygote", "--socket", str(socket)]
        child = Child.start("zygote", command, folder / "zygote.log", ENGINE_ENV)
        try:
            while not socket.exists():
                assert child.alive, child.tail(40)
                await asyncio.sleep(0.1)
            await recorded(folder / "fleet", str(socket))
        finally:
            await child.stop()


if __name__ == "__main__":
    asyncio.run(main())
