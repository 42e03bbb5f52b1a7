"""The agent's configuration: one frozen struct, parsed once at the edge.

Precedence: flag > environment `RELUME_*` > file (`--config`, TOML) > default. A setting
`ready_timeout_s` is the flag `--ready-timeout-s`, the variable `RELUME_READY_TIMEOUT_S`
and the key `ready_timeout_s` of the file.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import tomllib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from relume.engine_shim.agent_errors import ConfigInvalid
from relume.events.etcd.config import EtcdConfig, parse_url
from relume.events.etcd.errors import BadUrl

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class AgentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one agent; units are in the names. See `--help` for what each does."""

    worker: str
    run_dir: str
    model: str
    etcd: str = "127.0.0.1:2379"
    host_kind: str = "serve"
    zygote: str = ""
    backend: str = ""
    backend_key_file: str = ""
    served_model_name: str = ""
    domain: str = ""
    lease_ttl_s: int = 8
    engine_host: str = "127.0.0.1"
    advertise_host: str = ""
    engine_port: int = 0
    status_port: int = 0
    notice_port: int = 0
    ready_timeout_s: float = 300.0
    stop_timeout_s: float = 10.0
    flush_timeout_s: float = 5.0
    backoff_s: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    stable_after_s: float = 60.0
    restart_nice: int = 10
    restart_nice_bound_s: float = 60.0
    spool_mb: int = 256
    checkpoint_mb: int = 0
    checkpoint_percent: int = 0
    checkpoint_socket: str = ""
    checkpoint_local: bool = True
    checkpoint_listen: str = ""
    checkpoint_advertise: str = ""
    checkpoint_private_networks: tuple[str, ...] = ()
    checkpoint_secret_file: str = ""
    checkpoint_curve_file: str = ""
    checkpoint_file_dir: str = ""
    checkpoint_file_mb: int = 0
    checkpoint_cold_after_s: float = 5.0
    checkpoint_reserve_mb: int = 512
    checkpoint_allow_unlocked: bool = False
    checkpoint_ttl_s: float = 600.0
    log_level: str = "info"
    engine_args: tuple[str, ...] = ()

    def check(self) -> AgentConfig:
        """This configuration, if it is possible. Raises ConfigInvalid."""
        if not _NAME.fullmatch(self.worker):
            raise ConfigInvalid("--worker", f"{self.worker!r} is not 1-64 of A-Z a-z 0-9 _ . -")
        if self.host_kind not in ("zygote", "serve", "plain"):
            raise ConfigInvalid("--host-kind", f"{self.host_kind!r} is not zygote, serve or plain")
        if (self.host_kind == "plain") != bool(self.backend):
            raise ConfigInvalid("--backend", "a URL goes with --host-kind plain, and only there")
        if self.backend and not self.backend.startswith(("http://", "https://")):
            raise ConfigInvalid("--backend", f"{self.backend!r} is no http:// or https:// URL")
        if self.backend and find_spec("aiohttp") is None:
            raise ConfigInvalid("--host-kind", "plain needs aiohttp: pip install relume[plain]")
        if self.backend and (self.checkpoint_mb or self.checkpoint_percent):
            raise ConfigInvalid("--checkpoint-mb", "a plain server takes no part in checkpoints")
        if self.host_kind == "zygote" and not self.zygote:
            raise ConfigInvalid("--zygote", "the zygote's socket is needed with --host-kind zygote")
        if self.engine_host in ("0.0.0.0", "::") and not self.advertise_host:
            raise ConfigInvalid("--advertise-host", "is needed when the engine listens everywhere")
        if self.lease_ttl_s < 2:
            raise ConfigInvalid("--lease-ttl-s", "etcd keeps no lease under 2 s reliably")
        if not self.backoff_s or any(delay < 0 for delay in self.backoff_s):
            raise ConfigInvalid("--backoff-s", "needs delays of 0 s or more, e.g. 0,0.5,1,2")
        if bool(self.checkpoint_file_dir) != (self.checkpoint_file_mb != 0):
            raise ConfigInvalid("--checkpoint-file-dir", "goes with --checkpoint-file-mb")
        for name in ("checkpoint_mb", "checkpoint_file_mb", "checkpoint_reserve_mb"):
            if getattr(self, name) < 0:
                raise ConfigInvalid(_flag(name), "must be 0 MB or more")
        if not 0 <= self.checkpoint_percent <= 50:
            raise ConfigInvalid("--checkpoint-percent", "must be 0 to 50")
        if self.checkpoint_percent and self.checkpoint_mb:
            raise ConfigInvalid("--checkpoint-percent", "goes without --checkpoint-mb")
        for name in ("ready_timeout_s", "stop_timeout_s", "flush_timeout_s", "checkpoint_ttl_s"):
            if getattr(self, name) <= 0:
                raise ConfigInvalid(_flag(name), "must be more than 0 s")
        if self.checkpoint_cold_after_s < 0:
            raise ConfigInvalid("--checkpoint-cold-after-s", "must be 0 s or more")
        try:
            self.log_config()
        except BadUrl as error:
            raise ConfigInvalid("--etcd", str(error)) from None
        return self

    def log_config(self) -> EtcdConfig:
        """How to reach the log. Raises BadUrl."""
        url = self.etcd if "://" in self.etcd else f"http://{self.etcd}"
        return msgspec.structs.replace(
            parse_url(url),
            lease_ttl_s=self.lease_ttl_s,
            spool_dir=str(Path(self.run_dir).absolute() / "spool"),
            spool_limit_bytes=self.spool_mb << 20,
        )


# What `--help` says: setting -> (metavar, text). The order is the order of the help.
_HELP: dict[str, tuple[str, str]] = {
    "worker": ("NAME", "name of this worker; its log stream is w.NAME (needed)"),
    "run_dir": ("DIR", "directory for the state file, socket, spool and engine log (needed)"),
    "model": ("PATH", "the model the engine serves (needed)"),
    "served_model_name": ("NAME", "the name clients use for it (default: as PATH)"),
    "etcd": (
        "HOST:PORT,...",
        "endpoints of etcd, or a URL http[s]://user:password@host:port,.../prefix?ca=FILE "
        "(one with a password is better given as RELUME_ETCD_ENDPOINTS)",
    ),
    "host_kind": (
        "KIND",
        "serve: run stock `vllm serve` as a child; zygote: ask a zygote to fork an engine; plain: "
        "stand before an OpenAI-compatible server that runs already, without our plugin",
    ),
    "zygote": ("SOCKET", "unix socket of the zygote"),
    "backend": ("URL", "base URL of the plain server, e.g. http://10.0.0.7:30000"),
    "backend_key_file": ("FILE", "the plain server's API key, sent to it as a bearer token"),
    "domain": ("NAME", "failure domain of this host (default: the host's name)"),
    "lease_ttl_s": ("S", "after so long without a sign of this agent the worker counts as lost"),
    "engine_host": ("ADDR", "address the engine's HTTP listens on"),
    "advertise_host": ("ADDR", "address gateways reach it at (default: as --engine-host)"),
    "engine_port": ("PORT", "port of the engine's HTTP; 0 takes a free one at each start"),
    "status_port": ("PORT", "port of GET /state on loopback; 0 takes a free one"),
    "notice_port": (
        "PORT",
        "port, on the engine's address, where gateways hear of a death; 0 takes a free one",
    ),
    "ready_timeout_s": ("S", "an engine that is not ready by then is killed and restarted"),
    "stop_timeout_s": ("S", "an engine asked to stop has so long before SIGKILL"),
    "flush_timeout_s": ("S", "how long leaving waits for etcd to take the last events"),
    "backoff_s": ("S,S,...", "delays before successive restarts; the last one repeats"),
    "stable_after_s": ("S", "an engine ready for so long begins the delays anew"),
    "restart_nice": ("N", "added niceness of an engine that restarts; 0 switches it off"),
    "restart_nice_bound_s": ("S", "after so long it is brought back even if not ready"),
    "spool_mb": ("MB", "disk the log may take in the run directory while etcd is away"),
    "checkpoint_mb": (
        "MB",
        "host memory for KV checkpoints of other workers' requests, held by a state daemon; "
        "0: no daemon, and this worker's engine writes none",
    ),
    "checkpoint_percent": (
        "N",
        "the same as a share of the host's memory (LUMEN Eq. 7); 5 to 10 percent is usual",
    ),
    "checkpoint_socket": ("PATH", "the daemon's unix socket (default: state.sock in --run-dir)"),
    "checkpoint_local": (
        "BOOL",
        "false: engines of this machine reach it like those of others, not by socket and "
        "shared memory",
    ),
    "checkpoint_listen": ("HOST:PORT", "where it listens to other hosts' engines; empty: nowhere"),
    "checkpoint_advertise": ("HOST:PORT", "where they reach it (default: as it listens)"),
    "checkpoint_private_networks": (
        "CIDR,...",
        "networks on which checkpoints travel unencrypted, authenticated by the shared secret",
    ),
    "checkpoint_secret_file": (
        "FILE",
        "the fleet's shared secret, 16 bytes or more (chmod 600)",
    ),
    "checkpoint_curve_file": (
        "FILE",
        "CURVE keys of this host and the others, as `python -m relume.engine_shim.checkpoint_keys` "
        'writes them: {"public", "secret_file", "hosts": {"tcp://HOST:PORT": public key}}',
    ),
    "checkpoint_file_dir": (
        "DIR",
        "directory for blocks nobody touched for a while, in a file that ends with the daemon",
    ),
    "checkpoint_file_mb": ("MB", "how much of it may be used"),
    "checkpoint_cold_after_s": ("S", "blocks nobody touched for so long may go there"),
    "checkpoint_reserve_mb": ("MB", "memory of the host the daemon always leaves to others"),
    "checkpoint_allow_unlocked": ("BOOL", "take memory that the host could swap out"),
    "checkpoint_ttl_s": ("S", "a request nobody wrote or asked for so long is forgotten"),
    "log_level": ("LEVEL", "debug, info, warning or error"),
}

_EPILOG = """\
Everything behind `--` goes to the engine as vLLM arguments.
Precedence: flag > environment RELUME_<SETTING> > file given by --config (TOML) > default.

A worker beside a zygote:
  python -m engine_shim.agent --worker w0 --run-dir /run/relume/w0 --etcd 127.0.0.1:2379 \\
      --host-kind zygote --zygote /run/relume/zygote.sock --model ./model -- --max-model-len 2048
A worker in production, on stock `vllm serve`:
  python -m engine_shim.agent --worker w0 --run-dir /run/relume/w0 --etcd etcd-0:2379,etcd-1:2379 \\
      --model /models/qwen3 -- --tensor-parallel-size 4
A server that runs already, without our plugin (its streams cannot be moved once begun):
  python -m engine_shim.agent --worker p0 --run-dir /run/relume/p0 --etcd etcd-0:2379 \\
      --host-kind plain --backend http://10.0.0.7:30000 --model qwen3

Signals: SIGTERM and SIGINT stop the engine, flush the log and leave (exit status 0).
Exit status: 1 failed, 2 configuration, 3 another agent took the worker over,
4 another agent of the same worker is alive.
"""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    """The environment's name for a setting; RELUME_ETCD names the etcd program, not endpoints."""
    return "RELUME_ETCD_ENDPOINTS" if name == "etcd" else f"RELUME_{name.upper()}"


def _defaults() -> dict[str, Any]:
    fields = msgspec.structs.fields(AgentConfig)
    return {f.name: f.default for f in fields if f.default is not msgspec.NODEFAULT}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m relume.engine_shim.agent",
        description="Supervise one vLLM worker: start, watch and restart its engine, and write "
        "what happens to it into the worker's log stream.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    defaults = _defaults()
    for name, (metavar, text) in _HELP.items():
        default = defaults.get(name)
        if isinstance(default, tuple):
            default = ",".join(f"{item:g}" if isinstance(item, float) else item for item in default)
        if isinstance(default, float):
            default = f"{default:g}"
        if default not in (None, ""):
            text += f" (default: {default})"
        parser.add_argument(_flag(name), metavar=metavar, help=text.replace("%", "%%"))
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> AgentConfig:
    """The configuration of a command line. Raises ConfigInvalid; SystemExit for `--help`."""
    ours, engine_args = list(argv), None
    if "--" in ours:
        cut = ours.index("--")
        ours, engine_args = ours[:cut], ours[cut + 1 :]
    flags = {k: v for k, v in vars(_parser().parse_args(ours)).items() if v is not None}
    path = flags.pop("config", None) or environ.get("RELUME_CONFIG", "")
    settings: dict[str, Any] = _from_file(Path(path)) if path else {}
    for name in _HELP:
        if (value := environ.get(_variable(name))) is not None:
            settings[name] = value
    settings.update(flags)
    if engine_args is not None:
        settings["engine_args"] = engine_args
    for name in ("backoff_s", "checkpoint_private_networks"):
        if isinstance(settings.get(name), str):
            settings[name] = [item.strip() for item in settings[name].split(",") if item.strip()]
    settings.setdefault("domain", socket.gethostname())
    for name in ("worker", "run_dir", "model"):
        if not settings.get(name):
            raise ConfigInvalid(_flag(name), f"is needed: {_HELP[name][1]}")
    try:
        config = msgspec.convert(settings, AgentConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigInvalid("configuration", str(error)) from None
    return config.check()


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigInvalid("--config", f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid("--config", f"{path}: {error}") from None
