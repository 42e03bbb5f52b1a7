"""I22: no request fails for want of a worker that was there, or of a stream that was kept.

Of a simulated run it is known which engines served, and when each client got an error
(`relume.chaos.validators.ground_truth`).

- An answer 503 for want of a worker comes after a wait of `WAIT_S`. It is needless if it comes
  sooner, although an engine that no fault kept away served for `LEAST_S` on end within the wait.
- An answer 410 to a client that returns is needless while the log has its request live. Within
  `LATE_MS` of its arrival and end the replica may not know yet, or know already.

A run without truth, a real one, is not judged. Errors for other reasons, as a limit of a tenant or
an engine that refuses, are not judged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import (
    ClientRecord,
    Course,
    Violation,
    courses,
    log_of,
    of_clients,
)
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup

PROMISE = "I22"
GONE, NO_WORKER = 410, 503
WAIT_S = 30.0
"""Time for which a request waits for a worker (`WaitingConfig`)."""
LEAST_S = 5.0
SLACK_MS = 1000
"""Difference permitted between the log's clock and the wait."""
LATE_MS = 2000
LOG_LATE = "the log was too late"
"""How a return ends that the log, away meanwhile, did not record in time: its 410 is permitted."""
MS = 1_000_000
BEGINS = (v.RequestArrived, v.TransportObserved, v.ClientReturned)
"""Events with which a request begins to wait for a worker."""


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    truth: GroundTruth | None = None,
    began_ms: int = 0,
    away: Collection[str] = (),
) -> list[Violation]:
    """Needless failures. `began_ms`: wall time of the run's start; `away`: workers that a fault
    kept from gateways."""
    if truth is None:
        return []
    found: list[Violation] = []
    for client, course in of_clients(courses(log_of(groups)), clients):
        if course is None or course.arrived is None:
            continue  # it never was a request for the log
        status, at_ns = truth.refused.get(client.request, (0, 0))
        at_ms = began_ms + (at_ns - truth.began_ns) // MS
        if status == GONE:
            texts = _gone(course, at_ms)
        else:
            texts = _unserved(course, truth, began_ms, away)
        found += (Violation(PROMISE, client.request, text) for text in texts)
    return found


def _gone(course: Course, at_ms: int) -> Iterator[str]:
    assert course.arrived is not None
    since, until = course.arrived.at_ms, min((end.at_ms for end in course.ends), default=1 << 62)
    if any(LOG_LATE in end.event.detail for end in course.ends):
        return
    if since + LATE_MS <= at_ms <= until - LATE_MS:
        yield f"its client got 410 after {at_ms - since} ms, and the log had it live"


def _unserved(
    course: Course, truth: GroundTruth, began_ms: int, away: Collection[str]
) -> Iterator[str]:
    end = next((at for at in course.ends if at.event.status == NO_WORKER), None)
    if end is None or "no worker" not in end.event.detail:
        return
    begun = [at.at_ms for at in course.events if type(at.event) in BEGINS and at.at_ms <= end.at_ms]
    since_ms = max(begun, default=end.at_ms)
    waited_ms = end.at_ms - since_ms
    if waited_ms >= 1000 * WAIT_S - SLACK_MS:
        return
    since_ns = truth.began_ns + (since_ms - began_ms) * MS
    until_ns, least_ns = since_ns + int(WAIT_S * 1e9), int(LEAST_S * 1e9)
    served = [
        worker for worker in truth.serving
        if worker not in away and truth.served(worker, since_ns, until_ns, least_ns)
    ]  # fmt: skip
    if served:
        yield f"it waited {waited_ms} ms for a worker, then failed; {', '.join(served)} served"
