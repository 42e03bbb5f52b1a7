"""How to reach etcd and how the log behaves on it; parsed once, at the process edge."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from msgspec import Struct

from relume.events.etcd.errors import BadUrl


class TlsConfig(Struct, frozen=True):
    """PEM files. `cert` and `key` together mean mTLS; `ca` empty means the system's."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    """Name expected in the server's certificate when it is not the endpoint's host."""


class EtcdConfig(Struct, frozen=True):
    """Everything the log on etcd can be told. Times are milliseconds unless named."""

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    """`host:port`, tried in order, rotated on failure."""
    prefix: str = "/relume/v1"
    tls: TlsConfig | None = None
    user: str = ""
    password: str = ""
    """For etcd's own authentication; empty user means none."""

    call_timeout_ms: int = 2_000
    """Deadline of one unary call. The time after which a hung etcd is noticed."""
    dial_timeout_ms: int = 1_000
    keepalive_ms: int = 10_000
    """h2 ping when the connection is silent; below 5 s etcd answers GOAWAY."""
    keepalive_timeout_ms: int = 3_000
    backoff_min_ms: int = 20
    backoff_max_ms: int = 1_000
    receive_limit_bytes: int = 64 * 1024 * 1024

    lease_ttl_s: int = 8
    linger_ms: float = 5.0
    """A busy stream waits so long since its last segment before it sends the next."""
    linger_bytes: int = 16 * 1024
    """This much is sent without lingering."""
    close_timeout_ms: int = 3_000
    open_timeout_ms: int = 10_000
    """Bound for taking a stream's ownership while etcd does not answer."""

    memory_limit_bytes: int = 8 * 1024 * 1024
    """Events held in memory while they cannot land; past it they are on disk only."""
    spool_dir: str = ""
    """Where outages spool to; empty: memory only."""
    spool_limit_bytes: int = 256 * 1024 * 1024
    spool_sync_ms: int = 50
    """Taken events are fdatasynced to the spool in batches this far apart."""

    silence_ms: int = 2_000
    """A watch silent for so long is cross-examined with a linearizable read."""
    read_concurrency: int = 8

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise BadUrl("no etcd endpoint given")
        if self.lease_ttl_s < 1 or self.call_timeout_ms < 1 or self.linger_ms < 0:
            raise BadUrl("lease_ttl_s and call_timeout_ms must be positive, linger_ms not negative")
        if not self.prefix.startswith("/") or self.prefix.endswith("/"):
            raise BadUrl(f"prefix {self.prefix!r} must begin with / and not end with it")


def parse_url(url: str) -> EtcdConfig:
    """`http[s]://[user:password@]host:port[,host:port...][/prefix][?option=value...]`.

    Options are EtcdConfig's field names, and `ca`, `cert`, `key`, `server_name` with
    https. `etcd://` means http. Raises BadUrl.
    """
    parts = urlsplit(url)
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
        raise BadUrl(f"unknown option {sorted(unknown)[0]!r} in {url!r}")
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


def _with_port(host: str, url: str) -> str:
    bare = host.rsplit("]", 1)[-1]
    if ":" not in bare:
        return f"{host}:2379"
    if not bare.rsplit(":", 1)[1].isdigit():
        raise BadUrl(f"{url!r}: {host!r} has no numeric port")
    return host
