"""I12: after drain, no blocks, leases or streams are left.

Asked of the end of a log whose traffic has ended. With `stopped`, everything was also
shut down: then no stream has an owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaos.validators.records import ClientRecord, Violation, log_of
from events.log import RevisionGroup
from policies.state import Holder, Worker

PROMISE = "I12"


def check(
    groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord], stopped: bool = False
) -> list[Violation]:
    """What is left over in the fold of the whole log."""
    fleet = log_of(groups).end
    out = [Violation(PROMISE, name, "is still live") for name in fleet.requests]
    for worker in fleet.workers.values():
        out += [Violation(PROMISE, worker.name, text) for text in _left(worker)]
    for holder in fleet.holders.values():
        out += [Violation(PROMISE, holder.name, text) for text in _checkpoints(holder)]
    out += [Violation(PROMISE, name, "still has a checkpoint holder") for name in fleet.placed]
    for name in fleet.open_commands:
        out.append(Violation(PROMISE, name, "is a command nobody carried out"))
    if stopped:
        out += [Violation(PROMISE, stream, "still has an owner") for stream in fleet.owners]
    return out


def _left(worker: Worker) -> list[str]:
    texts = []
    if worker.attempts:
        texts.append(f"still holds {', '.join(sorted(worker.attempts))}")
    if worker.prefill_left:
        texts.append(f"is owed {worker.prefill_left} prompt tokens")
    if worker.engine == "ready" and worker.waiting:
        texts.append(f"has {worker.waiting} requests waiting")
    if worker.engine == "ready" and worker.kv_used:
        texts.append(f"holds {worker.kv_used} KV blocks")
    return texts


def _checkpoints(holder: Holder) -> list[str]:
    texts = []
    if holder.covered:
        texts.append(f"still holds checkpoints of {', '.join(sorted(holder.covered))}")
    if holder.held_bytes:
        texts.append(f"is still charged {holder.held_bytes} checkpoint bytes")
    return texts
