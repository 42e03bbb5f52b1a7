"""Ports for the processes of a local fleet, and their end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relume.controlplane.local.child_processes import free_port
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from tests.full_disk import full_disk


def test_ports_lie_below_the_ephemeral_range_and_none_is_given_twice() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [free_port() for _ in range(50)]
    assert max(ports) < low and len(set(ports)) == 50


def test_the_preferred_port_is_given_while_it_is_free() -> None:
    port = free_port()
    assert free_port(port) == port
    with socket.create_server(("127.0.0.1", port)):
        assert free_port(port) != port


def test_a_child_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    """Without Python between fork and exec, which crashes where gRPC has threads."""
    code = (
        "import sys, time; from pathlib import Path; from relume.controlplane.local.child_processes import Child\n"
        "print(Child.start('c', ['sleep', '300'], Path(sys.argv[1])).pid, flush=True)\n"
        "time.sleep(300)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        deadline = time.monotonic() + 20
        while not Path(f"/proc/{pid}/cmdline").read_text().startswith("sleep"):
            assert time.monotonic() < deadline, "it was not started"
            time.sleep(0.02)
        parent.kill()
    while _runs(pid):
        assert time.monotonic() < deadline, "it goes on"
        time.sleep(0.02)


@pytest.mark.full
async def test_what_dies_on_a_full_disk_is_restarted_and_shown_when_there_is_room(
    tmp_path: Path,
) -> None:
    fleet = LocalFleet(FleetOptions(state_dir=str(tmp_path)), lambda text: None)
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "fleet.json"
    first = fleet._child("c", ["sleep", "300"])
    fleet._write_fleet_file()
    told = file.read_bytes()
    supervising = asyncio.create_task(fleet.supervise())
    try:
        async with asyncio.timeout(30):
            with full_disk():
                first.kill()
                while fleet.children["c"].pid == first.pid:
                    await asyncio.sleep(0.05)
                assert file.read_bytes() == told, "what stood there still does"
            pids = {"c": fleet.children["c"].pid}
            while json.loads(file.read_bytes())["pids"] != pids:
                await asyncio.sleep(0.05)
        assert not supervising.done() and file.stat().st_mode & 0o777 == 0o600
    finally:
        supervising.cancel()
        await fleet.stop()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
