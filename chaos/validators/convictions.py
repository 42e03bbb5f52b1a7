"""What in the log convicts an engine of computing wrong results, counted without the policies.

Either two other engines agree against its answers to two requests that were answered again, or two
of its answers to canaries differ from its own first ones while two other workers answer canaries too.
Less than this permits no verdict: of two engines that differ, either may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.corrupt_engines import Engine
from relume.chaos.validators.records import events_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup

ENOUGH = 2
"""Requests, canaries, and other engines."""


def conviction(groups: Sequence[RevisionGroup], engine: Engine) -> str:
    """The evidence, in words; empty if there is not enough."""
    if count := _contradicted(groups, engine):
        return f"two other engines agree against its answers to {count} requests"
    if count := _canaries(groups, engine):
        return f"{count} of its answers to canaries differ from its first ones"
    return ""


def _contradicted(groups: Sequence[RevisionGroup], engine: Engine) -> int:
    """Requests that it answered otherwise than two other engines; 0 for too few."""
    served: dict[str, bytes] = {}
    others: dict[tuple[str, bytes], set[str]] = {}
    for at in events_of(groups, "r."):
        event = at.event
        if type(event) is v.CrossCheckDecided:
            if (event.worker, event.incarnation) == engine:
                served[event.request] = event.answer
        elif type(event) is v.CrossChecked and event.answer and event.by != engine[0]:
            others.setdefault((event.request, event.answer), set()).add(event.by)
    contradicted = {
        request
        for (request, answer), names in others.items()
        if len(names) >= ENOUGH and served.get(request, answer) != answer
    }
    return len(contradicted) if len(contradicted) >= ENOUGH else 0


def _canaries(groups: Sequence[RevisionGroup], engine: Engine) -> int:
    """Its answers to canaries that differ from its first ones; 0 for too few, or too few others."""
    first: dict[tuple[int, int], tuple[tuple[int, ...], tuple[float, ...]]] = {}
    differ, others = 0, set()
    for at in events_of(groups, "w."):
        event = at.event
        if type(event) is not v.CanaryReported or event.error:
            continue
        if event.worker != engine[0]:
            others.add(event.worker)
        elif event.incarnation == engine[1]:
            answer = event.tokens, event.logprobs
            differ += first.setdefault((event.prompts, event.canary), answer) != answer
    return differ if min(differ, len(others)) >= ENOUGH else 0
