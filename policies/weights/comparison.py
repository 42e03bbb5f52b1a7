"""Are the model files of a quarantined worker those of its class? Compared before it is released.

Theory of operation. Canaries say whether an engine computes rightly what their prompts touch. An engine
that loaded damaged files may answer all of them rightly, and be wrong for clients. So its agent reads
every byte of the files again, and their digest is compared with that of the healthy workers of its class:
those of the same model whose files have the same names, sizes and beginnings.

- *The same* as most of them: canaries decide, as they did before digests.
- *Different*: it stays quarantined until an engine of it has the files of most, or an operator trusts it. That
  most may be one worker: nothing is held against the other one. The verdict outlasts the workers that it
  rests on, and a restart.
- *Unknown*: canaries decide, and the log says why there was nothing to compare. Files that are still being
  read are waited for, up to a bound. It counts from the first report about the worker's present engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from msgspec import UnsetType
from msgspec.structs import replace

from relume.events.vocabulary import WeightsCompared
from relume.events.vocabulary.enums import EnginePhase, HealthState, WeightsOutcome
from relume.policies.health.health_life import EXCLUDED
from relume.policies.health.health_state import WorkerHealth
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.weights.weights_state import WeightsRecord

VERSION = 13
"""The first version of `health` that compares them."""
MOST_NAMED = 3
"""Maximum number of files and of workers that a sentence names."""

Majority = tuple[str, tuple[str, ...]]
"""A digest, and the workers that have it; both empty: there is none."""


def record_of(worker: Worker) -> WeightsRecord | None:
    """What is known of the files of the worker's present incarnation."""
    record = worker.weights
    if isinstance(record, UnsetType) or record.incarnation != worker.incarnation:
        return None
    return record


def is_held(worker: Worker, health: WorkerHealth) -> bool:
    """Whether the comparison does not permit the worker's release: it has not been made, or its files
    differ."""
    found = verdict_of(worker, health)
    return found is None or found.outcome == WeightsOutcome.DIFFERENT


def verdict_of(worker: Worker, health: WorkerHealth) -> WeightsCompared | None:
    """The comparison of the files of the worker's present incarnation."""
    found = health.weights
    if isinstance(found, UnsetType) or found.incarnation != worker.incarnation:
        return None
    return found


def due(
    fleet: Fleet, worker: Worker, health: WorkerHealth, bound_ticks: int
) -> WeightsCompared | None:
    """The comparison as it is now; None: digests are waited for. Files that differed are different until
    they are known to be the same."""
    found, before = _compare(fleet, worker, bound_ticks), health.weights
    if found is None or isinstance(before, UnsetType):
        return found
    if found.outcome == WeightsOutcome.UNKNOWN and before.outcome == WeightsOutcome.DIFFERENT:
        return replace(
            before, incarnation=worker.incarnation, digest=found.digest, reason=found.reason
        )
    return found


def key_of(found: WeightsCompared | UnsetType) -> tuple[int, WeightsOutcome, str, str] | UnsetType:
    """What makes another decision of it."""
    if isinstance(found, UnsetType):
        return found
    return found.incarnation, found.outcome, found.digest, found.expected


def _compare(fleet: Fleet, worker: Worker, bound_ticks: int) -> WeightsCompared | None:
    own = record_of(worker)
    if own is None:
        return _unknown(worker, "its agent reports no digest of them")
    if own.error:
        return _unknown(worker, f"its agent cannot read them: {own.error}")
    is_late = fleet.tick - own.since >= bound_ticks
    if not (own.digest and own.reread):
        why = f"its agent did not read them{' again' * bool(own.digest)} within {bound_ticks} ticks"
        return _unknown(worker, why, own.digest) if is_late else None
    found = _majority(_peers(fleet, worker, own), is_late)
    if found is None:
        return None
    expected, witnesses = found
    if not expected:
        return _unknown(worker, "no majority of healthy workers has the same", own.digest)
    same = own.digest == expected
    return WeightsCompared(
        worker=worker.name,
        incarnation=worker.incarnation,
        outcome=WeightsOutcome.SAME if same else WeightsOutcome.DIFFERENT,
        digest=own.digest,
        expected=expected,
        witnesses=witnesses,
        files=() if same else _different(fleet, own.digest, expected),
    )


def _unknown(worker: Worker, reason: str, digest: str = "") -> WeightsCompared:
    return WeightsCompared(
        worker=worker.name,
        incarnation=worker.incarnation,
        outcome=WeightsOutcome.UNKNOWN,
        digest=digest,
        reason=reason,
    )


def _peers(fleet: Fleet, worker: Worker, own: WeightsRecord) -> Iterator[tuple[str, str]]:
    """Healthy workers of its class, each with the digest of its files; empty while they are read."""
    for other in fleet.workers.values():
        record = record_of(other)
        if other is worker or record is None or record.error:
            continue
        health = other.health
        is_healthy = isinstance(health, UnsetType) or health.state not in EXCLUDED
        if other.model == worker.model and record.weights == own.weights and is_healthy:
            if other.present and other.engine == EnginePhase.READY:
                yield other.name, record.digest


def _majority(peers: Iterator[tuple[str, str]], is_late: bool) -> Majority | None:
    """What most of them have, of those that are read if it `is_late`; None: those that are not may
    change it."""
    digests = dict(peers)
    read = {name: digest for name, digest in digests.items() if digest}
    counts = Counter(read.values())
    best, count = counts.most_common(1)[0] if counts else ("", 0)
    if len(read) < len(digests) and 2 * count <= len(digests) and not is_late:
        return None
    if 2 * count <= len(read):
        return "", ()
    return best, tuple(sorted(name for name, digest in read.items() if digest == best))


def files_of(fleet: Fleet, digest: str, aside: Worker | None = None) -> tuple[tuple[str, str], ...]:
    """(name, digest) of the large files that together have `digest`, as any worker but `aside` has them."""
    for worker in fleet.workers.values():
        record = worker.weights
        if worker is not aside and not isinstance(record, UnsetType):
            if record.digest == digest and record.files:
                return record.files
    return ()


def _different(fleet: Fleet, digest: str, expected: str) -> tuple[str, ...]:
    theirs = dict(files_of(fleet, expected))
    own = files_of(fleet, digest)
    return tuple(name for name, digest in own if theirs.get(name, digest) != digest)


def in_words(found: WeightsCompared) -> str:
    """The outcome, and what to do about it."""
    whose = f"those of {_names(found.witnesses)}"
    if found.outcome == WeightsOutcome.SAME:
        return f"its model files are {whose}"
    if found.outcome != WeightsOutcome.DIFFERENT:
        return f"its model files were not compared: {found.reason}"
    files = f" ({_names(found.files)})" if found.files else ""
    return (
        f"not released, its model files differ from {whose}{files}: replace them, for example by another "
        f"download, then `relume restart {found.worker}`; or end the quarantine with "
        f"`relume trust {found.worker}`"
    )


def state_in_words(fleet: Fleet, worker: Worker) -> str:
    """What the comparison means for a quarantined worker; empty: nothing so far."""
    health = worker.health
    if isinstance(health, UnsetType) or health.state != HealthState.QUARANTINED:
        return ""
    if (found := verdict_of(worker, health)) is not None:
        return in_words(found)
    own = record_of(worker)
    if own is None or own.error:
        return ""
    if not (own.digest and own.reread):
        return "its model files are being read"
    unread = [name for name, digest in _peers(fleet, worker, own) if not digest]
    return f"the model files of {_names(unread)} are being read" if unread else ""


def _names(names: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
