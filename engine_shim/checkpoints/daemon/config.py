"""Settings of the state daemon: the JSON file that the agent writes.

Secrets come from files of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from relume.engine_shim.checkpoints.daemon.remote_server import RemoteConfig
from relume.engine_shim.checkpoints.link import link_auth
from relume.events.decode_errors import UNREADABLE
from relume.events.settings.config_error import ConfigError


class DaemonConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything the state daemon of a host can be configured with. `host`: name of the worker whose
    host this is. `socket`: for engines of this host. `budget_bytes` of memory are for checkpoints
    (LUMEN Eq. 5), of which `budget_share` is used (read again on SIGHUP); `reserve_bytes` of the
    host's are always left to others. Blocks without use for `cold_after_s` move to a file of
    `file_budget_bytes` in `file_directory` (empty: none). Blocks of an orphaned request are dropped
    after `ttl_s`. A daemon that holds nothing ends after `abandoned_s` without an agent (0: never).
    Older daemons of this host than `epoch` are refused. `remote`: where the daemon listens for other
    hosts, and which it admits. `pools_bytes` of memory more are for pools of this host's engines, which
    `pools_socket` serves (0: none)."""

    host: str
    socket: str
    budget_bytes: Annotated[int, Meta(gt=0)]
    budget_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    reserve_bytes: Annotated[int, Meta(ge=0)] = 512 << 20
    allow_unlocked: bool = False
    file_directory: str = ""
    file_budget_bytes: Annotated[int, Meta(ge=0)] = 0
    ttl_s: Annotated[float, Meta(ge=0)] = 600.0
    cold_after_s: Annotated[float, Meta(ge=0)] = 5.0
    abandoned_s: Annotated[float, Meta(ge=0)] = 0.0
    epoch: int = 0
    secret_file: str = ""
    remote: RemoteConfig | None = None
    pools_socket: str = ""
    pools_bytes: Annotated[int, Meta(ge=0)] = 0


def load(path: str) -> DaemonConfig:
    """The settings in the file at `path`. Raises ConfigError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=DaemonConfig)
    except (OSError, *UNREADABLE) as error:
        remedy = "restart the agent, which writes it"
        raise ConfigError("config", path, str(error), remedy) from None


def secret(config: DaemonConfig) -> bytes:
    """The fleet's secret; empty without a file. Raises ConfigError when others can read it."""
    if not config.secret_file:
        return b""
    try:
        return link_auth.read_private(config.secret_file)
    except OSError as error:
        remedy = "name a file that only this user can read (chmod 600)"
        problem = error.strerror or str(error)
        raise ConfigError("secret_file", config.secret_file, problem, remedy) from None
