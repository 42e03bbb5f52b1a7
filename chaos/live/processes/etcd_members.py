"""An etcd of one or more members on loopback; faults can strike single members."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import aiohttp
from aetcd import rpc

from relume.chaos.live.errors import LiveError
from relume.chaos.live.faults.peer_links import PeerLinks
from relume.chaos.live.processes.signals import kill
from relume.chaos.memory_folder import memory_folder
from relume.controlplane.local.child_processes import Child, free_port
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.errors import LeaseGone
from relume.events.etcd.maintenance import NOSPACE, Maintenance
from relume.events.log.errors import LogError

HEARTBEAT_MS = 50
"""Short enough for elections within a second; etcd then grants leases of one second or more."""

HEALTHY_S = 60.0


class Etcd:
    """An async context manager: inside, all members answer; outside, nothing is left.

    Data lies in memory if possible: fsync costs nothing there. `quota_bytes` 0: etcd's default.
    `linked`: members reach each other by way of `links`, which can be cut.
    """

    def __init__(self, members: int, quota_bytes: int = 0, *, linked: bool = False) -> None:
        self.names = tuple(f"e{index}" for index in range(members))
        self._quota_bytes = quota_bytes
        self._client_ports = [free_port() for _ in self.names]
        self._listen_ports = [free_port() for _ in self.names]
        self._peer_ports = self._listen_ports
        self.links: PeerLinks | None = None
        if linked:
            self._peer_ports = [free_port() for _ in self.names]
            ports = dict(zip(self.names, self._peer_ports, strict=True))
            targets = dict(zip(self.names, self._listen_ports, strict=True))
            self.links = PeerLinks(ports, targets, self._pids)
        self._children: dict[str, Child] = {}
        self._dir = Path()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """`host:port` of every member."""
        return tuple(f"127.0.0.1:{port}" for port in self._client_ports)

    def endpoint(self, name: str) -> str:
        return self.endpoints[self.names.index(name)]

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def _pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items() if child.alive}

    async def __aenter__(self) -> Self:
        self._dir = Path(tempfile.mkdtemp(prefix="relume-chaos-etcd-", dir=memory_folder()))
        try:
            if self.links is not None:
                await self.links.__aenter__()
            for name in self.names:
                self._start(name)
            await self.healthy()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children.values():
            if child.alive:
                child.kill()
        for child in self._children.values():
            await asyncio.to_thread(child.process.wait)
        if self.links is not None:
            await self.links.__aexit__()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _start(self, name: str, *, joins: bool = False) -> None:
        """`joins`: it is a new member of a cluster that exists."""
        binary = os.environ.get("RELUME_ETCD") or shutil.which("etcd")
        if binary is None:
            raise LiveError("no etcd found: set RELUME_ETCD to its path")
        index = self.names.index(name)
        client = f"http://127.0.0.1:{self._client_ports[index]}"
        listens = f"http://127.0.0.1:{self._listen_ports[index]}"
        peer = f"http://127.0.0.1:{self._peer_ports[index]}"
        argv = [
            binary, "--name", name, "--data-dir", str(self._dir / name),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", listens, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", self._cluster(),
            "--heartbeat-interval", str(HEARTBEAT_MS), "--election-timeout", str(10 * HEARTBEAT_MS),
            "--quota-backend-bytes", str(self._quota_bytes), "--log-level", "error",
            "--initial-cluster-state", "existing" if joins else "new",
        ]  # fmt: skip
        self._children[name] = Child.start(name, argv, self._dir / f"{name}.log")

    def _cluster(self) -> str:
        peers = zip(self.names, self._peer_ports, strict=True)
        return ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peers)

    async def healthy(self, names: Sequence[str] = ()) -> None:
        """Wait until these members (default: all) answer. Raises LiveError."""
        deadline = time.monotonic() + HEALTHY_S
        for name in names or self.names:
            while not await self._answers(name):
                if not self._children[name].alive:
                    raise LiveError(f"etcd {name} ended: {self._children[name].tail()}")
                if time.monotonic() > deadline:
                    raise LiveError(f"etcd {name} does not answer: {self._children[name].tail()}")
                await asyncio.sleep(0.05)

    async def _answers(self, name: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=2)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                async with session.get(f"http://{self.endpoint(name)}/health") as answer:
                    return b"true" in await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def leader(self) -> str:
        """The member that leads; if none claims to, the first one."""
        timeout = aiohttp.ClientTimeout(total=2)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for name in self.names:
                try:
                    async with session.get(f"http://{self.endpoint(name)}/metrics") as answer:
                        if b"\netcd_server_is_leader 1\n" in await answer.read():
                            return name
                except (aiohttp.ClientError, TimeoutError, OSError):
                    continue
        return self.names[0]

    def kill(self, name: str) -> None:
        """SIGKILL a member; its data stays."""
        kill(self.pid(name))
        self._children[name].process.wait()

    async def restart(self, name: str) -> None:
        """Restart a killed member on its data; no effect on one that runs."""
        if not self._children[name].alive:
            self._start(name)
        await self.healthy((name,))

    async def defragment(self, name: str) -> None:
        """Defragment the database of a member. Raises LogError."""
        async with EtcdClient(EtcdConfig(endpoints=self.endpoints)) as client:
            await client.defragment(self.endpoint(name))

    async def age_leases(self, prefix: str, seconds: float = 0.0, share: float = 0.0) -> int:
        """Leases of keys under `prefix` have `seconds` less left, or that `share` of their whole time:
        etcd revokes those that had no more. Returns how many. A lease that had more keeps its time.
        Raises LogError."""
        revoked = 0
        async with EtcdClient(EtcdConfig(endpoints=self.endpoints)) as client:
            for lease in (await client.call("LeaseLeases", rpc.LeaseLeasesRequest())).leases:
                request = rpc.LeaseTimeToLiveRequest(ID=lease.ID, keys=True)
                left = await client.call("LeaseTimeToLive", request)
                if 0 <= left.TTL < max(seconds, share * left.grantedTTL) and any(
                    key.startswith(prefix.encode()) for key in left.keys
                ):
                    with suppress(LeaseGone):
                        await client.lease_revoke(lease.ID)
                        revoked += 1
        return revoked

    async def replace(self, name: str) -> None:
        """Remove a member with its data, and have a new one take its place. etcd refuses a change of
        members within 5 s of another one, or of a member's start: it is tried again. Raises LogError,
        LiveError."""
        others = tuple(self.endpoint(other) for other in self.names if other != name)
        peer = f"http://127.0.0.1:{self._peer_ports[self.names.index(name)]}"
        async with EtcdClient(EtcdConfig(endpoints=others)) as client:
            known = {member.name: member.ID for member in (await client.members()).members}
            await _until_accepted(client, "MemberRemove", rpc.MemberRemoveRequest(ID=known[name]))
            if self._children[name].alive:
                self.kill(name)
            shutil.rmtree(self._dir / name)
            await _until_accepted(client, "MemberAdd", rpc.MemberAddRequest(peerURLs=[peer]))
        self._start(name, joins=True)
        await self.healthy((name,))

    async def back_up(self, backup: Path) -> None:
        """Save a backup of all that etcd has. Raises LiveError."""
        await _etcdctl("--endpoints", self.endpoints[0], "snapshot", "save", str(backup))

    async def restore(self, backup: Path) -> None:
        """End all members, and start them on what `backup` has, as the page about disasters says. Raises
        LiveError."""
        for child in self._children.values():
            if child.alive:
                child.kill()
                await asyncio.to_thread(child.process.wait)
        token = f"restored-{time.time_ns()}"
        for name, port in zip(self.names, self._peer_ports, strict=True):
            shutil.rmtree(self._dir / name)
            await _etcdctl(
                "snapshot", "restore", str(backup), "--name", name, "--data-dir",
                str(self._dir / name), "--initial-cluster", self._cluster(),
                "--initial-cluster-token", token,
                "--initial-advertise-peer-urls", f"http://127.0.0.1:{port}",
            )  # fmt: skip
        for name in self.names:
            self._start(name)
        await self.healthy()

    async def fill(self) -> None:
        """Raise the alarm of a full database at every member: etcd then refuses puts and lease
        grants. Raises LogError."""
        async with EtcdClient(EtcdConfig(endpoints=self.endpoints)) as client:
            for member in (await Maintenance(client).space()).members:
                request = rpc.AlarmRequest(action=1, memberID=member.member, alarm=NOSPACE)
                await client.call("Alarm", request)

    async def full(self) -> bool:
        """Whether any member has raised an alarm; False if none answers."""
        async with EtcdClient(EtcdConfig(endpoints=self.endpoints)) as client:
            try:
                return any(m.full for m in (await Maintenance(client).space()).members)
            except LogError:
                return False

    async def empty(self) -> None:
        """Lift the alarm. Raises LogError."""
        async with EtcdClient(EtcdConfig(endpoints=self.endpoints)) as client:
            maintenance = Maintenance(client)
            await maintenance.disarm(await maintenance.space())


def etcdctl() -> str | None:
    """Path of etcdctl: RELUME_ETCDCTL, else PATH; None where there is none."""
    return os.environ.get("RELUME_ETCDCTL") or shutil.which("etcdctl")


async def _etcdctl(*argv: str) -> None:
    process = await asyncio.create_subprocess_exec(
        etcdctl() or "etcdctl", *argv, env={**os.environ, "ETCDCTL_API": "3"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output = (await process.communicate())[0].decode(errors="replace")
    if process.returncode:
        raise LiveError(f"etcdctl {' '.join(argv[:4])}: {output}")


async def _until_accepted(client: EtcdClient, method: str, request: object) -> None:
    deadline = time.monotonic() + HEALTHY_S
    while True:
        try:
            await client.call(method, request)
        except LogError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
        else:
            return
