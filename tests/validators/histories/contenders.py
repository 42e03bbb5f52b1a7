"""Clients of etcd that fight for one stream, so that histories of its owner key and its manifests are
worth judging."""

from __future__ import annotations

import asyncio
import itertools
from random import Random

from relume.chaos.call_recorder import CallRecorder
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import LogError, LogUnavailable


class Contenders:
    """Clients that fight for one stream, and commit manifests for it."""

    def __init__(self, config: EtcdConfig, recorder: CallRecorder, seed: int) -> None:
        self.config = config
        self.recorder = recorder
        self.random = Random(seed)

    async def fight(self, log: EtcdLog, name: str, for_s: float) -> None:
        """Own the stream, commit a manifest and read all, again and again."""
        upkeep = Maintenance(log.client, "fleet")
        self.recorder.watch(log.client, name)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + for_s
        for number in itertools.count():
            if loop.time() >= until_s:
                return
            try:
                async with log.writer("fleet") as writer:
                    revision = self.random.randrange(1, 4)
                    await upkeep.commit(revision, b"%s %d" % (name.encode(), number), writer.epoch)
                    await upkeep.manifests()
                    await asyncio.sleep(self.random.random() / 10)
            except* LogError:
                await asyncio.sleep(self.random.random() / 5)
            try:
                await log.client.range(Keys(self.config.prefix).owner("fleet"))
                await upkeep.manifests()
            except LogUnavailable:
                continue
