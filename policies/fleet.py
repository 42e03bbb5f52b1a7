"""The fold: how each event changes the fleet.

Facts of an older incarnation are ignored; a step may never revive a dead engine.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from relume.events import codec
from relume.events import vocabulary as v
from relume.events.log import RevisionGroup
from relume.policies import (
    account,
    cached,
    counted,
    coverage,
    forgetting,
    orders,
    pace,
    receipts,
    returns,
    steptime,
    touched,
    unheard,
)
from relume.policies.account import CHANGES, SANE, key_of
from relume.policies.state import Fleet, Head, Receipts, Replica, Request, Worker
from relume.policies.steptime import PROMPT_EACH


def apply_group(
    fleet: Fleet, group: RevisionGroup, seen: Callable[[str, int, Any], None] | None = None
) -> None:
    """Fold one revision group. `seen(stream, position, event)` is called after each event.

    Raises UnknownEvent, MalformedRecord: a fold never skips a record.
    """
    fleet.revision = group.revision
    for stream, epoch in group.owners:
        _on_owner(fleet, stream, epoch)
    handlers, marks = _HANDLERS, touched.asked(fleet)
    for segment in group.segments:
        stream, epoch, position = segment.stream, segment.epoch, segment.first
        head = fleet.streams.get(stream)
        if head is not None and head.epoch != epoch:
            _on_new_epoch(fleet, stream, epoch)
        for event in codec.decode_all(segment.records):
            handler = handlers.get(type(event))
            if handler is not None:
                if marks is not None:
                    touched.note(fleet, marks, stream, event)
                handler(fleet, stream, epoch, event)
            if seen is not None:
                seen(stream, position, event)
                marks = touched.asked(fleet)  # it may have asked first
            position += 1
        fleet.streams[stream] = Head(epoch, segment.seq, segment.hash, position - 1)
    if group.segments:
        hashes = [segment.hash for segment in group.segments]
        ordered = b"".join((fleet.order, group.revision.to_bytes(8, "big"), *hashes))
        fleet.order = blake2b(ordered, digest_size=16).digest()


def fold(fleet: Fleet, stream: str, epoch: int, event: Any) -> None:
    """Fold one event of `stream`, written under `epoch`."""
    handler = _HANDLERS.get(type(event))
    if handler is not None:
        if (marks := touched.asked(fleet)) is not None:
            touched.note(fleet, marks, stream, event)
        handler(fleet, stream, epoch, event)


# --- owners --------------------------------------------------------------------------


def _on_owner(fleet: Fleet, stream: str, epoch: int) -> None:
    if epoch:
        fleet.owners[stream] = epoch
        fleet.gone.pop(stream, None)
    else:
        fleet.owners.pop(stream, None)
        fleet.gone[stream] = max(fleet.tick, 0)


def _on_new_epoch(fleet: Fleet, stream: str, epoch: int) -> None:
    """The stream was taken anew, though `StreamResumed` or a new start comes later in it:
    a loss declared of the old epoch does not concern the new. A leader that takes its own
    stream again was away from the log, and lands the ticks of that time first."""
    kind, _, name = stream.partition(".")
    if kind == "w" and name in fleet.workers:
        fleet.workers[name].epoch = epoch
    elif kind == "r" and name in fleet.replicas:
        fleet.replicas[name].epoch = epoch
    elif stream == "fleet":
        fleet.healthy_since_tick = fleet.tick


# --- workers -------------------------------------------------------------------------


def _worker(fleet: Fleet, stream: str) -> Worker:
    name = stream[2:]
    worker = fleet.workers.get(name)
    if worker is None:
        worker = fleet.workers[name] = Worker(name)
    return worker


def _clear(fleet: Fleet, worker: Worker) -> None:
    """The engine that held it all is gone."""
    account.clear(worker)
    cached.cleared(fleet, worker)


def _on_worker_registered(fleet: Fleet, stream: str, epoch: int, event: v.WorkerRegistered) -> None:
    worker = _worker(fleet, stream)
    worker.epoch = epoch
    worker.domain = event.domain
    worker.agent_pid = event.agent_pid
    worker.agent_url = event.agent_url
    worker.notices = event.notices
    worker.present = True
    orders.agent_started(fleet, worker.name)
    if worker.engine in ("starting", "ready"):
        worker.engine = "dead"
        worker.engine_pid = 0
        worker.died_of = "agent replaced"
        _clear(fleet, worker)


def _on_worker_deregistered(
    fleet: Fleet, stream: str, epoch: int, event: v.WorkerDeregistered
) -> None:
    worker = _worker(fleet, stream)
    worker.present = False
    worker.engine = "none"
    worker.engine_pid = 0
    worker.died_of = event.reason
    _clear(fleet, worker)


def _on_engine_started(fleet: Fleet, stream: str, epoch: int, event: v.EngineStarted) -> None:
    worker = _worker(fleet, stream)
    if event.incarnation <= worker.incarnation:
        return
    worker.incarnation = event.incarnation
    worker.engine = "starting"
    worker.engine_pid = event.pid
    worker.step = worker.step_us_high = 0
    _clear(fleet, worker)
    worker.cached.block_tokens = 0


def _on_engine_ready(fleet: Fleet, stream: str, epoch: int, event: v.EngineReady) -> None:
    worker = _worker(fleet, stream)
    if event.incarnation != worker.incarnation or worker.engine not in ("starting", "ready"):
        return
    worker.engine = "ready"
    worker.host = event.host
    worker.port = event.port
    worker.model = event.model
    worker.build = event.build
    worker.exact = event.exact
    worker.plain = event.kind == "plain"
    worker.max_model_len = event.max_model_len
    worker.block_size = event.block_size
    worker.kv_blocks = event.kv_blocks
    worker.step_tokens = event.step_tokens
    steptime.ready(fleet, worker, event.hardware)
    coverage.ready(fleet, worker, event)
    worker.restart_delay_ms = 0


def _on_engine_died(fleet: Fleet, stream: str, epoch: int, event: v.EngineDied) -> None:
    worker = _worker(fleet, stream)
    if event.incarnation < worker.incarnation:
        return
    if event.incarnation == worker.incarnation and worker.engine == "dead":
        return
    worker.incarnation = event.incarnation
    worker.engine = "dead"
    worker.engine_pid = 0
    worker.deaths += 1
    worker.died_of = event.reason
    _clear(fleet, worker)


def _on_restart_scheduled(
    fleet: Fleet, stream: str, epoch: int, event: v.EngineRestartScheduled
) -> None:
    _worker(fleet, stream).restart_delay_ms = event.delay_ms


def _on_stream_resumed(fleet: Fleet, stream: str, epoch: int, event: v.StreamResumed) -> None:
    kind, _, name = stream.partition(".")
    if kind == "w":
        worker = _worker(fleet, stream)
        worker.epoch = epoch
        worker.present = True
    elif kind == "r" and name in fleet.replicas:
        fleet.replicas[name].epoch = epoch
        fleet.replicas[name].alive = True


def _on_engine_step(fleet: Fleet, stream: str, epoch: int, event: v.EngineStep) -> None:
    worker = fleet.workers.get(stream[2:])
    if worker is None or event.incarnation != worker.incarnation:
        return
    if worker.engine not in ("ready", "starting"):
        return
    duration = event.duration_us
    changes = event.changes
    figures = duration | event.batch | event.sum_context | event.prefill_tokens
    if (figures | event.waiting | event.kv_used) & ~SANE:
        worker.absurd += 1
    elif duration > 0:
        number = event.step
        if number == worker.step + 1 and (worker.eager or not number % PROMPT_EACH):
            steptime.learn(fleet, worker, event)
        if number > worker.step or not worker.step:
            worker.decoding = event.batch
            worker.context = event.sum_context
        pace.learn(worker, event)
        if fleet.revision == worker.report_revision:
            worker.reported_us += duration
        else:
            account.next_report(worker, fleet.revision)
        worker.step = number
        faded = worker.step_us_high - (worker.step_us_high >> 5)
        worker.step_us_high = duration if duration > faded else faded
        worker.batch = event.batch
        worker.sum_context = event.sum_context
        worker.step_revision = fleet.revision
        worker.waiting = event.waiting
        worker.kv_used = event.kv_used
    else:
        if changes and (not worker.step_revision or type(changes[-1]) is v.RequestAdmitted):
            worker.step_revision = fleet.revision  # a step begins with whom it admits
        elif not worker.decoding and worker.prefilling == 0:
            worker.step_revision = fleet.revision
        worker.waiting = event.waiting
        worker.kv_used = event.kv_used
    if event.lost:
        worker.lost_records += event.lost
        account.doubt(worker)
        cached.settled_beyond(fleet, worker)
    if changes:
        fleet.changes += len(changes)
        worker.heard_tick = fleet.tick
        none_before = not worker.prefilling
        for change in changes:
            kind, key = type(change), key_of(change.request, change.attempt)
            handler = CHANGES.get(kind)
            if handler is not None:
                handler(worker, key, change)
            if kind is v.RequestQueued:
                counted.queued(fleet, change)
                unheard.queued(fleet, change)
            elif kind is v.FirstToken or kind is v.EngineFinished:
                cached.settled(fleet, worker, key)
        if none_before and worker.prefilling:
            worker.prompts_revision = fleet.revision


def _on_streams_reported(fleet: Fleet, stream: str, epoch: int, event: v.StreamsReported) -> None:
    worker = fleet.workers.get(stream[2:])
    if worker is not None and event.incarnation == worker.incarnation and worker.engine == "ready":
        worker.streams = dict(event.figures)


# --- replicas ------------------------------------------------------------------------


def _on_replica_started(fleet: Fleet, stream: str, epoch: int, event: v.ReplicaStarted) -> None:
    replica = fleet.replicas.get(event.replica)
    if replica is None:
        replica = fleet.replicas[event.replica] = Replica(event.replica)
    _orphan(fleet, lambda r: r.owner == stream and r.boot != event.boot)
    unheard.began(fleet, stream, replica, event.boot)
    replica.epoch = epoch
    replica.boot = event.boot
    replica.host = event.host
    replica.port = event.port
    replica.pid = event.pid
    replica.policy = event.policy
    replica.seed = event.seed
    replica.alive = True
    replica.suspects.clear()
    replica.receipts = Receipts()
    replica.settings = dict(event.settings)


def _on_groups_received(fleet: Fleet, stream: str, epoch: int, event: v.GroupsReceived) -> None:
    replica = fleet.replicas.get(stream[2:])
    if replica is not None:
        receipts.take(replica.receipts, event)


def _on_replica_stopped(fleet: Fleet, stream: str, epoch: int, event: v.ReplicaStopped) -> None:
    if event.replica in fleet.replicas:
        fleet.replicas[event.replica].alive = False
        _orphan(fleet, lambda r: r.owner == stream)


def _on_replica_lost(fleet: Fleet, stream: str, epoch: int, event: v.ReplicaLost) -> None:
    replica = fleet.replicas.get(event.replica)
    if replica is not None and replica.epoch == event.epoch:
        replica.alive = False
        _orphan(fleet, lambda r: r.owner == f"r.{event.replica}")


def _orphan(fleet: Fleet, left: Callable[[Request], bool]) -> None:
    for request in fleet.requests.values():
        if left(request):
            returns.orphan(fleet, request)


def _on_arrived(fleet: Fleet, stream: str, epoch: int, event: v.RequestArrived) -> None:
    replica = fleet.replicas.get(stream[2:])
    fleet.arrived += 1
    if not unheard.arrived(fleet, event.request):
        fleet.ended += 1
        return
    fleet.requests[event.request] = Request(
        event.request,
        stream,
        replica.boot if replica else "",
        event.model,
        event.stream,
        event.prompt_tokens,
        event.verdict,
        route=event.route,
        max_tokens=event.max_tokens,
        tenant=event.tenant,
        client_id=event.client_id,
        resumable=event.resumable,
        grace_ticks=event.grace_ticks,
    )


def _on_route_decided(fleet: Fleet, stream: str, epoch: int, event: v.RouteDecided) -> None:
    fleet.decisions += 1
    replica = fleet.replicas.get(stream[2:])
    if replica is not None:
        replica.decisions += 1
        replica.decided = event.basis.position
    request = fleet.requests.get(event.request)
    if request is not None and not returns.foreign(request, stream):
        request.attempt = event.attempt
        if event.worker:
            request.worker, request.incarnation = event.worker, event.incarnation
            request.predicted_us = -1
    worker = fleet.workers.get(event.worker)
    if worker is None or worker.incarnation != event.incarnation or worker.engine != "ready":
        return
    key = key_of(event.request, event.attempt)
    if request is not None and event.attempt == 1:
        steptime.dispatched(request, worker, event.ttft_us)
    opened = account.dispatch(worker, key, event, fleet.tick)
    worker.sent_by, worker.sent_us, worker.sent_revision = stream[2:], event.at_us, fleet.revision
    if opened and event.prefix and not worker.attempts[key].decoding:
        cached.dispatched(fleet, worker, key, event.prefix)
    if opened and request is not None:
        request.places.append((worker.name, key))
        counted.dispatched(request, worker, event)


def _on_transport_observed(
    fleet: Fleet, stream: str, epoch: int, event: v.TransportObserved
) -> None:
    if event.kind in SUSPICIOUS:
        _on_suspected(fleet, stream, epoch, event)
    _close(fleet, event.worker, key_of(event.request, event.attempt), ended=False)


def _close(fleet: Fleet, worker_name: str, key: str, ended: bool) -> None:
    """The replica is done with an attempt. What its engine holds, its engine closes."""
    worker = fleet.workers.get(worker_name)
    if worker is not None:
        account.close(worker, key, ended)
        if key not in worker.attempts:
            cached.settled(fleet, worker, key)


SUSPICIOUS = ("reset", "eof", "refused", "unreachable", "stall", "engine_dead")
"""Transport observations after which a replica sends the incarnation nothing new until it
proved itself. `stale` is our own error; `engine_error` (it answered, but wrongly),
`declined` and `timeout` may be the request's: one client's request must not shut out
workers."""


def _on_suspected(
    fleet: Fleet, stream: str, epoch: int, event: v.WorkerSuspected | v.TransportObserved
) -> None:
    """Late news of an older incarnation does not hide suspicion of a newer one."""
    replica = fleet.replicas.get(stream[2:])
    if replica is not None and event.incarnation >= replica.suspects.get(event.worker, 0):
        replica.suspects[event.worker] = event.incarnation


def _on_cleared(fleet: Fleet, stream: str, epoch: int, event: v.WorkerCleared) -> None:
    replica = fleet.replicas.get(stream[2:])
    if replica is not None and replica.suspects.get(event.worker) == event.incarnation:
        del replica.suspects[event.worker]


def _on_request_ended(fleet: Fleet, stream: str, epoch: int, event: v.RequestEnded) -> None:
    if returns.foreign(fleet.requests.get(event.request), stream):
        return
    for worker_name, key in places_of(fleet, event):
        _close(fleet, worker_name, key, ended=True)
    request = fleet.requests.pop(event.request, None)
    if request is not None:
        fleet.ended += 1
        steptime.first_token(fleet, request, event.ttft_us)
    unheard.ended(fleet, event.request)
    coverage.forget(fleet, event.request)


def places_of(fleet: Fleet, event: v.RequestEnded) -> list[tuple[str, str]]:
    """(worker, attempt key) of every dispatch that may still be open at a request's end.

    Dispatches of a request that the leader ended already (its gateway was taken for
    dead) are not listed anywhere: then it is each attempt at each worker.
    """
    request = fleet.requests.get(event.request)
    if request is not None:
        return request.places
    keys = [key_of(event.request, n) for n in range(1, event.attempts + 1)]
    return [(name, key) for name in fleet.workers for key in keys]


# --- the leader ----------------------------------------------------------------------


def _on_leader_elected(fleet: Fleet, stream: str, epoch: int, event: v.LeaderElected) -> None:
    fleet.leader = event.replica
    fleet.healthy_since_tick = fleet.tick
    _orphan(fleet, lambda r: _without_gateway(fleet, r))


def _without_gateway(fleet: Fleet, request: Request) -> bool:
    replica = fleet.replicas.get(request.owner[2:])
    return replica is None or not replica.alive or replica.boot != request.boot


def _on_leader_resigned(fleet: Fleet, stream: str, epoch: int, event: v.LeaderResigned) -> None:
    fleet.leader = ""


RECENT_TICKS = 32
"""So long it is remembered how many requests a worker had."""

TICK_GAP_MS = 3000
"""Two ticks further apart than this on the leader's clock mean the log stood still."""


def _on_tick(fleet: Fleet, stream: str, epoch: int, event: v.Tick) -> None:
    gap_ms = event.unix_ms - fleet.tick_unix_ms
    fleet.tick = event.number
    fleet.tick_unix_ms = event.unix_ms
    if gap_ms > TICK_GAP_MS or gap_ms < 0:
        fleet.healthy_since_tick = event.number
    marks = touched.asked(fleet)
    for worker in fleet.workers.values():
        if account.expire(worker, event.number):
            if marks is not None:
                marks.note(worker.name)
            cached.settled_beyond(fleet, worker)
        worker.recent.append(len(worker.attempts))
        del worker.recent[:-RECENT_TICKS]
        if f"w.{worker.name}" not in fleet.owners:
            fleet.gone.setdefault(f"w.{worker.name}", event.number)
    for replica in fleet.replicas.values():
        if replica.alive and f"r.{replica.name}" not in fleet.owners:
            fleet.gone.setdefault(f"r.{replica.name}", event.number)
    coverage.settle(fleet, event.number)
    returns.expire(fleet, event.number)
    unheard.expire(fleet, event.number)


def _on_worker_lost(fleet: Fleet, stream: str, epoch: int, event: v.WorkerLost) -> None:
    worker = fleet.workers.get(event.worker)
    if worker is None or worker.epoch != event.epoch:
        return
    worker.present = False
    worker.died_of = event.reason
    _clear(fleet, worker)
    coverage.lose(fleet, event.worker)


_HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.WorkerRegistered: _on_worker_registered,
    v.WorkerDeregistered: _on_worker_deregistered,
    v.EngineStarted: _on_engine_started,
    v.EngineReady: _on_engine_ready,
    v.EngineDied: _on_engine_died,
    v.EngineRestartScheduled: _on_restart_scheduled,
    v.EngineStep: _on_engine_step,
    v.StreamResumed: _on_stream_resumed,
    v.StreamsReported: _on_streams_reported,
    v.PrefixBlocksChanged: cached.changed,
    v.ReplicaStarted: _on_replica_started,
    v.GroupsReceived: _on_groups_received,
    v.ReplicaStopped: _on_replica_stopped,
    v.ReplicaLost: _on_replica_lost,
    v.RequestArrived: _on_arrived,
    v.RouteDecided: _on_route_decided,
    v.TransportObserved: _on_transport_observed,
    v.WorkerSuspected: _on_suspected,
    v.WorkerCleared: _on_cleared,
    v.RequestEnded: _on_request_ended,
    v.LeaderElected: _on_leader_elected,
    v.LeaderResigned: _on_leader_resigned,
    v.Tick: _on_tick,
    v.WorkerLost: _on_worker_lost,
    **orders.HANDLERS,
    **forgetting.HANDLERS,
    **returns.HANDLERS,
    **coverage.HANDLERS,
}
