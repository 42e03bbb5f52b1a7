"""Scales a scenario and its schedule down to this machine, and describes the changes.

Two cores run four tiny engines, so there are at most `MOST_WORKERS`. Leases are short; the times
of faults, which assume the leases of production, shrink with them.
"""

from __future__ import annotations

import math

import msgspec

from relume.chaos.scenario.language import Bound, Closed, Fleet, Scenario, Traffic
from relume.chaos.scenario.schedule import PlannedFault, Request, Schedule

MOST_WORKERS = 4
MOST_CHECKPOINT_MB = 64
MOST_REPLICAS = 2
MOST_MEMBERS = 3
MOST_CLIENTS = 8
"""Maximum number of clients of a closed loop; they send until the faults are over (`live_clients`)."""
LEASE_S = 4
TIMES = LEASE_S / 8
"""Factor for the times of faults: a lease of production is 8 s."""


def scaled(scenario: Scenario, schedule: Schedule) -> tuple[Scenario, Schedule, tuple[str, ...]]:
    """Both as they run live, and the differences from the originals, which the scenario's `about`
    has too."""
    fleet = fitting(scenario.fleet)
    notes = [
        f"{name} {getattr(fleet, name)} for {getattr(scenario.fleet, name)}"
        for name in fleet.__struct_fields__
        if getattr(fleet, name) != getattr(scenario.fleet, name)
    ]
    if schedule.faults:
        notes.append(f"times of faults x {TIMES:g}, as leases of {LEASE_S} s are to 8 s")
    fewer = _share_of_clients(scenario.traffic)
    if fewer < 1 and any(planned.nth > 1 for planned in schedule.faults):
        notes.append(f"events that faults wait for x {fewer:.2g}, as clients")
    if any(request.priority for request in schedule.requests):
        notes.append("no priorities, which the engines are not started for")
    traffic, requests = _fewer(scenario.traffic, schedule.requests)
    if len(requests) < len(schedule.requests):
        notes.append(
            f"{MOST_CLIENTS} clients, {len(requests)} of {len(schedule.requests)} requests"
        )
    about = f"{scenario.about} (live: {'; '.join(notes)})" if notes else scenario.about
    names = [f"w{index}" for index in range(fleet.workers)]
    fitted = msgspec.structs.replace(
        schedule,
        workers={name: f"d{index % fleet.domains}" for index, name in enumerate(names)},
        control_planes=schedule.control_planes[: fleet.control_planes],
        etcd=schedule.etcd[: fleet.etcd],
        requests=requests,
        faults=tuple(_fault(planned, fleet, fewer) for planned in schedule.faults),
    )
    share = len(requests) / max(len(schedule.requests), 1)
    expect = tuple(_bound(bound, share) for bound in scenario.expect)
    small = msgspec.structs.replace(
        scenario, fleet=fleet, traffic=traffic, expect=expect, about=about
    )
    return small, fitted, tuple(notes)


def _share_of_clients(traffic: Traffic) -> float:
    """Share of the clients of a closed loop that may run."""
    arrivals = traffic.arrivals
    return min(1.0, MOST_CLIENTS / arrivals.clients) if isinstance(arrivals, Closed) else 1.0


def _fewer(traffic: Traffic, requests: tuple[Request, ...]) -> tuple[Traffic, tuple[Request, ...]]:
    """The clients of a closed loop that may run, and their requests."""
    arrivals = traffic.arrivals
    if not isinstance(arrivals, Closed) or arrivals.clients <= MOST_CLIENTS:
        return traffic, requests
    chosen: dict[str, Request] = {}
    for request in requests:
        first = request.after is None and len(chosen) < MOST_CLIENTS
        if first or request.after in chosen:
            chosen[request.name] = request
    fewer = msgspec.structs.replace(
        traffic,
        arrivals=msgspec.structs.replace(arrivals, clients=MOST_CLIENTS),
        requests=len(chosen),
    )
    return fewer, tuple(chosen.values())


def _bound(bound: Bound, share: float) -> Bound:
    if bound.figure != "requests" or bound.least is None:
        return bound
    return msgspec.structs.replace(bound, least=math.floor(bound.least * share))


def fitting(fleet: Fleet) -> Fleet:
    """The fleet that runs in place of `fleet`."""
    workers = min(fleet.workers, MOST_WORKERS)
    return msgspec.structs.replace(
        fleet,
        workers=workers,
        domains=min(fleet.domains, workers),
        control_planes=min(fleet.control_planes, MOST_REPLICAS),
        etcd=min(fleet.etcd, MOST_MEMBERS),
        checkpoint_mb=min(fleet.checkpoint_mb, MOST_CHECKPOINT_MB),
        checkpoint_file_mb=min(fleet.checkpoint_file_mb, MOST_CHECKPOINT_MB),
        model="tiny",
        hardware="cpu",
    )


def _fault(planned: PlannedFault, fleet: Fleet, fewer: float) -> PlannedFault:
    target = planned.target
    counts = {
        "w": fleet.workers, "d": fleet.domains, "r": fleet.control_planes, "e": fleet.etcd
    }  # fmt: skip
    if target[:1] in counts and target[1:].isdigit():
        target = f"{target[0]}{int(target[1:]) % counts[target[0]]}"
    return msgspec.structs.replace(
        planned,
        target=target,
        nth=math.ceil(planned.nth * fewer),
        at_ns=None if planned.at_ns is None else round(planned.at_ns * TIMES),
        for_ns=None if planned.for_ns is None else round(planned.for_ns * TIMES),
    )
