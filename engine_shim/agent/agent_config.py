"""Settings of the agent: each is a flag, an environment variable and a key of the file.

The declarations say everything about a setting; `relume.events.settings` reads them. A file
without a known suffix is TOML.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from relume.events.etcd.config import EtcdConfig, parse_url
from relume.events.etcd.errors import BadUrl
from relume.events.settings import sources
from relume.events.settings.config_error import ConfigError
from relume.events.settings.declared import limits, masked_repr, option
from relume.events.settings.flags import add_flags
from relume.events.vocabulary.enums import HostKind

Port = Annotated[int, Meta(ge=0, le=65535)]
MiB = Annotated[int, Meta(ge=0)]
HOST_KINDS = tuple(HostKind)
LOG_LEVELS = ("debug", "info", "warning", "error")


class AgentConfig(Struct, frozen=True, kw_only=True):
    """Everything the agent of one worker can be configured with."""

    worker: Annotated[
        str,
        option(
            "Name of this worker; its log stream is w.NAME",
            metavar="NAME",
            pattern=r"^[A-Za-z0-9_.-]{1,64}$",
            form="1 to 64 characters of A-Z a-z 0-9 _ . -",
        ),
    ]
    run_dir: Annotated[
        str, option("Directory of the state file, socket, spool and engine log", metavar="DIR")
    ]
    model: Annotated[str, option("Model that the engine serves", metavar="PATH")]
    served_model_name: Annotated[
        str, option("Model name that clients use (empty: the value of --model)", metavar="NAME")
    ] = ""
    etcd: Annotated[
        str,
        option(
            "Endpoints of etcd, or a URL http[s]://user:password@host:port,.../prefix?ca=FILE; "
            "give a password as @FILE or in the environment, because every account sees flags",
            secret=True,  # it may have a password
            metavar="HOST:PORT,...",
            variable="RELUME_ETCD_ENDPOINTS",  # RELUME_ETCD names the etcd program
        ),
    ] = "127.0.0.1:2379"
    etcd_limits: Annotated[
        dict[str, float],
        limits("Limits of the log on etcd; they win over options of the URL", EtcdConfig),
    ] = {}
    host_kind: Annotated[
        str,
        option(
            "serve: run stock `vllm serve` as a child; zygote: have a zygote fork the engine; "
            "plain: represent a running OpenAI-compatible server that does not have the plugin",
            metavar="KIND",
            choices=HOST_KINDS,
        ),
    ] = "serve"
    zygote: Annotated[str, option("Unix socket of the zygote", metavar="SOCKET")] = ""
    backend: Annotated[
        str, option("Base URL of the plain server, e.g. http://10.0.0.7:30000", metavar="URL")
    ] = ""
    backend_key_file: Annotated[
        str,
        option("File with the API key of the plain server, sent as a bearer token", metavar="FILE"),
    ] = ""
    engine_nice: Annotated[
        int,
        option(
            "Niceness of the engine's processes, for hosts without cores of their own for agents; those "
            "that compute get twice as much (engines of a zygote have that of the zygote)",
            ge=0,
            le=19,
        ),
    ] = 0
    domain: Annotated[
        str, option("Failure domain of this host (empty: the host's name)", metavar="NAME")
    ] = ""
    lease_ttl_s: Annotated[
        int,
        option("Time without a sign of the agent after which its worker is lost", unit="s", ge=2),
    ] = 8
    engine_host: Annotated[
        str, option("Address the engine's HTTP server listens on", metavar="ADDR")
    ] = "127.0.0.1"
    advertise_host: Annotated[
        str,
        option(
            "Address at which gateways reach the engine (empty: the value of --engine-host)",
            metavar="ADDR",
        ),
    ] = ""
    engine_port: Annotated[
        Port, option("Port of the engine's HTTP server (0: a free one at each start)")
    ] = 0
    status_port: Annotated[Port, option("Port of GET /state on loopback (0: a free one)")] = 0
    notice_port: Annotated[
        Port,
        option(
            "Port on the engine's address at which gateways receive death notices (0: a free one)"
        ),
    ] = 0
    ready_timeout_s: Annotated[
        float,
        option("Maximum start time of an engine before it is killed and restarted", unit="s"),
    ] = 300.0
    hang_restart_s: Annotated[
        float,
        option(
            "Time that a hung engine has to return before it is killed and restarted",
            unit="s",
            ge=0,
        ),
    ] = 30.0
    canary_interval_s: Annotated[
        float,
        option("Mean time between two canaries to an engine (0: none)", unit="s", ge=0),
    ] = 30.0
    canary_budget_ppm: Annotated[
        int,
        option(
            "Maximum share of an engine's time that canaries take; they become rarer to keep it",
            unit="millionths",
            ge=1,
            le=1_000_000,
        ),
    ] = 1000
    weights_read_mb_s: Annotated[
        int,
        option(
            "Maximum rate at which the agent reads the model's files once, so that they can be compared with "
            "those of other workers (0: they are not read). In quarantine the rate has no limit",
            unit="MiB/s",
            ge=0,
            le=1_000_000,
        ),
    ] = 200
    drain_s: Annotated[
        float,
        option(
            "Maximum time an agent that is told to stop lets its requests end or move to other "
            "workers before it stops the engine. A second signal ends it at once",
            unit="s",
            ge=0,
            le=86_400,
        ),
    ] = 25.0
    stop_timeout_s: Annotated[
        float, option("Maximum time a stopping engine has before SIGKILL", unit="s")
    ] = 10.0
    backoff_s: Annotated[
        tuple[Annotated[float, Meta(ge=0)], ...],
        option(
            "Delays before successive restarts of an engine; the last one repeats",
            form="a list of seconds, each at least 0",
            metavar="S,S,...",
            min_length=1,
        ),
    ] = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    stable_after_s: Annotated[
        float, option("Time a ready engine must run before the delays start over", unit="s")
    ] = 60.0
    spool_mb: Annotated[
        int,
        option("Maximum disk space of the spool while etcd is unavailable", unit="MiB"),
    ] = 256
    checkpoint_mb: Annotated[
        MiB,
        option(
            "Host memory for KV checkpoints of requests on other workers, held by a state daemon "
            "(0: no daemon, and this worker's engine writes no checkpoints)",
            unit="MiB",
            metavar="MB",
        ),
    ] = 0
    checkpoint_percent: Annotated[
        int,
        option(
            "The same as a share of the host's memory (LUMEN Eq. 7); 5 to 10 percent is usual",
            unit="percent",
            ge=0,
            le=50,
        ),
    ] = 0
    keep_weights_mb: Annotated[
        MiB,
        option(
            "Host memory for the weights of this host's engines, which outlive them in the state daemon "
            "(0: each engine reads the files); needs checkpoints",
            unit="MiB",
            metavar="MB",
        ),
    ] = 0
    weights_load_mb_s: Annotated[
        MiB,
        option(
            "Maximum rate at which a rank reads the files of its model, so that engines that start together "
            "leave the storage to others (0: no limit); needs --keep-weights-mb",
            unit="MiB/s",
            metavar="MB",
        ),
    ] = 0
    checkpoint_socket: Annotated[
        str,
        option("Unix socket of the state daemon (empty: state.sock in --run-dir)", metavar="PATH"),
    ] = ""
    checkpoint_local: Annotated[
        bool,
        option(
            "false: engines on this host use TCP to reach the state daemon, not its socket and "
            "shared memory"
        ),
    ] = True
    checkpoint_listen: Annotated[
        str,
        option(
            "Address at which engines of other hosts reach the state daemon (empty: none)",
            metavar="HOST:PORT",
        ),
    ] = ""
    checkpoint_advertise: Annotated[
        str,
        option(
            "Address announced to other hosts (empty: the value of --checkpoint-listen)",
            metavar="HOST:PORT",
        ),
    ] = ""
    checkpoint_private_networks: Annotated[
        tuple[str, ...],
        option(
            "Networks on which checkpoints travel unencrypted, authenticated by the shared secret",
            metavar="CIDR,...",
        ),
    ] = ()
    checkpoint_secret_file: Annotated[
        str,
        option("File with the fleet's shared secret, 16 bytes or more, mode 600", metavar="FILE"),
    ] = ""
    checkpoint_curve_file: Annotated[
        str,
        option(
            "File with the CURVE keys of this host and of the others, as `python -m "
            "relume.engine_shim.checkpoints.curve_keys` writes it",
            metavar="FILE",
        ),
    ] = ""
    checkpoint_file_dir: Annotated[
        str,
        option("Directory for cold blocks; its file is removed with the daemon", metavar="DIR"),
    ] = ""
    checkpoint_file_mb: Annotated[
        MiB, option("Maximum size of that file", unit="MiB", metavar="MB")
    ] = 0
    checkpoint_cold_after_s: Annotated[
        float, option("Time without access after which a block is cold", unit="s", ge=0)
    ] = 5.0
    checkpoint_reserve_mb: Annotated[
        MiB,
        option("Host memory that the state daemon always leaves free", unit="MiB", metavar="MB"),
    ] = 512
    checkpoint_allow_unlocked: Annotated[
        bool, option("true: use memory that the host may swap out")
    ] = False
    log_level: Annotated[
        str, option("Minimum level of log messages", metavar="LEVEL", choices=LOG_LEVELS)
    ] = "info"
    engine_args: Annotated[
        tuple[str, ...],
        option("Arguments of vLLM; on the command line all that follow `--`", is_flag=False),
    ] = ()

    def __repr__(self) -> str:
        return masked_repr(self)

    def check(self) -> AgentConfig:
        """This configuration, if its settings fit one another. Raises ConfigError."""
        self._check_host()
        self._check_checkpoints()
        for name in ("ready_timeout_s", "stop_timeout_s"):
            if getattr(self, name) <= 0:
                raise self._error(name, "is not more than 0 s", "give a positive number of seconds")
        try:
            self.log_config()
        except BadUrl as error:
            remedy = "use HOST:PORT,... or http[s]://[user:password@]host:port[/prefix][?ca=FILE]"
            raise ConfigError("etcd", "***", str(error), remedy) from None
        return self

    def _check_host(self) -> None:
        if (self.host_kind == HostKind.PLAIN) != bool(self.backend):
            problem = "is required with --host-kind plain, and only there"
            raise self._error("backend", problem, "give --host-kind plain and --backend together")
        if self.backend and not self.backend.startswith(("http://", "https://")):
            raise self._error("backend", "is not an http:// or https:// URL", "give a full URL")
        if self.backend and find_spec("aiohttp") is None:
            raise self._error("host_kind", "needs aiohttp", "run: pip install relume[plain]")
        if self.host_kind == HostKind.SERVE and find_spec("vllm") is None:
            remedy = f"install vLLM for {sys.executable}, or give --host-kind plain and --backend"
            raise self._error("host_kind", "needs vLLM", remedy)
        if self.host_kind == HostKind.ZYGOTE and not self.zygote:
            remedy = "name the zygote's socket"
            raise self._error("zygote", "is required with --host-kind zygote", remedy)
        if is_unspecified(self.engine_host) and not self.advertise_host:
            problem = "is required when the engine listens on all addresses"
            raise self._error("advertise_host", problem, "name the address that gateways can reach")

    def _check_checkpoints(self) -> None:
        if self.backend and (self.checkpoint_mb or self.checkpoint_percent):
            name = "checkpoint_mb" if self.checkpoint_mb else "checkpoint_percent"
            raise self._error(name, "is not supported by a plain server", "leave it out")
        if bool(self.checkpoint_file_dir) != (self.checkpoint_file_mb != 0):
            remedy = "give both or neither"
            raise self._error("checkpoint_file_dir", "goes with --checkpoint-file-mb", remedy)
        if self.checkpoint_percent and self.checkpoint_mb:
            problem = "excludes --checkpoint-mb"
            raise self._error("checkpoint_percent", problem, "give one of them")
        if not self.keep_weights_mb:
            if self.weights_load_mb_s:
                problem, remedy = "needs Relume's loader", "give --keep-weights-mb, too"
                raise self._error("weights_load_mb_s", problem, remedy)
            return
        if not (self.checkpoint_mb or self.checkpoint_percent):
            problem = "needs the state daemon"
            raise self._error("keep_weights_mb", problem, "give --checkpoint-mb, too")
        if any(a.replace("_", "-").startswith("--load-format") for a in self.engine_args):
            problem = "excludes vLLM's --load-format"
            raise self._error("keep_weights_mb", problem, "leave one of them out")

    def _error(self, name: str, problem: str, remedy: str) -> ConfigError:
        return ConfigError(name, getattr(self, name), problem, remedy)

    def log_config(self) -> EtcdConfig:
        """How to reach the log. Raises BadUrl."""
        url = self.etcd if "://" in self.etcd else f"http://{self.etcd}"
        return msgspec.structs.replace(
            parse_url(url),
            **self.etcd_limits,
            lease_ttl_s=self.lease_ttl_s,
            spool_dir=str(Path(self.run_dir).absolute() / "spool"),
            spool_limit_bytes=self.spool_mb << 20,
        )


_EPILOG = """\
All arguments after `--` go to the engine as vLLM arguments.
Precedence: flag > environment RELUME_<SETTING> > file given by --config > default.

A worker with a zygote:
  relume worker --worker w0 --run-dir /run/relume/w0 --etcd 127.0.0.1:2379 \\
      --host-kind zygote --zygote /run/relume/zygote.sock --model ./model -- --max-model-len 2048
A worker in production, on stock `vllm serve`:
  relume worker --worker w0 --run-dir /run/relume/w0 --etcd etcd-0:2379,etcd-1:2379 \\
      --model /models/qwen3 -- --tensor-parallel-size 4
A running server without the plugin (its streams cannot move once they have begun):
  relume worker --worker p0 --run-dir /run/relume/p0 --etcd etcd-0:2379 \\
      --host-kind plain --backend http://10.0.0.7:30000 --model qwen3

Signals: at SIGTERM and SIGINT requests end or move to other workers within --drain-s; then the
agent stops the engine, flushes the log and ends (exit status 0). A second signal ends it at once.
Exit status: 1 failed, 2 configuration, 3 another agent took the worker over,
4 another agent of the same worker is alive.
"""


def is_unspecified(host: str) -> bool:
    """Whether a server on `host` listens on all addresses, so that others need another name."""
    try:
        return host == "*" or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def parser() -> argparse.ArgumentParser:
    """The command line of the agent."""
    made = argparse.ArgumentParser(
        prog="relume worker",
        description="Run the agent of one vLLM worker. It starts, watches and restarts the engine, "
        "and records what happens to it in the worker's log stream.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(made, AgentConfig)
    return made


def parse(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> AgentConfig:
    """The configuration of a command line. Raises ConfigError; SystemExit for `--help`."""
    own, engine_args = list(argv), None
    if "--" in own:
        cut = own.index("--")
        own, engine_args = own[:cut], own[cut + 1 :]
    flags = vars(parser().parse_args(own))
    flags["engine_args"] = engine_args
    config = sources.load(AgentConfig, flags, environ, flags.pop("config"), file_format="toml")
    if not config.domain:
        config = msgspec.structs.replace(config, domain=socket.gethostname())
    return config.check()
