"""I19: an engine stops computing within `BOUND_MS` of its client's end.

Of a simulated run it is known when each client left, and when each attempt began and ended in its
engine (`relume.chaos.validators.ground_truth`). An attempt of a client that has left ends within the
bound, or never begins.

Exceptions: the stream of a client that may return runs on for its grace time. A fault on the worker
or on a replica delays the news. An engine that died computes nothing. A run without truth, a real
one, is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relume.chaos.validators.ground_truth import ClientCall, GroundTruth
from relume.chaos.validators.records import ClientRecord, Violation
from relume.chaos.validators.strikes import FELT_MS, Strike
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome

PROMISE = "I19"
BOUND_MS = 500
"""The gateway closes the connection at once; an engine ends a request after its current step."""
MS = 1_000_000


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    truth: GroundTruth | None = None,
    strikes: Sequence[Strike] = (),
    began_ms: int = 0,
) -> list[Violation]:
    """Attempts that outlived their clients. `began_ms`: wall time of the run's start."""
    if truth is None:
        return []
    return [
        Violation(PROMISE, client.request, text)
        for client in clients
        if client.outcome == RequestOutcome.CANCELLED
        and (call := truth.calls.get(client.request)) is not None
        and call.kind != "resumable"
        and not _is_disturbed(truth, call, strikes, began_ms)
        for text in _outlived(truth, client.request, call)
    ]


def _outlived(truth: GroundTruth, name: str, call: ClientCall) -> Iterator[str]:
    bound_ns = BOUND_MS * MS
    due_ns = call.ended_ns + bound_ns
    for attempt, worker, began_ns in truth.attempts.get(name, ()):
        ended_ns = truth.ended.get(attempt, 1 << 62)
        since_ns = max(call.ended_ns, began_ns)
        if ended_ns > due_ns and truth.served(worker, since_ns, since_ns + bound_ns, bound_ns):
            yield f"its client left, and {worker} computed {attempt} for {BOUND_MS} ms more"


def _is_disturbed(
    truth: GroundTruth, call: ClientCall, strikes: Sequence[Strike], began_ms: int
) -> bool:
    at_ms = began_ms + (call.ended_ns - truth.began_ns) // MS
    return any(strike.is_on(at_ms - FELT_MS, at_ms + BOUND_MS) for strike in strikes)
