"""Configuration of the control plane: typed, with units, parsed once at the edge.

Precedence: flag > environment `RELUME_*` > file (YAML or JSON) > default. Each field of
`ServeConfig` is at once a flag (`--admin-port`), a variable (`RELUME_ADMIN_PORT`) and a
key of the file (`admin_port`); its type, limits and help text stand here and nowhere
else. Lists are comma-separated in flags and variables, mappings `key=value,key=value`
(or JSON); a secret `@path` is read from that file, so that it need not stand in a
process list.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from relume.events.errors import RelumeError
from relume.events.etcd.config import EtcdConfig, parse_url
from relume.events.etcd.errors import BadUrl
from relume.policies import routing_settings, waiting_settings
from relume.policies.checkpoint_settings import PLACEMENTS, RECOVERIES, CheckpointConfig
from relume.policies.migration_settings import LIMITS, MOVES, MigrationConfig
from relume.policies.routing_settings import RoutingConfig
from relume.policies.step import HEALTHY_TICKS
from relume.policies.waiting_settings import WaitingConfig

ROLES = ("viewer", "operator", "admin")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "console")

Port = Annotated[int, Meta(ge=1, le=65535)]
OptionalPort = Annotated[int, Meta(ge=0, le=65535)]


class ConfigError(RelumeError):
    """A setting is unusable. The operator's to repair: `remedy` says how.

    `field` is the setting's name, `value` what was given (secrets masked), `source`
    where it came from.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, problem: str, remedy: str, source: str = ""):
        came_from = f" (from {source})" if source else ""
        super().__init__(f"{field} = {value!r}{came_from}: {problem}; {remedy}")
        self.field = field
        self.value = value
        self.problem = problem
        self.remedy = remedy
        self.source = source


_CHECKPOINTS = CheckpointConfig()
_MIGRATION = MigrationConfig()
_MIGRATION_LIMITS = ", ".join(f"{name} ({getattr(_MIGRATION, name)})" for name in LIMITS)
_ROUTING = RoutingConfig()
_ROUTING_LIMITS = ", ".join(f"{n} ({getattr(_ROUTING, n)})" for n in routing_settings.LIMITS)
_WAITING = WaitingConfig()
_WAITING_LIMITS = ", ".join(f"{n} ({getattr(_WAITING, n)})" for n in waiting_settings.LIMITS)


class ServeConfig(Struct, frozen=True):
    """Everything `relume serve` needs to know. The texts are the help of its flags."""

    name: Annotated[
        str,
        Meta(
            description="name of this replica; its log stream is r.NAME",
            pattern=r"^[A-Za-z0-9_-]{1,32}$",
        ),
    ] = "r0"
    host: Annotated[str, Meta(description="address of the OpenAI endpoint")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="port of the OpenAI endpoint")] = 8000
    admin_host: Annotated[str, Meta(description="address of the admin API")] = "127.0.0.1"
    admin_port: Annotated[
        OptionalPort, Meta(description="port of the admin API and /metrics (0: none)")
    ] = 8001
    etcd: Annotated[
        tuple[str, ...],
        Meta(description="etcd endpoints, host:port or one https:// URL with options"),
    ] = ("127.0.0.1:2379",)
    prefix: Annotated[
        str, Meta(description="key prefix of the log in etcd", pattern="^/.*[^/]$")
    ] = "/relume/v1"
    policy: Annotated[
        str, Meta(description=f"routing policy: {', '.join(routing_settings.POLICIES)}")
    ] = _ROUTING.policy
    routing_shed: Annotated[
        str,
        Meta(description="on: requests that no worker would begin in time for their tier get 429"),
    ] = _ROUTING.shed
    routing_limits: Annotated[
        dict[str, int],
        Meta(description=f"what routing keeps to, NAME=N: {_ROUTING_LIMITS}"),
    ] = {}
    waiting_limits: Annotated[
        dict[str, int],
        Meta(description=f"bounds of workers' queues and of the room, NAME=N: {_WAITING_LIMITS}"),
    ] = {}
    lease_ttl_s: Annotated[
        int, Meta(ge=2, le=600, description="a stream's ownership lapses so long after its owner")
    ] = 8
    spool_dir: Annotated[
        str, Meta(description="directory events wait in while etcd is away", min_length=1)
    ] = ".relume/spool"
    archive_dir: Annotated[
        str,
        Meta(
            description="directory of snapshots and the archived log, shared by all replicas "
            "(empty: keep everything in etcd)"
        ),
    ] = ".relume/archive"
    snapshot_every_revisions: Annotated[
        int, Meta(ge=10, description="the leader takes a snapshot after so many revisions")
    ] = 20_000
    snapshot_every_s: Annotated[
        float, Meta(ge=1, description="and after so long, when there is anything new")
    ] = 300.0
    snapshots_kept: Annotated[
        int, Meta(ge=2, description="so many snapshots are kept; older ones are deleted")
    ] = 3
    etcd_quota_bytes: Annotated[
        int,
        Meta(ge=1024**2, description="etcd's --quota-backend-bytes; its own default is 2 GiB"),
    ] = 2 * 1024**3
    quota_shed_percent: Annotated[
        int, Meta(ge=1, le=100, description="from here on the log is trimmed early")
    ] = 60
    quota_alarm_percent: Annotated[
        int, Meta(ge=1, le=100, description="from here on an operator is alarmed")
    ] = 80
    api_keys: Annotated[
        tuple[str, ...], Meta(description="clients' API keys; required beyond loopback")
    ] = ()
    admin_tokens: Annotated[
        dict[str, str],
        Meta(
            description="bearer tokens of the admin API, TOKEN=ROLE or TOKEN=ROLE:NAME with role "
            "viewer, operator or admin; required beyond loopback"
        ),
    ] = {}
    wait_for_worker_s: Annotated[
        float, Meta(ge=0, le=3600, description="a request waits so long for a worker, then 503")
    ] = 30.0
    resume_grace_s: Annotated[
        int,
        Meta(ge=1, le=3600, description="the client of a resumable stream may stay away so long"),
    ] = 30
    resume_stream_kb: Annotated[
        int, Meta(ge=1, description="a worker keeps so much of each resumable stream")
    ] = 1024
    resume_total_mb: Annotated[
        int, Meta(ge=1, description="and so much of all of them; the longest detached goes first")
    ] = 64
    resume_streams: Annotated[int, Meta(ge=0, description="and so many whose clients are away")] = (
        256
    )
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="a longer request body is refused with 413")
    ] = 8 * 1024 * 1024
    stall_floor_ms: Annotated[
        int, Meta(ge=10, description="silence below this is never judged a stall")
    ] = 1000
    stall_cap_ms: Annotated[
        int, Meta(ge=10, description="silence beyond this is always judged")
    ] = 3000
    stall_factor: Annotated[
        int, Meta(ge=1, description="silence allowed, in slowest recent steps")
    ] = 8
    checkpoint_placement: Annotated[
        str, Meta(description=f"who holds a request's KV checkpoint: {', '.join(PLACEMENTS)}")
    ] = _CHECKPOINTS.placement
    checkpoint_holders: Annotated[
        int, Meta(ge=1, le=4, description="so many holders a request, in other failure domains")
    ] = _CHECKPOINTS.holders
    checkpoint_recovery: Annotated[
        str, Meta(description=f"how interrupted requests go on: {', '.join(RECOVERIES)}")
    ] = _CHECKPOINTS.recovery
    checkpoint_links: Annotated[
        dict[str, int],
        Meta(
            description="MB/s of links not measured yet, TIER=N: machine (shared memory, 4000), "
            "domain (within a failure domain, 1000), network (500)"
        ),
    ] = {}
    migration_moves: Annotated[
        str,
        Meta(
            description="running requests leave nobody (off), a worker that drains (drain), or "
            "also one that long has more than others (all)"
        ),
    ] = _MIGRATION.moves
    migration_limits: Annotated[
        dict[str, int],
        Meta(description=f"when and how many, NAME=N: {_MIGRATION_LIMITS}"),
    ] = {}
    tokenizer: Annotated[
        str,
        Meta(
            description="prompts are counted by this tokenizer and chat template: a folder with a "
            "tokenizer.json, or the name of a repository in the local Hugging Face cache; of "
            "several models MODEL=FOLDER,MODEL=FOLDER. Without it tokens are estimated from "
            "bytes, and what workers have cached is not known beforehand"
        ),
    ] = ""
    tokenize_wait_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="so long a request waits for its count; then it is estimated",
        ),
    ] = 250
    gather_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="arrivals, decisions and ends of requests wait so long for one another "
            "before they go to the log",
        ),
    ] = 50
    tick_ms: Annotated[int, Meta(ge=50, le=60_000, description="period of the leader's tick")] = (
        1000
    )
    log_level: Annotated[str, Meta(description=f"one of {', '.join(LOG_LEVELS)}")] = "info"
    log_format: Annotated[
        str, Meta(description="json, console, or auto: console on a terminal")
    ] = "auto"


FIELDS: tuple[str, ...] = ServeConfig.__struct_fields__
SECRETS = frozenset({"api_keys", "admin_tokens"})
_CREDENTIALS = re.compile(r"//[^/@]*@")
_HINTS = get_type_hints(ServeConfig, include_extras=True)
_VARIABLES = {"etcd": "RELUME_ETCD_ENDPOINTS"}  # RELUME_ETCD names the etcd program
_CHOICES = {
    "policy": routing_settings.POLICIES,
    "routing_shed": routing_settings.CHOICES[f"{routing_settings.PREFIX}shed"],
    "checkpoint_placement": PLACEMENTS,
    "checkpoint_recovery": RECOVERIES,
    "migration_moves": MOVES,
    "log_level": LOG_LEVELS,
    "log_format": LOG_FORMATS,
}
LINK_TIERS = ("machine", "domain", "network")


# --- reading -------------------------------------------------------------------------


def load(flags: Mapping[str, Any], environ: Mapping[str, str], path: str = "") -> ServeConfig:
    """The configuration from its sources, checked. Raises ConfigError.

    `flags` maps field names to what the command line gave (None: not given); `path` is the
    configuration file, default `RELUME_CONFIG`.
    """
    path = path or environ.get("RELUME_CONFIG", "")
    from_file = _read_file(path) if path else {}
    values: dict[str, Any] = {}
    for field in FIELDS:
        if flags.get(field) is not None:
            values[field] = _typed(field, flags[field], f"--{field.replace('_', '-')}")
        elif (name := variable(field)) in environ:
            values[field] = _typed(field, environ[name], name)
        elif field in from_file:
            values[field] = _typed(field, from_file[field], path)
    config = ServeConfig(**values)
    check(config)
    return config


def check(config: ServeConfig) -> None:
    """Refuse settings that contradict each other or would be unsafe. Raises ConfigError."""
    for field, choices in _CHOICES.items():
        value = getattr(config, field)
        if value not in choices:
            raise ConfigError(field, value, "is not known", f"use one of {', '.join(choices)}")
    if config.stall_floor_ms > config.stall_cap_ms:
        raise ConfigError(
            "stall_floor_ms",
            config.stall_floor_ms,
            f"is above stall_cap_ms = {config.stall_cap_ms}",
            "lower it or raise the cap",
        )
    if config.tick_ms * 2 > config.lease_ttl_s * 1000:
        raise ConfigError(
            "tick_ms",
            config.tick_ms,
            f"is more than half of lease_ttl_s = {config.lease_ttl_s}",
            "lower it, or losses are judged without a clock",
        )
    if config.tick_ms * HEALTHY_TICKS < config.lease_ttl_s * 1000:
        raise ConfigError(
            "tick_ms",
            config.tick_ms,
            f"makes {HEALTHY_TICKS} ticks shorter than lease_ttl_s = {config.lease_ttl_s}",
            "raise it or lower the lease, or an outage is taken for a loss",
        )
    for tier, rate in config.checkpoint_links.items():
        if tier not in LINK_TIERS or rate < 1:
            told = f"{tier}={rate}"
            tiers = ", ".join(LINK_TIERS)
            raise ConfigError("checkpoint_links", told, "is no rate of a tier", f"tiers: {tiers}")
    _check_limits("migration", config.migration_limits, LIMITS)
    _check_limits("routing", config.routing_limits, routing_settings.LIMITS)
    _check_limits("waiting", config.waiting_limits, waiting_settings.LIMITS)
    if config.admin_port and (config.host, config.port) == (config.admin_host, config.admin_port):
        raise ConfigError("admin_port", config.admin_port, "is the port too", "choose another")
    for role in config.admin_tokens.values():
        if role.partition(":")[0] not in ROLES:
            raise ConfigError("admin_tokens", role, "is no role", f"use one of {', '.join(ROLES)}")
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


def _check_limits(
    what: str, told: Mapping[str, int], limits: Mapping[str, tuple[int, int, str]]
) -> None:
    known = ", ".join(f"{name} {low} to {high}" for name, (low, high, _) in limits.items())
    for name, value in told.items():
        least, most, _ = limits.get(name, (0, -1, ""))
        if not least <= value <= most:
            why = f"is no limit of {what}"
            raise ConfigError(f"{what}_limits", f"{name}={value}", why, f"use {known}")


def etcd_config(config: ServeConfig) -> EtcdConfig:
    """How this replica reaches its log. Raises ConfigError."""
    base = EtcdConfig(endpoints=config.etcd, prefix=config.prefix)
    if config.etcd and "://" in config.etcd[0]:
        try:
            # A URL may name several members; the list's commas were taken for its own.
            base = parse_url(",".join(config.etcd))
        except BadUrl as error:
            raise ConfigError("etcd", "***", str(error), "see events/etcd/config.py") from None
    return msgspec.structs.replace(
        base,
        lease_ttl_s=config.lease_ttl_s,
        spool_dir=f"{config.spool_dir}/{config.name}",
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost may resolve
    to anything, so it counts as beyond."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _typed(field: str, given: Any, source: str) -> Any:
    hint = _HINTS[field]
    value = _from_text(field, hint, given, source) if isinstance(given, str) else given
    try:
        return msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError as error:
        problem = str(error).partition(" - at ")[0]
        shown = "***" if field in SECRETS else given
        raise ConfigError(
            field, shown, problem, f"{description(field)} (default {default(field)!r})", source
        ) from None


def _from_text(field: str, hint: Any, text: str, source: str) -> Any:
    if text.startswith("@") and field in SECRETS:
        try:
            text = Path(text[1:]).read_text().strip()
        except OSError as error:
            raise ConfigError(
                field, text, error.strerror or "unreadable", "name a readable file", source
            ) from None
    kind = _kind(hint)
    if kind in (tuple, dict) and text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except ValueError as error:
            shown = "***" if field in SECRETS else text
            raise ConfigError(field, shown, f"is not JSON: {error}", "repair it", source) from None
    parts = [part.strip() for part in text.replace("\n", ",").split(",") if part.strip()]
    if kind is tuple:
        return tuple(parts)
    if kind is dict:
        pairs = [part.partition("=") for part in parts]
        if any(not sign for _, sign, _ in pairs):
            raise ConfigError(field, "***", "has an entry without =", "write KEY=VALUE", source)
        return {key: value for key, _, value in pairs}
    return text


def _kind(hint: Any) -> Any:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_origin(hint) or hint


def _read_file(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(
            "config", path, error.strerror or "unreadable", "name a readable YAML or JSON file"
        ) from None
    try:
        found = json.loads(text) if path.endswith(".json") else _parse_yaml(text)
    except ValueError as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError("config", path, f"does not parse: {first_line}", "repair it") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError("config", path, "is not a mapping", "write `key: value` lines")
    for key in found:
        if key not in FIELDS:
            close = difflib.get_close_matches(str(key), FIELDS, 1)
            hint = f"did you mean {close[0]}?" if close else "see `relume serve --help`"
            raise ConfigError("config", str(key), "is not a setting", hint, path)
    return found


def _parse_yaml(text: str) -> Any:
    import yaml  # only when a file is given: it costs 20 ms at start

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", " ")) from None


# --- showing -------------------------------------------------------------------------


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return _VARIABLES.get(field, f"RELUME_{field.upper()}")


def description(field: str) -> str:
    """What the setting means, for help and errors."""
    return next(
        (m.description for m in reversed(get_args(_HINTS[field])[1:]) if m.description), field
    )


def default(field: str) -> Any:
    """The setting's default."""
    return getattr(ServeConfig(), field)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag for each setting, and `--config`; values stay text until `load`."""
    parser.add_argument("--config", metavar="FILE", default="", help="YAML or JSON settings file")
    for field in FIELDS:
        shown = default(field)
        if isinstance(shown, tuple | dict):
            shown = ",".join(shown)
        shown = "none" if shown == "" else shown
        text = f"{description(field)} [{variable(field)}; default {shown}]"
        parser.add_argument(
            f"--{field.replace('_', '-')}",
            dest=field,
            metavar={tuple: "A,B", dict: "K=V,K=V", int: "N", float: "S"}.get(
                _kind(_HINTS[field]), "TEXT"
            ),
            help=text.replace("%", "%%"),
        )


def masked(config: ServeConfig) -> dict[str, Any]:
    """The settings by name for people; secrets are counted, not shown, also those in URLs."""
    shown = {field: getattr(config, field) for field in FIELDS}
    for field in SECRETS:
        shown[field] = f"<{len(shown[field])} set>"
    shown["etcd"] = tuple(_CREDENTIALS.sub("//***@", endpoint) for endpoint in config.etcd)
    return shown
