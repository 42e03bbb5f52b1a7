"""Settings of the state daemon: each is a flag, a variable `RELUME_STATE_*` and a key of the file.

The agent writes the file. Secrets come from files of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from msgspec import Struct

from relume.engine_shim.checkpoints.daemon.remote_server import RemoteConfig
from relume.engine_shim.checkpoints.link import link_auth
from relume.events.settings import sources
from relume.events.settings.config_error import ConfigError
from relume.events.settings.declared import option


class DaemonConfig(Struct, frozen=True, kw_only=True):
    """Everything the state daemon of a host can be configured with."""

    VARIABLE_PREFIX: ClassVar[str] = "RELUME_STATE_"

    host: Annotated[str, option("Name of the worker whose host this is", metavar="NAME")]
    socket: Annotated[str, option("Unix socket for engines of this host", metavar="PATH")]
    budget_bytes: Annotated[
        int,
        option("Memory for checkpoints (LUMEN Eq. 5; 0: by --budget-fraction)", unit="bytes", ge=0),
    ] = 0
    budget_fraction: Annotated[
        float,
        option("Share of the host's memory for checkpoints (LUMEN Eq. 7)", metavar="X", ge=0, lt=1),
    ] = 0.0
    budget_share: Annotated[
        float,
        option(
            "Share of the budget that is used; read again on SIGHUP", metavar="X", ge=0.0, le=1.0
        ),
    ] = 1.0
    reserve_bytes: Annotated[
        int, option("Memory of the host that is always left to others", unit="bytes", ge=0)
    ] = 512 << 20
    allow_unlocked: Annotated[bool, option("Start also if memory cannot be locked")] = False
    file_directory: Annotated[
        str, option("Directory for blocks that are not in use (empty: none)", metavar="DIR")
    ] = ""
    file_budget_bytes: Annotated[
        int, option("Size of the file in --file-directory", unit="bytes", ge=0)
    ] = 0
    ttl_s: Annotated[
        float, option("Time after which blocks of an orphaned request are dropped", unit="s", ge=0)
    ] = 600.0
    cold_after_s: Annotated[
        float, option("Time after which an unused block moves to the file", unit="s", ge=0)
    ] = 5.0
    max_blocks: Annotated[int, option("Maximum number of blocks", ge=1)] = 1 << 20
    abandoned_s: Annotated[
        float,
        option(
            "Time without an agent after which a daemon that holds nothing ends (0: never)",
            unit="s",
            ge=0,
        ),
    ] = 0.0
    epoch: Annotated[int, option("Fencing epoch; older daemons of this host are refused")] = 0
    secret_file: Annotated[
        str, option("File with the shared secret of the fleet", metavar="FILE")
    ] = ""
    remote: Annotated[
        RemoteConfig | None,
        option(
            "Where the daemon listens for other hosts, and which it admits",
            form="a mapping with host, port, and curve_public, curve_secret, curve_clients or "
            "private_networks",
            secret=True,
            is_flag=False,
        ),
    ] = None


def load(flags: Mapping[str, Any], environ: Mapping[str, str], path: str) -> DaemonConfig:
    """The settings from flags, environment and file, checked. Raises ConfigError."""
    config = sources.load(DaemonConfig, flags, environ, path, file_format="json")
    if not (config.budget_bytes or config.budget_fraction):
        remedy = "give it, or --budget-fraction"
        raise ConfigError("budget_bytes", 0, "leaves no memory for checkpoints", remedy)
    if bool(config.file_directory) != (config.file_budget_bytes > 0):
        problem = "goes with --file-budget-bytes"
        raise ConfigError("file_directory", config.file_directory, problem, "give both or neither")
    return config


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
