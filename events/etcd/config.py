"""How to reach etcd and how the log behaves on it; parsed once, at the process edge."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from msgspec import Struct

from relume.events.etcd.errors import BadUrl
from relume.events.settings.declared import masked_repr, option

_PASSWORD = re.compile(r"([?&]password=)[^&]*")
BACKOFF_MIN_MS = 20
"""Minimum pause before a member is tried again."""


class TlsConfig(Struct, frozen=True):
    """PEM files. `cert` and `key` together mean mTLS; `ca` empty means the system's."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    """Name expected in the server's certificate when it is not the endpoint's host."""


class EtcdConfig(Struct, frozen=True, kw_only=True):
    """All settings of the log on etcd. Times are milliseconds unless named."""

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    """`host:port`, tried in order, rotated on failure."""
    prefix: str = "/relume/v1"
    tls: TlsConfig | None = None
    user: str = ""
    password: Annotated[str, option("Password of `user`", secret=True)] = ""
    """For etcd's own authentication; empty user means none."""

    call_timeout_ms: Annotated[
        int,
        option(
            "Timeout of one call to etcd, after which a hung member is noticed",
            unit="ms",
            ge=100,
            le=60_000,
        ),
    ] = 2_000
    keepalive_ms: Annotated[
        int,
        option(
            "Period of pings on a silent connection; etcd refuses less than 5 s",
            unit="ms",
            ge=5_000,
            le=600_000,
        ),
    ] = 10_000
    backoff_max_ms: Annotated[
        int, option("Maximum pause before a member is tried again", unit="ms", ge=1, le=600_000)
    ] = 1_000
    receive_limit_bytes: Annotated[
        int, option("Maximum size of an answer of etcd", unit="bytes", ge=1 << 20, le=1 << 30)
    ] = 64 * 1024 * 1024

    lease_ttl_s: int = 8
    linger_ms: Annotated[
        float,
        option("Minimum time between two segments of a busy stream", unit="ms", ge=0.0, le=10000.0),
    ] = 5.0
    linger_bytes: Annotated[
        int, option("Size from which a segment is sent at once", unit="bytes", ge=0, le=1 << 20)
    ] = 16 * 1024
    close_timeout_ms: Annotated[
        int,
        option(
            "Timeout for the last segment of a stream that is closed", unit="ms", ge=0, le=600_000
        ),
    ] = 3_000
    open_timeout_ms: Annotated[
        int,
        option(
            "Timeout for the ownership of a stream while etcd does not answer",
            unit="ms",
            ge=100,
            le=600_000,
        ),
    ] = 10_000

    memory_limit_bytes: Annotated[
        int,
        option(
            "Maximum size of events in memory that etcd has not taken; more are on disk only",
            unit="bytes",
            ge=1 << 16,
            le=1 << 34,
        ),
    ] = 8 * 1024 * 1024
    spool_dir: str = ""
    """Where outages spool to; empty: memory only."""
    spool_limit_bytes: int = 256 * 1024 * 1024
    spool_sync_ms: Annotated[
        int, option("Period in which the spool is synced to disk", unit="ms", ge=1, le=10_000)
    ] = 50

    silence_ms: Annotated[
        int,
        option(
            "Time after which a silent watch is compared with a read", unit="ms", ge=100, le=600_000
        ),
    ] = 2_000

    def __repr__(self) -> str:
        return masked_repr(self)

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise BadUrl("no etcd endpoint given")
        if any("@" in endpoint for endpoint in self.endpoints):
            raise BadUrl("an endpoint of etcd has a user or password; give one URL for all")
        if self.lease_ttl_s < 1 or self.call_timeout_ms < 1 or self.linger_ms < 0:
            raise BadUrl("lease_ttl_s and call_timeout_ms must be positive, linger_ms not negative")
        if not self.prefix.startswith("/") or self.prefix.endswith("/"):
            raise BadUrl(f"prefix {self.prefix!r} must begin with / and not end with it")


def parse_url(url: str) -> EtcdConfig:
    """`http[s]://[user:password@]host:port[,host:port...][/prefix][?option=value...]`.

    Options are EtcdConfig's field names, and `ca`, `cert`, `key`, `server_name` with
    https. `etcd://` means http. Raises BadUrl, whose text has neither user nor password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        raise BadUrl(f"{_without_secrets(url)!r} is no URL") from None
    if "@" in url and "@" not in parts.netloc:
        raise BadUrl(f"{_without_secrets(url)!r}: percent-encode the password (/ is %2F, # is %23)")
    url = _without_secrets(url)
    if parts.scheme not in ("http", "https", "etcd"):
        raise BadUrl(f"{url!r}: expected http://host:port[,host:port...]")
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    fields: dict[str, object] = dict(parse_qsl(parts.query))
    tls = {name: fields.pop(name) for name in TlsConfig.__struct_fields__ if name in fields}
    if tls and parts.scheme != "https":
        raise BadUrl(f"{url!r}: TLS options need https")
    unknown = set(fields) - set(EtcdConfig.__struct_fields__)
    if unknown:
        known = ", ".join((*EtcdConfig.__struct_fields__[1:], *TlsConfig.__struct_fields__))
        raise BadUrl(f"unknown option {sorted(unknown)[0]!r} in {url!r}; use one of {known}")
    fields["endpoints"] = tuple(_with_port(h, url) for h in hosts.split(",") if h)
    if parts.path.rstrip("/"):
        fields["prefix"] = parts.path.rstrip("/")
    if user:
        fields |= {"user": unquote(user), "password": unquote(password)}
    if parts.scheme == "https":
        fields["tls"] = tls
    try:
        return msgspec.convert(fields, EtcdConfig, strict=False)
    except msgspec.ValidationError as error:
        raise BadUrl(f"{url!r}: {error}") from None


def _without_secrets(url: str) -> str:
    """`url` for people."""
    before, at, after = url.rpartition("@")
    if at:
        scheme, mark, _ = before.partition("://")
        url = f"{scheme}{mark}***@{after}" if mark else f"***@{after}"
    return _PASSWORD.sub(r"\1***", url)


def _with_port(host: str, url: str) -> str:
    bare = host.rsplit("]", 1)[-1]
    if ":" not in bare:
        return f"{host}:2379"
    if not bare.rsplit(":", 1)[1].isdigit():
        raise BadUrl(f"{url!r}: {host!r} has no numeric port")
    return host
