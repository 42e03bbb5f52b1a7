"""I18: nothing is dispatched to a worker that the decision's basis knows as drained, suspected or
lost, and no request goes back at once to the engine that failed it.

The basis knows the log up to its revision, and of the deciding replica's own events those up to its
position (`chaos.validators.known_facts`). By this knowledge the engine that is chosen is the
worker's present one and serves the model, the host is there and does not drain, its agent wrote
nothing that cannot be read (or an operator trusts the worker since), and this replica does not suspect
the engine. It does not matter whether another worker is left: without one, the
request waits. Open and half-open breakers and quarantines are checked by I9, on the same basis. Decisions
about spares are checked in `i18_spares`.

Exceptions:

- What another replica suspects does not count. Each replica suspects for itself.
- What became known after the basis does not count: an engine may have died meanwhile.
- A request that a plan moves off a draining worker may return there. This holds for the attempt
  after that plan only, and if no other worker could take the request. It does not hold if the
  attempt failed before the handover, or if the client returned to another replica: then the request
  waits.
- A request that is not of tier batch goes to a spare at its first attempt only if no other worker
  could take it.
- A request may go back to an engine that failed it, if no other worker could take the request.
  A handover (`moved`) is no failure. Only failures that this replica recorded count: one to which
  a client returns from another knows none of them.

A worker could take a request if by the same basis all of the above holds for it, and no breaker,
probe or quarantine is against it, no request failed on its engine by an error, and this request
never failed there. A server without the plugin cannot continue a stream. Load does not count:
a full worker could take the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relume.chaos.validators.known_facts import (
    EXCLUDED,
    Dispatch,
    KnownFacts,
    KnownWorker,
)
from relume.chaos.validators.promises.decisions import i18_spares
from relume.chaos.validators.records import ClientRecord, Violation, log_of
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EnginePhase, HealthState, Tier

PROMISE = "I18"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Dispatches that their basis speaks against."""
    log = log_of(groups)
    known = log.known
    found = [
        Violation(PROMISE, f"{at.event.request}/{at.event.attempt}", why, at.revision)
        for at in known.dispatches
        if (why := _why_not(known, at))
    ]
    spares = i18_spares.unsound(log) if known.spares else ()
    return [*found, *(Violation(PROMISE, *about) for about in spares)]


def _why_not(known: KnownFacts, at: Dispatch) -> str:
    event = at.event
    name, incarnation = event.worker, event.incarnation
    worker = known.workers.get(name, None) or KnownWorker()
    if why := _against(known, at, name, worker):
        if why != "it drains" or name != at.left or any(_others(known, at)):
            return f"sent to {name}:{incarnation} although {why}"
    if (name, incarnation) in at.failed and (other := next(_others(known, at), "")):
        return f"sent back to {name}:{incarnation}, which failed it, and {other} could take it"
    if event.attempt == 1 and event.tier != Tier.BATCH and name in (spares := _spares(known, at)):
        instead = (n for n in _others(known, at) if n not in spares and _can_do(known, at, n, name))
        if other := next(instead, ""):
            return f"sent to {name}, which is a spare, and {other} could take it"
    return ""


def _spares(known: KnownFacts, at: Dispatch) -> tuple[str, ...]:
    decided = known.spares.get(at.event.model)
    return decided.at(at.event.basis.revision) if decided is not None else ()


def _can_do(known: KnownFacts, at: Dispatch, name: str, spare: str) -> bool:
    """Whether the worker can do what the spare can: one without the plugin may not."""
    revision = at.event.basis.revision
    plain, instead = (known.workers[n].standing.at(revision).plain for n in (spare, name))
    return plain or not instead


def _against(known: KnownFacts, at: Dispatch, name: str, worker: KnownWorker) -> str:
    """What the basis has against the worker's engine; empty: nothing."""
    event, standing = at.event, worker.standing.at(at.event.basis.revision)
    if name == event.worker and standing.incarnation != event.incarnation:
        return f"its engine is {standing.incarnation}"
    if standing.engine != EnginePhase.READY:
        return f"its engine is {standing.engine}"
    if standing.model != event.model:
        return f"it serves {standing.model}"
    if not standing.present:
        return "it is lost"
    if known.suspect(at.stream, name, event.basis.position) == standing.incarnation:
        return "the replica suspects it"
    if standing.unreadable:
        return "its agent wrote what cannot be read"
    return "it drains" if standing.drains else ""


def _others(known: KnownFacts, at: Dispatch) -> Iterator[str]:
    """Other workers that could take the request, by the same basis."""
    event = at.event
    for name, worker in known.workers.items():
        if name == event.worker or _against(known, at, name, worker):
            continue
        standing = worker.standing.at(event.basis.revision)
        place = name, standing.incarnation
        if place in at.failed or known.failing.get(place, at.failing) < at.failing:
            continue
        if standing.plain and event.delivered:
            continue
        health = worker.health.at(event.basis.revision)
        if health is None or health.state not in (*EXCLUDED, HealthState.PROBING):
            yield name
