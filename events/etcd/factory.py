"""The log on etcd as one object: writers and readers over one client."""

from __future__ import annotations

import os
import socket
from typing import Self

from aetcd import rpc
from msgspec import Struct
from msgspec.structs import replace

from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.client.etcd_versions import NotAVersion, judge, parse_version
from relume.events.etcd.config import EtcdConfig, parse_url
from relume.events.etcd.keys import Keys
from relume.events.etcd.metrics import quota_bytes
from relume.events.etcd.reader.log_reader import EtcdReader
from relume.events.etcd.reader.scan import together
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.errors import LogError
from relume.events.log.interface import Heads


class MemberState(Struct, frozen=True, kw_only=True):
    """One endpoint as it presents itself. `error` set: it did not answer."""

    endpoint: str
    version: str = ""
    leader: bool = False
    db_bytes: int = 0
    quota_bytes: int = 0
    """What `db_bytes` may grow to; 0 if the member does not report it."""
    error: str = ""


class Probe(Struct, frozen=True, kw_only=True):
    """What the cluster says about itself."""

    usable: bool = False
    """Its version may hold the log, and a linearizable read was answered."""
    verdict: str = ""
    """Empty, or why not, or a warning about the version."""
    members: tuple[MemberState, ...]
    member_count: int
    revision: int = 0
    alarms: tuple[str, ...] = ()
    error: str = ""


class EtcdLog:
    """The log on etcd. An async context manager; its writers must be left before it.

    `name` is shown as owner of the streams it writes; host and pid by default.
    """

    def __init__(self, config: EtcdConfig, name: str = "") -> None:
        self.config = config
        self.name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.client = EtcdClient(config)

    async def __aenter__(self) -> Self:
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.__aexit__(*exc)

    def writer(self, stream: str, *, wait_s: float = 0.0, gather_s: float = 0.0) -> EtcdWriter:
        """A writer; entering it takes the stream, waiting up to `wait_s` for its owner.
        `gather_s`: see EtcdWriter."""
        return EtcdWriter(self.client, stream, name=self.name, wait_s=wait_s, gather_s=gather_s)

    def reader(self, heads: Heads | None = None) -> EtcdReader:
        """A reader; `heads` from a snapshot where it does not begin at the beginning."""
        return EtcdReader(self.client, heads)

    async def probe(self) -> Probe:
        """Probe every endpoint; never raises for an answer of etcd, or for its absence."""
        members = tuple(await together(self._member(e) for e in self.config.endpoints))
        versions = sorted({m.version for m in members if m.version})
        try:
            count = len((await self.client.members()).members)
            identity = Keys(self.config.prefix).identity
            revision = (await self.client.range(identity, count_only=True)).header.revision
            alarms = tuple(_alarm(a) for a in (await self.client.alarms()).alarms)
        except LogError as error:
            return Probe(members=members, member_count=len(members), error=str(error))
        probe = Probe(members=members, member_count=count, revision=revision, alarms=alarms)
        if not versions:
            return replace(probe, error="the answer has no version")
        try:
            judgements = [judge(parse_version(version)) for version in versions]
        except NotAVersion as error:
            return replace(probe, verdict=str(error))
        return replace(
            probe,
            usable=all(j.usable for j in judgements),
            verdict="; ".join(j.reason for j in judgements if j.reason),
        )

    async def _member(self, endpoint: str) -> MemberState:
        timeout_s = self.config.call_timeout_ms / 1000
        try:
            answer = await self.client.status(endpoint)
        except LogError as error:
            return MemberState(endpoint=endpoint, error=str(error))
        leads = answer.leader == answer.header.member_id
        quota = await quota_bytes(endpoint, self.config.tls, timeout_s)
        return MemberState(
            endpoint=endpoint,
            version=answer.version,
            leader=leads,
            db_bytes=answer.dbSize,
            quota_bytes=quota,
        )


def open_log(url: str, name: str = "") -> EtcdLog:
    """The log at `url`, see `config.parse_url`. Raises BadUrl."""
    return EtcdLog(parse_url(url), name)


def _alarm(alarm: object) -> str:
    kind = rpc.AlarmType.Name(alarm.alarm)  # type: ignore[attr-defined]
    return f"{kind} at {alarm.memberID:x}"  # type: ignore[attr-defined]
