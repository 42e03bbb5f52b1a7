"""The pools of a host: who fills which, who has which open, and what is evicted for another.

A sealed pool cannot be changed, not by this process either: the kernel refuses it (F_SEAL_WRITE).
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable

from msgspec import Struct

from relume.engine_shim.checkpoints.daemon.store import host_memory
from relume.engine_shim.pools.pool_messages import Busy, Filling, Opened, Refused

logger = logging.getLogger("relume.state")

FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
FINAL = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Pool(Struct):
    """`digest`: empty until it is sealed. `filler`: the connection that fills it, then 0. `used_at`:
    when it was last opened or let go of, in seconds."""

    fd: int
    size: int
    filler: int
    used_at: float
    digest: bytes = b""
    users: set[int] = set()


class Pools:
    """`budget` bytes at most; `reserve` bytes of the host's memory are left to others. `now` is a
    monotonic clock in seconds. Connections are numbers above 0."""

    def __init__(self, budget: int, reserve: int, now: Callable[[], float]) -> None:
        self._budget = budget
        self._reserve = reserve
        self._now = now
        self._pools: dict[str, Pool] = {}

    def open(self, connection: int, name: str, size: int) -> tuple[Filling | Opened | Busy, int]:
        """The answer, and the descriptor that goes with it, or -1. Raises NoPool."""
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = self._allocate(connection, name, size)
            return Filling(), pool.fd
        if not pool.digest:
            return Busy(), -1
        if pool.size != size:
            raise NoPool(f"pool {name} has {pool.size} bytes, not {size}")
        pool.users.add(connection)
        pool.used_at = self._now()
        return Opened(pool.digest), pool.fd

    def seal(self, connection: int, name: str, digest: bytes) -> None:
        """Its filler becomes a user. Raises NoPool."""
        pool = self._pools.get(name)
        if pool is None or pool.filler != connection:
            raise NoPool(f"pool {name} is not filled by this engine")
        try:
            fcntl.fcntl(pool.fd, fcntl.F_ADD_SEALS, FINAL)
        except OSError as error:
            self.drop(name)
            raise NoPool(f"pool {name} is still mapped for writing ({error})") from None
        pool.digest, pool.filler = digest, 0
        pool.users = {connection}
        pool.used_at = self._now()
        logger.info("pool %s has %d bytes", name, pool.size)

    def drop(self, name: str) -> None:
        """Gone for all who ask from now on; engines that have it mapped keep their mapping."""
        pool = self._pools.pop(name, None)
        if pool is not None:
            os.close(pool.fd)
            logger.info("pool %s is dropped", name)

    def left(self, connection: int) -> None:
        """The connection is gone, and its hold on pools with it."""
        for name, pool in list(self._pools.items()):
            if pool.filler == connection:
                self.drop(name)
            elif connection in pool.users:
                pool.users.discard(connection)
                pool.used_at = self._now()

    def close(self) -> None:
        for name in list(self._pools):
            self.drop(name)

    def _bytes(self) -> int:
        return sum(pool.size for pool in self._pools.values())

    def _allocate(self, connection: int, name: str, size: int) -> Pool:
        self._evict_for(name, size)
        fd = os.memfd_create("relume-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, FIXED_SIZE)
        except OSError as error:
            os.close(fd)
            raise NoPool(f"no memory for pool {name} ({error})") from None
        return Pool(fd, size, connection, self._now())

    def _evict_for(self, name: str, size: int) -> None:
        """Evicts pools that no engine has open, the longest unused first. Raises NoPool."""
        idle = sorted(
            (known for known, pool in self._pools.items() if pool.digest and not pool.users),
            key=lambda known: self._pools[known].used_at,
        )
        freed = sum(self._pools[known].size for known in idle)
        if self._bytes() - freed + size > self._budget:
            raise NoPool(
                f"pool {name} needs {size} bytes, and {self._budget - self._bytes() + freed} of "
                f"{self._budget} can be freed; raise --keep-weights-mb"
            )
        while self._bytes() + size > self._budget:
            self.drop(idle.pop(0))
        spare = host_memory.available() - self._reserve
        if size > spare:
            raise NoPool(f"pool {name} needs {size} bytes, and the host can spare {spare}")


class NoPool(Exception):
    """Why there is no such pool, in words."""

    def answer(self) -> Refused:
        return Refused(str(self)[:1000])
