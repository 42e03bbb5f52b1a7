"""A scenario and its schedule cut to what this machine bears, and what was cut in words.

Two cores run three tiny engines, so there are at most `MOST_WORKERS`. Leases are short, and
the times of faults, which are meant in the leases of production, shrink with them.
"""

from __future__ import annotations

import msgspec

from chaos.scenario.language import Fleet, Scenario
from chaos.scenario.schedule import Planned, Schedule

MOST_WORKERS = 3
MOST_CHECKPOINT_MB = 64
MOST_REPLICAS = 2
MOST_MEMBERS = 3
LEASE_S = 4
TIMES = LEASE_S / 8
"""Of the faults: a lease of production is 8 s."""


def scaled(scenario: Scenario, schedule: Schedule) -> tuple[Scenario, Schedule, tuple[str, ...]]:
    """Both as they are run live, and what differs from what was given. The scenario's `about`
    says it too."""
    fleet = fitting(scenario.fleet)
    notes = [
        f"{name} {getattr(fleet, name)} for {getattr(scenario.fleet, name)}"
        for name in fleet.__struct_fields__
        if getattr(fleet, name) != getattr(scenario.fleet, name)
    ]
    if schedule.faults:
        notes.append(f"times of faults x {TIMES:g}, as leases of {LEASE_S} s are to 8 s")
    if any(request.priority for request in schedule.requests):
        notes.append("no priorities, which the engines are not started for")
    about = f"{scenario.about} (live: {'; '.join(notes)})" if notes else scenario.about
    names = [f"w{index}" for index in range(fleet.workers)]
    fitted = msgspec.structs.replace(
        schedule,
        workers={name: f"d{index % fleet.domains}" for index, name in enumerate(names)},
        control_planes=schedule.control_planes[: fleet.control_planes],
        etcd=schedule.etcd[: fleet.etcd],
        faults=tuple(_fault(planned, fleet) for planned in schedule.faults),
    )
    return msgspec.structs.replace(scenario, fleet=fleet, about=about), fitted, tuple(notes)


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
        model="tiny",
        hardware="cpu",
    )


def _fault(planned: Planned, fleet: Fleet) -> Planned:
    target = planned.target
    counts = {
        "w": fleet.workers, "d": fleet.domains, "r": fleet.control_planes, "e": fleet.etcd
    }  # fmt: skip
    if target[:1] in counts and target[1:].isdigit():
        target = f"{target[0]}{int(target[1:]) % counts[target[0]]}"
    return msgspec.structs.replace(
        planned,
        target=target,
        at_ns=None if planned.at_ns is None else round(planned.at_ns * TIMES),
        for_ns=None if planned.for_ns is None else round(planned.for_ns * TIMES),
    )
