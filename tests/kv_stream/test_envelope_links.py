"""Envelopes of long prompts to a real daemon and back, many at once, over each transport."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relume.engine_shim.checkpoints import envelope_links
from relume.engine_shim.checkpoints.daemon_links import LinkConfig
from relume.engine_shim.checkpoints.envelope_links import EnvelopeLinks
from relume.engine_shim.checkpoints.link.channel import Channel, LocalChannel, Wake
from relume.engine_shim.checkpoints.link.image import digest_of
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.events.wire.kv import kv_messages as m
from tests.kv_stream.transports import LINKS, Fleet
from tests.signals import stop
from tests.state_daemon.daemon import daemon_in

MIB = 1 << 20


def links_of(fleet: Fleet, link: str, socket: str) -> tuple[EnvelopeLinks, str]:
    if link == "local":
        return EnvelopeLinks(LinkConfig(epoch=1)), f"unix:{socket}"
    if link == "plain":
        config = LinkConfig(epoch=1, secret_file=fleet.secret_file)
        return EnvelopeLinks(config), f"tcp://127.0.0.1:{fleet.plain_port}"
    endpoint = f"tcp://127.0.0.1:{fleet.curve_port}"
    secret = Path(fleet.secret_file).with_name("client")
    secret.write_bytes(fleet.client[1])
    secret.chmod(0o600)
    return EnvelopeLinks(
        LinkConfig(
            epoch=1,
            curve_public=fleet.client[0].decode(),
            curve_secret_file=str(secret),
            curve_servers={endpoint: fleet.server[0].decode()},
        )
    ), endpoint


@pytest.mark.full
@pytest.mark.parametrize("link", LINKS)
async def test_large_envelopes_come_back_as_they_went(
    tmp_path: Path, link: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than the staging memory of a link holds at a time."""
    monkeypatch.setattr(envelope_links, "ANSWER_S", 30.0)  # the machine may be busy
    fleet = Fleet(tmp_path)
    options: dict[str, object] = {"budget_bytes": 64 * MIB, "secret_file": fleet.secret_file}
    if link != "local":
        options["remote"] = fleet.remote_options(link)
    with daemon_in(tmp_path / "d", **options) as daemon:
        links, endpoint = links_of(fleet, link, daemon.socket)
        draw = random.Random(3)
        envelopes = {f"q{n}": draw.randbytes(5 * MIB + n) for n in range(9)}
        envelopes["small"] = b"{}"
        try:
            async with asyncio.timeout(60):
                await links.keep("first", 1, [endpoint], b"{}")  # the link stands
                await asyncio.gather(
                    *(links.keep(q, 1, [endpoint], e) for q, e in envelopes.items())
                )
                for request, envelope in envelopes.items():
                    assert await links.recall(request, [endpoint]) == envelope, request
                await links.keep("huge", 1, [endpoint], bytes(m.MAX_ENVELOPE_BYTES + 1))
                assert await links.recall("huge", [endpoint]) == b""
            assert links.figures() == {
                "envelopes_kept": 11, "envelopes_refused": 0, "envelopes_too_large": 1,
            }  # fmt: skip
        finally:
            links._links.close()


def test_chunks_wait_for_room_in_staging_while_the_daemon_reads_nothing(tmp_path: Path) -> None:
    window = 6 * MIB

    def connect(wake: Wake) -> Channel:
        return LocalChannel(daemon.socket, wake, staging_bytes=2 * window)

    draw = random.Random(5)
    envelopes = {f"q{n}": draw.randbytes(4 * MIB) for n in range(6)}
    with daemon_in(tmp_path, budget_bytes=64 * MIB) as daemon:
        peer = Peer(
            "local",
            connect,
            m.Hello(
                version=m.VERSION, worker="w0", epoch=1, incarnation=1, role="keeper", nonce=b""
            ),
        )

        def keep(request: str) -> object:
            envelope = envelopes[request]
            told = m.KeepChunk(0, request, 1, digest_of(envelope))
            return peer.ask(told, 60.0, (envelope,))[0]

        try:
            assert isinstance(peer.ask(m.Keep(0, "first", 1, b"{}"), 20.0)[0], m.Done)
            stop(daemon.process.pid)
            with ThreadPoolExecutor(len(envelopes)) as threads:
                asking = threads.map(keep, envelopes)
                deadline = time.monotonic() + 20
                while len(peer._questions) < len(envelopes) or not peer._in_flight:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                for _ in range(1000):
                    assert sum(list(peer._in_flight.values())) <= window
                    time.sleep(0)  # the threads go on meanwhile
                daemon.process.send_signal(signal.SIGCONT)
                assert all(isinstance(answer, m.Done) for answer in asking)
            for request, envelope in envelopes.items():
                assert bytes(peer.ask(m.Recall(0, request), 20.0)[1]) == envelope
        finally:
            daemon.process.send_signal(signal.SIGCONT)
            peer.close()
