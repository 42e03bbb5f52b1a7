"""Real etcd for tests and fault runs: one or three members on loopback, killable.

    with EtcdServer() as etcd:            # or: async with EtcdServer(members=3) as etcd
        ...connect to etcd.url...
        etcd.kill9(); etcd.restart()      # power cut and back, data kept
        etcd.stop(); etcd.cont()          # SIGSTOP: hung, not dead

Data lies in a temporary directory, in memory (/dev/shm) by default: fast, and fsync
costs nothing there. Members die with the process that started them. Start takes well
under a second for one member. Every wait is bounded and raises EtcdDidNotStart with
the end of the member's own log.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from relume.controlplane.local.child_processes import free_port
from tests.signals import stop

PORT_S = 60.0
"""For so long a member that starts again waits for its port."""


class EtcdDidNotStart(RuntimeError):
    """A member did not become healthy in time, or exited."""


def etcd_binary() -> str | None:
    """Path of the etcd to test with: RELUME_ETCD, else PATH; None when there is none."""
    return os.environ.get("RELUME_ETCD") or shutil.which("etcd")


def _dying_with_parent() -> tuple[str, ...]:
    """What to put before a command so that it is killed when we die, however we do.

    A program and not a preexec_fn: forking a process with gRPC's threads in it and
    running Python there is how children hang.
    """
    setpriv = shutil.which("setpriv")
    return (setpriv, "--pdeathsig", "KILL", "--") if setpriv else ()


class EtcdServer:
    """One or three etcd members, started on entering, killed and removed on leaving.

    `quota_bytes` is etcd's --quota-backend-bytes (0: its default), `heartbeat_ms` the
    raft heartbeat; the election timeout is ten of them, and the least lease TTL etcd
    grants is 1.5 election timeouts, rounded up to seconds. `extra` are more flags.
    `directory`: parent of the data (default /dev/shm when there, else the temp dir).
    """

    def __init__(
        self,
        members: int = 1,
        *,
        quota_bytes: int = 0,
        heartbeat_ms: int = 50,
        extra: tuple[str, ...] = (),
        directory: str | None = None,
    ) -> None:
        self.members = members
        self.quota_bytes = quota_bytes
        self.heartbeat_ms = heartbeat_ms
        self.extra = extra
        self.client_ports = [free_port() for _ in range(members)]
        self.peer_ports = [free_port() for _ in range(members)]
        self._parent = directory or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
        self._dir: Path | None = None
        self._procs: list[subprocess.Popen[bytes] | None] = [None] * members

    # --- where it is -----------------------------------------------------------------

    @property
    def endpoints(self) -> tuple[str, ...]:
        """`host:port` of every member's client port."""
        return tuple(f"127.0.0.1:{port}" for port in self.client_ports)

    @property
    def url(self) -> str:
        """What `open_log` takes: `http://host:port[,host:port...]`."""
        return "http://" + ",".join(self.endpoints)

    @property
    def data_dir(self) -> Path:
        """Directory of all members' data and logs."""
        if self._dir is None:
            raise EtcdDidNotStart("not started")
        return self._dir

    def pid(self, member: int = 0) -> int:
        """Process id of a running member."""
        return self._running(member).pid

    def alive(self, member: int = 0) -> bool:
        """Whether the member's process exists (a stopped one does)."""
        proc = self._procs[member]
        return proc is not None and proc.poll() is None

    # --- life ------------------------------------------------------------------------

    def start(self, timeout_s: float = 20.0) -> Self:
        """Start all members and wait until each is healthy."""
        binary = etcd_binary()
        if binary is None:
            raise EtcdDidNotStart("no etcd on PATH; set RELUME_ETCD")
        self._dir = Path(tempfile.mkdtemp(prefix="relume-etcd-", dir=self._parent))
        atexit.register(self.terminate)
        for member in range(self.members):
            self._spawn(member)
        self.wait_healthy(timeout_s=timeout_s)
        return self

    def terminate(self) -> None:
        """Kill every member and remove the data. Safe to call twice."""
        atexit.unregister(self.terminate)
        for proc in self._procs:
            if proc is not None and proc.poll() is None:
                proc.kill()  # SIGKILL reaches a stopped process too
        for proc in self._procs:
            if proc is not None:
                proc.wait(timeout=10)
        self._procs = [None] * self.members
        if self._dir is not None:
            shutil.rmtree(self._dir, ignore_errors=True)
            self._dir = None

    def wait_healthy(self, member: int | None = None, timeout_s: float = 20.0) -> None:
        """Wait until `member` (default: every running one) says it is healthy."""
        which = range(self.members) if member is None else (member,)
        deadline = time.monotonic() + timeout_s
        for each in which:
            while self._procs[each] is not None and not self.healthy(each):
                if not self.alive(each):
                    raise EtcdDidNotStart(f"member {each} exited: {self.log_tail(each)}")
                if time.monotonic() > deadline:
                    raise EtcdDidNotStart(f"member {each} not healthy: {self.log_tail(each)}")
                time.sleep(0.01)

    def healthy(self, member: int = 0, timeout_s: float = 1.0) -> bool:
        """What the member's own /health says (False too when it does not answer)."""
        url = f"http://{self.endpoints[member]}/health"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=timeout_s) as answer:
                return b"true" in answer.read()
        except (OSError, urllib.error.URLError):
            return False

    def log_tail(self, member: int = 0, size: int = 2000) -> str:
        """The end of the member's own log."""
        path = self.data_dir / f"m{member}.log"
        return path.read_text(errors="replace")[-size:] if path.exists() else ""

    # --- faults and backups ----------------------------------------------------------------------

    def kill9(self, member: int = 0) -> None:
        """SIGKILL a member and reap it; its data stays."""
        proc = self._running(member)
        proc.kill()
        proc.wait(timeout=10)

    def terminate_member(self, member: int = 0) -> None:
        """SIGTERM a member and wait until it has ended; its data stays, and is complete."""
        proc = self._running(member)
        proc.terminate()
        proc.wait(timeout=20)

    def stop(self, member: int = 0) -> None:
        """SIGSTOP, seen to take effect: the member hangs with its sockets open."""
        stop(self._running(member).pid)

    def cont(self, member: int = 0) -> None:
        """SIGCONT a stopped member."""
        self._running(member).send_signal(signal.SIGCONT)

    def restart(self, member: int = 0, timeout_s: float = 20.0, wait: bool = True) -> None:
        """Start a killed member again on its data and ports (kills it first if it runs). While it was
        dead, another process may have got a port of it: then again, until that one ends."""
        if self.alive(member):
            self.kill9(member)
        deadline = time.monotonic() + PORT_S
        while True:
            self._spawn(member)
            if not wait:
                return
            try:
                return self.wait_healthy(member, timeout_s)
            except EtcdDidNotStart as error:
                is_taken = not self.alive(member) and "address already in use" in str(error)
                if not is_taken or time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def back_up(self, member: int = 0) -> None:
        """Copy the data of a single member, which is restarted for that."""
        self.kill9(member)
        data = self.data_dir / f"m{member}"
        shutil.copytree(data, data.with_suffix(".backup"))
        self.restart(member)

    def restore(self, member: int = 0) -> None:
        """Kill the member, and start it on what `back_up` copied; without a copy, on nothing."""
        if self.alive(member):
            self.kill9(member)
        data = self.data_dir / f"m{member}"
        shutil.rmtree(data)
        if data.with_suffix(".backup").exists():
            shutil.copytree(data.with_suffix(".backup"), data)
        self.restart(member)

    def leader(self) -> int:
        """Index of the member that leads. Raises EtcdDidNotStart when none says so."""
        for member in range(self.members):
            if not self.alive(member):
                continue
            url = f"http://{self.endpoints[member]}/metrics"
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            try:
                with opener.open(url, timeout=2) as answer:
                    if b"\netcd_server_is_leader 1\n" in answer.read():
                        return member
            except (OSError, urllib.error.URLError):
                continue
        raise EtcdDidNotStart("no member says it leads")

    # --- context managers --------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.terminate()
            raise

    def __exit__(self, *_: Any) -> None:
        self.terminate()

    async def __aenter__(self) -> Self:
        # On the loop on purpose: parent-death signals belong to the starting thread,
        # and a pool thread may end before the test does.
        return self.__enter__()

    async def __aexit__(self, *_: Any) -> None:
        self.terminate()

    # --- inside ------------------------------------------------------------------------

    def _running(self, member: int) -> subprocess.Popen[bytes]:
        proc = self._procs[member]
        if proc is None or proc.poll() is not None:
            raise EtcdDidNotStart(f"member {member} does not run")
        return proc

    def _spawn(self, member: int) -> None:
        binary = etcd_binary()
        if binary is None:
            raise EtcdDidNotStart("no etcd on PATH; set RELUME_ETCD")
        client = f"http://127.0.0.1:{self.client_ports[member]}"
        peer = f"http://127.0.0.1:{self.peer_ports[member]}"
        cluster = ",".join(f"m{i}=http://127.0.0.1:{p}" for i, p in enumerate(self.peer_ports))
        command = [
            *_dying_with_parent(),
            binary,
            f"--name=m{member}",
            f"--data-dir={self.data_dir / f'm{member}'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={cluster}",
            "--initial-cluster-state=new",
            f"--heartbeat-interval={self.heartbeat_ms}",
            f"--election-timeout={10 * self.heartbeat_ms}",
            f"--quota-backend-bytes={self.quota_bytes}",
            "--logger=zap",
            "--log-level=warn",
            *self.extra,
        ]
        env = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with open(self.data_dir / f"m{member}.log", "ab") as log:
            self._procs[member] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
            )
