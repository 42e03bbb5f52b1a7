"""I10: recovery ends within its bound.

From the log: what was cut (a connection observed broken, an engine dead under it) gets
its next first token, or an honest end, within `bound_ms`. From the clients: no gap in a
completed stream is longer. Times are those of the segments, so hosts' clocks must agree
to much better than the bound; one machine's do.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaos.validators.records import ClientRecord, Course, Violation, courses, events_of
from events import vocabulary as v
from events.log import RevisionGroup

PROMISE = "I10"
BOUND_MS = 10_000
"""Stall bound (3 s), waiting for a worker that restarts, and recomputing."""


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    bound_ms: int = BOUND_MS,
) -> list[Violation]:
    """Recoveries that took too long or never ended."""
    out = []
    first_tokens: dict[tuple[str, int], int] = {}
    died: dict[tuple[str, int], int] = {}
    for at in events_of(groups, "w."):
        if type(at.event) is v.EngineDied:
            died[at.event.worker, at.event.incarnation] = at.at_ms
        elif type(at.event) is v.EngineStep:
            for change in at.event.changes:
                if type(change) is v.FirstToken:
                    first_tokens[change.request, change.attempt] = at.at_ms
    for course in courses(groups).values():
        for text in _recoveries(course, first_tokens, died, bound_ms):
            out.append(Violation(PROMISE, course.request, text))
    for client in clients:
        longest = max(client.gaps_ms, default=0.0)
        if client.outcome == "completed" and longest > bound_ms:
            text = f"its client waited {longest:.0f} ms between tokens, bound {bound_ms} ms"
            out.append(Violation(PROMISE, client.request, text))
    return out


def _recoveries(
    course: Course,
    first_tokens: dict[tuple[str, int], int],
    died: dict[tuple[str, int], int],
    bound_ms: int,
) -> list[str]:
    texts = []
    cuts = [at for at in course.events if type(at.event) is v.TransportObserved]
    end_ms = course.ends[0].at_ms if course.ends else -1
    for index, cut in enumerate(cuts):
        event = cut.event
        begun = min(cut.at_ms, died.get((event.worker, event.incarnation), cut.at_ms))
        following = cuts[index + 1].at_ms if index + 1 < len(cuts) else end_ms
        back = first_tokens.get((course.request, event.attempt + 1), following)
        if back < 0:
            texts.append(f"attempt {event.attempt} was cut, and nothing followed")
        elif back - begun > bound_ms:
            texts.append(
                f"took {back - begun} ms to recover from {event.kind} on {event.worker}, "
                f"bound {bound_ms} ms"
            )
    return texts
