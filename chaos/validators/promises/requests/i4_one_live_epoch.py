"""I4: one live epoch per request: one gateway owns it at a time (another one after its client
returned there), and one attempt of it is live.

Attempts are numbered 1, 2, ... The gateway dispatches a further one only after it has given up
the one before. It dispatches nothing after the end. An engine accepts an attempt only if the
dispatch named it and its incarnation.
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.records import ClientRecord, Course, Violation, courses
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup

PROMISE = "I4"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Requests with two owners, two live attempts, or an engine that was never chosen."""
    out = []
    for course in courses(groups).values():
        texts = [*_owners(course), *_attempts(course), *_engines(course)]
        out += [Violation(PROMISE, course.request, text) for text in texts]
    return out


def _owners(course: Course) -> list[str]:
    streams = {at.stream for at in course.events if at.stream != "fleet"}
    if len(streams) > 1 and streams - set(course.owners):
        return [f"has events of {' and '.join(sorted(streams))}"]
    leader = [at for at in course.events if at.stream == "fleet"]
    if any(type(at.event) is not v.RequestEnded for at in leader):
        return ["is served by the leader's stream"]
    return []


def _attempts(course: Course) -> list[str]:
    texts = []
    live = last = 0
    over = False
    for at in course.events:
        event = at.event
        if type(event) is v.RequestEnded:
            over = over or at.stream != "fleet"
        elif type(event) is v.TransportObserved:
            if event.attempt == live:
                live = 0
        elif type(event) is v.RouteDecided and event.worker:
            if over:
                texts.append(f"attempt {event.attempt} was dispatched after the end")
            if live:
                texts.append(f"attempt {event.attempt} was dispatched while {live} was live")
            if event.attempt != last + 1:
                texts.append(f"attempt {event.attempt} follows attempt {last}")
            live = last = event.attempt
    return texts


def _engines(course: Course) -> list[str]:
    chosen = {d.attempt: (d.worker, d.incarnation) for d in course.decisions}
    takers: dict[int, set[tuple[str, int]]] = {}
    for at, attempt in course.queued:
        takers.setdefault(attempt, set()).add((at.stream[2:], at.event.incarnation))
    texts = []
    for attempt, engines in takers.items():
        for worker, incarnation in sorted(engines):
            if attempt in chosen and chosen[attempt] != (worker, incarnation):
                name, life = chosen[attempt]
                texts.append(
                    f"attempt {attempt} was sent to {name}:{life} "
                    f"and taken by {worker}:{incarnation}"
                )
        if len(engines) > 1:
            texts.append(f"attempt {attempt} was taken by {len(engines)} engines")
    return texts
