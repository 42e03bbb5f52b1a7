"""I2: a request's token stream equals the fault-free one, where its verdict is exact.

Compared are text, token ids, count and finish of every completed answer with those of
an undisturbed request that asked the same. What the verdict calls sampled, replayed or
restarted was not promised to be identical; what was disturbed must still be complete.
"""

from __future__ import annotations

from collections.abc import Sequence

from chaos.validators.records import ClientRecord, Violation, courses, of_clients
from events.log import RevisionGroup

PROMISE = "I2"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Answers that differ. An exact request without a counterpart cannot be judged, and a
    run where none could be compared although some should is itself a violation."""
    references: dict[str, ClientRecord] = {}
    for client in clients:
        if client.undisturbed and client.outcome == "completed" and client.asked:
            references.setdefault(client.asked, client)
    out: list[Violation] = []
    compared = eligible = 0
    for client, course in of_clients(courses(groups), clients):
        exact = course is None or course.arrived is None or course.arrived.event.verdict == "exact"
        if client.outcome != "completed" or not client.asked or not exact:
            continue
        reference = references.get(client.asked)
        if reference is client:
            continue
        eligible += 1
        if reference is None:
            continue
        compared += 1
        for text in _differences(reference, client):
            out.append(Violation(PROMISE, client.request, text))
    if eligible and not compared:
        out.append(Violation(PROMISE, "the run", f"none of {eligible} answers has a counterpart"))
    return out


def _differences(reference: ClientRecord, client: ClientRecord) -> list[str]:
    texts = []
    for name in ("tokens", "text"):
        ours, theirs = getattr(reference, name), getattr(client, name)
        if ours != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                min(len(ours), len(theirs)),
            )
            texts.append(f"{name} differ from {reference.request} at {at}")
    for name in ("token_count", "finish"):
        ours, theirs = getattr(reference, name), getattr(client, name)
        if ours != theirs:
            texts.append(f"{name} is {theirs!r}, {ours!r} in {reference.request}")
    return texts
