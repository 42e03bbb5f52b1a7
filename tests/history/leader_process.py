"""A leader in a process of its own, that meets a signal at a step of keeping history.

python -m tests.history.leader_process ENDPOINT ROOT NAME STEP SIGNAL
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from tests.history.stage import replica_on


async def main(endpoint: str, root: str, name: str, step: str, signal_name: str) -> None:
    server = cast(Any, SimpleNamespace(endpoints=(endpoint,)))
    met = False

    def meet(at: str) -> None:
        nonlocal met
        print(at, flush=True)
        if at == step and not met:
            met = True
            os.kill(os.getpid(), signal.Signals[signal_name])

    async with replica_on(server, Path(root), name, meet):
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
