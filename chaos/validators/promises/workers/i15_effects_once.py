"""I15: every effect is applied at most once, by the worker it is for, after it was decided.

Agents write `EffectApplied` before they acknowledge; `outcome` distinguishes an application
(`applied`) from a refusal, and from a target state that existed already.
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.records import ClientRecord, Violation, events_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup

PROMISE = "I15"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Effects applied twice, by another worker, or without a decision."""
    out = []
    decided: dict[tuple[str, int], v.Effect] = {}
    applied: dict[tuple[str, int], int] = {}
    for at in events_of(groups):
        event = at.event
        if type(event) is v.EffectsDecided:
            for index, effect in enumerate(event.effects, max(event.again, 0)):
                if decided.setdefault((event.decision, index), effect) != effect:
                    text = "was decided twice, differently"
                    out.append(Violation(PROMISE, event.decision, text, at.revision))
        elif type(event) is v.EffectApplied:
            key = event.decision, event.index
            name = f"{event.decision}#{event.index}"
            known = decided.get(key)
            if known is None:
                out.append(Violation(PROMISE, name, "was applied undecided", at.revision))
            elif at.stream != f"w.{known.worker}":
                text = f"is for {known.worker}, {at.stream} applied it"
                out.append(Violation(PROMISE, name, text, at.revision))
            if event.outcome == "applied":
                applied[key] = applied.get(key, 0) + 1
                if applied[key] > 1:
                    text = f"was applied {applied[key]} times"
                    out.append(Violation(PROMISE, name, text, at.revision))
    return out
