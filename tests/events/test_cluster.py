"""Clusters that lose members, run full, or want to know who we are."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from aetcd import rpc

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import EtcdConfig, TlsConfig, parse_url
from relume.events.etcd.errors import AccessRefused, BadUrl, NoSpace
from relume.events.etcd.factory import EtcdLog, open_log
from relume.events.log.errors import LogUnavailable
from relume.events.log.interface import LandedSegment
from tests.etcd_server import EtcdDidNotStart, EtcdServer, etcd_binary
from tests.events.conftest import config_for
from tests.events.support import following, numbers, tick, until
from tests.pace import outlast, paced

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.skipif(etcd_binary() is None, reason="no etcd on PATH"),
]


PATIENT = {"call_timeout_ms": 10_000}
"""For what takes time on a busy machine, and is no fault: megabytes, hashed passwords."""


@pytest.mark.parametrize("fault", ["kill", "stop"])
async def test_leader_of_three_lost_costs_no_event(fault: str) -> None:
    async with EtcdServer(3) as etcd, EtcdLog(config_for(etcd, lease_ttl_s=4)) as log:
        async with following(log.reader()) as seen, log.writer("w.w0") as writer:
            epoch = writer.epoch
            lost = None
            async for n in paced(range(150), 0.01):
                writer.append(tick(n))
                if n == 50:
                    lost = etcd.leader()
                    etcd.stop(lost) if fault == "stop" else etcd.kill9(lost)
            await writer.flush(15)
            await until(lambda: len(numbers(seen.groups, "w.w0")) >= 150, 15)
            assert numbers(seen.groups, "w.w0") == list(range(150))
            assert numbers(await log.reader().read(), "w.w0") == list(range(150))
            assert writer.epoch == epoch, "two of three members keep the lease"
            await until(lambda: writer.healthy, 5)
            if lost is not None and fault == "stop":
                etcd.cont(lost)


async def test_acknowledged_appends_survive_kills_of_the_only_member(etcd: EtcdServer) -> None:
    """I13: whatever `on_landed` told is there after every kill, at the same revision."""
    landed: list[LandedSegment] = []
    async with EtcdLog(config_for(etcd)) as log, log.writer("w.w0") as writer:
        writer.on_landed(landed.append)
        taken = 0
        for _ in range(4):
            async for _ in paced(range(60), 0.002):
                writer.append(tick(taken))
                taken += 1
            etcd.kill9()
            etcd.restart()
        await writer.flush(10)
        groups = await log.reader().read()
        assert numbers(groups, "w.w0") == list(range(taken))
        there = {(s.seq, g.revision, s.first, s.last) for g in groups for s in g.segments}
        assert {(e.seq, e.revision, e.first, e.last) for e in landed} <= there
        assert len(landed) == len(there)


async def test_two_writers_race_for_one_stream(etcd: EtcdServer) -> None:
    """Whoever is in writes alone; the stream has no gap and no repetition."""
    done: list[int] = []

    async def contend(which: int) -> None:
        async with EtcdLog(config_for(etcd), name=f"writer {which}") as log:
            for life in range(3):
                async with log.writer("fleet", wait_s=20) as writer:
                    for n in range(5):
                        writer.append(tick(100 * which + 10 * life + n))
                        await asyncio.sleep(0.003)
                    await writer.flush(5)
                    done.append(which)

    async with asyncio.TaskGroup() as tasks:
        for which in range(3):
            tasks.create_task(contend(which))
    assert sorted(done) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    async with EtcdLog(config_for(etcd)) as log:
        told = numbers(await log.reader().read(), "fleet")
        lives = [told[at : at + 5] for at in range(0, len(told), 5)]
        assert len(told) == 45
        assert all(life == list(range(life[0], life[0] + 5)) for life in lives)


async def test_no_space_is_reported_and_resolved() -> None:
    quota = 16 * 1024 * 1024  # below that etcd counts itself full when empty
    async with EtcdServer(quota_bytes=quota) as etcd, EtcdLog(config_for(etcd, **PATIENT)) as log:
        await log.client.put(b"/ballast", b"")
        await fill(log)
        async with asyncio.timeout(10):
            while "NOSPACE" not in "".join((await log.probe()).alarms):
                await asyncio.sleep(0.1)
        # No stream can be taken: the lease is refused.
        with pytest.raises(LogUnavailable):
            async with EtcdLog(config_for(etcd, open_timeout_ms=300)) as hasty:
                async with hasty.writer("fleet"):
                    pass
        revision = (await log.client.delete(b"/ballast")).header.revision
        await log.client.compact(revision, physical=True)
        await log.client.defragment(etcd.endpoints[0])
        for alarm in (await log.client.alarms()).alarms:
            await log.client.disarm(alarm.memberID, alarm.alarm)
        async with log.writer("fleet") as writer:
            writer.append(tick(0))
            await writer.flush(5)


async def fill(log: EtcdLog) -> None:
    """Write until the quota refuses: etcd learns its size at each commit, up to 100 ms late,
    so a fast machine writes far beyond the quota before it is told."""
    with pytest.raises(NoSpace):
        async with asyncio.timeout(30):
            while True:
                await log.client.put(b"/ballast", bytes(1_000_000))


async def test_writer_waits_through_no_space() -> None:
    """Its lease lives on (keepalives are no writes), its events land afterwards."""
    quota = 16 * 1024 * 1024
    async with EtcdServer(quota_bytes=quota) as etcd, EtcdLog(config_for(etcd, **PATIENT)) as log:
        async with log.writer("w.w0") as writer:
            epoch = writer.epoch
            await fill(log)
            writer.append(tick(0))
            await until(lambda: writer.state == "nospace", 5)
            await outlast(2.5, "its lease of 2 s")
            revision = (await log.client.delete(b"/ballast")).header.revision
            await log.client.compact(revision, physical=True)
            await log.client.defragment(etcd.endpoints[0])
            for alarm in (await log.client.alarms()).alarms:
                await log.client.disarm(alarm.memberID, alarm.alarm)
            await writer.flush(10)
            assert writer.epoch == epoch
            await until(lambda: writer.healthy, 5)
            assert numbers(await log.reader().read(), "w.w0") == [0]


async def test_probe_tells_version_health_and_members(etcd: EtcdServer, log: EtcdLog) -> None:
    probe = await log.probe()
    assert probe.usable and not probe.error and not probe.alarms
    assert (probe.member_count, len(probe.members)) == (1, 1)
    member = probe.members[0]
    assert member.quota_bytes == 2 * 1024**3  # etcd's default
    assert member.leader and member.version and member.db_bytes > 0 and not member.error
    etcd.kill9()
    probe = await log.probe()
    assert not probe.usable and probe.error and probe.members[0].error


async def test_passwords_are_used_and_tokens_renewed(tmp_path: Path) -> None:
    async with EtcdServer(extra=("--auth-token-ttl=1", "--bcrypt-cost=4")) as etcd:
        async with EtcdClient(config_for(etcd, **PATIENT)) as root:
            auth = root._connected(root.endpoint).methods
            await auth["UserAdd"](rpc.AuthUserAddRequest(name="root", password="secret"))
            await auth["UserGrantRole"](rpc.AuthUserGrantRoleRequest(user="root", role="root"))
            await auth["UserAdd"](rpc.AuthUserAddRequest(name="guest", password="guest"))
            await auth["AuthEnable"](rpc.AuthEnableRequest())
        with pytest.raises(AccessRefused):
            async with EtcdClient(config_for(etcd, **PATIENT)) as nobody:
                await nobody.range(b"/relume/")
        with pytest.raises(AccessRefused):
            async with EtcdClient(
                config_for(etcd, **PATIENT, user="root", password="wrong")
            ) as liar:
                await liar.range(b"/relume/")
        guest = config_for(etcd, **PATIENT, user="guest", password="guest")
        async with EtcdLog(guest) as log, asyncio.timeout(5):
            with pytest.raises(AccessRefused):
                async for _ in log.reader().follow(1):
                    pass
        config = config_for(etcd, **PATIENT, user="root", password="secret")
        async with EtcdLog(config) as log, following(log.reader()) as seen:
            async with log.writer("w.w0") as writer:
                for n in range(4):
                    writer.append(tick(n))
                    await outlast(1.2, "the token's lifetime of 1 s")
                await writer.flush(5)
                await until(lambda: numbers(seen.groups, "w.w0") == [0, 1, 2, 3])
                etcd.restart()  # forgets every token it gave out
                writer.append(tick(4))
                await writer.flush(5)
                await until(lambda: numbers(seen.groups, "w.w0") == [0, 1, 2, 3, 4])


def certificates(directory: Path) -> None:
    """A CA, and one certificate for 127.0.0.1 that server and client both use."""

    def openssl(*arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=30
        )

    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
    openssl("req", "-x509", *ec, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca")
    openssl("req", *ec[:-2], "-keyout", "key.pem", "-out", "req.pem", "-subj", "/CN=relume")
    (directory / "san.txt").write_text(
        "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    openssl(
        "x509",
        "-req",
        "-in",
        "req.pem",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-days",
        "2",
        "-CAcreateserial",
        "-extfile",
        "san.txt",
        "-out",
        "cert.pem",
    )


class TlsServer(EtcdServer):
    """One member that speaks TLS and wants to see a client certificate."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        url = f"https://{self.endpoints[0]}"
        self.extra = (
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            f"--cert-file={directory / 'cert.pem'}",
            f"--key-file={directory / 'key.pem'}",
            f"--trusted-ca-file={directory / 'ca.pem'}",
            "--client-cert-auth",
        )

    def wait_healthy(self, member: int | None = None, timeout_s: float = 20.0) -> None:
        """Its /health wants a certificate as well; the test's first call waits instead."""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates")
async def test_mutual_tls(tmp_path: Path) -> None:
    certificates(tmp_path)
    tls = TlsConfig(*(str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem")))
    async with TlsServer(tmp_path) as etcd:
        async with EtcdLog(config_for(etcd, tls=tls, open_timeout_ms=10_000)) as log:
            async with log.writer("w.w0", wait_s=5) as writer, following(log.reader()) as seen:
                writer.append(tick(0))
                await writer.flush(5)
                await until(lambda: numbers(seen.groups, "w.w0") == [0], 5)
                assert (await log.probe()).members[0].quota_bytes > 0
        for wrong in (None, TlsConfig(ca=tls.ca)):
            with pytest.raises(LogUnavailable):
                async with EtcdClient(config_for(etcd, tls=wrong)) as stranger:
                    await stranger.range(b"/relume/")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:2379", EtcdConfig()),
        ("etcd://a:1,b", EtcdConfig(endpoints=("a:1", "b:2379"))),
        (
            "http://u:p%40@h:1/x/y?lease_ttl_s=3&linger_ms=2.5",
            EtcdConfig(
                endpoints=("h:1",),
                prefix="/x/y",
                user="u",
                password="p@",
                lease_ttl_s=3,
                linger_ms=2.5,
            ),
        ),
        ("https://h:1?ca=/a.pem", EtcdConfig(endpoints=("h:1",), tls=TlsConfig(ca="/a.pem"))),
        ("http://[::1]:5", EtcdConfig(endpoints=("[::1]:5",))),
    ],
)
def test_urls(url: str, expected: EtcdConfig) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://h",
        "h:1",
        "http://",
        "http://h:x",
        "http://h?no=1",
        "http://h?ca=x",
        "http://h?lease_ttl_s=soon",
        "http://h?lease_ttl_s=0",
    ],
)
def test_bad_urls_are_refused_with_the_reason(url: str) -> None:
    with pytest.raises(BadUrl):
        open_log(url)


def test_etcd_that_cannot_start_says_why() -> None:
    server = EtcdServer(extra=("--no-such-flag",))
    with pytest.raises(EtcdDidNotStart, match="no-such-flag"):
        server.__enter__()
