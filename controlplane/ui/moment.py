"""A moment of the fleet: everything that the page shows at once, in one shape.

`moment_of` reads it from a view, so a live replica and a stored log give the same. `changes` is the
difference of two moments: the rows that are new or different, and the names of those that are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from msgspec import Struct, UnsetType, field

from relume.controlplane.admin import models as m
from relume.controlplane.incidents.incident import Incident, IncidentInfo
from relume.controlplane.incidents.sentences import info
from relume.events.vocabulary.enums import EnginePhase, FailureClass, HealthState, WorkerState
from relume.policies.state import unreadable
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.overlay.view import View

SHOWN_REQUESTS = 100
"""The newest requests of a moment; others are found by a search."""
SHOWN_INCIDENTS = 50


class RecordedPlace(Struct, frozen=True, kw_only=True):
    """Where a moment is in a stored log: after `place` transactions and `decision` of those with
    decisions. `events` of the transaction that led there, without frequent ones."""

    place: int
    decision: int
    events: list[m.EventInfo]


class Head(Struct, frozen=True, kw_only=True):
    """What a moment says of the whole fleet. `replica` answered at `at_ms`, its wall clock, with the
    log up to `revision`. `log_silent_ms`: since the newest record; `unwritten`: events of this replica
    that etcd does not have yet. `degradation` is its mode. `requests_known`: those that a search can
    find in memory. `recorded`: the place, if the moment is one of a stored log; then `at_ms` is the
    time of its last record, and the log counts as healthy."""

    replica: str
    leader: str
    revision: int
    at_ms: int
    serving: bool
    log_healthy: bool
    log_silent_ms: int
    unwritten: int
    live_requests: int
    arrived: int
    ended: int
    decisions: int
    degradation: str
    requests_known: int
    recorded: RecordedPlace | None = None


class Lane(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker as the page shows it: the fields of `WorkerInfo`, and its state daemon. `because`:
    why it is not healthy, drains or cannot be read. `holds`: number of live requests whose
    checkpoints its daemon is to hold, by the worker where they run. The daemon is `alive` and has
    `held_bytes` of `budget_bytes` (0: there is no daemon)."""

    name: str
    state: WorkerState
    health: HealthState = HealthState.HEALTHY
    failure: FailureClass = FailureClass.NONE
    because: str = ""
    model: str = ""
    domain: str = ""
    incarnation: int = 0
    engine_pid: int = 0
    requests: int = 0
    prefill_tokens: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_blocks: int = 0
    deaths: int = 0
    daemon_alive: bool = False
    held_bytes: int = 0
    budget_bytes: int = 0
    holds: dict[str, int] = field(default_factory=dict)


class ReplicaRow(Struct, frozen=True, kw_only=True):
    """One control plane replica. `suspects`: the workers that it suspects."""

    name: str
    alive: bool
    leader: bool
    suspects: list[str]


class Moment(Struct, frozen=True, kw_only=True):
    """The fleet at one moment: `requests` are the newest, oldest of them first."""

    head: Head
    lanes: list[Lane]
    replicas: list[ReplicaRow]
    models: list[m.DegradationInfo]
    requests: list[m.RequestInfo]
    incidents: list[IncidentInfo]


class MomentChanges(Struct, frozen=True, kw_only=True):
    """From one moment to the next. Each list has the rows that are new or different; `gone` names, by
    list, the rows that are no longer there."""

    head: Head
    lanes: list[Lane]
    replicas: list[ReplicaRow]
    models: list[m.DegradationInfo]
    requests: list[m.RequestInfo]
    incidents: list[IncidentInfo]
    gone: dict[str, list[str]]


ROW_NAMES: dict[str, Callable[[Any], str]] = {
    "lanes": attrgetter("name"),
    "replicas": attrgetter("name"),
    "models": attrgetter("model"),
    "requests": attrgetter("request"),
    "incidents": attrgetter("id"),
}
"""By list of a moment, what names its rows."""


def changes(before: Moment, after: Moment) -> MomentChanges:
    """What became different."""
    rows: dict[str, Any] = {}
    gone: dict[str, list[str]] = {}
    for part, name in ROW_NAMES.items():
        old = {name(row): row for row in getattr(before, part)}
        rows[part] = [row for row in getattr(after, part) if old.pop(name(row), None) != row]
        if old:
            gone[part] = list(old)
    return MomentChanges(head=after.head, gone=gone, **rows)


def moment_of(
    view: View,
    head: Head,
    requests: Iterable[m.RequestInfo],
    incidents: list[Incident],
    models: list[m.DegradationInfo],
) -> Moment:
    """The moment that `view` shows. `requests`: the newest first."""
    return Moment(
        head=head,
        lanes=lanes_of(view),
        replicas=_replicas_of(view.fleet),
        models=models,
        requests=list(requests)[::-1],
        incidents=[info(record) for record in incidents[-SHOWN_INCIDENTS:]],
    )


def lanes_of(view: View) -> list[Lane]:
    """One lane for each worker, in the order of the log."""
    fleet = view.fleet
    holds: dict[str, dict[str, int]] = {}
    for placed in fleet.placed.values():
        for holder in placed.holders:
            of = holds.setdefault(holder, {})
            of[placed.primary] = of.get(placed.primary, 0) + 1
    return [_lane(view, worker, holds.get(worker.name, {})) for worker in fleet.workers.values()]


def _lane(view: View, worker: Worker, holds: dict[str, int]) -> Lane:
    fleet = view.fleet
    prefill, requests = view.load(worker)
    suspected = m.is_suspected(view, worker)
    state = m.shown_state(fleet, worker, suspected, requests)
    holder = fleet.holders.get(worker.name)
    health, failure = HealthState.HEALTHY, FailureClass.NONE
    if not isinstance(worker.health, UnsetType):
        health, failure = worker.health.state, worker.health.failure
    return Lane(
        name=worker.name,
        state=state,
        health=health,
        failure=failure,
        because=_because(fleet, worker, health),
        model=worker.model,
        domain=worker.domain,
        incarnation=worker.incarnation,
        engine_pid=worker.engine_pid,
        requests=requests,
        prefill_tokens=prefill,
        waiting=worker.waiting,
        kv_used=worker.kv_used,
        kv_blocks=worker.kv_blocks,
        deaths=worker.deaths,
        daemon_alive=holder is not None and holder.alive,
        held_bytes=holder.held_bytes if holder is not None else 0,
        budget_bytes=holder.budget_bytes if holder is not None else 0,
        holds=holds,
    )


def _because(fleet: Fleet, worker: Worker, health: HealthState) -> str:
    """Why the worker is not simply serving, in the words of the log."""
    parts = []
    if problem := unreadable.why(fleet, worker.name):
        parts.append(f"unreadable records: {problem}")
    is_unhealthy = health not in (HealthState.HEALTHY, HealthState.DRAINING)
    if is_unhealthy:
        parts.append(m.evidence_of(fleet, worker))
    elif worker.died_of and worker.engine == EnginePhase.DEAD:
        parts.append(f"its engine died: {worker.died_of}")
    if worker.held:
        parts.append("an operator disabled restarts")
    if not isinstance(worker.drain, UnsetType):
        reason = f" ({worker.drain.reason})" if worker.drain.reason else ""
        parts.append(f"drained by {worker.drain.principal}{reason}")
    if not isinstance(worker.leaving, UnsetType):
        parts.append("its agent stops")
    if not isinstance(worker.rolling, UnsetType):
        parts.append("part of a rolling restart")
    return "; ".join(filter(None, parts))


def _replicas_of(fleet: Fleet) -> list[ReplicaRow]:
    return [
        ReplicaRow(
            name=replica.name,
            alive=replica.alive,
            leader=replica.name == fleet.leader,
            suspects=list(replica.suspects),
        )
        for replica in fleet.replicas.values()
    ]
