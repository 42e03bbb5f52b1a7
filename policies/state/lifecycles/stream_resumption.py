"""Streams whose clients may resume: the owner of a request, and when an orphan expires.

A gateway's death leaves requests without an owner. One that may be resumed waits its grace,
counted in ticks; a client that returns meanwhile gives it a new owner: the replica whose log record
of it comes first. At the tick that finds it due it has expired, once and for all, and the leader
ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from relume.events import vocabulary as v
from relume.policies.agreement import LEADER_VERSION, has_version
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Fleet, Request, Worker
from relume.policies.state.lifecycles.request_life import Input, follows

UNWRITTEN_ATTEMPTS = 8
"""Maximum number of attempts that a dead gateway is assumed to have sent and not written."""


def newest_attempt(fleet: Fleet, request: str, written: int) -> int:
    """The last attempt of `request` that any replica wrote, an engine runs or a holder has blocks of,
    at least `written`, that of its last owner. A gateway acts before it writes, so one that died
    may have sent later attempts; and the last owner may not have read of those of the one before. A
    new owner must not use their numbers again."""
    limit = written + UNWRITTEN_ATTEMPTS
    newest = written
    for site in fleet.holders.values():
        covered = site.covered.get(request)
        if covered is not None and newest < covered.attempt <= limit:
            newest = covered.attempt
    known = fleet.requests.get(request)
    places = known.places if known is not None else ()
    sent = (int(key.rpartition("/")[2]) for _, key in places)
    return max([newest, *sent, *(n for n, _ in later_attempts(fleet, request, written))])


def later_attempts(fleet: Fleet, request: str, after: int) -> Iterator[tuple[int, Worker]]:
    """The attempts of `request` with a number above `after` that an engine runs, or has finished before
    any replica wrote them, or that a former owner wrote after another replica had taken the stream."""
    numbers = range(after + 1, after + UNWRITTEN_ATTEMPTS + 1)
    keys = [(n, key_of(request, n)) for n in numbers]
    for worker in fleet.workers.values():
        attempts, finished = worker.attempts, worker.finished_early
        yield from ((n, worker) for n, key in keys if key in attempts or key in finished)


def engine_with(fleet: Fleet, request: str) -> Worker | None:
    """The worker with the latest attempt of `request` that an engine says it has, or has finished before
    any replica wrote of it."""
    named = f"{request}/"
    found = [
        (int(key.rpartition("/")[2]), worker.name)
        for worker in fleet.workers.values()
        for keys in (worker.attempts, worker.finished_early)
        for key in keys
        if key.startswith(named)
    ]
    return fleet.workers[max(found)[1]] if found else None


def orphan(fleet: Fleet, request: Request) -> None:
    """The request's gateway is gone."""
    request.orphaned += 1
    if request.grace_ticks and not request.due:
        request.due = max(fleet.tick, 0) + request.grace_ticks


def ended_at_once(request: Request) -> bool:
    """Whether the orphan cannot be resumed, so that it ends with its gateway."""
    return not request.grace_ticks


def expire(fleet: Fleet, tick: int) -> None:
    """Mark the orphans whose grace is over at `tick`."""
    for request in fleet.requests.values():
        if request.due and not request.expired and tick >= request.due:
            request.expired = tick


def expired(fleet: Fleet, tick: int) -> list[Request]:
    """The orphans that `tick` found due."""
    return [r for r in fleet.requests.values() if r.expired and r.expired == tick]


def foreign(request: Request | None, stream: str) -> bool:
    """Whether `stream` writes of a request that another replica owns by now."""
    return request is not None and stream not in (request.owner, "fleet")


def _on_client_returned(fleet: Fleet, stream: str, epoch: int, event: v.ClientReturned) -> None:
    if follows(fleet, event.request, Input.RETURNED) is None:
        return
    request = fleet.requests[event.request]
    replica = fleet.replicas.get(stream[2:])
    request.owner = stream
    request.boot = replica.boot if replica is not None else ""
    request.claim = event.claim
    request.orphaned = request.due = 0
    if event.attempt and not request.attempt and has_version(fleet, LEADER_VERSION, 3):
        _place(fleet, request, event.attempt)


def _place(fleet: Fleet, request: Request, attempt: int) -> None:
    """No replica wrote of the attempt in this log: it was sent under a former one. Its engine reported
    it."""
    key = key_of(request.request, attempt)
    for worker in fleet.workers.values():
        held = worker.attempts.get(key)
        if held is not None and held.queued:
            held.dispatched = True
            request.attempt = attempt
            request.worker, request.incarnation = worker.name, worker.incarnation
            request.places.append((worker.name, key))
            return


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.ClientReturned: _on_client_returned,
}
