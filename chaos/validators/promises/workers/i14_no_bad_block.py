"""I14: no bad block is consumed.

A failed restore could use the first `tokens` of the wanted ones; the engine must compute all after
them. So the first prefill chunk of that attempt begins no later than there, and the answers of
restored requests equal the undisturbed ones token for token. A restore without a recorded end,
although its request continued, is a violation too.

Tokens of a corrupt worker are checked in `i14_corrupt_tokens`, prefix caches in `i14_prefix_caches`, model
files in `i14_released_files`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relume.chaos.validators.corrupt_engines import CorruptSince
from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.promises.requests import i2_identical_stream
from relume.chaos.validators.promises.workers import (
    i14_corrupt_tokens,
    i14_prefix_caches,
    i14_released_files,
)
from relume.chaos.validators.records import ClientRecord, Violation, courses, events_of, of_clients
from relume.chaos.validators.strikes import Strike
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup

PROMISE = "I14"
Key = tuple[str, int, str, int]
"""Worker, incarnation, request, attempt."""


class _Restore:
    """One attempt's restore. `usable`: number of tokens up to the last one restored."""

    def __init__(self, revision: int, event: v.RestoreStarted) -> None:
        self.revision = revision
        self.first = event.first
        self.wanted = event.first + event.tokens
        self.usable = -1
        self.begun = -1
        self.died = False


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    shared: Mapping[str, int] | None = None,
    corrupt: Sequence[CorruptSince] = (),
    truth: GroundTruth | None = None,
    began_ms: int = 0,
    strikes: Sequence[Strike] = (),
) -> list[Violation]:
    """Uses of unusable blocks, tokens and files. `corrupt`: workers whose engines a fault made compute
    wrong results, and when (wall ms); `truth` and `began_ms`: see `corrupt_engines.unwritten`. `shared`:
    number of tokens that a client's prompt shares with others from its start; while it waited for its
    blocks, the engine may have computed those for another request. `strikes`: faults that struck."""
    restores, several = _restores(groups)
    alike: dict[str, int] = {}
    if shared:
        for client, course in of_clients(courses(groups), clients):
            if course is not None:
                alike[course.request] = shared.get(client.request, 0)
    out = []
    for (worker, _, request, attempt), restore in restores.items():
        if (worker, request, attempt) in several:
            continue  # steps do not distinguish choices of one request
        about = f"{request}/{attempt}"
        if restore.usable < 0:
            if restore.begun >= 0 and not restore.died:
                text = f"{worker} continued, and its restore never ended"
                out.append(Violation(PROMISE, about, text, restore.revision))
        elif restore.begun > max(restore.usable, alike.get(request, 0)):
            text = (
                f"{worker} computed from token {restore.begun} on, but only "
                f"{restore.usable} of {restore.wanted} were restored"
            )
            out.append(Violation(PROMISE, about, text, restore.revision))
    restored = {request for _, _, request, _ in restores}
    out += _answers(groups, clients, restored, corrupt)
    out += i14_prefix_caches.check(groups)
    out += i14_released_files.check(groups, strikes)
    return [*out, *i14_corrupt_tokens.check(groups, clients, corrupt, truth, began_ms)]


def _restores(
    groups: Sequence[RevisionGroup],
) -> tuple[dict[Key, _Restore], set[tuple[str, str, int]]]:
    found: dict[Key, _Restore] = {}
    of_life: dict[tuple[str, int], list[_Restore]] = {}
    several: set[tuple[str, str, int]] = set()
    lost: set[tuple[str, int]] = set()
    for at in events_of(groups, "w."):
        event, worker = at.event, at.stream[2:]
        kind = type(event)
        if kind is v.RestoreStarted:
            if event.child:
                several.add((worker, event.request, event.attempt))
            key = worker, event.incarnation, event.request, event.attempt
            found[key] = _Restore(at.revision, event)
            of_life.setdefault(key[:2], []).append(found[key])
        elif kind in (v.RestoreDone, v.RestoreFailed):
            if event.child:
                several.add((worker, event.request, event.attempt))
            key = worker, event.incarnation, event.request, event.attempt
            if restore := found.get(key):
                restore.usable = restore.first + event.tokens
        elif kind is v.EngineStep:
            if event.lost:
                lost.add((worker, event.incarnation))
            if (worker, event.incarnation) not in lost:
                _begin(found, worker, event)
        elif kind is v.EngineDied:
            for restore in of_life.pop((worker, event.incarnation), ()):
                restore.died = True
    return found, several


def _begin(found: Mapping[Key, _Restore], worker: str, step: v.EngineStep) -> None:
    """Record the first computed token of each restored request."""
    for change in step.changes:
        restore = found.get((worker, step.incarnation, change.request, change.attempt))
        if restore is None or type(change) is not v.PrefillChunkDone:
            continue
        if restore.begun < 0:
            restore.begun = change.computed - change.tokens


def _answers(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    restored: set[str],
    corrupt: Sequence[CorruptSince],
) -> list[Violation]:
    compared = [
        client
        for client, course in of_clients(courses(groups), clients)
        if client.undisturbed or (course is not None and course.request in restored)
    ]
    if all(client.undisturbed for client in compared):
        return []
    return [
        Violation(PROMISE, broken.about, f"was restored, and {broken.detail}", broken.revision)
        for broken in i2_identical_stream.check(groups, compared, corrupt)
    ]
