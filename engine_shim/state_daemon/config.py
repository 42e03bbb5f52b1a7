"""Configuration of the daemon: one JSON file, parsed once. Secrets come from files."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from relume.engine_shim.kv_stream import auth
from relume.engine_shim.state_daemon.errors import BadConfig
from relume.engine_shim.state_daemon.remote_server import RemoteConfig


class DaemonConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`budget_bytes` of host DRAM for checkpoints (Eq. 5), or `budget_fraction` of the
    host's memory (Eq. 7; 0.05 to 0.1 is usual) when that is 0. `reserve_bytes` are left to
    others always. `epoch` fences older daemons of this host. After `abandoned_s` without a
    word of its agent, holding nothing, it ends (0: never). `budget_share` of the budget is used;
    it is read again on SIGHUP."""

    host: str
    socket: str
    budget_bytes: int = 0
    budget_fraction: float = 0.0
    reserve_bytes: int = 512 << 20
    allow_unlocked: bool = False
    file_directory: str = ""
    file_budget_bytes: int = 0
    ttl_s: float = 600.0
    cold_after_s: float = 5.0
    max_blocks: int = 1 << 20
    abandoned_s: float = 0.0
    epoch: int = 0
    secret_file: str = ""
    budget_share: float = 1.0
    remote: RemoteConfig | None = None


def read(path: str) -> DaemonConfig:
    """Raises BadConfig."""
    try:
        with open(path, "rb") as file:
            config = msgspec.json.decode(file.read(), type=DaemonConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise BadConfig(f"{path}: {error}") from None
    if not (config.budget_bytes > 0 or 0 < config.budget_fraction < 1):
        raise BadConfig("budget_bytes or budget_fraction must say how much memory to use")
    if bool(config.file_directory) != (config.file_budget_bytes > 0):
        raise BadConfig("file_directory and file_budget_bytes go together")
    return config


def secret(config: DaemonConfig) -> bytes:
    """The fleet's secret; empty without a file. Raises BadConfig when others can read it."""
    if not config.secret_file:
        return b""
    try:
        return auth.read_private(config.secret_file)
    except OSError as error:
        raise BadConfig(str(error)) from None
