"""Checkpoint settings of a host: what its state daemon is started with, and its engines.

Written from one configuration, so that both ends of every link agree on keys and secrets.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from relume.engine_shim.agent.agent_config import AgentConfig, is_unspecified
from relume.engine_shim.checkpoints.daemon.store import host_memory
from relume.engine_shim.checkpoints.link import link_auth
from relume.events.decode_errors import UNREADABLE
from relume.events.settings.config_error import ConfigError
from relume.events.wire.engine_environment import LOAD_MB_S, POOLS, POOLS_ANEW

_CURVE_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_ENDPOINT_PATH = re.compile(r"/[A-Za-z0-9_./-]{1,100}")
LOAD_FORMAT = "relume"
"""Of vLLM, as `relume.engine_shim.pools.weights_loader` registers it."""
ABANDONED_S = 900.0
CHECKPOINT_TTL_S = 600.0
"""Time without access after which the checkpoints of a request are dropped."""
_CURVE_REMEDY = "write it with python -m relume.engine_shim.checkpoints.curve_keys"


class CurveFile(Struct, frozen=True, forbid_unknown_fields=True):
    """`checkpoint_curve_file`: this host's CURVE pair (Z85; the secret in a separate file,
    named from the curve file's directory), and the public keys of the other hosts' daemons by
    endpoint. Hosts whose keys are listed may connect."""

    public: str
    secret_file: str
    hosts: dict[str, str] = {}


class Checkpoints(Struct, frozen=True, kw_only=True):
    """What one host does about checkpoints. `local` and `address` are endpoints of its
    daemon; `address` is empty when it listens to no other host."""

    socket: str
    local: str
    address: str
    daemon: dict[str, Any]
    links: dict[str, Any]
    machine: str
    load_mb_s: int = 0

    @property
    def digest(self) -> str:
        """Digest of the settings: a daemon started with others is restarted."""
        return hashlib.blake2b(msgspec.json.encode(self.daemon), digest_size=8).hexdigest()

    def engine_arguments(self, epoch: int) -> tuple[str, ...]:
        """vLLM's arguments that make an engine take part; `epoch` is its worker's."""
        connector = {
            "kv_connector": "RelumeConnector",
            "kv_connector_module_path": "relume.engine_shim.checkpoints.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {**self.links, "epoch": epoch},
        }
        load_format = ("--load-format", LOAD_FORMAT) if self.pools else ()
        return *load_format, "--kv-transfer-config", msgspec.json.encode(connector).decode()

    @property
    def pools(self) -> str:
        """The socket at which engines find pools for their weights; empty: they have none."""
        return str(self.daemon.get("pools_socket", ""))

    def engine_environment(self, anew: bool) -> dict[str, str]:
        """What tells an engine where its weights are; `anew`: it reads the files, whatever pools have."""
        if not self.pools:
            return {}
        how = {POOLS_ANEW: "1" if anew else "", LOAD_MB_S: str(self.load_mb_s)}
        return {POOLS: self.pools, **how}


def budget_bytes(config: AgentConfig) -> int:
    """What the host's daemon may hold in memory (LUMEN Eq. 5), given in MB or as a share of
    the host's (Eq. 7); whole pages."""
    share = host_memory.total() * config.checkpoint_percent // 100 // mmap.PAGESIZE * mmap.PAGESIZE
    return config.checkpoint_mb << 20 or share


def checkpoints_of(config: AgentConfig) -> Checkpoints | None:
    """None if the configuration disables checkpoints. Raises ConfigError."""
    budget = budget_bytes(config)
    if not budget:
        return None
    run = Path(config.run_dir).absolute()
    socket = config.checkpoint_socket or str(run / "state.sock")
    if not _ENDPOINT_PATH.fullmatch(socket):
        remedy = "use an absolute path of at most 100 characters from A-Z a-z 0-9 _ . / -"
        raise ConfigError("checkpoint_socket", socket, "cannot be a socket's path", remedy)
    if not (config.checkpoint_local or config.checkpoint_listen):
        problem = "is required with --checkpoint-local false"
        raise ConfigError("checkpoint_listen", "", problem, "give HOST:PORT")
    _check_secret(config.checkpoint_secret_file)
    daemon: dict[str, Any] = {
        "host": config.worker,
        "socket": socket,
        "budget_bytes": budget,
        "reserve_bytes": config.checkpoint_reserve_mb << 20,
        "allow_unlocked": config.checkpoint_allow_unlocked,
        "ttl_s": CHECKPOINT_TTL_S,
        "secret_file": config.checkpoint_secret_file,
        "abandoned_s": ABANDONED_S,
    }
    if config.keep_weights_mb:
        daemon["pools_socket"] = f"{socket}.pools"
        daemon["pools_bytes"] = config.keep_weights_mb << 20
    if config.checkpoint_file_dir:
        _check_directory(config.checkpoint_file_dir)
        daemon["file_directory"] = config.checkpoint_file_dir
        daemon["file_budget_bytes"] = config.checkpoint_file_mb << 20
        daemon["cold_after_s"] = config.checkpoint_cold_after_s
    links: dict[str, Any] = {"secret_file": config.checkpoint_secret_file}
    curve = _curve(config.checkpoint_curve_file)
    if curve is not None:
        links["curve_public"] = curve.public
        links["curve_secret_file"] = curve.secret_file
        links["curve_servers"] = curve.hosts
    address = ""
    if config.checkpoint_listen:
        address, daemon["remote"] = _remote(config, curve)
    local = f"unix:{socket}" if config.checkpoint_local else ""
    return Checkpoints(
        socket=socket, local=local, address=address, daemon=daemon, links=links, machine=machine(),
        load_mb_s=config.weights_load_mb_s,
    )  # fmt: skip


def _remote(config: AgentConfig, curve: CurveFile | None) -> tuple[str, dict[str, Any]]:
    """Where others reach the daemon, and its settings for them. Raises ConfigError."""
    host, port = _host_port("checkpoint_listen", config.checkpoint_listen)
    if is_unspecified(host) and not config.checkpoint_advertise:
        problem = f"is required when the state daemon listens on {host}"
        raise ConfigError("checkpoint_advertise", "", problem, "give HOST:PORT as others reach it")
    named = config.checkpoint_advertise or config.checkpoint_listen
    address = "tcp://{}:{}".format(*_host_port("checkpoint_advertise", named))
    remote: dict[str, Any] = {"host": host, "port": port}
    if curve is not None:
        remote["curve_public"] = curve.public
        remote["curve_secret"] = _curve_secret(curve.secret_file)
        remote["curve_clients"] = sorted({curve.public, *curve.hosts.values()})
        return address, remote
    networks = config.checkpoint_private_networks
    try:
        private = link_auth.declared_private(host, networks)
    except ValueError as error:
        remedy = "give networks as CIDR, e.g. 10.0.0.0/8"
        raise ConfigError("checkpoint_private_networks", networks, str(error), remedy) from None
    if not private:
        problem = f"does not contain {host}, the address the state daemon listens on"
        remedy = "add its network, or give --checkpoint-curve-file"
        raise ConfigError("checkpoint_private_networks", networks, problem, remedy)
    if not config.checkpoint_secret_file:
        problem = "is required on networks without encryption"
        raise ConfigError("checkpoint_secret_file", "", problem, "name the fleet's shared secret")
    remote["private_networks"] = list(networks)
    return address, remote


def machine() -> str:
    """Names what shares Unix sockets: a running kernel, its file tree as we see it, and our
    user, since the daemon admits no other."""
    space = os.stat("/proc/self/ns/mnt").st_ino
    named = f"{kernel_boot()} {space} {os.getuid()}"
    return hashlib.blake2b(named.encode(), digest_size=8).hexdigest()


def kernel_boot() -> str:
    """The running kernel's own name of this boot: pids and start times are within it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _host_port(setting: str, text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(setting, text, "is not HOST:PORT", "give a port from 1 to 65535")
    return host, int(port)


def _curve(path: str) -> CurveFile | None:
    if not path:
        return None
    setting = "checkpoint_curve_file"
    try:
        curve = msgspec.json.decode(Path(path).read_bytes(), type=CurveFile)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(setting, path, str(error), _CURVE_REMEDY) from None
    for key in (curve.public, *curve.hosts.values()):
        if not _CURVE_KEY.fullmatch(key):
            problem = f"{key!r} is not a key of 40 characters (Z85)"
            raise ConfigError(setting, path, problem, _CURVE_REMEDY)
    for endpoint in curve.hosts:
        if not endpoint.startswith("tcp://"):
            problem = f"{endpoint!r} is not tcp://HOST:PORT"
            raise ConfigError(setting, path, problem, _CURVE_REMEDY)
        _host_port(setting, endpoint.removeprefix("tcp://"))
    secret_file = str(Path(path).absolute().parent / curve.secret_file)
    _curve_secret(secret_file)
    return msgspec.structs.replace(curve, secret_file=secret_file)


def _curve_secret(path: str) -> str:
    setting = "checkpoint_curve_file"
    try:
        key = link_auth.read_private(path).decode(errors="replace")
    except OSError as error:
        raise ConfigError(setting, path, str(error.strerror), _CURVE_REMEDY) from None
    if not _CURVE_KEY.fullmatch(key):
        raise ConfigError(setting, path, "has no key of 40 characters (Z85)", _CURVE_REMEDY)
    return key


def _check_secret(path: str) -> None:
    if not path:
        return
    try:
        secret = link_auth.read_private(path)
    except OSError as error:
        remedy = "name a file that only this user can read (chmod 600)"
        raise ConfigError("checkpoint_secret_file", path, str(error.strerror), remedy) from None
    if len(secret) < link_auth.MIN_SECRET_BYTES:
        problem = f"has {len(secret)} bytes, at least {link_auth.MIN_SECRET_BYTES} are required"
        raise ConfigError("checkpoint_secret_file", path, problem, "write a longer secret")


def _check_directory(path: str) -> None:
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        problem = "is not a directory that this user may write to"
        raise ConfigError("checkpoint_file_dir", path, problem, "create it, or name another")
