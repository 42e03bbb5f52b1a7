"""A worker's account: what its engine holds, or is about to get, attempt by attempt.

Two streams report an attempt: the replica's (`RouteDecided`, `RequestEnded`) and the
worker's (`RequestQueued` ... `EngineFinished`), and the total order may show either
first. Whichever comes first opens the entry. The engine's word closes it; if the engine
finishes before the dispatch was folded, a tombstone (`finished_early`) makes the late
dispatch a no-op. A request that ends before its engine ever took it is closed by the
replica's word. Death of the incarnation clears everything. An engine that had to drop
records (`EngineStep.lost`), or whose agent could not read some (`ReportsDropped`), may have dropped a
finish: from there on the replica's report closes what was open. The clock ends (`expire`) entries
without a report for long: the log's ticks count, not the next record. So all orders converge, and
after a drain the account is exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.policies.state.fleet import Attempt, Worker

TOMBSTONES = 4096
"""Maximum number of early finishes stored per worker; the oldest are dropped first."""

TOMBSTONE_TICKS = 60
"""And for at most this time: the dispatch of a gateway that died before it wrote never comes."""


FLIGHT_TICKS = 30
"""Time after which an unconfirmed dispatch no longer counts for its engine."""

SILENT_TICKS = 120
"""Time without a report after which a confirmed attempt is dropped, if it is over for its replica
or its dispatcher is unknown."""

MOST_TOKENS = 1 << 24
"""No request has more."""

SANE = (1 << 40) - 1
"""No number of a step has bits beyond these, so none is negative or absurdly large."""


def key_of(request: str, attempt: int) -> str:
    """The key of an attempt in a worker's account."""
    return f"{request}/{attempt}"


def clear(worker: Worker) -> None:
    """The engine that held it all is gone."""
    worker.attempts.clear()
    worker.finished_early.clear()
    worker.prefill_left = worker.batch = worker.sum_context = 0
    worker.waiting = worker.kv_used = 0
    worker.decoding = worker.context = worker.step_revision = worker.prompts_revision = 0
    worker.report_us = worker.reported_us = 0
    worker.flights = worker.flight_left = worker.prefilling = worker.prefilling_tokens = 0
    worker.streams.clear()


def next_report(worker: Worker, revision: int, took: int, waited: int) -> None:
    """The first step of another revision, which took `took` microseconds, in `waited` of which it
    waited for a CPU: the time that the one before reported is known now."""
    delay_us, usual = worker.reported_us, worker.report_us
    pace = worker.pace
    if not isinstance(pace, UnsetType):
        steps = worker.step - pace.step
        if steps > 0 and pace.prompts == worker.prefill_tokens:
            steps = pace.records if pace.records >= 0 else steps
            pace.steps += steps
            pace.us += pace.first_us + delay_us - pace.wait_us
            pace.requests += steps * worker.batch
            pace.context += steps * worker.sum_context
        pace.step, pace.prompts, pace.first_us = worker.step, worker.prefill_tokens, took
        pace.wait_us = waited
        if pace.records >= 0:
            pace.records = 1
    worker.report_us = delay_us if delay_us > usual else usual - ((usual - delay_us + 3) >> 2)
    worker.report_revision = revision
    worker.reported_us = 0


def dispatch(worker: Worker, key: str, event: v.RouteDecided, tick: int) -> bool:
    """A replica sends the attempt. False when the engine is done with it already."""
    if worker.finished_early.pop(key, None) is not None:
        return False
    attempt = worker.attempts.get(key)
    if attempt is None:
        left = _tokens(event.prompt_tokens + event.delivered - event.cached_tokens)
        attempt = worker.attempts[key] = Attempt(
            request=event.request, attempt=event.attempt, left=left, tick=tick
        )
        worker.prefill_left += left
        worker.flights += 1
        worker.flight_left += left
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
            if attempt.queued:
                _unconfirm(worker, attempt)
        else:
            _remove(worker, key)


def expire(worker: Worker, tick: int) -> bool:
    """Drop entries without a report for too long, and old early finishes; returns whether there
    were such entries. Engines that do not report `step_tokens` are of logs in which entries
    stayed."""
    _forget_finished(worker, tick)
    if not worker.step_tokens:
        return False
    late = [
        key
        for key, a in worker.attempts.items()
        if tick - a.tick > (SILENT_TICKS if a.queued else FLIGHT_TICKS)
        and not (a.queued and ((a.dispatched and not a.ended) or not a.attempt))
    ]
    for key in late:
        _remove(worker, key)
    return bool(late)


def _tokens(count: int) -> int:
    return count if 0 <= count <= MOST_TOKENS else min(max(count, 0), MOST_TOKENS)


def _unconfirm(worker: Worker, attempt: Attempt) -> None:
    if not attempt.decoding:
        worker.prefilling -= 1
        worker.prefilling_tokens -= attempt.tokens
    worker.flights += 1
    worker.flight_left += attempt.left
    attempt.queued = attempt.decoding = False


def _remove(worker: Worker, key: str) -> Attempt:
    attempt = worker.attempts.pop(key)
    worker.prefill_left -= attempt.left
    if not attempt.queued:
        worker.flights -= 1
        worker.flight_left -= attempt.left
    elif not attempt.decoding:
        worker.prefilling -= 1
        worker.prefilling_tokens -= attempt.tokens
    return attempt


def _on_queued(worker: Worker, key: str, change: v.RequestQueued) -> None:
    attempt = worker.attempts.get(key)
    tokens = _tokens(change.prompt_tokens)
    if attempt is None:
        attempt = worker.attempts[key] = Attempt(
            request=change.request, attempt=change.attempt, left=0
        )
    elif attempt.queued:
        return
    else:
        worker.flights -= 1
        worker.flight_left -= attempt.left
    attempt.queued = True
    attempt.tokens = tokens
    attempt.tick = worker.heard_tick
    worker.prefilling += 1
    worker.prefilling_tokens += tokens
    _set_left(worker, attempt, tokens)


def _on_admitted(worker: Worker, key: str, change: v.RequestAdmitted) -> None:
    attempt = worker.attempts.get(key)
    if attempt is None:
        return
    attempt.tick = worker.heard_tick
    _set_left(worker, attempt, attempt.left - _tokens(change.cached_tokens))
    if change.attempt > 1:  # what no cache and no checkpoint had of a request sent on
        worker.recomputed_tokens += attempt.left
    if attempt.left <= 1 and attempt.preempted:
        _decodes(worker, attempt)


def _on_chunk(worker: Worker, key: str, change: v.PrefillChunkDone) -> None:
    attempt = worker.attempts.get(key)
    if attempt is None:
        return
    attempt.tick = worker.heard_tick
    if worker.step_tokens and attempt.queued and attempt.tokens - change.computed >= attempt.left:
        return  # reported before
    _set_left(worker, attempt, attempt.left - _tokens(change.tokens))
    if attempt.preempted and not attempt.left:
        _decodes(worker, attempt)


def _on_first_token(worker: Worker, key: str, change: v.FirstToken) -> None:
    attempt = worker.attempts.get(key)
    if attempt is not None:
        attempt.tick = worker.heard_tick
        _decodes(worker, attempt)


def _decodes(worker: Worker, attempt: Attempt) -> None:
    _set_left(worker, attempt, 0)
    if attempt.queued and not attempt.decoding:
        worker.prefilling -= 1
        worker.prefilling_tokens -= attempt.tokens
        worker.decoding += 1
        worker.context += attempt.tokens
    attempt.decoding = True
    attempt.preempted = False


def _on_filled(worker: Worker, key: str, change: v.KvBlocksFilled) -> None:
    attempt = worker.attempts.get(key)
    if attempt is not None:
        attempt.tick = worker.heard_tick
        attempt.filled = change.blocks


def _on_preempted(worker: Worker, key: str, change: v.RequestPreempted) -> None:
    worker.preemptions += 1
    attempt = worker.attempts.get(key)
    if attempt is None or not attempt.queued or not change.tokens:
        return
    attempt.tick = worker.heard_tick
    if attempt.decoding:
        _stops_decoding(worker, change.tokens - 1)
        worker.prefilling += 1
    else:
        worker.prefilling_tokens -= attempt.tokens
    attempt.decoding = False
    attempt.preempted = True
    attempt.tokens = _tokens(change.tokens)
    attempt.generated = _tokens(change.generated) or UNSET
    worker.prefilling_tokens += attempt.tokens
    _set_left(worker, attempt, attempt.tokens)


def _stops_decoding(worker: Worker, context: int) -> None:
    worker.decoding = max(worker.decoding - 1, 0)
    worker.context = max(worker.context - context, 0) if worker.decoding else 0


def _on_finished(worker: Worker, key: str, change: v.EngineFinished) -> None:
    if key in worker.attempts:
        attempt = _remove(worker, key)
        if attempt.decoding:
            # its last token was never fed back; its `tokens` may have some of its output already
            known = 0 if isinstance(attempt.generated, UnsetType) else attempt.generated
            _stops_decoding(worker, attempt.tokens - known + _tokens(change.output_tokens) - 1)
        if attempt.dispatched:
            return
    if change.attempt == 0 or "#" in change.request:
        return  # stock traffic, or a further choice of a request: no dispatch names it
    worker.finished_early[key] = -1
    if len(worker.finished_early) > TOMBSTONES:
        del worker.finished_early[next(iter(worker.finished_early))]


def _forget_finished(worker: Worker, tick: int) -> None:
    """Stamp new tombstones with the tick, drop those older than TOMBSTONE_TICKS."""
    early = worker.finished_early
    for key in [k for k, since in early.items() if tick - since > TOMBSTONE_TICKS and since >= 0]:
        del early[key]
    for key, since in early.items():
        if since < 0:
            early[key] = tick


def _set_left(worker: Worker, attempt: Attempt, left: int) -> None:
    left = left if left > 0 else 0
    worker.prefill_left += left - attempt.left
    if not attempt.queued:
        worker.flight_left += left - attempt.left
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
