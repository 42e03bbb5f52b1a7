"""The identity of this engine process, from the environment that its agent set."""

from __future__ import annotations

import os
from collections.abc import Mapping

from relume.events.wire.engine_environment import EngineIdentity


def from_environment(env: Mapping[str, str] = os.environ) -> EngineIdentity:
    """Raises ValueError when the incarnation is not a number."""
    return EngineIdentity.parse(env)
