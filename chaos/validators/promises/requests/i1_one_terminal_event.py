"""I1: every accepted request has one terminal event, matching what its client saw.

The first terminal event in the total order ends a request; the fold ignores a later one. One kind
of second event is no violation. If a gateway is cut from etcd long enough, the leader declares it
dead and ends its requests. When the gateway is back, it lands its own terminal event, which is what
its client saw, so clients are compared with it. So the owner's end may follow a leader's end; a
second end of the leader or of the owner is a violation.

A killed gateway may have served a client to the end, or answered it with an error, without a terminal
event in the log. Then the leader ends the request, without a status. Of a short answer the log may
have no event of the gateway at all; then the dispatch in its engine's record stands for it
(`unheard`), and the leader ends it. Nothing need be in the log if that record was dropped too: the log
says that reports of its engine are missing, and of a simulated run it is known what the record said.
The end of a gateway that the leader took to be dead may land ahead of the leader's end, while that one
is in flight. An arrived request without an end is a violation, as is one that only the leader can end,
by the log. Check a drained log only.

A replica that stood still may serve a client whose stream another one ended as left. One that cannot
have a stream sends its client away, which need not return.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import (
    ClientRecord,
    Course,
    Violation,
    courses,
    events_of,
    log_of,
    of_clients,
)
from relume.chaos.validators.unacknowledged_requests import (
    UnacknowledgedRequests,
    UnreportedRequests,
    in_order,
)
from relume.chaos.validators.unwritten_decisions import broken_replicas
from relume.controlplane.gateway.http.routes import PROTECTED, UNPROTECTED
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome

PROMISE = "I1"
_UNTOLD = ("", "-", "multi")
"""Finish reasons without information."""
SLACK_TICKS = 5
"""Number of ticks within which the leader writes a due end."""
_FAILURES = (RequestOutcome.FAILED, RequestOutcome.REJECTED)
IN_FLIGHT = 2
"""Number of transactions that may land while the leader's is in flight."""
_SHOWN_AS = {"tool_calls": "stop"}
"""The engine's finish reason, by the one that its parser reports to the client."""


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    truth: GroundTruth | None = None,
) -> list[Violation]:
    """Violations in the log itself, then between log and clients."""
    found = courses(groups)
    broken, lost = broken_replicas(groups)
    unheard = UnacknowledgedRequests(groups, lost) if broken else None
    given_up = {
        f"r.{at.event.replica}": at.revision
        for at in events_of(groups, "fleet")
        if type(at.event) is v.ReplicaLost
    }
    unacknowledged = set(unheard.tokens) if unheard is not None else set()
    out = [
        Violation(PROMISE, c.request, text)
        for c in found.values()
        for text in _ends(c, unacknowledged, given_up)
    ]
    out += [Violation(PROMISE, name, "has no terminal event") for name in _left(groups)]
    unknown = []
    for client, course in of_clients(found, clients):
        if course is None:
            unknown += [client] if _answered(client, broken) else []
            continue
        for text in _agreement(client, course, broken):
            out.append(Violation(PROMISE, client.request, text))
    if unknown and broken and truth is not None:
        unreported = UnreportedRequests(groups, lost, truth)
        unknown = [client for client in unknown if not unreported.has(client)]
    for client in in_order(unknown):
        if unheard is None or not unheard.take(client):
            text = f"was answered {client.status}, the log does not know it"
            out.append(Violation(PROMISE, client.request, text))
    return out


def _answered(client: ClientRecord, broken: set[str]) -> bool:
    """Whether the log must have the client's request."""
    refused = client.status == 0 or client.status >= 400
    unheard = client.outcome in ("cut", "gone") and bool(broken)  # killed before it could write
    return not refused and not unheard


def _left(groups: Sequence[RevisionGroup]) -> list[str]:
    """Requests known from engines alone, which no leader ended in time."""
    end = log_of(groups).end
    due = [(name, one.due) for name, one in end.unacknowledged.items() if one.due and not one.ended]
    return [name for name, tick in due if end.tick - tick >= SLACK_TICKS]


def _ends(course: Course, unheard: set[str], given_up: Mapping[str, int]) -> list[str]:
    """`given_up`: streams of replicas that a leader declared dead, and at which revision."""
    by_leader = [at for at in course.ends if at.stream == "fleet"]
    by_owner = [at for at in course.ends if at.stream != "fleet"]
    texts = []
    if course.arrived is not None and not course.ends:
        texts.append("has no terminal event")
    if course.arrived is None and (by_owner or course.request not in unheard):
        texts.append("ended without having arrived")
    if len(by_owner) > 1:
        texts.append(f"has {len(by_owner)} terminal events of its gateway")
    if len(by_leader) > 1:
        texts.append(f"has {len(by_leader)} terminal events of the leader")
    if course.arrived is not None:
        for at in by_owner:
            if at.stream != course.owners[-1]:
                texts.append(f"was {course.owners[-1]}'s and was ended by {at.stream}")
    if by_owner and by_leader and by_owner[0].revision < by_leader[0].revision:
        came = course.arrived.revision if course.arrived is not None else 0
        written = by_owner[0].revision
        # It landed whole, or its gateway had just been declared dead.
        is_late = came == written or given_up.get(by_owner[0].stream, written) < written
        if not is_late or by_leader[0].revision - written > IN_FLIGHT:
            texts.append("was ended by the leader after its gateway had ended it")
    return texts


def _agreement(client: ClientRecord, course: Course, broken: set[str]) -> list[str]:
    end = course.end
    if end is None:
        return []  # reported already
    owner = course.owners[-1] if course.owners else ""
    unsaid = owner in broken and all(at.stream == "fleet" for at in course.ends)
    if unsaid and client.outcome == RequestOutcome.COMPLETED:
        return []  # killed between the last bytes and their record
    if unsaid and client.outcome in _FAILURES and not end.status:
        return []  # killed between the error and its record
    resumable = course.arrived is not None and bool(course.arrived.event.resumable)
    if client.outcome == RequestOutcome.CANCELLED and end.outcome in _FAILURES:
        if resumable or not client.status:
            return []  # it was absent when it failed
    if resumable and end.outcome == RequestOutcome.CANCELLED:
        if client.outcome in _FAILURES:
            return []  # another replica sent it away, and it did not return
        end = next((at.event for at in course.late_ends if _is_whole(client, at.event)), end)
    if client.outcome == "cut" and end.outcome == RequestOutcome.FAILED and _is_relayed(course):
        return []  # only a broken connection can show that such an answer will not come whole
    return _OUTCOMES[client.outcome](client, end, owner in broken)


def _is_whole(client: ClientRecord, end: v.RequestEnded) -> bool:
    """Whether a replica that stood still ended the request as its client saw, and had not read that
    another one had it meanwhile."""
    both = {client.outcome, end.outcome} == {RequestOutcome.COMPLETED}
    return both and end.tokens == client.token_count + client.other_tokens


def _is_relayed(course: Course) -> bool:
    arrived = course.arrived
    if arrived is None:
        return False
    return arrived.event.route not in PROTECTED or arrived.event.reason == UNPROTECTED


def _completed(client: ClientRecord, end: v.RequestEnded, broken: bool) -> list[str]:
    if end.outcome == RequestOutcome.FAILED and broken:
        return []  # killed between the last byte and its record
    if end.outcome != RequestOutcome.COMPLETED:
        return [f"its client has the whole answer, the log says {end.outcome}: {end.detail}"]
    texts = []
    counted = client.token_count + client.other_tokens
    if counted and end.tokens > 0 and counted != end.tokens:
        texts.append(f"its client counted {counted} tokens, the log {end.tokens}")
    finish = _SHOWN_AS.get(client.finish, client.finish)
    if finish and end.finish not in _UNTOLD and finish != end.finish:
        texts.append(f"its client was told {client.finish}, the log says {end.finish}")
    return texts


def _cancelled(client: ClientRecord, end: v.RequestEnded, broken: bool) -> list[str]:
    """A client that leaves may just have missed the end."""
    fine = end.outcome in (RequestOutcome.CANCELLED, RequestOutcome.COMPLETED) or (
        broken and end.outcome == RequestOutcome.FAILED
    )
    return [] if fine else [f"its client left, the log says {end.outcome}: {end.detail}"]


def _refused(client: ClientRecord, end: v.RequestEnded, broken: bool) -> list[str]:
    if end.outcome not in _FAILURES:
        return [f"its client was told of a failure, the log says {end.outcome}"]
    if client.status >= 400 and end.status != client.status:
        return [f"its client was answered {client.status}, the log says {end.status}"]
    return []


def _cut(client: ClientRecord, end: v.RequestEnded, broken: bool) -> list[str]:
    if not broken:
        return [f"its connection broke though its gateway lived; the log says {end.outcome}"]
    return []


def _gone(client: ClientRecord, end: v.RequestEnded, broken: bool) -> list[str]:
    """It was away for too long, or the log did not answer: it never had all of its answer."""
    if end.outcome == RequestOutcome.COMPLETED:
        return ["its client was told that its stream is gone, the log says completed"]
    if end.outcome == RequestOutcome.REJECTED:
        return []  # it was absent when every worker was full
    return _cancelled(client, end, True)


_OUTCOMES = {
    "completed": _completed,
    "cancelled": _cancelled,
    "failed": _refused,
    "rejected": _refused,
    "cut": _cut,
    "gone": _gone,
}
