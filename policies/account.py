"""A worker's account: what its engine holds, or is about to get, attempt by attempt.

Two streams tell of an attempt: the replica's (`RouteDecided`, `RequestEnded`) and the
worker's (`RequestQueued` ... `EngineFinished`), and the total order may show either
first. Whichever comes first opens the entry. The engine's word closes it; if the engine
finishes before the dispatch was folded, a tombstone (`finished_early`) makes the late
dispatch a no-op. A request that ends before its engine ever took it is closed by the
replica's word. Death of the incarnation clears everything. An engine that had to drop
records (`EngineStep.lost`) may have dropped a finish: from there on the replica's word
closes what was open. So all orders converge, and after a drain the account is exactly
zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from events import vocabulary as v
from policies.state import Attempt, Worker

TOMBSTONES = 4096
"""At most so many early finishes are remembered a worker; the oldest go first."""

TOMBSTONE_TICKS = 60
"""And no longer than this: the dispatch of a gateway that died unheard never comes."""


def key_of(request: str, attempt: int) -> str:
    """The key of an attempt in a worker's account."""
    return f"{request}/{attempt}"


def clear(worker: Worker) -> None:
    """The engine that held it all is gone."""
    worker.attempts.clear()
    worker.finished_early.clear()
    worker.prefill_left = worker.batch = worker.sum_context = 0
    worker.waiting = worker.kv_used = 0
    worker.streams.clear()


def dispatch(worker: Worker, key: str, event: v.RouteDecided) -> bool:
    """A replica sends the attempt. False when the engine is done with it already."""
    if worker.finished_early.pop(key, None) is not None:
        return False
    attempt = worker.attempts.get(key)
    if attempt is None:
        attempt = worker.attempts[key] = Attempt(event.request, event.attempt, 0)
        _set_left(worker, attempt, event.prompt_tokens + event.delivered)
    attempt.dispatched = True
    return True


def close(worker: Worker, key: str, ended: bool) -> None:
    """The replica is done with an attempt. What its engine holds, its engine closes."""
    attempt = worker.attempts.get(key)
    if attempt is None:
        return
    if attempt.queued:
        attempt.ended = attempt.ended or ended
    else:
        _remove(worker, key)


def doubt(worker: Worker) -> None:
    """Finishes may be among the dropped records: the replica's word counts from here on."""
    for key, attempt in list(worker.attempts.items()):
        if attempt.dispatched and not attempt.ended:
            attempt.queued = False
        else:
            _remove(worker, key)


def _remove(worker: Worker, key: str) -> None:
    worker.prefill_left -= worker.attempts.pop(key).left


def _on_queued(worker: Worker, key: str, change: v.RequestQueued) -> None:
    attempt = worker.attempts.get(key)
    if attempt is None:
        attempt = worker.attempts[key] = Attempt(change.request, change.attempt, 0)
    elif attempt.queued:
        return
    attempt.queued = True
    attempt.tokens = change.prompt_tokens
    _set_left(worker, attempt, change.prompt_tokens)


def _on_admitted(worker: Worker, key: str, change: v.RequestAdmitted) -> None:
    attempt = worker.attempts.get(key)
    if attempt is not None:
        _set_left(worker, attempt, attempt.left - change.cached_tokens)
        if change.attempt > 1:  # what no cache and no checkpoint had of a request sent on
            worker.recomputed_tokens += attempt.left


def _on_chunk(worker: Worker, key: str, change: v.PrefillChunkDone) -> None:
    attempt = worker.attempts.get(key)
    if attempt is not None:
        _set_left(worker, attempt, attempt.left - change.tokens)


def _on_first_token(worker: Worker, key: str, change: v.FirstToken) -> None:
    attempt = worker.attempts.get(key)
    if attempt is not None:
        attempt.decoding = True
        _set_left(worker, attempt, 0)


def _on_filled(worker: Worker, key: str, change: v.KvBlocksFilled) -> None:
    attempt = worker.attempts.get(key)
    if attempt is not None:
        attempt.filled = change.blocks


def _on_preempted(worker: Worker, key: str, change: v.RequestPreempted) -> None:
    worker.preemptions += 1


def _on_finished(worker: Worker, key: str, change: v.EngineFinished) -> None:
    attempt = worker.attempts.pop(key, None)
    if attempt is not None:
        worker.prefill_left -= attempt.left
        if attempt.dispatched:
            return
    if change.attempt == 0 or "#" in change.request:
        return  # stock traffic, or a further choice of a request: no dispatch names it
    worker.finished_early[key] = -1
    if len(worker.finished_early) > TOMBSTONES:
        del worker.finished_early[next(iter(worker.finished_early))]


def forget_finished(worker: Worker, tick: int) -> None:
    """Stamp new tombstones with the tick, drop those older than TOMBSTONE_TICKS."""
    early = worker.finished_early
    for key in [k for k, since in early.items() if tick - since > TOMBSTONE_TICKS and since >= 0]:
        del early[key]
    for key, since in early.items():
        if since < 0:
            early[key] = tick


def _set_left(worker: Worker, attempt: Attempt, left: int) -> None:
    left = max(left, 0)
    worker.prefill_left += left - attempt.left
    attempt.left = left


CHANGES: dict[type, Callable[[Worker, str, Any], None]] = {
    v.RequestQueued: _on_queued,
    v.RequestAdmitted: _on_admitted,
    v.PrefillChunkDone: _on_chunk,
    v.FirstToken: _on_first_token,
    v.KvBlocksFilled: _on_filled,
    v.RequestPreempted: _on_preempted,
    v.EngineFinished: _on_finished,
}
