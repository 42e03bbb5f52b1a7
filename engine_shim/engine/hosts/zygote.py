"""Forks engines from a process that has imported vLLM already.

Importing vLLM takes most of an engine's start; a fork of this process serves within two
or three seconds. It never runs torch code and never starts a thread itself, because
neither survives a fork. Protocol (docs/reference/report-socket.md): one JSON line
`{"cmd":"fork","env":{..},"argv":[..]}` on the unix socket, answered by
`{"pid":N,"start_time":T}` (T in clock ticks since boot, as in /proc). With
`"log":path` the engine's output goes there, else where the zygote's own goes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from relume.engine_shim.engine.hosts.niceness import keep_niceness
from relume.events.log.disk import SteadyOutput

PRELOAD = (
    "relume.engine_shim.engine.hosts.inproc_host",
    "relume.engine_shim.engine.middleware",
    "relume.engine_shim.engine.reporting_scheduler",
    "relume.engine_shim.checkpoints.selftest_restore",
    "model_hosting_container_standards.sagemaker",
    "pydantic.v1",
    "uvicorn.lifespan.on",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.protocols.websockets.auto",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.launchers.api_server.app_state",
    "vllm.entrypoints.launchers.api_server.routers",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.entrypoints.scale_out.factories",
    "vllm.entrypoints.serve.instrumentator.metrics",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "vllm.renderers.hf",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.structured_output",
)
CPU_WORKER = (
    "vllm.utils.cpu_triton_utils",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)
GPU_WORKER = (
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.worker.gpu_worker",
)
REQUEST_BYTES = 1 << 20
FAILED_EXIT = 72
PR_SET_NAME = 15


def start_time(pid: int) -> int:
    """Clock ticks since boot at which `pid` started. Raises OSError when it is gone."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def preload() -> None:
    """Imports what an engine needs, and builds what does not depend on its arguments."""
    for name in [name for name in os.environ if name.startswith("RELUME_")]:
        del os.environ[name]  # an identity here would make this process report as an engine
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Where pyarrow is installed, transformers imports it; its allocator would start a thread.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    for module in _modules():
        # Some depend on the build; what cannot be imported here the engine does not need,
        # or it says so itself.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    from relume.engine_shim.engine.hosts import inproc_host as engine_host

    engine_host.argument_parser()
    gc.collect()
    gc.freeze()


def _modules() -> tuple[str, ...]:
    """What to import for the vLLM that is installed. vLLM's CPU worker replaces torch.cuda's events
    and streams by placeholders as soon as it is imported."""
    from vllm.platforms import current_platform

    return (*PRELOAD, *(CPU_WORKER if current_platform.is_cpu() else GPU_WORKER))


def _threads() -> list[str]:
    """Names of the threads that a fork would lose, without that of NVIDIA's driver. `nvmlInit`,
    which torch and vLLM call when they are imported, starts it, and `nvmlShutdown` does not end it.
    CUDA works in a child that is forked beside it (docs/testing/gpu.md)."""
    names = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            name = comm.read().strip()
        if int(task) != os.getpid() and not name.startswith("cuda"):
            names.append(name)
    return names


def _uses_cuda() -> bool:
    """Whether this process has a CUDA context, which a child could not use."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


class Zygote:
    """Listens on `path`; lives until SIGTERM, or EOF on `lifeline`."""

    def __init__(self, path: str, lifeline: int | None = None) -> None:
        self._lifeline = lifeline
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener.bind(path)
        self._listener.listen(16)
        self._poll = select.poll()
        self._poll.register(self._listener, select.POLLIN)
        if lifeline is not None:
            self._poll.register(lifeline, select.POLLIN | select.POLLHUP)
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake_write = wake_write
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        self._poll.register(self._wake_read, select.POLLIN)

    def run(self) -> NoReturn:
        """Serves fork requests; never returns."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._lifeline:
                    sys.exit(0)
                if fd == self._wake_read:
                    self._reap()
                elif fd == self._listener.fileno():
                    client, _ = self._listener.accept()
                    self._clients[client.fileno()] = (client, bytearray())
                    self._poll.register(client, select.POLLIN)
                elif fd in self._clients:
                    self._read(fd)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass

    def _read(self, fd: int) -> None:
        client, buffer = self._clients[fd]
        try:
            data = client.recv(65536)
        except OSError:
            data = b""
        buffer += data
        if not data or len(buffer) > REQUEST_BYTES:
            self._drop(fd)
            return
        while (newline := buffer.find(b"\n")) >= 0:
            line = bytes(buffer[:newline])
            del buffer[: newline + 1]
            answer = json.dumps(self._answer(line)).encode() + b"\n"
            try:
                client.sendall(answer)
            except OSError:
                self._drop(fd)
                return

    def _drop(self, fd: int) -> None:
        client, _ = self._clients.pop(fd)
        self._poll.unregister(fd)
        client.close()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if request["cmd"] != "fork":
                return {"error": f"unknown command {request['cmd']!r}"}
            pid = self._fork(request["env"], request["argv"], request.get("log", ""))
        except (ValueError, KeyError, TypeError) as error:
            return {"error": f"malformed request: {error!r}"}
        except OSError as error:
            return {"error": f"fork failed: {error}"}
        return {"pid": pid, "start_time": start_time(pid)}

    def _fork(self, env: dict[str, str], argv: list[str], log: str) -> int:
        """The pid of a new engine. It inherits nothing of the zygote's but memory."""
        if threading.active_count() > 1 or _threads():
            raise OSError(f"threads exist: {_threads()}; use --host-kind serve")
        if _uses_cuda():
            raise OSError("CUDA is initialized, which no fork survives; use --host-kind serve")
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644) if log else os.dup(1)
        pid = os.fork()
        if pid:
            os.close(output)
            return pid
        self._become_engine(env, argv, output)

    def _become_engine(self, env: dict[str, str], argv: list[str], output: int) -> NoReturn:
        status = FAILED_EXIT
        try:
            self._let_go()
            os.setsid()
            keep_niceness()
            devnull = os.open(os.devnull, os.O_RDONLY)
            for fd, target in ((devnull, 0), (output, 1), (output, 2)):
                os.dup2(fd, target)
            os.close(output)
            os.environ.update(env)
            sys.argv = ["relume-engine", *argv]
            _name_process(f"relume-engine {env.get('RELUME_WORKER', '')}")
            from relume.engine_shim.engine.hosts import inproc_host as engine_host

            engine_host.main(argv)
            status = 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else FAILED_EXIT
        except BaseException:  # process edge: the log file must hold the reason
            import traceback

            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # a full disk: this fork must still end here
                    stream.flush()
            # No interpreter exit: threads of the engine may be inside torch.
            os._exit(status)

    def _let_go(self) -> None:
        """Closes what belongs to the zygote and undoes its signal handling."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._listener.close()
        for client, _ in self._clients.values():
            client.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        if self._lifeline is not None:
            os.close(self._lifeline)


def _name_process(name: str) -> None:
    """Shows in `ps -o comm`; 15 characters are kept."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15] + b"\0", 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="relume-zygote", description=__doc__.split("\n")[0])
    parser.add_argument("--socket", required=True, help="unix socket to listen on")
    parser.add_argument("--lifeline-fd", type=int, help="exit when this descriptor is at EOF")
    args = parser.parse_args()
    preload()
    zygote = Zygote(args.socket, args.lifeline_fd)
    SteadyOutput(sys.stdout).write("zygote ready\n")
    try:
        zygote.run()
    finally:  # not reached in a fork, which ends in os._exit
        with contextlib.suppress(FileNotFoundError):
            os.unlink(args.socket)


if __name__ == "__main__":
    main()
