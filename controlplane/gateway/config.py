"""Settings of the gateway, with units in the names. Parsed once, at the edge."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from msgspec import Struct

from relume.controlplane.gateway.errors import UnsafeBind
from relume.events.settings.declared import option


class ResumeConfig(Struct, frozen=True, kw_only=True):
    """Bounds of resumable streams: how long a client may stay away (for the leader in ticks),
    and what a worker keeps meanwhile, a stream, in all, and in detached streams."""

    grace_s: int = 30
    grace_ticks: int = 30
    stream_bytes: int = 1 << 20
    total_bytes: int = 64 << 20
    streams: int = 256


class GatewayConfig(Struct, frozen=True, kw_only=True):
    """Every bound of the token path. `port` 0 takes a free one. Fields with `option` are limits
    that an operator may set (`--gateway-limits`).

    `api_keys`: tokens clients must show; none means open, loopback only. `unkept_tenants`: prompts of
    these are not kept for cross-checks. `allowed_origins`: see `cross_origin`.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: frozenset[str] = frozenset()
    unkept_tenants: frozenset[str] = frozenset()
    allowed_origins: frozenset[str] = frozenset()
    backlog: Annotated[int, option("Connections that wait to be accepted", ge=1, le=65_535)] = 2048

    max_header_bytes: Annotated[
        int, option("Maximum size of the head of a request", unit="bytes", ge=1_024, le=1 << 20)
    ] = 64 << 10
    max_body_bytes: int = 8 << 20
    max_bodies_bytes: Annotated[
        int,
        option(
            "Maximum size of all request bodies in memory", unit="bytes", ge=1 << 20, le=1 << 40
        ),
    ] = 512 << 20
    max_clients: Annotated[
        int, option("Maximum number of client connections; more get 503", ge=1, le=1_000_000)
    ] = 16_384
    max_requests: Annotated[
        int, option("Maximum number of requests in progress; more get 429", ge=1, le=1_000_000)
    ] = 12_288
    max_pipelined: Annotated[
        int, option("Maximum number of requests that a connection may send ahead", ge=1, le=1_024)
    ] = 64

    header_timeout_s: Annotated[
        float, option("Timeout for the head of a request", unit="s", ge=0.1, le=3600.0)
    ] = 10.0
    body_timeout_s: Annotated[
        float, option("Timeout for the body of a request", unit="s", ge=0.1, le=3600.0)
    ] = 60.0
    keepalive_timeout_s: Annotated[
        float,
        option("Time after which an idle client connection is closed", unit="s", ge=0.1, le=3600.0),
    ] = 75.0
    client_stall_timeout_s: Annotated[
        float,
        option(
            "Time after which a client that reads nothing is disconnected",
            unit="s",
            ge=0.1,
            le=86400.0,
        ),
    ] = 120.0
    linger_timeout_s: Annotated[
        float,
        option(
            "Time in which the rest of a refused body is read, so that the client sees the refusal",
            unit="s",
            ge=0.0,
            le=60.0,
        ),
    ] = 2.0
    linger_bytes: Annotated[
        int,
        option(
            "Maximum size of the rest of a refused body that is read",
            unit="bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = 128 << 20

    stream_buffer_bytes: Annotated[
        int,
        option(
            "Buffer per stream for a client that reads slowly; then the worker is paused",
            unit="bytes",
            ge=4_096,
            le=1 << 30,
        ),
    ] = 256 << 10

    wait_timeout_s: float = 30.0
    retry_after_s: Annotated[
        int, option("Retry-After of an answer 429 or 503", unit="s", ge=1, le=3_600)
    ] = 5
    max_attempts: Annotated[int, option("Maximum number of attempts per request", ge=1, le=100)] = 8
    max_engine_errors: Annotated[
        int,
        option(
            "Maximum number of wrong answers of engines per request. Refusals by full workers count"
            " until its stream has begun, thereafter as attempts",
            ge=1,
            le=100,
        ),
    ] = 3
    max_deaths: Annotated[
        int,
        option(
            "Maximum number of engines that die on one request without a token in between",
            ge=1,
            le=100,
        ),
    ] = 4

    connect_timeout_s: Annotated[
        float, option("Timeout for a connection to an engine", unit="s", ge=0.01, le=60.0)
    ] = 2.0
    upstream_keepalive_s: Annotated[
        float,
        option(
            "Time after which an idle connection to an engine is closed",
            unit="s",
            ge=0.0,
            le=3600.0,
        ),
    ] = 3.0
    upstream_silence_s: Annotated[
        float,
        option("Timeout of an engine that sends nothing on a stream", unit="s", ge=1.0, le=86400.0),
    ] = 900.0
    max_idle_per_engine: Annotated[
        int, option("Maximum number of idle connections per engine", ge=0, le=65_535)
    ] = 256
    max_error_body_bytes: Annotated[
        int,
        option("Maximum size of the error answer of an engine", unit="bytes", ge=1_024, le=1 << 30),
    ] = 1 << 20

    tokenizer: str = ""
    """Where prompts are tokenised by (`relume.controlplane.gateway.openai.tokenizing`); empty:
    estimated."""
    tokenize_wait_s: float = 0.25

    sweep_interval_s: Annotated[
        float, option("Period in which timeouts of clients are checked", unit="s", ge=0.01, le=60.0)
    ] = 1.0
    resume: ResumeConfig = ResumeConfig()

    def refuse_unsafe_bind(self) -> None:
        """Raises `UnsafeBind` when other hosts could connect and no API key is required."""
        if not self.api_keys and not is_loopback(self.host):
            raise UnsafeBind(self.host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost may resolve
    to anything, so it counts as beyond."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
