"""What the fold makes of an engine's step: statistics of load, step times, and each request's
progress. Most records of a log are of this kind, so this is where the fold's time goes.

A record has one of two meanings. With a duration, it is a step that ended: its numbers are the
engine's load, and the time that it took updates the cost of steps. That is its duration and the gap
before it: requests wait for both, and a report comes that much later. Without a duration, it is what changed between
two steps (requests that came, or records that were merged), and its numbers are how the next step
begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UnsetType

from relume.events import vocabulary as v
from relume.policies.health.health_state import DecodeSteps
from relume.policies.state import account, prefix_cache, step_times
from relume.policies.state.account import CHANGES, SANE
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.lifecycles import unacknowledged
from relume.policies.state.lifecycles.engine_life import taken_in
from relume.policies.state.prefill_rate import learn as learn_prefill_rate
from relume.policies.state.prompt_tokens import queued as count_prompt
from relume.policies.state.step_times import PROMPT_EACH

_STEPS = taken_in(v.EngineStep)
_ABSURD = ~SANE


def on_engine_step(fleet: Fleet, stream: str, epoch: int, event: v.EngineStep) -> None:
    """An engine reported a step, or changes between steps."""
    worker = fleet.workers.get(stream[2:])
    if worker is None or event.incarnation != worker.incarnation or worker.engine not in _STEPS:
        return
    duration, gap, waited, changes = event.duration_us, event.gap_us, event.wait_us, event.changes
    waiting, used = event.waiting, event.kv_used
    figures = duration | gap | waited | event.batch | event.sum_context | event.prefill_tokens
    if (figures | waiting | used) & _ABSURD:
        worker.absurd += 1
    else:
        if duration > 0:
            _ended(fleet, worker, event, duration, gap)
        else:
            _between(fleet, worker, changes)
        worker.waiting = waiting
        worker.kv_used = used
    if event.lost:
        _lost(fleet, worker, event.lost)
    if changes:
        _change(fleet, worker, changes)


def on_reports_dropped(fleet: Fleet, stream: str, epoch: int, event: v.ReportsDropped) -> None:
    """An agent could not read what its engine reported. The engine may be idle since: its load is
    known again with its next step."""
    worker = fleet.workers.get(stream[2:])
    if worker is not None and event.incarnation == worker.incarnation and worker.engine in _STEPS:
        _lost(fleet, worker, event.count)
        worker.batch = worker.sum_context = worker.decoding = worker.context = 0
        worker.waiting = worker.kv_used = 0


def _lost(fleet: Fleet, worker: Worker, count: int) -> None:
    worker.lost_records += count
    account.doubt(worker)
    prefix_cache.settled_beyond(fleet, worker)


def _ended(fleet: Fleet, worker: Worker, event: v.EngineStep, duration: int, gap: int) -> None:
    """A step ended. The order matters: the update compares with the step before."""
    number, before, revision = event.step, worker.step, fleet.revision
    took = duration + gap
    if revision == worker.report_revision:
        worker.reported_us += took
        if not isinstance(pace := worker.pace, UnsetType):
            pace.wait_us += min(event.wait_us, took)
            if pace.records >= 0:
                pace.records += 1
    else:  # of the report before, with what the worker was by then
        account.next_report(worker, revision, took, min(event.wait_us, took))
    if number == before + 1:
        if worker.eager or gap > duration or not number % PROMPT_EACH:
            step_times.learn(fleet, worker, event)
        learn_prefill_rate(worker, event.prefill_tokens, took)
    worker.batch = batch = event.batch
    worker.sum_context = context = event.sum_context
    if not isinstance(decoded := worker.decode_steps, UnsetType):
        if batch and not event.prefill_tokens:
            _decoded(decoded, took - event.wait_us, batch, context)
    if number > before or not before:
        worker.decoding = batch
        worker.context = context
    worker.step = number
    high = worker.step_us_high
    high -= high >> 5
    worker.step_us_high = took if took > high else high
    worker.step_revision = revision


def _decoded(decoded: DecodeSteps, us: int, batch: int, context: int) -> None:
    """A step that computed no prompts took so long, without waits for a CPU."""
    decoded.steps += 1
    decoded.requests += batch
    decoded.context += context
    if us > 0:
        decoded.us += us
        if us > decoded.longest_us:
            decoded.longest_us = us


def _between(fleet: Fleet, worker: Worker, changes: tuple[v.AnyChange, ...]) -> None:
    """Something changed between two steps. A step begins with the requests that it admits."""
    if changes and (not worker.step_revision or type(changes[-1]) is v.RequestAdmitted):
        worker.step_revision = fleet.revision
    elif not worker.decoding and worker.prefilling == 0:
        worker.step_revision = fleet.revision


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
