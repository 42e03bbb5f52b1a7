"""Settings of the gateway, with units in the names. Parsed once, at the edge."""

from __future__ import annotations

import ipaddress

from msgspec import Struct

from relume.controlplane.gateway.errors import UnsafeBind


class ResumeConfig(Struct, frozen=True, kw_only=True):
    """Bounds of resumable streams: how long a client may stay away (for the leader in ticks),
    and what a worker keeps meanwhile, a stream, in all, and in detached streams."""

    grace_s: int = 30
    grace_ticks: int = 30
    stream_bytes: int = 1 << 20
    total_bytes: int = 64 << 20
    streams: int = 256


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Every bound of the token path. `port` 0 takes a free one.

    `api_keys`: bearer tokens clients must show; none means open, loopback only.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: frozenset[str] = frozenset()
    backlog: int = 2048

    max_header_bytes: int = 64 << 10
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: int = 512 << 20
    max_clients: int = 16_384
    max_requests: int = 12_288  # a full waiting room, and as many as 16 workers of 256
    max_pipelined: int = 64

    header_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keepalive_timeout_s: float = 75.0
    client_stall_timeout_s: float = 120.0
    linger_timeout_s: float = 2.0
    linger_bytes: int = 128 << 20  # of a refused body, thrown away so that the refusal is read

    stream_buffer_bytes: int = 256 << 10

    wait_timeout_s: float = 30.0
    retry_after_s: int = 5
    max_attempts: int = 8
    max_engine_errors: int = 3
    max_deaths: int = 4
    """Engines that may die on one request in a row, with no token between: it may be what
    kills them."""

    connect_timeout_s: float = 2.0
    upstream_keepalive_s: float = 3.0
    upstream_silence_s: float = 900.0
    max_idle_per_engine: int = 256
    max_error_body_bytes: int = 1 << 20

    tokenizer: str = ""
    """Where prompts are tokenised by (`relume.controlplane.gateway.tokenizing`); empty: estimated."""
    tokenize_wait_s: float = 0.25

    sweep_interval_s: float = 1.0
    resume: ResumeConfig = ResumeConfig()

    def refuse_unsafe_bind(self) -> None:
        """Raises `UnsafeBind` when strangers could connect and nobody is asked for a key."""
        if not self.api_keys and not _is_loopback(self.host):
            raise UnsafeBind(self.host)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
