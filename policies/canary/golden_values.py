"""Golden values: what the workers of a class answer to a canary, by their own majority.

Theory of operation. A class is a model, a digest of its weights, a build and hardware: its workers
compute the same. The latest answers of its workers are compared. If more than half of the workers of
the class agree, and at least two do, their answer is golden, and those workers are its witnesses.
Exact answers come first: others are witnesses only if there is no majority of exact ones. A
class of one worker takes that worker's own first answer; it waits for the first canaries of others
that may be of the class. Such values have one witness, and a second worker that differs is only
doubtful, because either of the two may be wrong. If all workers of a class answered and there is no
majority, all are doubtful.

A majority that agrees on something else replaces the values, in a new version. This happens when a
class of one grows, and when all its workers load other weights in place. A majority of exact answers
also replaces values that are not exact, which hide small differences. One wrong worker cannot replace
them. So the first worker whose weights change in place is wrong, and quarantined, until the majority
has changed too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UnsetType

from relume.events.vocabulary import CanaryValuesDecided
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.canary.canary_state import CanaryAnswer, CanaryValues, ClassValues
from relume.policies.canary.comparison import agree, difference, values_like
from relume.policies.state.fleet import Fleet, Worker


def members(fleet: Fleet, kind: str) -> list[Worker]:
    """Serving workers of the class."""
    return [
        worker
        for worker in fleet.workers.values()
        if worker.present
        and worker.engine == EnginePhase.READY
        and not isinstance(worker.canary, UnsetType)
        and worker.canary.kind == kind
        and worker.canary.incarnation == worker.incarnation
    ]


def _answers_of(peers: list[Worker], canary: int) -> dict[str, CanaryAnswer]:
    return {
        worker.name: worker.canary.answers[canary]
        for worker in peers
        if not isinstance(worker.canary, UnsetType) and canary in worker.canary.answers
    }


def find_due(
    fleet: Fleet, kind: str, known: ClassValues, canary: int, tolerance: float
) -> CanaryValuesDecided | None:
    """The values that the leader has to write for one canary of a class; None: those it has
    stand, or there are too few answers."""
    peers = members(fleet, kind)
    answers = _answers_of(peers, canary)
    exact = {name: answer for name, answer in answers.items() if answer.exact}
    agreed = _majority(fleet, peers, exact, tolerance)
    agreed = agreed or _majority(fleet, peers, answers, tolerance)
    if not agreed:
        return None
    found = [answers[name] for name in agreed]
    values = known.values.get(canary)
    if values is not None and _stand(values, found, tolerance):
        return None
    return CanaryValuesDecided(
        kind=kind,
        canary=canary,
        version=known.owed.get(canary, 0) + 1,
        tokens=found[0].tokens,
        low=_bounds(found, min),
        high=_bounds(found, max),
        exact=all(answer.exact for answer in found),
        witnesses=tuple(agreed),
        workers=len(peers),
    )


def _stand(values: CanaryValues, found: list[CanaryAnswer], tolerance: float) -> bool:
    """Whether the values hold on, although workers agree on `found`."""
    differ = all(difference(answer, values, tolerance) for answer in found)
    sharper = not values.exact and all(answer.exact for answer in found)
    own = len(values.witnesses) == 1
    if len(found) == 1:  # a lone worker does not replace what it is compared with
        return differ or not (sharper and own)
    return not (own or differ or sharper)


def _are_all(fleet: Fleet, peers: list[Worker]) -> bool:
    """Whether no other worker may turn out to be of the class of `peers`."""
    return not any(
        other.present
        and other.engine == EnginePhase.READY
        and other.steps_like == peers[0].steps_like
        and (isinstance(other.canary, UnsetType) or other.canary.incarnation != other.incarnation)
        for other in fleet.workers.values()
        if other not in peers
    )


def find_undecided(
    fleet: Fleet, kind: str, known: ClassValues, canary: int, tolerance: float
) -> dict[str, str]:
    """The workers of a class that all answered a canary without any majority, so that there are no
    values: each with what differs from the first other answer."""
    peers = members(fleet, kind)
    answers = _answers_of(peers, canary)
    if canary in known.values or known.owed.get(canary, 0):
        return {}
    if not 1 < len(peers) == len(answers) or not _are_all(fleet, peers):
        return {}
    found = {}
    for name, answer in answers.items():
        others = (values_like(other) for at, other in answers.items() if at != name)
        differences = (difference(answer, values, tolerance) for values in others)
        found[name] = next(filter(None, differences), "no number")
    return found


def _majority(
    fleet: Fleet, peers: list[Worker], answers: dict[str, CanaryAnswer], tolerance: float
) -> list[str]:
    """The workers that agree, if they are enough to say what is right."""
    agreed = _largest(answers, tolerance)
    enough = len(agreed) > 1 or (len(peers) == 1 and _are_all(fleet, peers))
    return agreed if enough and 2 * len(agreed) > len(peers) else []


def _largest(answers: dict[str, CanaryAnswer], tolerance: float) -> list[str]:
    """The workers of the largest group that agrees; of equal ones the first. Answers that are no
    numbers agree with nothing, not even with themselves."""
    best: list[str] = []
    for answer in answers.values():
        group = [name for name, other in answers.items() if agree(answer, other, tolerance)]
        if len(group) > len(best):
            best = group
    return best


def _bounds(
    found: Sequence[CanaryAnswer], choose: Callable[[tuple[float, ...]], float]
) -> tuple[float, ...]:
    like = [answer for answer in found if answer.tokens == found[0].tokens]
    return tuple(choose(column) for column in zip(*(a.logprobs for a in like), strict=True))


def values_of(event: CanaryValuesDecided, since: int | UnsetType) -> CanaryValues:
    """As the fold has them."""
    return CanaryValues(
        version=event.version,
        tokens=event.tokens,
        low=event.low,
        high=event.high,
        exact=event.exact,
        witnesses=event.witnesses,
        since=since,
    )
