"""The fold: how each event changes the fleet.

Facts of an older incarnation are ignored; a step may never revive a dead engine.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from msgspec import UnsetType

from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome
from relume.policies.agreement import LEADER_VERSION, has_version
from relume.policies.degradation import decisions, demand
from relume.policies.health import cross_check_evidence, evidence
from relume.policies.leader import feature_level
from relume.policies.liveness.suspicious import SUSPICIOUS
from relume.policies.rollout import rollout_records
from relume.policies.spares import spare_decisions
from relume.policies.state import (
    account,
    coverage,
    dirty_set,
    operator_commands,
    prefix_cache,
    prompt_tokens,
    step_times,
    unreadable,
)
from relume.policies.state.account import key_of
from relume.policies.state.engine_step import on_engine_step, on_reports_dropped
from relume.policies.state.fleet import Fleet, Head, Receipts, Replica, Request
from relume.policies.state.lifecycles import (
    departed_workers,
    stream_resumption,
    unacknowledged,
    worker_records,
)
from relume.policies.state.lifecycles.engine_life import taken_in
from relume.policies.state.lifecycles.worker_life import worker_of
from relume.policies.state.overlay import receive_clock

MOST_ATTEMPTS = 10_000
"""Maximum number of attempts of a request that its end concludes; retry budgets are far smaller."""


def apply_group(
    fleet: Fleet, group: RevisionGroup, seen: Callable[[str, int, Any], None] | None = None
) -> None:
    """Fold one revision group. `seen(stream, position, event)` is called after each event. A record
    that cannot be read is a fact of its stream (`unreadable`).
    """
    fleet.revision = group.revision
    for stream, epoch in group.owners:
        _on_owner(fleet, stream, epoch)
    handlers, marks = _HANDLERS, dirty_set.in_use(fleet)
    for segment in group.segments:
        stream, epoch, position = segment.stream, segment.epoch, segment.first
        head = fleet.streams.get(stream)
        if head is not None and head.epoch != epoch:
            _on_new_epoch(fleet, stream, epoch)
        for event in codec.decode_all(segment.records):
            handler = handlers.get(type(event))
            if handler is not None:
                if marks is not None:
                    dirty_set.note(fleet, marks, stream, event)
                handler(fleet, stream, epoch, event)
            elif type(event) is codec.UnreadableRecord:
                unreadable.note(fleet, stream, position, event)
            if seen is not None:
                seen(stream, position, event)
                marks = dirty_set.in_use(fleet)  # it may have asked first
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
        if (marks := dirty_set.in_use(fleet)) is not None:
            dirty_set.note(fleet, marks, stream, event)
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
    """The stream has a new owner, although `StreamResumed` or a new start comes later in it:
    a loss declared of the old epoch does not concern the new. A leader that takes its own
    stream again was away from the log, and lands the ticks of that time first."""
    kind, _, name = stream.partition(".")
    if kind == "w" and name in fleet.workers:
        fleet.workers[name].epoch = epoch
    elif kind == "r" and name in fleet.replicas:
        fleet.replicas[name].epoch = epoch
        operator_commands.begin_landing(fleet, stream)
    elif stream == "fleet":
        fleet.healthy_since_tick = fleet.tick


def _on_stream_resumed(fleet: Fleet, stream: str, epoch: int, event: v.StreamResumed) -> None:
    kind, _, name = stream.partition(".")
    if kind == "w":
        worker = worker_of(fleet, stream)
        worker.epoch = epoch
        worker.present = True
    elif kind == "r" and name in fleet.replicas:
        fleet.replicas[name].epoch = epoch
        fleet.replicas[name].alive = True
        operator_commands.end_landing(fleet, stream)


# --- replicas ------------------------------------------------------------------------


def _on_replica_started(fleet: Fleet, stream: str, epoch: int, event: v.ReplicaStarted) -> None:
    replica = fleet.replicas.get(event.replica)
    if replica is None:
        replica = fleet.replicas[event.replica] = Replica(name=event.replica)
    _orphan(fleet, lambda r: r.owner == stream and r.boot != event.boot)
    unacknowledged.began(fleet, stream, replica, event.boot)
    replica.epoch = epoch
    replica.boot = event.boot
    replica.host = event.host
    replica.port = event.port
    replica.pid = event.pid
    replica.policy = event.policy
    replica.seed = event.seed
    replica.alive = True
    operator_commands.end_landing(fleet, stream)
    replica.suspects.clear()
    replica.receipts = Receipts()
    replica.settings = dict(event.settings)


def _on_groups_received(fleet: Fleet, stream: str, epoch: int, event: v.GroupsReceived) -> None:
    replica = fleet.replicas.get(stream[2:])
    if replica is not None:
        receive_clock.take(replica.receipts, event)


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
            stream_resumption.orphan(fleet, request)


def _on_arrived(fleet: Fleet, stream: str, epoch: int, event: v.RequestArrived) -> None:
    """The stream of a client that returns to two replicas may arrive twice from a former log."""
    if event.request in fleet.requests and has_version(fleet, LEADER_VERSION, 3):
        return
    replica = fleet.replicas.get(stream[2:])
    fleet.arrived += 1
    if not unacknowledged.arrived(fleet, event.request):
        fleet.ended += 1
        return
    fleet.requests[event.request] = Request(
        request=event.request,
        owner=stream,
        boot=replica.boot if replica else "",
        model=event.model,
        stream=event.stream,
        prompt_tokens=event.prompt_tokens,
        verdict=event.verdict,
        route=event.route,
        max_tokens=event.max_tokens,
        tenant=event.tenant,
        client_id=event.client_id,
        resumable=event.resumable,
        grace_ticks=event.grace_ticks,
    )


_TAKES = taken_in(v.RouteDecided)


def _on_route_decided(fleet: Fleet, stream: str, epoch: int, event: v.RouteDecided) -> None:
    fleet.decisions += 1
    replica = fleet.replicas.get(stream[2:])
    if replica is not None:
        replica.decisions += 1
        replica.decided = event.basis.position
    request = fleet.requests.get(event.request)
    if request is not None and not stream_resumption.foreign(request, stream):
        request.attempt = event.attempt
        if event.worker:
            request.worker, request.incarnation = event.worker, event.incarnation
            request.predicted_us = -1
    worker = fleet.workers.get(event.worker)
    if worker is None or worker.incarnation != event.incarnation or worker.engine not in _TAKES:
        return
    key = key_of(event.request, event.attempt)
    if request is not None and event.attempt == 1:
        step_times.dispatched(request, worker, event.ttft_us)
    opened = account.dispatch(worker, key, event, fleet.tick)
    if not isinstance(worker.health, UnsetType):
        evidence.dispatched(fleet, worker, worker.health, event)
    worker.sent_by, worker.sent_us, worker.sent_revision = stream[2:], event.at_us, fleet.revision
    if opened and event.prefix and not worker.attempts[key].decoding:
        prefix_cache.dispatched(fleet, worker, key, event.prefix)
    if opened and request is not None:
        request.places.append((worker.name, key))
        prompt_tokens.dispatched(request, worker, event)


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
            prefix_cache.settled(fleet, worker, key)


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
    if stream_resumption.foreign(fleet.requests.get(event.request), stream):
        return
    places = places_of(fleet, event)
    for worker_name, key in places:
        _close(fleet, worker_name, key, ended=True)
    request = fleet.requests.pop(event.request, None)
    if request is not None:
        fleet.ended += 1
        step_times.first_token(fleet, request, event.ttft_us)
        if event.outcome == RequestOutcome.COMPLETED:
            evidence.succeeded(fleet, request)
            demand.completed(fleet, request.model, event)
            cross_check_evidence.completed(fleet, request, event)
    unacknowledged.ended(fleet, event.request)
    coverage.forget(fleet, event.request)
    evidence.ended(fleet, event, _with_last(fleet, request, event, places))


def _with_last(
    fleet: Fleet, request: Request | None, event: v.RequestEnded, places: list[tuple[str, str]]
) -> list[tuple[str, str]]:
    """With the last dispatch, if it is a probe: of one that the engine finished before the dispatch
    was folded, the account has no place."""
    if request is None:
        return places
    key = key_of(event.request, request.attempt)
    if evidence.is_open_probe(fleet, request.worker, key):
        return [*places, (request.worker, key)]
    return places


def places_of(fleet: Fleet, event: v.RequestEnded) -> list[tuple[str, str]]:
    """(worker, attempt key) of every dispatch that may still be open at a request's end.

    Dispatches of a request that the leader ended already (its gateway was taken for
    dead) are not listed anywhere: then it is each attempt at each worker.
    """
    request = fleet.requests.get(event.request)
    if request is not None:
        return request.places
    keys = [key_of(event.request, n) for n in range(1, min(event.attempts, MOST_ATTEMPTS) + 1)]
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
"""Time for which a worker's number of requests is stored."""

TICK_GAP_MS = 3000
"""Two ticks further apart than this on the leader's clock mean that the log made no progress."""


def _on_tick(fleet: Fleet, stream: str, epoch: int, event: v.Tick) -> None:
    gap_ms = event.unix_ms - fleet.tick_unix_ms
    fleet.tick = event.number
    fleet.tick_unix_ms = event.unix_ms
    if gap_ms > TICK_GAP_MS or gap_ms < 0:
        fleet.healthy_since_tick = event.number
    marks = dirty_set.in_use(fleet)
    for worker in fleet.workers.values():
        if account.expire(worker, event.number):
            if marks is not None:
                marks.note(worker.name)
            prefix_cache.settled_beyond(fleet, worker)
        worker.recent.append(len(worker.attempts))
        del worker.recent[:-RECENT_TICKS]
        if f"w.{worker.name}" not in fleet.owners:
            fleet.gone.setdefault(f"w.{worker.name}", event.number)
    for replica in fleet.replicas.values():
        if replica.alive and f"r.{replica.name}" not in fleet.owners:
            fleet.gone.setdefault(f"r.{replica.name}", event.number)
    coverage.settle(fleet, event.number)
    stream_resumption.expire(fleet, event.number)
    unacknowledged.expire(fleet, event.number)


_HANDLERS: dict[type, evidence.Handler] = {
    v.EngineStep: on_engine_step,
    v.ReportsDropped: on_reports_dropped,
    v.StreamResumed: _on_stream_resumed,
    v.PrefixBlocksChanged: prefix_cache.changed,
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
    **worker_records.HANDLERS,
    **operator_commands.HANDLERS,
    **departed_workers.HANDLERS,
    **stream_resumption.HANDLERS,
    **coverage.HANDLERS,
    **feature_level.HANDLERS,
    **unreadable.HANDLERS,
}


def _then(first: evidence.Handler, second: evidence.Handler) -> evidence.Handler:
    def both(fleet: Fleet, stream: str, epoch: int, event: Any) -> None:
        first(fleet, stream, epoch, event)
        second(fleet, stream, epoch, event)

    return both


for _kind, _also in (
    *evidence.HANDLERS.items(),
    *decisions.HANDLERS.items(),
    *spare_decisions.HANDLERS.items(),
    *rollout_records.HANDLERS.items(),
):
    _HANDLERS[_kind] = _then(_HANDLERS[_kind], _also) if _kind in _HANDLERS else _also
