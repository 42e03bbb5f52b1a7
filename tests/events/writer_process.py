"""A process of its own that writes ticks to w.w0 until fenced; run by test_processes.

    python -m tests.events.writer_process URL

Prints `ready <epoch>`, then `taken <n>` for every tick, and `fenced` before it exits
with status 3.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from relume.events.etcd.factory import open_log
from relume.events.log.errors import Fenced
from relume.events.vocabulary import Tick


async def main(url: str) -> int:
    async with open_log(url, "child") as log, log.writer("w.w0", wait_s=10) as writer:
        print("ready", writer.epoch, flush=True)
        try:
            for n in itertools.count():
                writer.append(Tick(n, 0))
                print("taken", n, flush=True)
                await asyncio.sleep(0.01)
        except Fenced:
            print("fenced", flush=True)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
