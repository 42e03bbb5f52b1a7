"""The directory of an engine's sockets: short, private, and gone with what it was for."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

from relume.engine_shim.agent.engine_process import ipc_directory
from relume.events import vocabulary as v
from tests.agent.stage import staged


def test_a_path_that_is_too_long_gives_way_to_a_short_one_that_is_the_same_each_time(
    tmp_path: Path,
) -> None:
    longest = Path("/" + "d" * (107 - 37 - len("/ipc") - 1))
    assert ipc_directory.ipc_path(longest) == longest / "ipc"
    over = longest.with_name(longest.name + "d")
    short = ipc_directory.ipc_path(over)
    assert short == ipc_directory.ipc_path(over) != ipc_directory.ipc_path(over.with_name("e" * 70))
    assert len(os.fsencode(short)) + 37 <= 107
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    path = ipc_directory.renew(deep)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700 and deep not in path.parents
    ipc_directory.remove(deep)
    assert not path.exists()


def test_what_is_not_a_directory_of_ours_is_left_alone(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    ipc_directory.ipc_path(tmp_path).symlink_to(kept)
    ipc_directory.remove(tmp_path)
    assert (kept / "file").exists()


async def test_each_engine_finds_it_empty_and_it_goes_with_the_worker(tmp_path: Path) -> None:
    run = tmp_path / "run"
    path = ipc_directory.ipc_path(run)
    left = path / "left-by-a-killed-engine"
    async with staged(run) as stage:
        for number in (1, 2):
            await stage.nth(v.EngineReady, number)
            pid = stage.agent.describe()["engine"]["pid"]
            told = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert f"VLLM_RPC_BASE_PATH={path}".encode() in told
            assert [*path.iterdir()] == []
            left.touch()
            if number == 1:
                os.kill(pid, signal.SIGKILL)
    assert not path.exists()
