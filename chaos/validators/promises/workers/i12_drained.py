"""I12: after drain, no blocks, leases or streams are left.

It checks the end of a log whose traffic has ended. With `stopped`, everything was also shut down:
then no stream has an owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relume.chaos.validators.records import ClientRecord, Violation, log_of
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state.fleet import Fleet, Holder, Worker

PROMISE = "I12"


def check(
    groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord], stopped: bool = False
) -> list[Violation]:
    """Remains in the fold of the whole log."""
    fleet = log_of(groups).end
    out = [Violation(PROMISE, about, text) for about, text in left_over(fleet)]
    if stopped:
        out += [Violation(PROMISE, stream, "still has an owner") for stream in fleet.owners]
    return out


def left_over(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """Remains in a fold, by worker or request."""
    for name in fleet.requests:
        yield name, "is still live"
    for worker in fleet.workers.values():
        for text in _left(worker):
            yield worker.name, text
    for holder in fleet.holders.values():
        for text in _checkpoints(holder):
            yield holder.name, text
    for name in fleet.placed:
        yield name, "still has a checkpoint holder"
    for name in fleet.open_commands:
        yield name, "is a command that was never carried out"


def _left(worker: Worker) -> Iterator[str]:
    if worker.attempts:
        yield f"still holds {', '.join(sorted(worker.attempts))}"
    if worker.prefill_left:
        yield f"is owed {worker.prefill_left} prompt tokens"
    if worker.engine == EnginePhase.READY and worker.waiting:
        yield f"has {worker.waiting} requests waiting"
    if worker.engine == EnginePhase.READY and worker.kv_used:
        yield f"holds {worker.kv_used} KV blocks"


def _checkpoints(holder: Holder) -> Iterator[str]:
    if holder.covered:
        yield f"still holds checkpoints of {', '.join(sorted(holder.covered))}"
    if holder.held_bytes:
        yield f"is still charged {holder.held_bytes} checkpoint bytes"
