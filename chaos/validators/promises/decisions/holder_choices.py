"""I8, about choices of holders: each is up, has room, and is in another failure domain than the
primary while a holder of another domain is up.

A holder is up if by the decision's basis its state daemon runs, and its host is there and does not
drain. It has room if its budget fits what it holds, what is still to come of other live requests
that were placed there, and what is expected of this one.

Exceptions:

- If no holder of another domain is up, one in the primary's domain is better than none. That the
  others have no room is no reason. The primary itself never holds its own checkpoint.
- A holder that the request had already may stay without room for the whole: it has a part.
- Of what is still to come, only placements count that the log has by the basis, and that still stand
  when the decision lands. The replica's own, which it has not written yet, are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from relume.chaos.validators.known_facts import KnownFacts, Placing


def wrong_holders(known: KnownFacts) -> Iterator[tuple[str, str, int]]:
    """Requests whose holders are wrong, why, and the revision."""
    for at in known.placings:
        for name, promised in zip(at.event.holders, at.promised, strict=True):
            if why := _why_not(known, at, name, promised):
                yield at.event.request, why, at.revision


def _why_not(known: KnownFacts, at: Placing, name: str, promised: int) -> str:
    event, revision = at.event, at.event.basis.revision
    if name == event.primary:
        return f"{name} is to hold the checkpoint of a request that runs there"
    if not is_up(known, name, revision):
        return f"{name} is chosen as holder and is not up"
    holder = known.holders[name]
    used, budget = holder.held.at(revision) + promised, holder.budget.at(revision)
    if name not in at.before and used + event.expected_bytes > budget:
        return f"{name} gets {event.expected_bytes} bytes and has {used} of at most {budget}"
    domain = _domain(known, event.primary, revision)
    if _domain(known, name, revision) != domain:
        return ""
    others = [
        other
        for other in known.holders
        if is_up(known, other, revision) and _domain(known, other, revision) != domain
    ]
    if others:
        return f"{name} is in the failure domain of {event.primary}; {', '.join(others)} was up"
    return ""


def is_up(known: KnownFacts, name: str, revision: int) -> bool:
    """Whether the daemon of `name` may get checkpoints by what is known at `revision`."""
    holder, worker = known.holders.get(name), known.workers.get(name)
    if holder is None or worker is None or not holder.up.at(revision):
        return False
    standing = worker.standing.at(revision)
    return standing.present and not standing.drains


def _domain(known: KnownFacts, name: str, revision: int) -> str:
    worker = known.workers.get(name)
    return worker.standing.at(revision).domain if worker is not None else ""
