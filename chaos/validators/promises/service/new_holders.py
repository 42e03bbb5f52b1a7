"""I26, holders: a running request gets a new holder within `BOUND_MS` after its holder died.

Where the log says that a state daemon is lost, each request whose checkpoint is placed there, and
that still runs then, gets another choice of holders. The choice may find no room: it is recorded all
the same, with its reason.

Exceptions: within the bound the request ended, its engine finished it, it lost its attempt or changed
its replica, or the same host had a new state daemon; its replica was struck by a fault, or the log was
away, or a fault delayed what the host of the holder wrote; no state daemon was left; the log had lost its
worker, and nothing says what its engine still runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from relume.chaos.validators.records import Entry, Log, events_of
from relume.chaos.validators.strikes import FELT_MS, THE_LOG, Strike, is_struck
from relume.events import vocabulary as v

BOUND_MS = 500
"""The replica decides when it folds the loss; the rest is its way into the log and back."""


_DELAYS = frozenset(("link-slow", "cut", "cut-one-way", "cut-from-half", "agent-stop", "cpu-limit"))
"""Faults of its host by which the news of a lost state daemon come later."""


class _Placed(Struct, kw_only=True):
    """A request that runs, on `worker`. `due_ms`: by when it needs another choice (0: it does not); `lost`: the
    holder that it lost."""

    stream: str
    worker: str
    attempt: int
    holders: tuple[str, ...]
    due_ms: int = 0
    lost: str = ""


def missing_holders(
    log: Log, strikes: Sequence[Strike], late_ms: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Requests that had no new choice in time, and which holder they had lost. Records of a stream
    in `late_ms` come so much later."""
    running: dict[str, _Placed] = {}
    finished: set[tuple[str, int]] = set()
    up: set[str] = set()
    now_ms = 0  # by the clocks of replicas: an agent's records may land late
    for at in events_of(log):
        event, kind = at.event, type(at.event)
        if not at.stream.startswith("w."):
            now_ms = max(now_ms, at.at_ms)
        if kind is v.HolderChosen or kind in _LEAVES:
            placed = running.pop(event.request, None)
            if placed is not None and _is_missing(placed, at, strikes, late_ms):
                yield event.request, _missing(placed, at.at_ms)
            if kind is v.HolderChosen and (event.request, event.attempt) not in finished:
                running[event.request] = _Placed(
                    stream=at.stream,
                    worker=event.primary,
                    attempt=event.attempt,
                    holders=event.holders,
                )
        elif kind is v.EngineStep:
            for request, placed in _finished(running, finished, event):
                if _is_missing(placed, at, strikes, late_ms):
                    yield request, _missing(placed, at.at_ms)
        elif kind in (v.ReplicaStarted, v.WorkerLost):
            running = {name: one for name, one in running.items() if not _is_unknown(one, at)}
        elif kind is v.StateDaemonStarted:
            up.add(event.worker)
            _regain(running, event.worker, max(at.at_ms, now_ms))
        elif kind is v.StateDaemonLost:
            up.discard(event.worker)
            _lose(running, event.worker, max(at.at_ms, now_ms), is_last=not up)


_LEAVES = (v.RequestEnded, v.TransportObserved, v.ClientReturned)
"""Events after which the attempt does not run at this replica."""


def _is_unknown(placed: _Placed, at: Entry) -> bool:
    """Whether nothing says from here on what runs there: another boot of its replica began, or the log
    lost its worker."""
    if type(at.event) is v.WorkerLost:
        return placed.worker == at.event.worker
    return placed.stream == at.stream


def _missing(placed: _Placed, at_ms: int) -> str:
    took = f"no other for {at_ms - placed.due_ms + BOUND_MS} ms"
    return f"its holder {placed.lost} was lost, and it had {took}"


def _finished(
    running: dict[str, _Placed], finished: set[tuple[str, int]], step: v.EngineStep
) -> Iterator[tuple[str, _Placed]]:
    """What an engine has finished has no blocks any more, though its client may be absent."""
    for change in step.changes:
        if type(change) is v.EngineFinished:
            finished.add((change.request, change.attempt))
            placed = running.get(change.request)
            if placed is not None and placed.attempt == change.attempt:
                yield change.request, running.pop(change.request)


def _lose(running: dict[str, _Placed], holder: str, at_ms: int, is_last: bool) -> None:
    """A holder is lost; after the last one nothing can be placed."""
    for placed in running.values():
        if is_last:
            placed.due_ms = 0
        elif holder in placed.holders and not placed.due_ms:
            placed.due_ms, placed.lost = at_ms + BOUND_MS, holder


def _regain(running: dict[str, _Placed], holder: str, at_ms: int) -> None:
    """A new state daemon of the holder is there in time: it is offered the blocks, and no other is
    chosen."""
    for placed in running.values():
        if placed.lost == holder and at_ms <= placed.due_ms:
            placed.due_ms, placed.lost = 0, ""


def _is_missing(
    placed: _Placed, at: Entry, strikes: Sequence[Strike], late_ms: Mapping[str, int]
) -> bool:
    """Whether the choice was due before `at`, and no fault struck the replica, the log, or the worker
    whose reports say so."""
    if not 0 < placed.due_ms < at.at_ms - late_ms.get(placed.stream, 0):
        return False
    since_ms = placed.due_ms - BOUND_MS - FELT_MS
    delays = [strike for strike in strikes if strike.what in _DELAYS]
    if is_struck(delays, (placed.lost,), since_ms, at.at_ms):
        return False
    targets = (placed.stream[2:], at.stream[2:], THE_LOG)
    return not is_struck(strikes, targets, since_ms, at.at_ms)
