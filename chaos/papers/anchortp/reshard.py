"""Which rank holds which part of a model when the tensor-parallel size changes, and what has to
move (AnchorTP Section III.C).

One sharding axis (KV head groups, columns of the feed-forward, vocabulary, experts) is a row
of `total` units. Before the change `held` says which units each living rank has; no rank has those
of a dead one. A plan gives every unit to one of `targets`: kept in place, copied from a living rank
(peer), or loaded from the host's memory or disk (reload).

- `continuous`: AnchorTP Alg. 1 (CMM). Targets are equal pieces in order; a target takes what
  living ranks have of its piece, and reloads the rest.
- `own_only`: the same pieces; all that a rank does not have itself is reloaded (what Table II
  calls Greedy). `full_reload`: everything is.
- `keep_in_place`: ours. The order of units within an axis is free, so no rank gives up what fits:
the smallest possible largest shard is found, ranks keep what they have up to that,
  and the lost units are spread so that the busiest loader is done earliest.

Every plan but `own_only` and `full_reload` reloads as little as can be: the lost units (Eq. 1).
They differ in what crosses between ranks and in how much one rank loads. Integers: units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from msgspec import Struct

from relume.chaos.papers.anchortp.spans import Span, Spans, common, cut, normal, size, without

Held = Mapping[int, Spans]
"""Units of each living rank: normal spans, disjoint between ranks."""


class Move(Struct, frozen=True, kw_only=True):
    """Units `[start, end)` come to be on rank `target`. `kind`: keep, peer (from rank
    `source`) or reload (`source` is -1)."""

    kind: str
    target: int
    source: int
    start: int
    end: int


class Plan(Struct, frozen=True):
    """What each rank does to get its units, in the order of ranks and units."""

    total: int
    moves: tuple[Move, ...]

    def units(self, kind: str, target: int | None = None) -> int:
        """Units of all moves of a kind, or of those to one rank."""
        chosen = (m for m in self.moves if m.kind == kind and target in (None, m.target))
        return sum(move.end - move.start for move in chosen)

    def busiest(self, kind: str) -> int:
        """The most units of a kind that one rank gets."""
        ranks = {move.target for move in self.moves}
        return max((self.units(kind, rank) for rank in sorted(ranks)), default=0)

    def layout(self) -> dict[int, Spans]:
        """What each rank holds afterwards."""
        after: dict[int, list[Span]] = {}
        for move in self.moves:
            after.setdefault(move.target, []).append((move.start, move.end))
        return {rank: normal(spans) for rank, spans in after.items()}


class BadLayout(ValueError):
    """The layout or the demand is not one that a plan can be made for."""


def even(total: int, parts: int) -> tuple[Span, ...]:
    """`parts` pieces of `[0, total)` that differ by one unit at most (Alg. 1, lines 2 to 5)."""
    return tuple((i * total // parts, (i + 1) * total // parts) for i in range(parts))


def after_failure(total: int, ranks: int, dead: Sequence[int]) -> dict[int, Spans]:
    """What the living ones of `ranks` ranks with equal pieces hold once `dead` have died."""
    pieces = enumerate(even(total, ranks))
    return {rank: normal([piece]) for rank, piece in pieces if rank not in dead}


def lost(held: Held, total: int) -> Spans:
    """Units no living rank has; their number is the least that any plan reloads (Eq. 1).
    Raises BadLayout for spans outside `[0, total)`, or of two ranks."""
    together = [span for spans in held.values() for span in spans]
    known = normal(together)
    if size(known) != size(together):
        raise BadLayout("a unit is held by two ranks")
    if known and (known[0][0] < 0 or known[-1][1] > total):
        raise BadLayout(f"units outside 0 to {total}")
    return without(((0, total),), known)


def continuous(held: Held, targets: Sequence[int], total: int) -> Plan:
    """AnchorTP Alg. 1 for `targets` in this order. Raises BadLayout."""
    return _pieces(held, targets, total, peers=True)


def own_only(held: Held, targets: Sequence[int], total: int) -> Plan:
    """Alg. 1's pieces, without copies between ranks (Table II, Greedy). Raises BadLayout."""
    return _pieces(held, targets, total, peers=False)


def full_reload(targets: Sequence[int], total: int) -> Plan:
    """Restart: everything is loaded again (Table II, Full Reload)."""
    return _pieces({}, targets, total, peers=False)


def _pieces(held: Held, targets: Sequence[int], total: int, *, peers: bool) -> Plan:
    lost(held, total)
    if not targets:
        raise BadLayout("no rank is left")
    moves: list[Move] = []
    for target, piece in zip(targets, even(total, len(targets)), strict=True):
        open_ = normal([piece])
        own = common(open_, held.get(target, ()))
        moves += _moves("keep", target, target, own)
        open_ = without(open_, own)
        for source in sorted(held) if peers else ():
            found = common(open_, held[source])
            moves += _moves("peer", target, source, found)
            open_ = without(open_, found)
        moves += _moves("reload", target, -1, open_)
    return _plan(total, moves)


def keep_in_place(
    held: Held,
    targets: Sequence[int],
    total: int,
    weights: Mapping[int, int] | None = None,
    capacity: Mapping[int, int] | None = None,
    host: Mapping[int, int] | None = None,
    domains: Mapping[int, int] | None = None,
) -> Plan:
    """Least reload, then least copied between ranks, then the busiest loader done earliest,
    among the layouts whose largest shard (in proportion to `weights`, speeds) is smallest.

    `capacity`: units a rank can hold; `host`: how fast it loads, relative to others;
    `domains`: its NUMA node or host, since copies stay within one while they can. Left out:
    equal, unlimited, equal, one. Raises BadLayout when the units do not fit."""
    gone = lost(held, total)
    speeds = [(weights or {}).get(rank, 1) for rank in targets]
    capacity_left = [min((capacity or {}).get(rank, total), total) for rank in targets]
    shards = divide(total, speeds, capacity_left)
    level = max((Fraction(n, s) for n, s in zip(shards, speeds, strict=True)), default=Fraction(0))
    limits = [min(r, int(level * s)) for r, s in zip(capacity_left, speeds, strict=True)]

    moves: list[Move] = []
    spare: dict[int, Spans] = {rank: held[rank] for rank in sorted(held)}
    free: dict[int, int] = {}
    for rank, limit in zip(targets, limits, strict=True):
        fitting, spare[rank] = cut(held.get(rank, ()), limit)
        free[rank] = limit - size(fitting)
        moves += _moves("keep", rank, rank, fitting)

    loads = [(host or {}).get(rank, 1) for rank in targets]
    for rank, count in zip(targets, divide(size(gone), loads, list(free.values())), strict=True):
        taken, gone = cut(gone, count)
        free[rank] -= count
        moves += _moves("reload", rank, -1, taken)
    moves += _copies(spare, free, domains or {})
    return _plan(total, moves)


def _copies(
    spare: dict[int, Spans], free: dict[int, int], domains: Mapping[int, int]
) -> list[Move]:
    """Copies that bring everything in `spare` to ranks with `free` room, near ones first."""
    moves: list[Move] = []
    for near in (True, False):
        for source in sorted(spare):
            for target in sorted(free):
                if near and domains.get(source, 0) != domains.get(target, 0):
                    continue
                taken, spare[source] = cut(spare[source], free[target])
                free[target] -= size(taken)
                moves += _moves("peer", target, source, taken)
    return moves


def divide(count: int, speeds: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Shares of `count` within `caps`, the largest share / speed as small as can be.

    Raises BadLayout when the caps do not reach, or a speed is not positive."""
    if sum(caps) < count:
        raise BadLayout(f"{count} units, room for {sum(caps)}")
    if any(speed < 1 for speed in speeds):
        raise BadLayout("a rank's speed is a positive whole number")
    shares = [0] * len(caps)
    open_ = list(range(len(caps)))
    while open_:
        together = sum(speeds[i] for i in open_)
        full = [i for i in open_ if caps[i] * together <= count * speeds[i]]
        if not full:
            break
        for i in full:
            shares[i] = caps[i]
            count -= caps[i]
        open_ = [i for i in open_ if i not in full]
    together = sum(speeds[i] for i in open_)
    for i in open_:
        shares[i] = count * speeds[i] // together
    for _ in range(count - sum(shares[i] for i in open_)):
        not_full = (i for i in open_ if shares[i] < caps[i])
        shares[min(not_full, key=lambda i: (Fraction(shares[i] + 1, speeds[i]), i))] += 1
    return shares


def _plan(total: int, moves: list[Move]) -> Plan:
    return Plan(total, tuple(sorted(moves, key=lambda move: (move.target, move.start))))


def _moves(kind: str, target: int, source: int, spans: Spans) -> list[Move]:
    return [
        Move(kind=kind, target=target, source=source, start=start, end=end) for start, end in spans
    ]
