"""What the fold makes of records about a worker and its engine, by their tables (`worker_life`,
`engine_life`). Engine steps have a module of their own (`relume.policies.state.engine_step`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EngineKind
from relume.policies.state import account, coverage, operator_commands, prefix_cache, step_times
from relume.policies.state.fleet import LOADING, Fleet, Leaving, LoadedWeights, Worker
from relume.policies.state.lifecycles.engine_life import LIFE as ENGINE_LIFE
from relume.policies.state.lifecycles.engine_life import NOT_NAMED, Age, Step, age_of, taken_in
from relume.policies.state.lifecycles.worker_life import declared_away, worker_of

TICK_MS = 1000
"""Nominal time between two ticks."""


def advance(fleet: Fleet, worker: Worker, kind: type, age: Age = NOT_NAMED) -> Step | None:
    """Take the worker's engine through the table. None: the record is to be ignored."""
    step = ENGINE_LIFE[kind, age][worker.engine]
    if step is not None:
        worker.engine = step.state
        if step.clears:
            account.clear(worker)
            prefix_cache.cleared(fleet, worker)
    return step


def _on_registered(fleet: Fleet, stream: str, epoch: int, event: v.WorkerRegistered) -> None:
    worker = worker_of(fleet, stream)
    worker.epoch = epoch
    worker.domain = event.domain
    worker.agent_pid = event.agent_pid
    worker.agent_url = event.agent_url
    worker.notices = event.notices
    worker.present = True
    worker.leaving = UNSET
    operator_commands.agent_started(fleet, worker.name)
    if (step := advance(fleet, worker, v.WorkerRegistered)) is not None and step.clears:
        worker.engine_pid = 0
        worker.died_of = "agent replaced"


def _on_leaving(fleet: Fleet, stream: str, epoch: int, event: v.WorkerLeaving) -> None:
    """For half of the time its requests may wait for a cheap move, as within an operator's
    deadline."""
    if (worker := fleet.workers.get(stream[2:])) is not None:
        ticks = max(event.within_ms // (2 * TICK_MS), 1)
        worker.leaving = Leaving(since_tick=fleet.tick, deadline_tick=fleet.tick + ticks)


def _on_deregistered(fleet: Fleet, stream: str, epoch: int, event: v.WorkerDeregistered) -> None:
    worker = worker_of(fleet, stream)
    worker.present = False
    worker.leaving = UNSET
    advance(fleet, worker, v.WorkerDeregistered)
    worker.engine_pid = 0
    worker.died_of = event.reason


def _on_lost(fleet: Fleet, stream: str, epoch: int, event: v.WorkerLost) -> None:
    worker = declared_away(fleet, event)
    if worker is None:
        return
    worker.died_of = event.reason
    advance(fleet, worker, v.WorkerLost)
    coverage.lose(fleet, event.worker)


def _on_started(fleet: Fleet, stream: str, epoch: int, event: v.EngineStarted) -> None:
    worker = worker_of(fleet, stream)
    if advance(fleet, worker, v.EngineStarted, age_of(worker, event.incarnation)) is None:
        return
    worker.incarnation = event.incarnation
    worker.engine_pid = event.pid
    worker.step = worker.step_us_high = 0
    worker.pace = worker.decode_steps = UNSET
    worker.batch_limit = worker.restored = worker.loaded = UNSET
    worker.cached.block_tokens = 0


def _on_ready(fleet: Fleet, stream: str, epoch: int, event: v.EngineReady) -> None:
    worker = worker_of(fleet, stream)
    if advance(fleet, worker, v.EngineReady, age_of(worker, event.incarnation)) is None:
        return
    worker.host = event.host
    worker.port = event.port
    worker.model = event.model
    worker.build = event.build
    worker.exact = event.exact
    worker.plain = event.kind == EngineKind.PLAIN
    worker.max_model_len = event.max_model_len
    worker.block_size = event.block_size
    worker.kv_blocks = event.kv_blocks
    worker.step_tokens = event.step_tokens
    worker.max_seqs = event.max_seqs or UNSET
    step_times.ready(fleet, worker, event.hardware)
    coverage.ready(fleet, worker, event)
    worker.restart_delay_ms = 0


def _on_died(fleet: Fleet, stream: str, epoch: int, event: v.EngineDied) -> None:
    worker = worker_of(fleet, stream)
    if advance(fleet, worker, v.EngineDied, age_of(worker, event.incarnation)) is None:
        return
    worker.incarnation = event.incarnation
    worker.engine_pid = 0
    worker.deaths += 1
    worker.died_of = event.reason


def _on_restart_scheduled(
    fleet: Fleet, stream: str, epoch: int, event: v.EngineRestartScheduled
) -> None:
    worker_of(fleet, stream).restart_delay_ms = event.delay_ms


_REPORTS_STREAMS = taken_in(v.StreamsReported)


def _on_streams_reported(fleet: Fleet, stream: str, epoch: int, event: v.StreamsReported) -> None:
    worker = fleet.workers.get(stream[2:])
    if worker is not None and event.incarnation == worker.incarnation:
        if worker.engine in _REPORTS_STREAMS:
            worker.streams = dict(event.figures)


def _on_weights_loaded(fleet: Fleet, stream: str, epoch: int, event: v.WeightsLoaded) -> None:
    worker = fleet.workers.get(stream[2:])
    if worker is not None and event.incarnation == worker.incarnation:
        worker.loaded = LoadedWeights(event.bytes, event.read_bytes, event.took_ms)


def _on_weights_loading(fleet: Fleet, stream: str, epoch: int, event: v.WeightsLoading) -> None:
    """One that was written when every replica could read it may be late."""
    worker = fleet.workers.get(stream[2:])
    if worker is None or event.incarnation != worker.incarnation:
        return
    if isinstance(worker.loaded, UnsetType) or worker.loaded.took_ms == LOADING:
        worker.loaded = LoadedWeights(event.bytes, event.read_bytes, LOADING)


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.WorkerRegistered: _on_registered,
    v.WorkerLeaving: _on_leaving,
    v.WorkerDeregistered: _on_deregistered,
    v.WorkerLost: _on_lost,
    v.EngineStarted: _on_started,
    v.EngineReady: _on_ready,
    v.EngineDied: _on_died,
    v.EngineRestartScheduled: _on_restart_scheduled,
    v.StreamsReported: _on_streams_reported,
    v.WeightsLoaded: _on_weights_loaded,
    v.WeightsLoading: _on_weights_loading,
}
