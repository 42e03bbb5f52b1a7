"""I3: delivered token indices are 0, 1, 2, ...: no repetition, no gap.

From the client: where chunks name their first index, they join. From the log: each attempt
continues exactly after the tokens that the attempt before it had delivered, or after those that a
returning client has. The gateway's total equals the client's count (I1 compares them).
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.records import ClientRecord, Course, Violation, courses
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import AttemptMode, RequestOutcome

PROMISE = "I3"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Breaks in the delivered indices."""
    out = [Violation(PROMISE, c.request, text) for c in clients for text in _chunks(c)]
    for course in courses(groups).values():
        out += [Violation(PROMISE, course.request, text) for text in _attempts(course)]
    return out


def _chunks(client: ClientRecord) -> list[str]:
    if client.tokens and client.token_count and len(client.tokens) != client.token_count:
        return [f"{client.token_count} tokens counted, {len(client.tokens)} ids received"]
    if not client.starts:
        return []
    ends = [*client.starts[1:], client.token_count]
    if client.starts[0] != 0:
        return [f"begins with token {client.starts[0]}"]
    for start, end in zip(client.starts, ends, strict=True):
        if end <= start:
            return [f"token {end} comes after token {start}"]
    return []


def _attempts(course: Course) -> list[str]:
    texts = []
    # Each owner continues from what it knows: one that has not heard yet that the client went
    # elsewhere writes on.
    delivered = dict[str, int]()
    again: set[str] = set()  # owners whose answer is generated again
    returned = False
    is_whole = course.arrived is not None and not course.arrived.event.stream
    for at in course.events:
        event, before = at.event, delivered.get(at.stream, 0)
        if type(event) is v.TransportObserved:
            if event.delivered < before and at.stream not in again:
                texts.append(
                    f"attempt {event.attempt} had delivered {event.delivered} tokens, "
                    f"{before} were delivered before it"
                )
            delivered[at.stream] = event.delivered
            again.discard(at.stream)
        elif type(event) is v.ClientReturned:
            delivered[at.stream] = event.tokens  # the rest had not reached it
            returned = True
        elif type(event) is v.RouteDecided and event.worker and event.mode == AttemptMode.CONTINUE:
            if event.delivered != before:
                texts.append(
                    f"attempt {event.attempt} continues from {event.delivered}, "
                    f"{before} tokens were delivered"
                )
        elif type(event) is v.RouteDecided and event.mode == AttemptMode.NEW:
            # From its envelope; what the client has is not counted meanwhile. Of an answer in one
            # piece it has nothing.
            if returned or is_whole:
                again.add(at.stream)
            else:
                again.discard(at.stream)
            if event.delivered:
                texts.append(f"attempt {event.attempt} starts over with tokens delivered")
    end = course.end
    if end is not None and end.outcome == RequestOutcome.COMPLETED:
        had = delivered.get(course.owners[-1], 0) if course.owners else 0
        if 0 < end.tokens < had:
            texts.append(f"ended with {end.tokens} tokens, {had} were delivered before")
    return texts
