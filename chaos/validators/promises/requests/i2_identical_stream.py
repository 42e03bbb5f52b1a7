"""I2: a request's token stream equals the fault-free one, if its resume guarantee is exact.

The validator compares text, token ids, count and finish of every completed answer with those of an
equal undisturbed request. Of an answer that did not complete, it compares the received token ids
with the beginning of that answer: its length is unknown. Guarantees sampled, replay and restart do
not promise identical answers; disturbed answers must still be complete.

Requests that got tokens from a corrupt worker are judged by I14 instead, also those whose gateway was
killed before it wrote of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.corrupt_engines import CorruptSince, served, unwritten, verdicts
from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import THE_RUN, ClientRecord, Violation, courses, of_clients
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import Guarantee, RequestOutcome

PROMISE = "I2"


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    corrupt: Sequence[CorruptSince] = (),
    truth: GroundTruth | None = None,
    began_ms: int = 0,
) -> list[Violation]:
    """Answers that differ. An exact request without a counterpart cannot be judged. A run with
    exact answers of which none could be compared is itself a violation. `corrupt`: see
    `corrupt_engines.verdicts`; `truth` and `began_ms`: see `corrupt_engines.unwritten`."""
    of_corrupt = served(groups, verdicts(groups, corrupt))
    unknown = unwritten(groups, corrupt, truth, began_ms)
    references: dict[str, ClientRecord] = {}
    for client in clients:
        if client.undisturbed and client.outcome == RequestOutcome.COMPLETED and client.content_id:
            references.setdefault(client.content_id, client)
    out: list[Violation] = []
    compared = eligible = 0
    for client, course in of_clients(courses(groups), clients):
        exact = (
            course is None
            or course.arrived is None
            or course.arrived.event.verdict == Guarantee.EXACT
        )
        reference = references.get(client.content_id)
        if not client.content_id or not exact or reference is client:
            continue
        if client.request in unknown or (course is not None and course.request in of_corrupt):
            continue
        if client.outcome != RequestOutcome.COMPLETED:
            if reference is not None and (at := _unlike(reference.tokens, client.tokens)) >= 0:
                text = f"tokens differ from {reference.request} at {at}"
                out.append(Violation(PROMISE, client.request, text))
            continue
        eligible += 1
        if reference is None:
            continue
        compared += 1
        out.extend(
            Violation(PROMISE, client.request, text) for text in _differences(reference, client)
        )
    if eligible and not compared:
        out.append(Violation(PROMISE, THE_RUN, f"none of {eligible} answers has a counterpart"))
    return out


def _unlike(reference: Sequence[int], beginning: Sequence[int]) -> int:
    """First position where `beginning` and `reference` differ; -1: none, or unknown."""
    if not reference or reference[: len(beginning)] == beginning:
        return -1
    pairs = enumerate(zip(reference, beginning, strict=False))
    return next((i for i, (a, b) in pairs if a != b), len(reference))


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
