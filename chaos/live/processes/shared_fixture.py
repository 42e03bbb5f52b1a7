"""The parts that runs share: the zygote, an etcd of each size, and the undisturbed answers.

None of them carries state of a run that another run could see: a run's log has a key prefix of its
own, and its agents, engines, daemons and replicas are its own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from relume.chaos.live.errors import LiveError
from relume.chaos.live.processes.etcd_members import Etcd
from relume.chaos.validators.records import ClientRecord
from relume.controlplane.local.child_processes import Child
from relume.controlplane.local.local_fleet import ENGINE_ENV, zygote_argv

ZYGOTE_S = 180.0
MODEL = Path(os.environ.get("RELUME_TEST_MODEL", ".relume/models/tiny"))


class Bed:
    """An async context manager; its exit leaves nothing. `say` receives progress.
    `zygote`: socket of a running zygote, instead of a new one. `known`: undisturbed answers, by
    a digest of the request."""

    def __init__(
        self, say: Callable[[str], None] = print, model: Path = MODEL, zygote: str = ""
    ) -> None:
        self.model = model.absolute()
        self.directory = Path()
        self.zygote = zygote
        self.known: dict[str, ClientRecord] = {}
        self._say = say
        self._stack = AsyncExitStack()
        self._etcds: dict[tuple[int, bool, bool], Etcd] = {}
        self._runs = 0

    async def __aenter__(self) -> Self:
        if not self.model.exists():
            raise LiveError(f"no model at {self.model}: run `make models`")
        self.directory = Path(tempfile.mkdtemp(prefix="relume-chaos-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        try:
            if not self.zygote:
                await self._start_zygote()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start_zygote(self) -> None:
        self.zygote = str(self.directory / "z.sock")
        log = self.directory / "zygote.log"
        child = Child.start("zygote", zygote_argv(self.zygote), log, ENGINE_ENV)
        self._stack.push_async_callback(child.stop)
        self._say("the process engines are forked from imports vLLM")
        deadline = time.monotonic() + ZYGOTE_S
        while not Path(self.zygote).exists():
            if not child.alive or time.monotonic() > deadline:
                raise LiveError(f"no engine can be forked: {child.tail()}")
            await asyncio.sleep(0.1)

    async def etcd(self, members: int, linked: bool, restored: bool) -> Etcd:
        """The etcd with `members` members, which are `linked` or not, healthy; the first call starts
        it. `restored`: for runs that restore it from a backup, and so end the logs of all others."""
        if (kind := (members, linked, restored)) not in self._etcds:
            etcd = Etcd(members, linked=linked)
            self._etcds[kind] = await self._stack.enter_async_context(etcd)
        await self._etcds[kind].healthy()
        return self._etcds[kind]

    def discard(self, members: int, linked: bool, restored: bool) -> None:
        """Stop using this etcd for further runs: its state is unknown."""
        self._etcds.pop((members, linked, restored), None)

    def place(self, name: str) -> tuple[Path, str]:
        """A new directory and a new key prefix."""
        self._runs += 1
        # The path must be short: it contains sockets.
        path = self.directory / f"{self._runs}"
        path.mkdir()
        return path, f"/chaos/{self._runs}-{name}"
