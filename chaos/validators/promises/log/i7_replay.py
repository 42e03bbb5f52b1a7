"""I7: replay gives identical decisions and state hash.

A log without a decision between alternatives, or without a state hash, proves nothing and fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.records import THE_RUN, ClientRecord, Violation
from relume.controlplane.replay.verify import verify
from relume.events.log.interface import RevisionGroup

PROMISE = "I7"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Divergences of a replay from the beginning."""
    verdict = verify(groups)
    out = [
        Violation(
            PROMISE,
            f"{d.stream}:{d.position}",
            f"{d.what}: recorded {d.expected}, replayed {d.actual}",
            d.revision,
        )
        for d in verdict.divergences
    ]
    if not verdict.contested:
        out.append(Violation(PROMISE, THE_RUN, "no decision had an alternative"))
    if not verdict.hashes:
        out.append(Violation(PROMISE, THE_RUN, "no state hash was recorded"))
    return out
