"""Real engines for tests: one zygote a session, engines forked from it on demand."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from relume.controlplane.local.child_processes import free_port
from relume.events.log import codec
from relume.events.vocabulary import (
    AnyChange,
    EngineFinished,
    EngineStep,
    PrefixBlocksChanged,
    RequestQueued,
)
from relume.events.wire.reports import Hello, Layout, Ready, ReportReader, Weights, parse

HANG_S = 180.0
"""A wait that takes longer hangs: this bounds waits, that for vLLM's start too, and measures
nothing."""
VLLM_ARGUMENTS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32"),
    *("--max-model-len", "2048", "--kv-cache-memory-bytes", str(32 << 20)),
    *("--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
    *("--served-model-name", "tiny", "--enable-prompt-tokens-details"),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = HANG_S) -> Any:
    """The condition's first true value. Raises AssertionError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out: {what}"
        time.sleep(0.005)
    return value


class AgentSocket:
    """The agent's end of the report socket. `steps`, `events`, `prefixes` and `changes` first read
    what has come: an engine sends its report of a step before the step's tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hellos: list[Hello] = []
        self.ready: Ready | None = None
        self.layout: Layout | None = None
        self.weights: list[Weights] = []
        self.paused = threading.Event()
        self._steps: list[EngineStep] = []
        self._events: list[Any] = []
        self._prefixes: list[PrefixBlocksChanged] = []
        self._reading = threading.Lock()
        self._readers: dict[socket.socket, ReportReader] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def steps(self) -> list[EngineStep]:
        self._read_all()
        return self._steps

    @property
    def events(self) -> list[Any]:
        self._read_all()
        return self._events

    @property
    def prefixes(self) -> list[PrefixBlocksChanged]:
        self._read_all()
        return self._prefixes

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            with self._reading:
                self._readers[connection] = ReportReader()
            threading.Thread(target=self._follow, args=(connection,), daemon=True).start()

    def _follow(self, connection: socket.socket) -> None:
        poll = select.poll()
        with contextlib.suppress(ValueError):  # closed
            poll.register(connection, select.POLLIN)
            while self._read(connection):
                poll.poll()
                while self.paused.is_set():
                    time.sleep(0.01)

    def _read_all(self) -> None:
        for connection in list(self._readers):
            self._read(connection)

    def _read(self, connection: socket.socket) -> bool:
        """Take what has come; False at its end."""
        with self._reading:
            while not self.paused.is_set():
                try:
                    data = connection.recv(1 << 16)
                except BlockingIOError:
                    return True
                except OSError:
                    return False
                if not data:
                    return False
                for payload in self._readers[connection].feed(data):
                    self._take(parse(payload))
        return True

    def _take(self, message: Hello | Ready | Layout | Weights | bytes) -> None:
        if isinstance(message, Hello):
            self.hellos.append(message)
        elif isinstance(message, Ready):
            self.ready = message
        elif isinstance(message, Layout):
            self.layout = message
        elif isinstance(message, Weights):
            self.weights.append(message)
        else:
            event = codec.decode(message)
            known: list[Any] = self._events
            if isinstance(event, EngineStep):
                known = self._steps
            elif isinstance(event, PrefixBlocksChanged):
                known = self._prefixes
            known.append(event)

    def changes(self, request: str = "") -> list[AnyChange]:
        """All changes so far, of one request or of all."""
        steps = list(self.steps)
        return [c for s in steps for c in s.changes if not request or c.request == request]

    def close(self) -> None:
        """What the death of an agent looks like from the engine."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in list(self._readers):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class Engine:
    """One engine and the socket it reports to."""

    def __init__(
        self, pid: int, port: int, agent: AgentSocket, incarnation: int, log: Path, worker: str
    ) -> None:
        self.worker = worker
        self.pid = pid
        self.port = port
        self.agent = agent
        self.incarnation = incarnation
        self.log = log

    @property
    def core(self) -> int:
        """The process that computes: the whole engine, or one of three of `vllm serve`."""
        (pid,) = [hello.pid for hello in self.agent.hellos if hello.role == "core"]
        return pid

    def wait_ready(self) -> Engine:
        def ready() -> Ready | None:
            assert self.alive(), f"engine died at start:\n{self.log.read_text()[-4000:]}"
            return self.agent.ready

        wait_until(ready, f"engine {self.pid} ready")
        return self

    def alive(self) -> bool:
        """Whether the process runs; a zombie does not."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"

    def state(self) -> dict[str, Any]:
        from tests.engine import client

        return json.loads(client.get(self.port, "/relume/state").body)

    def wait_idle(self) -> None:
        """Until nothing runs or waits; a finished request needs a step to be cleaned up."""

        def idle() -> bool:
            state = self.state()
            return state["running"] + state["waiting"] + state["kv_used"] == 0

        wait_until(idle, "engine idle")
        if not self.agent.paused.is_set():
            wait_until(self._told, "engine's reports are read")

    def _told(self) -> bool:
        """Whether the agent has read of every request's end and nothing more comes."""
        before = len(self.agent.steps)
        kinds = Counter(type(c) for c in self.agent.changes())
        time.sleep(0.1)
        return kinds[RequestQueued] == kinds[EngineFinished] and len(self.agent.steps) == before

    def stop(self) -> None:
        self.agent.close()
        wait_until(lambda: not self.alive(), "engine exits on EOF")


class Zygote:
    """A running zygote; engines are forked with `fork`."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory
        self._model = model
        self._count = 0
        self.log = directory / "zygote.log"
        self.socket = directory / "zygote.sock"
        lifeline_read, self._lifeline = os.pipe()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "relume.engine_shim.engine.hosts.zygote"),
                    *("--socket", str(self.socket), "--lifeline-fd", str(lifeline_read)),
                ],
                env={**os.environ, **ENVIRONMENT},
                pass_fds=[lifeline_read],
                stdout=subprocess.PIPE,
                stderr=log,
            )
        os.close(lifeline_read)
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], HANG_S)[0], "zygote is slow"
        line = self.process.stdout.readline()
        assert line == b"zygote ready\n", self.log.read_text()[-4000:]

    def fork(self, *arguments: str, incarnation: int = 1, **env: str) -> Engine:
        """A new engine, ready to serve."""
        self._count += 1
        directory = self._directory / f"engine{self._count}"
        directory.mkdir()
        agent = AgentSocket(directory / "agent.sock")
        port = free_port()
        request = {
            "cmd": "fork",
            "env": {
                "RELUME_WORKER": f"w{self._count}",
                "RELUME_INCARNATION": str(incarnation),
                "RELUME_AGENT_SOCKET": str(agent.path),
                **env,
            },
            "argv": [
                *("--model", str(self._model), "--port", str(port)),
                *VLLM_ARGUMENTS,
                *arguments,
            ],
            "log": str(directory / "engine.log"),
        }
        answer = self.ask(request)
        return Engine(
            answer["pid"],
            port,
            agent,
            incarnation,
            directory / "engine.log",
            f"w{self._count}",
        ).wait_ready()

    def ask(self, request: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.socket))
            connection.sendall(json.dumps(request).encode() + b"\n")
            return json.loads(connection.makefile().readline())

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close_lifeline()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def close_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class StockServe:
    """Starts `vllm serve` with our hooks, as the agent does in production."""

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory
        self._model = model
        self._count = 0

    def start(self, *arguments: str, incarnation: int = 1, **env: str) -> Engine:
        """A new engine of three processes; it is not ready yet."""
        self._count += 1
        worker = f"s{self._count}"
        directory = self._directory / worker
        directory.mkdir()
        agent = AgentSocket(directory / "agent.sock")
        port = free_port()
        identity = {
            "RELUME_WORKER": worker,
            "RELUME_INCARNATION": str(incarnation),
            "RELUME_AGENT_SOCKET": str(agent.path),
            "RELUME_PROGRESS": str(directory / "progress"),
        }
        with open(directory / "engine.log", "wb") as log:
            process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-m",
                        "relume.engine_shim.engine.hosts.vllm_serve",
                        "--model",
                        str(self._model),
                    ),
                    *("--host", "127.0.0.1", "--port", str(port)),
                    *VLLM_ARGUMENTS,
                    *arguments,
                ],
                env={**os.environ, **ENVIRONMENT, **identity, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        threading.Thread(target=process.wait, daemon=True).start()  # reaps it
        return Engine(process.pid, port, agent, incarnation, directory / "engine.log", worker)


@contextlib.contextmanager
def engine_of(engine: Engine) -> Iterator[Engine]:
    """Stops `engine` at the end, whatever happened."""
    try:
        yield engine
    finally:
        engine.agent.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGKILL)
