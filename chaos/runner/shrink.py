"""From a failing case to a small one that fails the same way.

Delta debugging: leave out faults, then requests, then workers, replicas and members, then make
requests shorter; repeat until nothing more can be removed. A smaller case counts if it breaks the
same promise (or shows the same error, or misses the same bound). Removing a part of a schedule does
not change the rest, so each step is one run.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from relume.chaos.runner.cases import Case
from relume.chaos.runner.judge import OF_TRAFFIC
from relume.chaos.runner.world import JudgedRun
from relume.chaos.scenario.schedule import PlannedFault, Request, Schedule

Item = TypeVar("Item")
_SHORTEST = 4
"""Number of tokens below which lengths stay unchanged."""


class NotFailing(Exception):
    """The case does not fail, so there is nothing to shrink."""


class Shrunk(Struct, frozen=True, kw_only=True):
    """The smallest case found, its verdict, its failure, and the number of runs."""

    case: Case
    judged: JudgedRun
    target: str
    runs: int
    complete: bool


def shrink(
    case: Case,
    attempt: Callable[[Case], JudgedRun],
    until: float,
    seen: Callable[[int, Case], None] = lambda runs, case: None,
) -> Shrunk:
    """The smallest case with the first failure of `case`, as judged by `attempt`; after `until` (of
    time.monotonic), the smallest so far. It calls `seen` with each smaller case.

    Raises NotFailing.
    """
    first = attempt(case)
    if first.result != "failed" or not first.signature:
        raise NotFailing(f"{case.command}: {first.result}" + "".join(f"; {w}" for w in first.why))
    target = first.signature[0]
    best, found, runs = _bare(case, target), first, 1

    def fails(smaller: Case) -> bool:
        nonlocal best, found, runs
        if time.monotonic() >= until:
            return False
        runs += 1
        judged = attempt(smaller)
        if judged.result != "failed" or target not in judged.signature:
            return False
        best, found = smaller, judged
        seen(runs, smaller)
        return True

    fails(best)
    while time.monotonic() < until:
        before = best
        for smaller in (_fewer_faults, _fewer_requests, _smaller_fleet, _shorter):
            smaller(best, fails)
        if best is before:
            break
    return Shrunk(
        case=best, judged=found, target=target, runs=runs, complete=time.monotonic() < until
    )


def _bare(case: Case, target: str) -> Case:
    """The case without bounds that are unrelated to the failure."""
    bounds = [
        bound
        for bound in case.scenario.expect
        if target == f"bound:{bound.figure}" and bound.figure not in OF_TRAFFIC
    ]
    return replace(case, scenario=replace(case.scenario, expect=tuple(bounds)))


Fails = Callable[[Case], bool]


def minimal(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """A sublist from which no single item can be removed, by Zeller's ddmin; `fails` says whether a
    sublist still fails. `items` themselves fail."""
    left, parts = list(items), 2
    while left:
        size = max(len(left) // parts, 1)
        for begin in range(0, len(left), size):
            rest = left[:begin] + left[begin + size :]
            if fails(rest):
                left, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(parts * 2, len(left))
    return left


def _fewer_faults(case: Case, fails: Fails) -> None:
    minimal(case.schedule.faults, lambda remaining: fails(with_faults(case, remaining)))


def _fewer_requests(case: Case, fails: Fails) -> None:
    requests = case.schedule.requests
    while len(requests) > 1 and fails(with_requests(case, requests[: len(requests) // 2])):
        requests = requests[: len(requests) // 2]
    minimal(requests, lambda remaining: bool(remaining) and fails(with_requests(case, remaining)))


def _smaller_fleet(case: Case, fails: Fails) -> None:
    workers = case.scenario.fleet.workers
    for count in range(1, workers):
        if fails(with_fleet(case, count)):
            case = with_fleet(case, count)
            break
    for replicas, members in ((1, 1), (1, 0), (2, 1), (2, 0), (0, 1)):
        fleet = case.scenario.fleet
        wanted = replicas or fleet.control_planes, members or fleet.etcd
        if wanted < (fleet.control_planes, fleet.etcd):
            smaller = with_fleet(case, fleet.workers, *wanted)
            if fails(smaller):
                return


def _shorter(case: Case, fails: Fails) -> None:
    for field in ("output_tokens", "prompt_tokens"):
        while True:
            requests = [
                replace(r, **{field: max(getattr(r, field) // 2, _SHORTEST)})
                if getattr(r, field) > _SHORTEST
                else r
                for r in case.schedule.requests
            ]
            smaller = with_requests(case, requests)
            if smaller.schedule == case.schedule or not fails(smaller):
                break
            case = smaller


def with_faults(case: Case, remaining: Sequence[PlannedFault]) -> Case:
    """`case` with these faults of its schedule alone."""
    names = {planned.name for planned in remaining}
    faults = case.schedule.faults
    given = case.scenario.faults
    if len(given) == len(faults):
        pairs = zip(given, faults, strict=True)
        given = tuple(fault for fault, planned in pairs if planned.name in names)
    scenario = replace(case.scenario, faults=given)
    return replace(
        case, scenario=scenario, schedule=replace(case.schedule, faults=tuple(remaining))
    )


def with_requests(case: Case, remaining: Sequence[Request]) -> Case:
    """`case` with these requests alone. A request that followed a removed one now follows that
    one's predecessor, or is sent at the time of the first removed one."""
    traffic = replace(case.scenario.traffic, requests=max(len(remaining), 1))
    schedule = replace(case.schedule, requests=tuple(_joined(case.schedule, remaining)))
    return replace(case, scenario=replace(case.scenario, traffic=traffic), schedule=schedule)


def _joined(schedule: Schedule, remaining: Sequence[Request]) -> Iterator[Request]:
    all_ = {request.name: request for request in schedule.requests}
    names = {request.name for request in remaining}
    for request in remaining:
        at = request
        while at.after is not None and at.after not in names:
            at = all_[at.after]
        if at is request:
            yield request
        else:
            yield replace(request, at_ns=at.at_ns, after=at.after, think_ns=at.think_ns)


def with_fleet(case: Case, workers: int, control_planes: int = 0, etcd: int = 0) -> Case:
    """`case` with the first of its workers, replicas and members (0: all); faults of those that
    are gone are left out."""
    old = case.schedule
    remaining = dict(list(old.workers.items())[:workers])
    replicas = old.control_planes[: control_planes or None]
    members = old.etcd[: etcd or None]
    domains = list(dict.fromkeys(remaining.values()))
    gone = {*old.workers, *old.control_planes, *old.etcd, *old.workers.values()}
    gone -= {*remaining, *replicas, *members, *domains}
    faults = [planned for planned in old.faults if planned.target not in gone]
    case = with_faults(case, faults)
    models = {name: model for name, model in old.models.items() if name in remaining}
    fleet = replace(
        case.scenario.fleet, workers=len(remaining), domains=len(domains),
        control_planes=len(replicas), etcd=len(members), others=dict(Counter(models.values())),
    )  # fmt: skip
    schedule = replace(
        case.schedule, workers=remaining, control_planes=replicas, etcd=members, models=models
    )
    return replace(case, scenario=replace(case.scenario, fleet=fleet), schedule=schedule)


def size_of(case: Case) -> str:
    """Its size, as text."""
    schedule = case.schedule
    tokens = sum(r.prompt_tokens + r.output_tokens for r in schedule.requests)
    faults = ", ".join(f"{p.what} {p.target}" for p in schedule.faults) or "no fault"
    return (
        f"{len(schedule.workers)} workers, {len(schedule.control_planes)} control planes, "
        f"{len(schedule.requests)} requests ({tokens} tokens), {faults}"
    )
