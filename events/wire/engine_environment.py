"""The environment that an agent gives its engine's processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

WORKER = "RELUME_WORKER"
INCARNATION = "RELUME_INCARNATION"
AGENT_SOCKET = "RELUME_AGENT_SOCKET"
PROGRESS = "RELUME_PROGRESS"


class EngineIdentity(msgspec.Struct, frozen=True):
    """`worker` and `incarnation` name the engine; `agent_socket` is the path reports go
    to, empty without an agent; `progress` is the file steps are counted in, empty when
    engine and HTTP server share one process."""

    worker: str
    incarnation: int
    agent_socket: str
    progress: str

    def format(self) -> dict[str, str]:
        """As variables of the environment."""
        return {
            WORKER: self.worker,
            INCARNATION: str(self.incarnation),
            AGENT_SOCKET: self.agent_socket,
            PROGRESS: self.progress,
        }

    @classmethod
    def parse(cls, env: Mapping[str, str]) -> Self:
        """Raises ValueError when the incarnation is not a number."""
        return cls(
            worker=env.get(WORKER, ""),
            incarnation=int(env.get(INCARNATION, "0")),
            agent_socket=env.get(AGENT_SOCKET, ""),
            progress=env.get(PROGRESS, ""),
        )
