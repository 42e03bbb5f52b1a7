"""How long a plan of `reshard` takes: reloads and copies overlap, so the slowest of the
links decides (AnchorTP Section III.C, the execution scheduler)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from relume.chaos.papers.anchortp.reshard import Plan


class Links(Struct, frozen=True, kw_only=True):
    """Bandwidths in bytes/s; 0: no limit known. `host`: a rank's link to the host's memory;
    `source`: the one place all reloads come from; `domain`: all reloads of one NUMA node;
    `near`, `far`: a pair of ranks within one domain, or across."""

    host: int
    source: int = 0
    domain: int = 0
    near: int = 0
    far: int = 0


def busiest_us(
    plan: Plan, unit_bytes: int, links: Links, domains: Mapping[int, int] | None = None
) -> int:
    """Microseconds until the slowest link is done:
    `max(max_g R_g / host, sum(R) / source, max_n R_n / domain, max_pair P / link)`."""
    known = domains or {}
    loads: dict[tuple[str, int, int], int] = {}
    for move in plan.moves:
        count = move.end - move.start
        if move.kind == "reload":
            home = known.get(move.target, 0)
            used = [("host", move.target, 0), ("source", 0, 0), ("domain", home, 0)]
        elif move.kind == "peer":
            near = known.get(move.source, 0) == known.get(move.target, 0)
            used = [("near" if near else "far", move.source, move.target)]
        else:
            continue
        for link in used:
            loads[link] = loads.get(link, 0) + count
    times = [_us(units * unit_bytes, getattr(links, link[0])) for link, units in loads.items()]
    return max(times, default=0)


def _us(amount: int, per_s: int) -> int:
    return -(-amount * 1_000_000 // per_s) if per_s else 0
