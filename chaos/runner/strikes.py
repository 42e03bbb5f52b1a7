"""What the faults of a run struck, and when, for its validators."""

from __future__ import annotations

from msgspec.structs import replace

from relume.chaos.outcome import FiredFault, Outcome
from relume.chaos.scenario.catalogue import FAULTS
from relume.chaos.validators.strikes import THE_LOG, WRONG_WEIGHTS, Strike

_STOPS_OF_MEMBERS = frozenset(
    ("etcd-stop", "etcd-kill", "etcd-cut", "etcd-defragment", "disk-slow", "disk-hangs")
)


def strikes_of(run: Outcome) -> tuple[Strike, ...]:
    """The faults of processes and links; not clients that hang up. A fault that kills a holder too
    is two."""
    struck = [fired for fired in run.fired if FAULTS[fired.what].target != "request"]
    holders = [replace(f, what="holder-kill", target=f.holder) for f in struck if f.holder]
    return tuple(_strike(run, fired) for fired in (*struck, *holders))


def _strike(run: Outcome, fired: FiredFault) -> Strike:
    kind, names = FAULTS[fired.what], frozenset(fired.target.split(","))
    if kind.target == "etcd":
        names = frozenset((THE_LOG,))
    elif kind.target == "domain":
        names = frozenset(name for name, domain in run.schedule.workers.items() if domain in names)
    lasts = kind.lasts == "must" or fired.what in WRONG_WEIGHTS
    since_ms, until_ms = span_ms(run, fired, lasts)
    return Strike(
        what=fired.what, targets=names, since_ms=since_ms, until_ms=until_ms,
        stops_log=stops_log(run, fired), incarnations=fired.incarnations,
    )  # fmt: skip


def stops_log(run: Outcome, fired: FiredFault) -> bool:
    """Whether the fault left etcd without a majority, or without space."""
    outvoted = 2 * len(fired.target.split(",")) > len(run.schedule.etcd)
    return fired.what == "etcd-quota" or (fired.what in _STOPS_OF_MEMBERS and outvoted)


def span_ms(run: Outcome, fired: FiredFault, lasts: bool = True) -> tuple[int, int]:
    """From when to when (wall ms) the fault was in force. One without an end was over at once, or, if
    it `lasts`, at the end of the run."""
    until_ns = fired.until_ns or (run.ended_ns if lasts else fired.at_ns)
    return run.began_ms + fired.at_ns // 1_000_000, run.began_ms + until_ns // 1_000_000
