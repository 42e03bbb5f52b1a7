"""Draft assistance while an engine loads (LUMEN, mechanism 3, Algorithm 3), in simulated engines
alone: the control plane does not know of it.

A host whose engine died has a draft model some seconds after its next engine began to load. Until
that engine answers, the host drafts for the survivor with most requests that has no drafter yet; if
that survivor dies, for the next one. Drafting does not slow the loading.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from relume.chaos.sim.engine.speed import Drafts
from relume.chaos.sim.worker_host import Host
from relume.chaos.sim.world.virtual_loop import VirtualLoop

LOOK_S = 0.25


class Assist(Struct, frozen=True):
    """`after_s` after the start of an engine, its host drafts for another, as `drafts` says."""

    drafts: Drafts
    after_s: float = 2.0


class Assisting:
    """Pairs hosts of a fleet while it runs."""

    def __init__(self, hosts: Mapping[str, Host], loop: VirtualLoop, assist: Assist) -> None:
        self._hosts = hosts
        self._loop = loop
        self._assist = assist
        self._since: dict[str, float] = {}
        self.pairs: dict[str, str] = {}
        """The host that a loading host drafts for."""
        self._look()

    def _look(self) -> None:
        hosts, loop = self._hosts, self._loop
        for name, host in hosts.items():
            if not _loading(host):
                self._since.pop(name, None)
                self._let_go(name)
                continue
            since = self._since.setdefault(name, loop.time())
            target = self.pairs.get(name)
            if target is not None and not _serving(hosts[target]):
                self._let_go(name)
            if name not in self.pairs and loop.time() - since >= self._assist.after_s:
                self._pair(name)
        loop.call_at(loop.time() + LOOK_S, self._look)

    def _pair(self, name: str) -> None:
        taken = set(self.pairs.values())
        open_ = [h for h in self._hosts.values() if _serving(h) and h.name not in taken]
        if open_:
            target = max(open_, key=_load)
            self.pairs[name] = target.name
            target.draft(self._assist.drafts)

    def _let_go(self, name: str) -> None:
        target = self.pairs.pop(name, None)
        if target is not None:
            self._hosts[target].draft(None)


def _loading(host: Host) -> bool:
    engine = host.engine
    return (
        engine is not None
        and engine.incarnation > 1
        and engine.process.alive
        and not engine.serving
    )


def _serving(host: Host) -> bool:
    engine = host.engine
    return (
        engine is not None
        and engine.serving
        and engine.process.alive
        and not engine.process.stopped
    )


def _load(host: Host) -> int:
    return host.engine.engine.load if host.engine is not None else 0
