"""Who this engine process is, from the environment its agent gave it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec


class EngineIdentity(msgspec.Struct, frozen=True):
    """`worker` and `incarnation` name the engine; `agent_socket` is the path reports go
    to, empty without an agent; `progress` is the file steps are counted in, empty when
    engine and HTTP server share one process."""

    worker: str
    incarnation: int
    agent_socket: str
    progress: str


def from_environment(env: Mapping[str, str] = os.environ) -> EngineIdentity:
    """Raises ValueError when RELUME_INCARNATION is not a number."""
    return EngineIdentity(
        worker=env.get("RELUME_WORKER", ""),
        incarnation=int(env.get("RELUME_INCARNATION", "0")),
        agent_socket=env.get("RELUME_AGENT_SOCKET", ""),
        progress=env.get("RELUME_PROGRESS", ""),
    )
