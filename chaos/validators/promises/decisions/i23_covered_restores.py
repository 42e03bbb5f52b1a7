"""I23: no restore is planned from a holder that does not have the blocks.

A plan of recoveries or migrations names for each request a holder, and how many tokens are restored
from it. By the plan's basis that holder's state daemon runs, and has acknowledged at least as many
tokens of every child of the request. What was evicted, dropped or voided since, or held by an
earlier life of the daemon, does not count.

There is no exception. What a holder loses after the basis is known to nobody when the plan is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relume.chaos.validators.known_facts import KnownFacts, Planning
from relume.chaos.validators.records import ClientRecord, Violation, log_of
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RecoveryKind

PROMISE = "I23"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Restores of blocks that the holder does not have."""
    known = log_of(groups).known
    return [found for at in known.plannings for found in _missing(known, at)]


def _missing(known: KnownFacts, at: Planning) -> Iterator[Violation]:
    revision = at.event.basis.revision
    for choice in at.event.choices:
        option = choice.options[choice.chosen] if choice.chosen >= 0 else None
        if option is None or option.kind != RecoveryKind.RESTORE:
            continue
        holder = known.holders.get(option.holder)
        tokens, _ = holder.has_of(choice.request, revision) if holder is not None else (0, 0)
        if option.restored > tokens:
            text = (
                f"{option.restored} tokens are to be restored from {option.holder}, which has "
                f"{tokens}"
            )
            yield Violation(PROMISE, choice.request, text, at.revision)
