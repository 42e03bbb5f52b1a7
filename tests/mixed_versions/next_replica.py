"""`relume serve` of the next build: it reads and announces level `NEXT`, and writes a newer event at each
tick as soon as it may.

python -m tests.mixed_versions.next_replica [flags of `relume serve`]
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from msgspec.structs import replace

from relume.controlplane.cli.relume_command import main
from relume.controlplane.gateway.ports import GatewayPort
from relume.controlplane.replica import serve
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.controlplane.serve_settings import ServeConfig
from relume.events.vocabulary import Tick
from relume.policies.leader.feature_level import in_force
from tests.mixed_versions.next_build import NEXT, WeatherReported, next_build

_config_of, _run = serve._replica_config, Replica.run


def config_of(config: ServeConfig) -> ReplicaConfig:
    return replace(_config_of(config), feature_level=NEXT)


async def run(self: Replica, gateway: GatewayPort) -> None:
    loop = asyncio.get_running_loop()

    def seen(stream: str, position: int, event: Any) -> None:
        if type(event) is Tick and in_force(self.fleet) >= NEXT:
            loop.call_soon(self.scheduler.emit, WeatherReported(sky="grey"))

    self.observe(seen)
    await _run(self, gateway)


if __name__ == "__main__":
    serve._replica_config, Replica.run = config_of, run  # type: ignore[method-assign]
    with next_build():
        sys.exit(main(["serve", *sys.argv[1:]]))
