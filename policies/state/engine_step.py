"""What the fold makes of an engine's step: statistics of load, step times, and each request's
progress. Most records of a log are of this kind, so this is where the fold's time goes.

A record has one of two meanings. With a duration, it is a step that ended: its numbers are the
engine's load, and its duration updates the cost of steps. Without one, it is what changed between
two steps (requests that came, or records that were merged), and its numbers are how the next step
begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.events import vocabulary as v
from relume.policies.state import account, prefix_cache, step_times
from relume.policies.state.account import CHANGES, SANE
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.lifecycles import unacknowledged
from relume.policies.state.lifecycles.engine_life import taken_in
from relume.policies.state.prefill_rate import learn as learn_prefill_rate
from relume.policies.state.prompt_tokens import queued as count_prompt
from relume.policies.state.step_times import PROMPT_EACH

_STEPS = taken_in(v.EngineStep)


def on_engine_step(fleet: Fleet, stream: str, epoch: int, event: v.EngineStep) -> None:
    """An engine reported a step, or changes between steps."""
    worker = fleet.workers.get(stream[2:])
    if worker is None or event.incarnation != worker.incarnation or worker.engine not in _STEPS:
        return
    duration, changes = event.duration_us, event.changes
    figures = duration | event.batch | event.sum_context | event.prefill_tokens
    if (figures | event.waiting | event.kv_used) & ~SANE:
        worker.absurd += 1
    elif duration > 0:
        _ended(fleet, worker, event, duration)
    else:
        _between(fleet, worker, event)
    if event.lost:
        worker.lost_records += event.lost
        account.doubt(worker)
        prefix_cache.settled_beyond(fleet, worker)
    if changes:
        _change(fleet, worker, changes)


def _ended(fleet: Fleet, worker: Worker, event: v.EngineStep, duration: int) -> None:
    """A step ended. The order matters: the update compares with the step before."""
    number, before, revision = event.step, worker.step, fleet.revision
    if number == before + 1:
        if worker.eager or not number % PROMPT_EACH:
            step_times.learn(fleet, worker, event)
        learn_prefill_rate(worker, event)
    worker.batch = batch = event.batch
    worker.sum_context = context = event.sum_context
    if number > before or not before:
        worker.decoding = batch
        worker.context = context
    if revision == worker.report_revision:
        worker.reported_us += duration
    else:
        account.next_report(worker, revision)
    worker.step = number
    high = worker.step_us_high
    high -= high >> 5
    worker.step_us_high = duration if duration > high else high
    worker.step_revision = revision
    worker.waiting = event.waiting
    worker.kv_used = event.kv_used


def _between(fleet: Fleet, worker: Worker, event: v.EngineStep) -> None:
    """Something changed between two steps. A step begins with the requests that it admits."""
    changes = event.changes
    if changes and (not worker.step_revision or type(changes[-1]) is v.RequestAdmitted):
        worker.step_revision = fleet.revision
    elif not worker.decoding and worker.prefilling == 0:
        worker.step_revision = fleet.revision
    worker.waiting = event.waiting
    worker.kv_used = event.kv_used


def _change(fleet: Fleet, worker: Worker, changes: tuple[v.AnyChange, ...]) -> None:
    """Requests advanced on the engine."""
    fleet.changes += len(changes)
    worker.heard_tick = fleet.tick
    none_before = not worker.prefilling
    handlers = _HANDLERS
    for change in changes:
        key = f"{change.request}/{change.attempt}"
        handler, also = handlers[type(change)]
        handler(worker, key, change)
        if also is not None:
            also(fleet, worker, key, change)
    if none_before and worker.prefilling:
        worker.prompts_revision = fleet.revision


def _also_queued(fleet: Fleet, worker: Worker, key: str, change: v.RequestQueued) -> None:
    count_prompt(fleet, change)
    unacknowledged.queued(fleet, change)


def _also_settled(
    fleet: Fleet, worker: Worker, key: str, change: v.FirstToken | v.EngineFinished
) -> None:
    """Its prompt's blocks are in the prefix cache, or never will be."""
    prefix_cache.settled(fleet, worker, key)


_ALSO: dict[type, Callable[[Fleet, Worker, str, Any], None]] = {
    v.RequestQueued: _also_queued,
    v.FirstToken: _also_settled,
    v.EngineFinished: _also_settled,
}
"""Changes that concern more than the worker's account."""
_HANDLERS = {kind: (handler, _ALSO.get(kind)) for kind, handler in CHANGES.items()}
