"""A whole fleet on this machine: etcd, zygote, agents with engines, control plane.

The same processes as in production, on loopback, with engines forked from one zygote
that imported vLLM once. Used by `relume up`, the demo, tests and benches.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import aiohttp
from msgspec import Struct

from relume.controlplane.history.files import write_whole
from relume.controlplane.local.child_processes import Child, free_port
from relume.controlplane.local.local_checkpoints import LocalCheckpoints
from relume.controlplane.local.orphans import end_daemons
from relume.events.etcd.client.etcd_versions import judge, parse_version
from relume.events.log.errors import RelumeError
from relume.events.vocabulary.enums import HostKind

ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",  # eager: no compiler needed, no pause at first use
    "PYTHONHASHSEED": "0",
}


ENGINE_NICE = 5
"""Engines of a local fleet give way to agents, etcd and the control plane by so much."""

DRAIN_S = 10.0
"""Time in which requests of a replica or worker that stops may end or move."""
STOP_PATIENCE_S = 25.0
"""More than a replica drains, and more than an agent drains and stops its engine."""


def zygote_argv(socket: str, nice: int = ENGINE_NICE) -> list[str]:
    """The command of the process that imports vLLM once and forks engines."""
    # On cores shared with engines, detection and decisions go before computation.
    module = "relume.engine_shim.engine.hosts.zygote"
    return ["nice", "-n", str(nice), sys.executable, "-m", module, "--socket", socket]


class FleetFailed(RelumeError):
    """A part of the fleet did not come up; the message holds its last output."""


class FleetOptions(Struct, frozen=True, kw_only=True):
    """What to start. `engine_args` go to vLLM as they are, `replica_args` to replicas.
    `port` 0: any free one. `etcd`, `zygote`: use this running one (host:port, socket path)
    instead of starting it. `models`: several models in one fleet, each `path=name`, assigned to the
    workers round robin; empty: `model` for all. `checkpoint_mb`: host memory of each worker's state
    daemon, 0: no checkpoints; `checkpoint_file_mb`: disk for what is cold there; `checkpoint_link`:
    how engines reach daemons (`local_checkpoints.LINKS`), by way of `checkpoint_advertise` if given;
    `checkpoint_holders`: how many a request has. `tokenizer`: replicas count prompts by the
    models' tokenizers."""

    workers: int = 3
    replicas: int = 1
    state_dir: str = ".relume"
    model: str = ".relume/models/tiny"
    model_name: str = "tiny"
    models: tuple[str, ...] = ()
    port: int = 8000
    admin_port: int = 8001
    lease_ttl_s: int = 8
    host_kind: str = "zygote"
    etcd: str = ""
    keep_log: bool = False
    zygote: str = ""
    ready_timeout_s: float = 180.0
    checkpoint_mb: int = 0
    checkpoint_file_mb: int = 0
    checkpoint_link: str = "shared"
    checkpoint_holders: int = 1
    checkpoint_advertise: tuple[str, ...] = ()
    tokenizer: bool = False
    replica_args: tuple[str, ...] = ()
    engine_args: tuple[str, ...] = (
        "--dtype", "float32", "--max-model-len", "2048", "--block-size", "32",
        "--kv-cache-memory-bytes", "67108864", "--max-num-seqs", "64", "--enforce-eager",
    )  # fmt: skip


class LocalFleet:
    """Async context manager: inside, the fleet answers; outside, nothing is left.

    `say(text)` receives progress. Attributes: `gateways` and `admins` (URLs), `etcd_url`,
    `children` by name, `admin_token`.
    """

    def __init__(self, options: FleetOptions, say: Callable[[str], None] = print) -> None:
        self.options = options
        self.dir = Path(options.state_dir).absolute()
        self.children: dict[str, Child] = {}
        self._commands: dict[str, tuple[list[str], dict[str, str]]] = {}
        self.gateways: list[str] = []
        self.admins: list[str] = []
        self.admin_token = secrets.token_urlsafe(18)
        self.viewer_token = secrets.token_urlsafe(18)
        self.etcd_endpoint = options.etcd
        self.zygote_socket = ""
        self.checkpoints: LocalCheckpoints | None = None
        self._say = say
        self._began = time.monotonic()
        self._lifeline: int | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # --- starting ------------------------------------------------------------------

    async def _start(self) -> None:
        (self.dir / "run").mkdir(parents=True, exist_ok=True)
        if not self.options.etcd:
            await self.start_etcd()
        self.zygote_socket = self.options.zygote
        if self.options.host_kind == HostKind.ZYGOTE and not self.zygote_socket:
            self.start_zygote()
        self._prepare_checkpoints()
        for index in range(self.options.replicas):
            self.start_replica(index)
        for index in range(self.options.workers):
            self.start_agent(index)
        self._write_fleet_file()
        await self._until("control plane answers", self._gateways_live)
        await self._until_workers()
        self.say(f"{self.options.workers} workers answer")

    def _prepare_checkpoints(self) -> None:
        options = self.options
        if not options.checkpoint_mb:
            return
        try:
            self.checkpoints = LocalCheckpoints(
                self.dir / "run" / "checkpoints",
                options.workers,
                options.checkpoint_mb,
                options.checkpoint_link,
                options.checkpoint_file_mb,
                options.checkpoint_advertise,
            )
        except (ValueError, subprocess.SubprocessError) as error:
            raise FleetFailed(str(error)) from None

    def say(self, text: str) -> None:
        """Report progress with the time since the start."""
        self._say(f"[{time.monotonic() - self._began:5.1f} s] {text}")

    async def start_etcd(self) -> None:
        """Start one etcd member on free loopback ports and wait until it answers."""
        binary = os.environ.get("RELUME_ETCD") or shutil.which("etcd")
        if binary is None:
            raise FleetFailed("no etcd found: run `make up`, or set RELUME_ETCD to its path")
        self._judge_etcd(binary)
        data = self.dir / "etcd"
        if data.exists() and not self.options.keep_log:
            shutil.rmtree(data)
            shutil.rmtree(self.dir / "archive", ignore_errors=True)
        client, peer = free_port(), free_port()
        self.etcd_endpoint = f"127.0.0.1:{client}"
        argv = [
            binary, "--name", "relume", "--data-dir", str(data),
            "--listen-client-urls", f"http://127.0.0.1:{client}",
            "--advertise-client-urls", f"http://127.0.0.1:{client}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"relume=http://127.0.0.1:{peer}",
            "--log-level", "error", "--auto-compaction-mode", "periodic",
            "--auto-compaction-retention", "0",
        ]  # fmt: skip
        self._child("etcd", argv)
        await self._until("etcd answers", self._etcd_healthy, 30.0)
        self.say(f"etcd answers at {self.etcd_endpoint}")

    def _judge_etcd(self, binary: str) -> None:
        """Refuse an etcd that loses acknowledged writes; say so when it is merely old."""
        version = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10)
        judgement = judge(parse_version(version.stdout))
        if not judgement.usable:
            raise FleetFailed(f"{binary}: {judgement.reason}; set RELUME_ETCD to another one")
        if judgement.reason:
            self.say(f"note: {judgement.reason}")

    def start_zygote(self) -> None:
        """Start the process that imports vLLM once and forks engines."""
        self.zygote_socket = str(self.dir / "run" / "zygote.sock")
        Path(self.zygote_socket).unlink(missing_ok=True)
        self._child("zygote", zygote_argv(self.zygote_socket), ENGINE_ENV)
        self.say("zygote is importing vLLM")

    def start_replica(self, index: int) -> None:
        """Start control plane replica `r<index>`."""
        port = free_port(self.options.port + 2 * index if self.options.port else 0)
        admin = free_port(self.options.admin_port + 2 * index if self.options.admin_port else 0)
        self.gateways.append(f"http://127.0.0.1:{port}")
        self.admins.append(f"http://127.0.0.1:{admin}")
        argv = [
            sys.executable, "-m", "relume.controlplane.cli.relume_command", "serve",
            "--name", f"r{index}", "--port", str(port), "--admin-port", str(admin),
            "--etcd", self.etcd_endpoint,
            "--lease-ttl-s", str(self.options.lease_ttl_s), "--spool-dir", str(self.dir / "spool"),
            "--archive-dir", str(self.dir / "archive"),
            "--drain-s", str(DRAIN_S), "--drain-announce-s", "0",  # no load balancer is here
            "--checkpoint-holders", str(self.options.checkpoint_holders),
            *self.options.replica_args, *self.replica_flags(index),
        ]  # fmt: skip
        if self.options.tokenizer:
            argv += ["--tokenizer", self._tokenizers()]
        tokens = json.dumps({self.admin_token: "admin", self.viewer_token: "viewer:page"})
        env = {"RELUME_ADMIN_TOKENS": tokens, **self.replica_env(index)}
        self._child(f"r{index}", argv, env)

    def replica_flags(self, index: int) -> list[str]:
        """More options of replica `r<index>`; they count more than those before."""
        return []

    def replica_env(self, index: int) -> dict[str, str]:
        """What is added to the environment of that replica."""
        return {}

    def _tokenizers(self) -> str:
        """What `--tokenizer` takes for the models there are."""
        if not self.options.models:
            return str(Path(self.options.model).absolute())
        pairs = (model.rpartition("=") for model in self.options.models)
        return ",".join(f"{name}={Path(path).absolute()}" for path, _, name in pairs)

    def start_agent(self, index: int) -> None:
        """Start the agent of worker `w<index>`, which starts its engine."""
        options = self.options
        name = f"w{index}"
        model, served_as = options.model, options.model_name
        if options.models:
            model, _, served_as = options.models[index % len(options.models)].rpartition("=")
        argv = [
            sys.executable, "-m", "relume.engine_shim.agent",
            "--worker", name, "--etcd", self.etcd_endpoint,
            "--run-dir", str(self.dir / "run" / name),
            "--host-kind", options.host_kind, "--model", str(Path(model).absolute()),
            "--served-model-name", served_as, "--domain", f"host{index}",
            "--lease-ttl-s", str(options.lease_ttl_s), "--drain-s", str(DRAIN_S),
        ]  # fmt: skip
        if self.checkpoints is not None:
            argv += self.checkpoints.flags(index)
        if self.zygote_socket:
            argv += ["--zygote", self.zygote_socket]
        else:
            argv += ["--engine-nice", str(ENGINE_NICE)]
        argv += self.agent_flags(index)
        self._child(name, [*argv, "--", *self.engine_args(index)], self.agent_env(index))

    def agent_flags(self, index: int) -> list[str]:
        """More options of the agent of worker `w<index>`; they count more than those before."""
        return []

    def agent_env(self, index: int) -> dict[str, str]:
        """What is added to the environment of that agent."""
        return ENGINE_ENV

    def engine_args(self, index: int) -> tuple[str, ...]:
        """vLLM's arguments for the engine of worker `w<index>`."""
        return self.options.engine_args

    def _child(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Child:
        (self.dir / "logs" / f"{name}.log").unlink(missing_ok=True)
        self._commands[name] = (argv, env or {})
        return self.restart(name)

    def restart(self, name: str) -> Child:
        """Start child `name` again with its command of before; the old one must be dead."""
        argv, env = self._commands[name]
        child = Child.start(name, argv, self.dir / "logs" / f"{name}.log", env)
        self.children[name] = child
        return child

    async def supervise(self) -> None:
        """Restart whatever dies, as systemd or Kubernetes would; for ever. What a full disk
        does not allow is tried again."""
        delays: dict[str, float] = {}
        due: dict[str, float] = {}
        stale = False
        while True:
            now = time.monotonic()
            for name, child in list(self.children.items()):
                if child.alive:
                    continue
                if name not in due:
                    delays[name] = min(2 * delays.get(name, 0.25), 30.0)
                    due[name] = now + delays[name]
                    code = child.process.returncode
                    self.say(f"{name} stopped with code {code}; restart in {delays[name]:.1f} s")
                elif now >= due[name]:
                    del due[name]
                    try:
                        self.restart(name)
                        stale = True
                    except OSError as error:
                        self.say(f"{name} does not start: {error}")
            if stale:
                with contextlib.suppress(OSError):
                    self._write_fleet_file()
                    stale = False
            await asyncio.sleep(0.2)

    def _write_fleet_file(self) -> None:
        """Raises OSError; then the old file is unchanged."""
        facts = {
            "gateways": self.gateways,
            "admins": self.admins,
            "admin_token": self.admin_token,
            "etcd": [self.etcd_endpoint],
            "supervisor": os.getpid(),
            "pids": {name: child.pid for name, child in self.children.items()},
        }
        path = self.dir / "run" / "fleet.json"
        write_whole(path, json.dumps(facts, indent=1).encode(), 0o600)

    # --- waiting ---------------------------------------------------------------------

    async def _until(
        self, what: str, ready: Callable[[], Any], timeout_s: float | None = None
    ) -> None:
        deadline = time.monotonic() + (timeout_s or self.options.ready_timeout_s)
        while not await ready():
            self._raise_if_dead()
            if time.monotonic() > deadline:
                raise FleetFailed(f"waited too long: {what}; see {self.dir / 'logs'}")
            await asyncio.sleep(0.1)

    def _raise_if_dead(self) -> None:
        for child in self.children.values():
            if not child.alive:
                raise FleetFailed(
                    f"{child.name} stopped with code {child.process.returncode}; "
                    f"its last words ({child.log_path}):\n{child.tail()}"
                )

    async def _etcd_healthy(self) -> bool:
        return await _answers(f"http://{self.etcd_endpoint}/health")

    async def _gateways_live(self) -> bool:
        return all([await _answers(f"{url}/live") for url in self.gateways])

    async def _until_workers(self) -> None:
        ready: set[str] = set()

        async def all_ready() -> bool:
            for worker in await self.workers():
                if worker["engine"] == "ready" and worker["name"] not in ready:
                    ready.add(worker["name"])
                    self.say(f"worker {worker['name']} answers (engine pid {worker['engine_pid']})")
            return len(ready) >= self.options.workers

        await self._until("workers answer", all_ready)

    @property
    def page(self) -> str:
        """The address of the page, with a token that may only view."""
        return f"{self.admins[0]}/ui#token={self.viewer_token}"

    async def admin(
        self, path: str, method: str = "GET", replica: int = 0, body: Any = None
    ) -> Any:
        """Call the admin API of a replica, with `body` as JSON; returns the decoded JSON."""
        headers = {"Authorization": f"Bearer {self.admin_token}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            url = f"{self.admins[replica]}/admin/v1/{path}"
            timeout = aiohttp.ClientTimeout(total=10)
            async with session.request(method, url, timeout=timeout, json=body) as answer:
                return await answer.json()

    async def workers(self, replica: int = 0) -> list[dict[str, Any]]:
        """The workers as that replica sees them; empty when it does not answer."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            answer = await self.admin("workers", replica=replica)
            return answer["workers"]
        return []

    # --- stopping --------------------------------------------------------------------

    async def stop(self) -> None:
        """End everything: replicas first, which let open streams end, then workers, then etcd."""
        order = sorted(self.children.values(), key=_stop_rank)
        for rank in (0, 1, 2, 3):
            group = [c for c in order if _stop_rank(c) == rank]
            await asyncio.gather(*(c.stop(STOP_PATIENCE_S) for c in group))
        await end_daemons(self.dir / "run")
        (self.dir / "run" / "fleet.json").unlink(missing_ok=True)


def _stop_rank(child: Child) -> int:
    if child.name.startswith("w"):
        return 1
    if child.name == "zygote":
        return 2
    return 3 if child.name.startswith("etcd") else 0


async def _answers(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session:
            timeout = aiohttp.ClientTimeout(total=1)
            async with session.get(url, timeout=timeout) as answer:
                return answer.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
