"""Settings of `relume serve`: each is a flag, an environment variable and a key of the file.

The declarations say everything about a setting; `relume.events.settings` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from relume.controlplane.gateway.config import GatewayConfig, is_loopback
from relume.controlplane.gateway.http.cross_origin import ORIGIN
from relume.events.etcd.config import EtcdConfig, parse_url
from relume.events.etcd.errors import BadUrl
from relume.events.settings import sources
from relume.events.settings.config_error import ConfigError, without_credentials
from relume.events.settings.declared import (
    Setting,
    limits,
    masked_repr,
    option,
    settings_of,
)
from relume.policies.admission import admission_settings
from relume.policies.canary.canary_settings import CanaryConfig
from relume.policies.checkpoints import checkpoint_settings
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from relume.policies.degradation.degradation_settings import MODES, DegradationConfig
from relume.policies.health.health_settings import HealthConfig
from relume.policies.leader.duties import HEALTHY_TICKS
from relume.policies.liveness.overdue import OverdueConfig
from relume.policies.migration import migration_settings
from relume.policies.routing import routing_settings
from relume.policies.spares.spare_settings import SparesConfig

ROLES = ("viewer", "operator", "admin")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "console")

Port = Annotated[int, Meta(ge=1, le=65535)]
OptionalPort = Annotated[int, Meta(ge=0, le=65535)]

_CHECKPOINTS = checkpoint_settings.CheckpointConfig()
_URL_FORM = "use http[s]://[user:password@]host:port[,host:port][/prefix][?ca=FILE]"


class ServeConfig(Struct, frozen=True, kw_only=True):
    """Everything `relume serve` can be configured with."""

    name: Annotated[
        str,
        option(
            "Name of this replica; its log stream is r.NAME",
            pattern=r"^[A-Za-z0-9_-]{1,32}$",
            form="1 to 32 characters of A-Z a-z 0-9 _ -",
        ),
    ] = "r0"
    host: Annotated[str, option("Address of the OpenAI endpoint")] = "127.0.0.1"
    port: Annotated[Port, option("Port of the OpenAI endpoint")] = 8000
    admin_host: Annotated[str, option("Address of the admin API")] = "127.0.0.1"
    admin_port: Annotated[
        OptionalPort, option("Port of the admin API and of /metrics (0: disabled)")
    ] = 8001
    etcd: Annotated[
        tuple[str, ...],
        option(
            "Endpoints of etcd: host:port, or one URL http[s]://user:password@host:port,.../prefix?ca=FILE; "
            "give a password as @FILE or in the environment, because every account sees flags",
            secret=True,  # it may have a password
            variable="RELUME_ETCD_ENDPOINTS",
        ),
    ] = ("127.0.0.1:2379",)
    prefix: Annotated[
        str,
        option(
            "Key prefix of the log in etcd",
            pattern="^/.*[^/]$",
            form="a path that begins with / and does not end with /",
        ),
    ] = "/relume/v1"
    policy: Annotated[str, option("Routing policy", choices=routing_settings.POLICIES)] = (
        routing_settings.RoutingConfig().policy
    )
    routing_shed: Annotated[
        str,
        option(
            "on: reject a request with 429 if no worker is predicted to meet the TTFT goal of its "
            "tier",
            choices=("off", "on"),
        ),
    ] = routing_settings.RoutingConfig().shed
    routing_limits: Annotated[
        dict[str, int], limits("Limits of routing", routing_settings.RoutingConfig)
    ] = {}
    waiting_limits: Annotated[
        dict[str, int],
        limits(
            "Limits of worker queues and of the admission queue", admission_settings.WaitingConfig
        ),
    ] = {}
    lease_ttl_s: Annotated[
        int,
        option("Time after which the owner of a log stream counts as dead", unit="s", ge=2, le=600),
    ] = 8
    spool_dir: Annotated[
        str, option("Directory that buffers events while etcd is unavailable", min_length=1)
    ] = ".relume/spool"
    archive_dir: Annotated[
        str,
        option(
            "Directory of snapshots and of the archived log, shared by all replicas (empty: "
            "everything stays in etcd)"
        ),
    ] = ".relume/archive"
    snapshot_every_revisions: Annotated[
        int, option("Number of revisions after which the leader takes a snapshot", ge=10)
    ] = 20_000
    snapshot_every_s: Annotated[
        float,
        option(
            "Time after which the leader takes a snapshot if the log has changed", unit="s", ge=1
        ),
    ] = 300.0
    snapshots_kept: Annotated[
        int, option("Number of snapshots to keep; older ones are deleted", ge=2)
    ] = 3
    etcd_quota_bytes: Annotated[
        int,
        option("--quota-backend-bytes of etcd; its own default is 2 GiB", unit="bytes", ge=1024**2),
    ] = 2 * 1024**3
    api_keys: Annotated[
        tuple[str, ...],
        option(
            "API keys of clients (@FILE reads them from a file); required beyond loopback",
            secret=True,
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        option(
            "Origins of web pages that may use the OpenAI endpoint (CORS), for example "
            "https://chat.example.org; *: any"
        ),
    ] = ()
    unkept_tenants: Annotated[
        tuple[str, ...],
        option(
            "Tenants, as /admin/v1/requests names them, whose prompts are not kept for cross-checks"
        ),
    ] = ()
    admin_tokens: Annotated[
        dict[str, str],
        option(
            "Bearer tokens of the admin API, TOKEN=ROLE or TOKEN=ROLE:NAME with role viewer, "
            "operator or admin (@FILE reads them from a file); required beyond loopback",
            secret=True,
        ),
    ] = {}
    wait_for_worker_s: Annotated[
        float,
        option(
            "Maximum time a request waits for an available worker before 503; longer while an "
            "engine of its model restarts (learnt from earlier restarts, 600 s at most)",
            unit="s",
            ge=0,
            le=3600,
        ),
    ] = 30.0
    resume_grace_s: Annotated[
        int,
        option(
            "Maximum time the client of a resumable stream may be disconnected",
            unit="s",
            ge=1,
            le=3600,
        ),
    ] = 30
    resume_stream_kb: Annotated[
        int, option("Maximum buffer per resumable stream on a worker", unit="KiB", ge=1)
    ] = 1024
    resume_total_mb: Annotated[
        int,
        option(
            "Maximum buffer of all resumable streams on a worker; the stream detached for the "
            "longest time is dropped first",
            unit="MiB",
            ge=1,
        ),
    ] = 64
    resume_streams: Annotated[
        int, option("Maximum number of detached streams per worker", ge=0)
    ] = 256
    drain_s: Annotated[
        float,
        option(
            "Maximum time a replica that is told to stop lets running requests end. Then resumable "
            "streams continue at another replica, and other requests get an error. A second signal "
            "ends it at once",
            unit="s",
            ge=0,
            le=86_400,
        ),
    ] = 25.0
    drain_announce_s: Annotated[
        float,
        option(
            "Of it, time in which new connections are accepted although /ready and /health "
            "answer 503, so that load balancers notice",
            unit="s",
            ge=0,
            le=3600,
        ),
    ] = 5.0
    max_body_bytes: Annotated[
        int, option("Maximum size of a request body; a larger one gets 413", unit="bytes", ge=1024)
    ] = 8 * 1024 * 1024
    stall_floor_ms: Annotated[int, option("Minimum stall timeout", unit="ms", ge=10)] = 1000
    stall_cap_ms: Annotated[int, option("Maximum stall timeout", unit="ms", ge=10)] = 2500
    stall_factor: Annotated[
        int, option("Stall timeout, as a multiple of the slowest recent engine step", ge=1)
    ] = 8
    checkpoint_placement: Annotated[
        str,
        option(
            "Policy that chooses the holder of a KV checkpoint",
            choices=checkpoint_settings.PLACEMENTS,
        ),
    ] = _CHECKPOINTS.placement
    checkpoint_holders: Annotated[
        int, option("Number of holders per request, in different failure domains", ge=1, le=4)
    ] = _CHECKPOINTS.holders
    checkpoint_recovery: Annotated[
        str,
        option(
            "Policy that plans how interrupted requests continue",
            choices=checkpoint_settings.RECOVERIES,
        ),
    ] = _CHECKPOINTS.recovery
    checkpoint_links: Annotated[
        dict[str, int],
        option(
            "Rates in MB/s of links before they are measured: machine (shared memory, 4000), "
            "domain (within a failure domain, 1000), network (500)",
            members=dict.fromkeys(("machine", "domain", "network"), (1, 1_000_000_000)),
        ),
    ] = {}
    migration_moves: Annotated[
        str,
        option(
            "When to migrate running requests. off: never; drain: from draining workers; all: also"
            " from persistently overloaded workers",
            choices=migration_settings.MOVES,
        ),
    ] = migration_settings.MigrationConfig().moves
    migration_limits: Annotated[
        dict[str, int],
        limits("Limits of migration", migration_settings.MigrationConfig),
    ] = {}
    health_limits: Annotated[
        dict[str, int],
        limits("Limits of circuit breakers and suspects", HealthConfig),
    ] = {}
    overdue_limits: Annotated[
        dict[str, int],
        limits("When a stream moves that gets no tokens while its engine steps", OverdueConfig),
    ] = {}
    canary_limits: Annotated[
        dict[str, int],
        limits("When answers to canaries quarantine a worker or release it", CanaryConfig),
    ] = {}
    crosscheck_limits: Annotated[
        dict[str, int],
        limits(
            "Which finished requests another engine answers again, for comparison",
            CrossCheckConfig,
        ),
    ] = {}
    degradation: Annotated[
        str,
        option(
            "When workers serve less than clients ask for. off: nothing is decided; observe: levels "
            "are decided and shown; on: levels limit and refuse requests",
            choices=MODES,
        ),
    ] = DegradationConfig().mode
    degradation_limits: Annotated[
        dict[str, int],
        limits("When levels of degradation change, and the limit of answers", DegradationConfig),
    ] = {}
    spares: Annotated[
        dict[str, int],
        limits(
            "How many workers of a model are spares, and when a new one is chosen", SparesConfig
        ),
    ] = {}
    gateway_limits: Annotated[dict[str, float], limits("Limits of the gateway", GatewayConfig)] = {}
    etcd_limits: Annotated[
        dict[str, float],
        limits("Limits of the log on etcd; they win over options of the URL", EtcdConfig),
    ] = {}
    tokenizer: Annotated[
        str,
        option(
            "Tokenizer and chat template that count prompt tokens: a folder with a tokenizer.json,"
            " or a repository in the local Hugging Face cache; for several models "
            "MODEL=FOLDER,MODEL=FOLDER. Without it, tokens are estimated from bytes, and routing "
            "cannot predict what workers have cached"
        ),
    ] = ""
    tokenize_wait_ms: Annotated[
        int,
        option(
            "Maximum time a request waits for its token count; then the count is estimated",
            unit="ms",
            ge=1,
            le=10000,
        ),
    ] = 250
    tick_ms: Annotated[
        int, option("Period of the tick of the leader", unit="ms", ge=50, le=60000)
    ] = 1000
    trace_file: Annotated[
        str,
        option(
            "File for spans of requests, a JSON object per line (empty: none); a collector is "
            "named by OTEL_EXPORTER_OTLP_ENDPOINT"
        ),
    ] = ""
    log_level: Annotated[str, option("Minimum level of log messages", choices=LOG_LEVELS)] = "info"
    log_format: Annotated[
        str,
        option(
            "Format of log messages; auto: console on a terminal, else json", choices=LOG_FORMATS
        ),
    ] = "auto"

    def __repr__(self) -> str:
        return masked_repr(self)


SETTINGS: dict[str, Setting] = settings_of(ServeConfig)


def load(flags: Mapping[str, Any], environ: Mapping[str, str], path: str = "") -> ServeConfig:
    """The settings from flags, environment and file, checked. Raises ConfigError.

    `flags` maps names to what the command line gave (None: not given); `path` is the settings
    file, by default what RELUME_CONFIG names.
    """
    config = sources.load(ServeConfig, flags, environ, path)
    check(config)
    return config


def check(config: ServeConfig) -> None:
    """Refuse settings that contradict each other or would be unsafe. Raises ConfigError."""
    if config.stall_floor_ms > config.stall_cap_ms:
        raise ConfigError(
            "stall_floor_ms",
            config.stall_floor_ms,
            f"is above stall_cap_ms = {config.stall_cap_ms}",
            "lower --stall-floor-ms or raise --stall-cap-ms",
        )
    if config.tick_ms * 2 > config.lease_ttl_s * 1000:
        raise ConfigError(
            "tick_ms",
            config.tick_ms,
            f"is more than half of lease_ttl_s = {config.lease_ttl_s}, too coarse to notice losses",
            "lower --tick-ms",
        )
    if config.tick_ms * HEALTHY_TICKS < config.lease_ttl_s * 1000:
        raise ConfigError(
            "tick_ms",
            config.tick_ms,
            f"makes {HEALTHY_TICKS} ticks shorter than lease_ttl_s = {config.lease_ttl_s}, so that "
            "an outage of etcd would look like the loss of workers",
            "raise --tick-ms or lower --lease-ttl-s",
        )
    if config.drain_announce_s > config.drain_s:
        raise ConfigError(
            "drain_announce_s",
            config.drain_announce_s,
            f"is above drain_s = {config.drain_s}",
            "lower --drain-announce-s or raise --drain-s",
        )
    if config.admin_port and (config.host, config.port) == (config.admin_host, config.admin_port):
        raise ConfigError(
            "admin_port", config.admin_port, "is also the value of --port", "choose another"
        )
    for role in config.admin_tokens.values():
        if role.partition(":")[0] not in ROLES:
            raise ConfigError(
                "admin_tokens", role, "is not a role", f"use one of {', '.join(ROLES)}"
            )
    for origin in config.allowed_origins:
        if not ORIGIN(origin):
            remedy = "write scheme://host[:port] without a path, or *"
            raise ConfigError("allowed_origins", origin, "is not an origin", remedy)
    if not is_loopback(config.host) and not config.api_keys:
        raise ConfigError(
            "host",
            config.host,
            "listens beyond loopback without credentials",
            "set api_keys (RELUME_API_KEYS=@file) or use 127.0.0.1",
        )
    if config.admin_port and not is_loopback(config.admin_host) and not config.admin_tokens:
        raise ConfigError(
            "admin_host",
            config.admin_host,
            "listens beyond loopback without credentials",
            "set admin_tokens (RELUME_ADMIN_TOKENS=@file) or use 127.0.0.1",
        )


def etcd_config(config: ServeConfig) -> EtcdConfig:
    """How this replica reaches its log. Raises ConfigError."""
    # A URL may name several members; its commas were read as those of the list.
    url = ",".join(config.etcd)
    try:
        if "://" in url:
            base = parse_url(url)
        elif "@" in url:
            base = parse_url(f"http://{url}{config.prefix}")
        else:
            base = EtcdConfig(endpoints=config.etcd, prefix=config.prefix)
    except BadUrl as error:
        raise ConfigError("etcd", "***", str(error), _URL_FORM) from None
    return msgspec.structs.replace(
        base,
        **config.etcd_limits,
        lease_ttl_s=config.lease_ttl_s,
        spool_dir=f"{config.spool_dir}/{config.name}",
    )


def masked(config: ServeConfig) -> dict[str, Any]:
    """The settings by name for people; secrets are counted, not shown, also those in URLs."""
    shown = {name: getattr(config, name) for name in SETTINGS}
    for name, setting in SETTINGS.items():
        if setting.secret:
            shown[name] = f"<{len(shown[name])} set>"
    shown["etcd"] = tuple(without_credentials(endpoint) for endpoint in config.etcd)
    return shown
