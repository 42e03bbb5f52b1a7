"""I17: no living owner is declared lost.

The leader declares a loss of one ownership of a stream (`WorkerLost`, `ReplicaLost`). There are two
checks. By the log, etcd has removed that owner's key before. By the faults of a simulated run, the
owner's process could not keep its lease: within `SLACK_MS` before the declaration it was dead,
stopped, short of CPU, or cut from etcd. All leases lapse in an outage of etcd, which is no reason: a
living owner takes its stream again, and the leader waits for that.

Exceptions: logs that begin after the owner came do not show its key. Live runs have the first check
only: on a busy machine a process may lose its lease without a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relume.chaos.validators.records import ClientRecord, Violation, events_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup

PROMISE = "I17"
SLACK_MS = 30_000
"""A lease lapses in seconds, and the leader waits for the log to be healthy."""


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    cut_off: Sequence[tuple[str, int, int]] | None = None,
) -> list[Violation]:
    """Declared losses of living owners. `cut_off`: streams whose owner could not keep its lease, and
    from when to when (wall ms); None: unknown."""
    return [
        Violation(PROMISE, stream, why, revision)
        for stream, epoch, revision, at_ms in _losses(groups)
        if (why := _owns(groups, stream, epoch, revision) or _lives(cut_off, stream, at_ms))
    ]


def _losses(groups: Sequence[RevisionGroup]) -> Iterator[tuple[str, int, int, int]]:
    """Stream, epoch, and where and when its owner was declared lost."""
    for at in events_of(groups, "fleet"):
        if type(at.event) is v.WorkerLost:
            yield f"w.{at.event.worker}", at.event.epoch, at.revision, at.at_ms
        elif type(at.event) is v.ReplicaLost:
            yield f"r.{at.event.replica}", at.event.epoch, at.revision, at.at_ms


def _owns(groups: Sequence[RevisionGroup], stream: str, epoch: int, revision: int) -> str:
    """Whether the key of this owner was there when it was declared lost."""
    owner = 0
    for group in groups:
        if group.revision >= revision:
            break
        for name, since in group.owners:
            if name == stream:
                owner = since
    return (
        f"was declared lost, and owns its stream since revision {epoch}" if owner == epoch else ""
    )


def _lives(cut_off: Sequence[tuple[str, int, int]] | None, stream: str, at_ms: int) -> str:
    if cut_off is None:
        return ""
    for name, since_ms, until_ms in cut_off:
        if name == stream and since_ms <= at_ms <= until_ms + SLACK_MS:
            return ""
    return "was declared lost, and its owner was alive and connected"
