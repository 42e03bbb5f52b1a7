"""What the fold makes of cross-checks: disputes, and who was contradicted in them.

A first difference is evidence against both engines. Then the engine that served the client answers
again: if it now agrees with the other one, its first answer was no lasting fault, and nothing is held
against anybody. A full batch can do that where kernels depend on it. Otherwise its new answer counts,
and further engines of the class are heard. Of three or more, more than half decide: each of the rest
is outvoted. The doubt about the others ends at once, else with right answers to canaries.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from relume.events.vocabulary import CrossCheckDecided, CrossChecked
from relume.events.vocabulary.enums import CheckCause
from relume.policies.crosscheck import check_budget
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from relume.policies.crosscheck.check_state import CheckRecord, Dispute, Opinion
from relume.policies.state.fleet import Fleet, Worker

MOST_DISPUTES = 32
"""Open disputes of the fleet; the oldest are forgotten."""
MOST_OPINIONS = 5
"""Engines heard in one dispute. Without a majority it ends there."""
MOST_REQUESTS = 16
"""Requests that are stored per worker."""
CHECK_TICKS = 60
"""Maximum time of one check; a replica that is gone does not end it."""
LONGEST_REST_MS = 600_000
"""Before version 2 of `cross_check`."""
HURRY_TICKS = 30
"""Canaries of one worker are sent at once so often at most: damage that they do not see brings one
dispute after another."""
DOUBT_TICKS = 120
"""Time for which a worker is in doubt after one of its answers differed, if nothing ends it."""


def record_of(worker: Worker) -> CheckRecord | None:
    """The checks of the worker's present incarnation."""
    record = worker.checks
    if isinstance(record, UnsetType):
        return None
    return record if record.incarnation == worker.incarnation else None


def begin(fleet: Fleet, event: CrossCheckDecided) -> None:
    """An engine answers a request again."""
    if (record := _record(fleet, event.by, event.by_incarnation)) is not None:
        record.busy_until = fleet.tick + CHECK_TICKS
        if check_budget.engines_save(fleet):
            record.is_paid = event.cause == CheckCause.SHARE


def take(fleet: Fleet, event: CrossChecked, config: CrossCheckConfig) -> list[Worker]:
    """What came of it; returns the workers about which something else is known now."""
    record = _record(fleet, event.by, event.by_incarnation)
    if record is not None:
        record.busy_until = -1
        if isinstance(record.is_paid, UnsetType):
            rest_ms = check_budget.saving_ms(event.took_us, config)
            record.rests_until_ms = fleet.tick_unix_ms + min(rest_ms, LONGEST_REST_MS)
        elif record.is_paid:
            check_budget.spend(record, event.took_us, fleet.tick_unix_ms, config)
            record.is_paid = False
    if event.error:
        return []
    disputes = {} if isinstance(fleet.disputes, UnsetType) else fleet.disputes
    dispute = disputes.get(event.request)
    if dispute is None:
        return _open(fleet, event) if event.differs >= 0 else []
    opinion = Opinion(event.by_incarnation, event.answer)
    if event.by != dispute.worker:
        dispute.others[event.by] = opinion
        if event.differs >= 0:
            _doubt(fleet, event.request, event.by, event.by_incarnation)
    elif event.by_incarnation == dispute.incarnation:
        dispute.again = opinion
        if any(opinion.answer == other.answer for other in dispute.others.values()):
            return _end(fleet, disputes, event.request, dispute)
    return _decide(fleet, disputes, event.request, dispute)


def expire(fleet: Fleet) -> None:
    """Forget old disputes and doubts. That a majority contradicted a worker is not forgotten, but alone
    it is no reason for doubt any more."""
    if isinstance(fleet.disputes, UnsetType):
        return
    begin = fleet.tick - DOUBT_TICKS
    fleet.disputes = {r: dispute for r, dispute in fleet.disputes.items() if dispute.tick >= begin}
    for worker in fleet.workers.values():
        if (record := record_of(worker)) is not None and record.disputed:
            record.disputed = {r: at for r, at in record.disputed.items() if at >= begin}
    if not fleet.disputes and not any(has_differed(w, fleet.tick) for w in fleet.workers.values()):
        fleet.disputes = UNSET


def has_differed(worker: Worker, tick: int) -> bool:
    """Whether an answer of it differed lately, and nothing has ended the doubt."""
    record = record_of(worker)
    if record is None:
        return False
    since = (*record.disputed.values(), *record.outvoted.values())
    return any(at >= tick - DOUBT_TICKS for at in since)


def answered_canary(worker: Worker) -> None:
    """A right answer to a canary. Enough of them end the doubt, but not what a majority said."""
    record = record_of(worker)
    if record is not None and record.disputed:
        record.owed -= 1
        if record.owed <= 0:
            record.disputed.clear()


def is_outvoted(record: CheckRecord | None, config: CrossCheckConfig) -> bool:
    """Whether majorities contradicted it often enough."""
    return record is not None and len(record.outvoted) >= config.confirm


def in_words(record: CheckRecord) -> str:
    """The evidence."""
    if record.outvoted:
        named = ", ".join(list(record.outvoted)[:3])
        count = len(record.outvoted)
        return (
            f"its answer{'s' if count > 1 else ''} to {count} request{'s' if count > 1 else ''} "
            f"({named}) differ{'' if count > 1 else 's'} from what most engines answer"
        )
    named = ", ".join(list(record.disputed)[:3])
    return f"it and another engine answer differently: {named}"


def just_opened(fleet: Fleet, event: CrossChecked) -> tuple[str, ...]:
    """The workers of a dispute that this check opened: their canaries are due."""
    if isinstance(fleet.disputes, UnsetType) or event.differs < 0:
        return ()
    dispute = fleet.disputes.get(event.request)
    if dispute is None or dispute.again is not None or list(dispute.others) != [event.by]:
        return ()
    return dispute.hurried


def _open(fleet: Fleet, event: CrossChecked) -> list[Worker]:
    """The answers differ."""
    served = fleet.workers.get(event.worker)
    if served is None or served.incarnation != event.incarnation or event.by == event.worker:
        return []
    if isinstance(fleet.disputes, UnsetType):
        fleet.disputes = {}
    fleet.disputes[event.request] = Dispute(
        worker=event.worker,
        incarnation=event.incarnation,
        tick=fleet.tick,
        others={event.by: Opinion(event.by_incarnation, event.answer)},
    )
    while len(fleet.disputes) > MOST_DISPUTES:
        del fleet.disputes[next(iter(fleet.disputes))]
    _doubt(fleet, event.request, event.worker, event.incarnation)
    _doubt(fleet, event.request, event.by, event.by_incarnation)
    both = [worker for n in (event.worker, event.by) if (worker := fleet.workers.get(n))]
    fleet.disputes[event.request].hurried = tuple(w.name for w in both if _hurry(fleet, w))
    return both


def _hurry(fleet: Fleet, worker: Worker) -> bool:
    """Whether its canaries are due now, because of a dispute."""
    record = record_of(worker)
    if record is None or (record.hurried >= 0 and fleet.tick - record.hurried < HURRY_TICKS):
        return False
    record.hurried = fleet.tick
    return True


def _doubt(fleet: Fleet, request: str, name: str, incarnation: int) -> None:
    """The answer of that engine is in dispute, until it has answered each canary of its class rightly."""
    if (record := _record(fleet, name, incarnation)) is not None:
        record.disputed[request] = fleet.tick
        record.owed = _canaries_of(fleet, name)
        while len(record.disputed) > MOST_REQUESTS:
            del record.disputed[next(iter(record.disputed))]


def _decide(
    fleet: Fleet, disputes: dict[str, Dispute], request: str, dispute: Dispute
) -> list[Worker]:
    """If more than half of three engines or more agree, the rest is outvoted."""
    heard = dict(dispute.others)
    if dispute.again is not None:
        heard[dispute.worker] = dispute.again
    concerned = [worker for name in heard if (worker := fleet.workers.get(name)) is not None]
    if len(heard) < 3:
        return concerned
    answers = [opinion.answer for opinion in heard.values()]
    common = max(answers, key=answers.count)
    if 2 * answers.count(common) <= len(answers):
        if len(heard) >= MOST_OPINIONS:
            del disputes[request]
        return concerned
    for name, opinion in heard.items():
        record = _record(fleet, name, opinion.incarnation)
        if record is None:
            continue
        record.disputed.pop(request, None)
        if opinion.answer != common:
            record.outvoted[request] = fleet.tick
            while len(record.outvoted) > MOST_REQUESTS:
                del record.outvoted[next(iter(record.outvoted))]
    del disputes[request]
    return concerned


def _end(
    fleet: Fleet, disputes: dict[str, Dispute], request: str, dispute: Dispute
) -> list[Worker]:
    """Nothing is held against anybody."""
    del disputes[request]
    concerned = []
    for name in (dispute.worker, *dispute.others):
        worker = fleet.workers.get(name)
        record = record_of(worker) if worker is not None else None
        if worker is not None and record is not None and request in record.disputed:
            del record.disputed[request]
            concerned.append(worker)
    return concerned


def _canaries_of(fleet: Fleet, name: str) -> int:
    """Number of canaries of the worker's class."""
    record = fleet.workers[name].canary
    if isinstance(record, UnsetType) or isinstance(fleet.canaries, UnsetType):
        return 1
    known = fleet.canaries.get(record.kind)
    return max(len(known.values), 1) if known is not None else 1


def _record(fleet: Fleet, name: str, incarnation: int) -> CheckRecord | None:
    """The worker's, if its present incarnation is meant."""
    worker = fleet.workers.get(name)
    if worker is None or worker.incarnation != incarnation:
        return None
    record = record_of(worker)
    if record is None:
        spent_ms = fleet.tick_unix_ms if check_budget.engines_save(fleet) else 0
        record = worker.checks = CheckRecord(incarnation=incarnation, rests_until_ms=spent_ms)
    return record
