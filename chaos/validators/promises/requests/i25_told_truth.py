"""I25: what a client was told is what the log says, for every outcome.

I1 compares the outcome, the status of an answer that had not begun, and of a whole answer its tokens
and finish. This compares the rest, by the clients' records alone:

- A client that has the whole answer got the status in the log.
- A client that got an error, also in the middle of its stream, has as many tokens as the log says.
- A client that left, or was told that its stream is gone, has no more tokens than the log says.

And by what is known of a simulated run (`relume.chaos.validators.ground_truth`):

- The status and the words of an error, also in the middle of a stream, are those in the log. The log
  may give a reason after them. Of an engine's own refusal the log has the status alone, and of its
  answer on a relayed route too.
- A stream that is gone (410), or of which its replica did not know (503), had ended otherwise in the log:
  it was left, or failed. No other request gets 410.
- A replica's own counters of outcomes and of tokens are the sums over its ends in the log.

Exceptions:

- The replica was killed or declared lost: its last words may be missing, and the leader ended the
  request. What it counted is gone with it.
- A client that was absent: the end was not for it.
- A client that left, and had its last tokens from another replica than the one that ended the request:
  the return to that one was earlier, and came into the log later. It knows what its client had then.
- A client that returned may have a part of one more frame (`PART_OF_FRAME`).
- An answer in one piece, and one on a relayed route, shows its tokens only as a whole. The client
  of a worker that does not name its tokens counts what the log cannot.
- Ends that a replica writes for requests that it does not serve are not in its counters: `OTHERS`, and
  completed ends that it repeats from the replica that gave the client its stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from relume.chaos.validators.ground_truth import ClientCall, GroundTruth
from relume.chaos.validators.records import (
    ClientRecord,
    Course,
    Entry,
    Violation,
    courses,
    events_of,
    has_unnamed_tokens,
    log_of,
    of_clients,
)
from relume.chaos.validators.unwritten_decisions import broken_replicas
from relume.controlplane.stream.error_codes import NOT_KNOWN
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome

PROMISE = "I25"
GONE = 410
MOST_DETAIL = 200
"""Maximum length of an end's detail in the log."""
OF_WORKER = "worker answered"
"""How an end begins whose error is its engine's own."""
OTHERS = "the log was too late"
"""How an end ends that a replica writes for a request that it does not serve."""
FAILURES = (RequestOutcome.FAILED, RequestOutcome.REJECTED)
PART_OF_FRAME = 3
"""Tokens that the client of a resumable stream may have of a frame that it did not get whole: the
position with which it returns counts whole frames."""
IN_ONE_PIECE = frozenset(("whole", "relayed", "restarting", "unnamed"))


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    truth: GroundTruth | None = None,
) -> list[Violation]:
    """Differences between what clients were told and the log."""
    log = log_of(groups)
    broken, _ = broken_replicas(log)
    calls = truth.calls if truth is not None else {}
    found = []
    for client, course in of_clients(courses(log), clients):
        end = course.end if course is not None else None
        call = calls.get(client.request)
        if course is None or end is None or _is_unsaid(course, broken):
            continue
        texts = [*_of_record(client, call, course, end)]
        if call is not None and call.status:
            texts += _of_error(call, end)
        found += [Violation(PROMISE, client.request, text) for text in texts]
    if truth is not None:
        found += _of_counters(log, truth)
    return found


def _is_unsaid(course: Course, broken: set[str]) -> bool:
    """Whether its replica's last words may be missing."""
    return bool(broken.intersection(course.owners)) or all(
        at.stream == "fleet" for at in course.ends
    )


def _of_record(
    client: ClientRecord, call: ClientCall | None, course: Course, end: v.RequestEnded
) -> Iterator[str]:
    counted = client.token_count + client.other_tokens
    if client.outcome == RequestOutcome.COMPLETED:
        if client.status and end.outcome == client.outcome and client.status != end.status:
            yield f"its client was answered {client.status}, the log says {end.status}"
        return
    if (
        end.tokens < 0
        or has_unnamed_tokens(end)
        or client.outcome == "cut"
        or (call and call.kind in IN_ONE_PIECE)
    ):
        return
    more = counted - end.tokens
    most = PART_OF_FRAME if call is None or call.kind == "resumable" else 0
    if client.outcome in FAILURES and end.outcome in FAILURES:
        if not 0 <= more <= most:
            yield f"its client counted {counted} tokens when it failed, the log {end.tokens}"
    elif more > most and not _was_elsewhere_later(call, course, end):
        yield f"its client counted {counted} tokens when it left, the log {end.tokens}"


def _was_elsewhere_later(call: ClientCall | None, course: Course, end: v.RequestEnded) -> bool:
    """Whether another replica gave the client its last tokens, and the one that ended the request has
    it by an earlier return, which came into the log after that one's: it says what it knows."""
    if call is None or call.served_by not in course.owners[1:-1]:
        return False
    owner = course.owners[-1]
    if call.served_by == owner or all(at.stream != owner for at in course.ends):
        return False  # another's end
    events = [at.event for at in course.events if at.stream == owner]
    returns = [event for event in events if type(event) is v.ClientReturned]
    return bool(returns) and returns[-1].tokens == end.tokens


def _of_error(call: ClientCall, end: v.RequestEnded) -> Iterator[str]:
    if call.status == GONE or call.message in NOT_KNOWN:
        if end.outcome == RequestOutcome.COMPLETED:
            yield f"its client was told {call.status}, the log says {end.outcome}"
        return
    if call.status != end.status:
        yield f"its client was told {call.status}, the log says {end.status}"
    elif not _are_same(call.message, end.detail):
        yield f"its client was told {call.message!r}, the log says {end.detail!r}"


def _are_same(message: str, detail: str) -> bool:
    """Whether the log has the words of an error; those of an engine it never has."""
    if not message:
        return not detail
    return detail.startswith((message[:MOST_DETAIL], OF_WORKER))


def _of_counters(log: Sequence[RevisionGroup], truth: GroundTruth) -> Iterator[Violation]:
    """Replicas whose counters differ from their ends in the log."""
    sums: dict[str, Counter[str]] = {}
    ends: dict[str, Entry] = {}
    for at in events_of(log, "r."):
        event = at.event
        if type(event) is v.ReplicaStarted:
            sums[at.stream] = Counter()
        elif type(event) is v.RequestEnded and OTHERS not in event.detail:
            first = ends.setdefault(event.request, at)
            is_repeated = first.stream != at.stream and first.event == event
            if is_repeated and event.outcome == RequestOutcome.COMPLETED:
                continue
            counts = sums.setdefault(at.stream, Counter())
            counts[event.outcome] += 1
            counts["tokens"] += max(event.tokens, 0)
    for stream, counted in truth.counted.items():
        written = sums.get(stream, Counter())
        for name, count in counted.items():
            if written[name] != count:
                text = f"its replica counted {count} for {name}, the log {written[name]}"
                yield Violation(PROMISE, stream, text)
