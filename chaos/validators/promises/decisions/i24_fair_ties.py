"""I24: ties rotate.

Where a dispatch lists workers that are equal in every number that the policies compare, and the
chosen one is among them, any of them would have been right. These numbers are the cost, the requests
and the uncomputed prompt tokens there, the part of this prompt that is cached there, and the
predicted TTFT. Over a run, equal workers get equal shares: of a tie of four, a quarter is due to
each. The bound is coarse, since several replicas draw by chance: a worker breaks it that got less
than one in `PART` of its due, and at least `LEAST_DUE` were due to it. Ties rotate with the
replica's dispatches. So if four requests come at once, again and again, four equal workers take them in
the same order each time: the last one is in each tie, gets none, and gets the fourth request, which is
no tie. Such ties do not count: those that begin a round whose distance from the last such tie, in
dispatches, is a multiple of the number of workers, of all or of those that are equal, and those that
follow within the round.

Exceptions: policies that go by something else than a number (a session, a draw of two workers, a
plan), and fleets so large that a decision does not list all workers. There the log does not show
that workers were equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from relume.chaos.validators.records import ClientRecord, Violation, log_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup

PROMISE = "I24"
POLICIES = frozenset(("least_load", "jsq", "predicted_ttft"))
LEAST_DUE = 12
"""By chance, a worker gets nothing of as many in one of 160,000 runs."""
PART = 16


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Workers that were passed over in ties."""
    ties: Counter[str] = Counter()
    got: Counter[str] = Counter()
    due: dict[str, float] = {}
    rounds: dict[str, Round] = {}
    for at in log_of(groups).known.dispatches:
        equal = _equal(at.event)
        listed = len(at.event.candidates)
        if not rounds.setdefault(at.stream, Round()).counts(at.event.worker, equal, listed):
            continue
        got[at.event.worker] += 1
        for name in equal:
            ties[name] += 1
            due[name] = due.get(name, 0.0) + 1 / len(equal)
    return [
        Violation(PROMISE, name, f"was in {ties[name]} ties, and got {got[name]} of the dispatches")
        for name, share in due.items()
        if share >= LEAST_DUE and PART * got[name] < share
    ]


class Round:
    """The ties of one replica that follow each other, each among those whom the one before left over."""

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._since = 0
        """Dispatches since the first tie of the round."""
        self._counts = True

    def counts(self, chosen: str, equal: list[str], listed: int) -> bool:
        """Whether the next dispatch, to one of `equal` of so many workers, is a tie that counts."""
        self._since += 1
        if len(equal) > 1 and not self._left.issuperset(equal):
            self._counts = bool(self._since % len(equal) and self._since % listed)
            self._since = 0
        self._left = set(equal) - {chosen}
        return self._counts and len(equal) > 1


def _equal(event: v.RouteDecided) -> list[str]:
    """The chosen worker and those that are equal to it, if the decision shows it."""
    if event.policy not in POLICIES or event.others:
        return []
    for chosen in event.candidates:
        if chosen.worker == event.worker:
            break
    else:
        return []
    if chosen.excluded:
        return []
    cost, numbers = chosen.cost, _numbers(chosen)
    return [
        other.worker
        for other in event.candidates
        if other.cost == cost and not other.excluded and _numbers(other) == numbers
    ]


def _numbers(candidate: v.Candidate) -> tuple[int, ...]:
    """What policies compare, apart from the cost."""
    return (
        candidate.prefill_tokens,
        candidate.requests,
        candidate.hit_tokens,
        candidate.ttft_us,
    )
