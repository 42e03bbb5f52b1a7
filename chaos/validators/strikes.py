"""Faults as validators need them: what struck whom, from when to when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct

THE_LOG = "the log"
"""Target of a fault that stops or slows members of etcd."""
FELT_MS = 15_000
"""Time after a fault in which requests may still suffer from it: an engine loads for 5 s, and its
start may be put off or fail; a hung one is found within seconds."""
WRONG_WEIGHTS = frozenset(("weights-flipped", "weights-flipped-unseen"))
"""Faults that damage the weights of an engine: they strike once and stay."""
DEATHS_OF_REPLICAS = frozenset(("gateway-kill", "replica-spool-torn", "replica-spool-corrupt"))
"""Faults that end a replica."""


class Strike(Struct, frozen=True, kw_only=True):
    """One fault that struck. `targets`: workers, replicas, or `THE_LOG`. Wall times as in
    `Segment.at_ms`; a fault that is over at once has one time, and its damage lasts. `stops_log`: it left etcd
    without a majority, or without space. `incarnations`: by worker, the engines whose weights it
    changed, where that is known."""

    what: str
    targets: frozenset[str]
    since_ms: int
    until_ms: int
    stops_log: bool = False
    incarnations: dict[str, int] = {}

    def is_on(self, since_ms: int, until_ms: int) -> bool:
        """Whether it lasted at any moment of that time."""
        return self.since_ms <= until_ms and self.until_ms >= since_ms


class Slowed(Struct, frozen=True, kw_only=True):
    """What faults slowed down. `workers`: name, from when to when (wall ms), by which factor;
    `link_ms`: the most that a fault delayed messages to and from engines by; `cut`: workers that were
    cut from the gateways, from when to when (wall ms); `blind`: streams of replicas that nothing of
    etcd reached, the same; `outages`: when nothing could be written into the log (wall ms); `lives`: of
    simulated runs, from when to when (wall ms) each engine served; `failing`: models of which each worker
    that got requests failed most of them, from when to when (wall ms)."""

    workers: Sequence[tuple[str, int, int, float]] = ()
    link_ms: int = 0
    cut: Sequence[tuple[str, int, int]] = ()
    blind: Sequence[tuple[str, int, int]] = ()
    outages: Sequence[tuple[int, int]] = ()
    lives: Sequence[tuple[int, int]] = ()
    failing: Sequence[tuple[str, int, int]] = ()


NOT_SLOWED = Slowed()


def is_struck(
    strikes: Iterable[Strike], targets: Collection[str], since_ms: int, until_ms: int
) -> bool:
    """Whether any of the targets was struck in that time."""
    return any(
        strike.is_on(since_ms, until_ms) and not strike.targets.isdisjoint(targets)
        for strike in strikes
    )
