"""Rules for links of the simulated network: which processes cannot reach each other, and how slow
and unreliable a link is.

A process named `w0.engine` is on host `w0`. A rule names its ends (a process, a host, or "" for
all) and a kind of link.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

DELAY_S = 0.0001
"""Minimum delay one way; the maximum is twice as long."""


class Rule(Struct, eq=False, kw_only=True):
    """A rule for a link while it is in force. Shares are between 0 and 1."""

    one: str
    other: str
    kind: str
    both: bool
    cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    frame_lost: float = 0.0
    frame_repeated: float = 0.0


class Way(Struct, kw_only=True):
    """One direction between two processes, with all rules combined."""

    cut: bool = False
    delay_s: float = DELAY_S
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    frame_lost: float = 0.0
    frame_repeated: float = 0.0


def host_of(name: str) -> str:
    """The host of a process, by its name; a host is its own."""
    return name.partition(".")[0]


def way_by(rules: Iterable[Rule], sender: str, receiver: str, kind: str) -> Way:
    """The direction from one process to another under all rules that apply."""
    way = Way()
    for rule in rules:
        if _applies(rule, sender, receiver, kind):
            way.cut = way.cut or rule.cut
            way.delay_s += rule.delay_s
            way.loss = max(way.loss, rule.loss)
            way.duplicate = max(way.duplicate, rule.duplicate)
            way.reorder = max(way.reorder, rule.reorder)
            way.frame_lost = max(way.frame_lost, rule.frame_lost)
            way.frame_repeated = max(way.frame_repeated, rule.frame_repeated)
    return way


def _applies(rule: Rule, sender: str, receiver: str, kind: str) -> bool:
    if rule.kind and rule.kind != kind:
        return False
    if _is(sender, rule.one) and _is(receiver, rule.other):
        return True
    return rule.both and _is(receiver, rule.one) and _is(sender, rule.other)


def _is(process: str, end: str) -> bool:
    return not end or end == process or end == host_of(process)
