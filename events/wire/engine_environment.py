"""The environment that an agent gives its engine's processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

WORKER = "RELUME_WORKER"
INCARNATION = "RELUME_INCARNATION"
AGENT_SOCKET = "RELUME_AGENT_SOCKET"
PROGRESS = "RELUME_PROGRESS"
POOLS = "RELUME_POOLS"
POOLS_ANEW = "RELUME_POOLS_ANEW"
LOAD_MB_S = "RELUME_LOAD_MB_S"


class EngineIdentity(msgspec.Struct, frozen=True):
    """`worker` and `incarnation` name the engine; `agent_socket` is the path reports go
    to, empty without an agent; `progress` is the file steps are counted in, empty when
    engine and HTTP server share one process; `pools` is the socket of the host's pools, empty
    when weights stay in the engine; `pools_anew`: not empty where files are read, whatever pools have; `load_mb_s`: how
    many MiB of files a rank reads per second at most, 0: no limit."""

    worker: str
    incarnation: int
    agent_socket: str
    progress: str
    pools: str = ""
    pools_anew: str = ""
    load_mb_s: int = 0

    def format(self) -> dict[str, str]:
        """As variables of the environment."""
        return {
            WORKER: self.worker,
            INCARNATION: str(self.incarnation),
            AGENT_SOCKET: self.agent_socket,
            PROGRESS: self.progress,
            POOLS: self.pools,
            POOLS_ANEW: self.pools_anew,
            LOAD_MB_S: str(self.load_mb_s),
        }

    @classmethod
    def parse(cls, env: Mapping[str, str]) -> Self:
        """Raises ValueError when the incarnation or the limit is not a number."""
        return cls(
            worker=env.get(WORKER, ""),
            incarnation=int(env.get(INCARNATION, "0")),
            agent_socket=env.get(AGENT_SOCKET, ""),
            progress=env.get(PROGRESS, ""),
            pools=env.get(POOLS, ""),
            pools_anew=env.get(POOLS_ANEW, ""),
            load_mb_s=int(env.get(LOAD_MB_S, "0")),
        )
