"""What the attempts of a request left, by engine: tokens at its client, and KV blocks in later attempts.

If an engine turns out to compute wrong results, a stream is in doubt that has something of it: its
client got tokens from it, or a later attempt restored blocks. A restored block may come from any
attempt before, so a restore counts for all of their engines.

The replica that owns a request notes this from its own dispatches and failures. What former owners
did is only in the fold, which marks requests that were sent to a quarantined worker.
"""

from __future__ import annotations

from collections.abc import Container

from msgspec import Struct

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState
from relume.policies.state.fleet import Request

TRUSTED = (HealthState.PROBING, HealthState.HEALTHY)
"""States that take back the verdict on an engine."""
MOST_CORRUPT = 1024
"""Maximum number of quarantined engines that are remembered."""


def engine_of(worker: str, incarnation: int) -> str:
    """An engine's name."""
    return f"{worker}:{incarnation}"


class CorruptEngines:
    """Engines that the leader quarantined, from its decisions in their order. If it decides that the
    same engine may serve again, that takes the verdict back: an operator trusts it. Its death does
    not."""

    def __init__(self) -> None:
        self._engines: dict[str, None] = {}

    def on_decided(self, event: v.HealthDecided) -> None:
        """The decision was folded."""
        engine = engine_of(event.worker, event.incarnation)
        if event.state in TRUSTED:
            self._engines.pop(engine, None)
        if event.state != HealthState.QUARANTINED:
            return
        self._engines[engine] = None
        if len(self._engines) > MOST_CORRUPT:
            del self._engines[next(iter(self._engines))]

    def __contains__(self, engine: object) -> bool:
        return engine in self._engines


class Lineage(Struct):
    """Of one request, at the replica that owns it. `engines`: those of its attempts; `served`: those
    of which the stream has something; `had`: tokens delivered before the present attempt.
    `is_adopted`: another replica owned it before."""

    is_adopted: bool = False
    had: int = 0
    engines: tuple[str, ...] = ()
    served: tuple[str, ...] = ()

    def begin(self, engine: str, delivered: int, restores: bool) -> None:
        """An attempt is sent there after `delivered` tokens. `restores`: it may load blocks that
        earlier attempts wrote."""
        if restores:
            self.served = tuple(dict.fromkeys((*self.served, *self.engines)))
        self.had = delivered
        self.engines = tuple(dict.fromkeys((*self.engines, engine)))

    def end(self, engine: str, delivered: int) -> None:
        """The attempt there ended after `delivered` tokens in all."""
        if delivered > self.had:
            self.served = tuple(dict.fromkeys((*self.served, engine)))

    def start_over(self, doubted: bool) -> None:
        """Its client has nothing yet, and the next attempt generates all of it. If it was in doubt,
        that attempt restores nothing either."""
        self.served = ()
        if doubted:
            self.engines, self.is_adopted = (), False

    def is_doubted(self, corrupt: Container[str], request: Request | None) -> bool:
        """Whether it has something of a corrupt engine. `request`: as the fold has it."""
        if self.is_adopted and request is not None and request.doubted is True:
            return True
        return any(engine in corrupt for engine in self.served)

    def has_part_of(self, worker: str, incarnation: int, request: Request | None) -> bool:
        """Whether it has something of that engine."""
        if self.is_adopted and request is not None:
            if any(name == worker for name, _ in request.places):
                return True
        return engine_of(worker, incarnation) in self.served
