"""What the fold makes of canaries: each worker's answers, compared with the golden values.

An answer that comes before its class has values is compared when they are decided; so is each
latest answer when values are replaced. An engine that starts begins anew.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from relume.events.vocabulary import CanaryReported, CanaryValuesDecided
from relume.policies.canary import golden_values
from relume.policies.canary.canary_settings import CanaryConfig
from relume.policies.canary.canary_state import CanaryAnswer, CanaryRecord, ClassValues
from relume.policies.canary.comparison import difference
from relume.policies.state.fleet import Fleet, Worker

MOST_CANARIES = 16
"""Canaries that are stored per worker and per class; more are not taken."""
MOST_CLASSES = 64
"""Classes beyond this number are stored only while they have workers."""


def kind_of(worker: Worker, event: CanaryReported) -> str:
    """The class whose workers answer alike."""
    return f"{worker.steps_like}/{event.weights}/{event.prompts}"


def store_answer(fleet: Fleet, worker: Worker, event: CanaryReported) -> CanaryRecord | None:
    """The worker answered a canary: its record, with the answer. None: it is not taken."""
    if not 0 <= event.canary < MOST_CANARIES:
        return None
    kind, record = kind_of(worker, event), worker.canary
    if (
        isinstance(record, UnsetType)
        or record.kind != kind
        or record.incarnation != worker.incarnation
    ):
        record = worker.canary = CanaryRecord(kind=kind, incarnation=worker.incarnation)
    record.answers[event.canary] = CanaryAnswer(
        tokens=event.tokens,
        logprobs=event.logprobs,
        exact=event.exact and event.alone,
        tick=fleet.tick,
    )
    if isinstance(fleet.canaries, UnsetType):
        fleet.canaries = {}
    if kind not in fleet.canaries:
        _drop_oldest(fleet, fleet.canaries)
        fleet.canaries[kind] = ClassValues()
    return record


def _drop_oldest(fleet: Fleet, classes: dict[str, ClassValues]) -> None:
    """Forget classes without workers, the oldest first, if there are too many."""
    for kind in list(classes):
        if len(classes) < MOST_CLASSES:
            return
        if not golden_values.members(fleet, kind):
            del classes[kind]


def take_answer(
    fleet: Fleet, worker: Worker, event: CanaryReported, config: CanaryConfig
) -> CanaryValuesDecided | None:
    """The same, and the answer is compared; returns the values that the leader has to write."""
    record = store_answer(fleet, worker, event)
    if record is None or isinstance(fleet.canaries, UnsetType):
        return None
    known, answer = fleet.canaries[record.kind], record.answers[event.canary]
    _compare(worker.name, record, known, event.canary, answer, config, anew=True)
    return find_due(fleet, record.kind, known, event.canary, config)


def find_due(
    fleet: Fleet, kind: str, known: ClassValues, canary: int, config: CanaryConfig
) -> CanaryValuesDecided | None:
    """The values of one canary that the leader has to write, once."""
    values = known.values.get(canary)
    if known.owed.get(canary, 0) > (values.version if values is not None else 0):
        return None  # they are on their way
    decision = golden_values.find_due(fleet, kind, known, canary, tolerance_of(config))
    if decision is not None:
        known.owed[canary] = decision.version
    return decision


def mark_undecided(fleet: Fleet, kind: str, canary: int, config: CanaryConfig) -> list[Worker]:
    """Every worker of a class without a majority is doubtful, because each may be the wrong one.
    Returns those that were not before."""
    if isinstance(fleet.canaries, UnsetType) or (known := fleet.canaries.get(kind)) is None:
        return []
    tolerance, marked = tolerance_of(config), []
    for name, what in golden_values.find_undecided(fleet, kind, known, canary, tolerance).items():
        record = record_of(fleet.workers[name])
        if record is not None and canary not in record.doubtful:
            record.what, record.good, record.doubtful[canary] = what, 0, 0
            marked.append(fleet.workers[name])
    return marked


def mark_all_undecided(fleet: Fleet, config: CanaryConfig) -> list[Worker]:
    """The same for all classes, under a new leader."""
    classes = {} if isinstance(fleet.canaries, UnsetType) else fleet.canaries
    return [
        worker
        for kind in classes
        for canary in range(MOST_CANARIES)
        for worker in mark_undecided(fleet, kind, canary, config)
    ]


def record_values(
    fleet: Fleet, event: CanaryValuesDecided, config: CanaryConfig, dated: bool
) -> list[tuple[Worker, bool]]:
    """Golden values hold from here on; returns the workers whose answers were compared anew, and
    whether no answer of them is wrong any more. Where they replace those of a majority, an answer that
    was right before is only doubtful until the next one: it may be from before a change."""
    if isinstance(fleet.canaries, UnsetType):
        fleet.canaries = {}
    known = fleet.canaries.setdefault(event.kind, ClassValues())
    before = known.values.get(event.canary)
    since: int | UnsetType = fleet.tick if dated else UNSET
    if before is not None and before.witnesses == event.witnesses:
        since = before.since
    known.values[event.canary] = golden_values.values_of(event, since)
    known.owed[event.canary] = event.version
    compared = []
    for worker in fleet.workers.values():
        record = worker.canary
        if isinstance(record, UnsetType) or record.kind != event.kind:
            continue
        if (answer := record.answers.get(event.canary)) is not None:
            was_wrong = event.canary in record.wrong
            was_right = (
                before is not None
                and len(before.witnesses) > 1
                and before.exact == event.exact
                and not difference(answer, before, tolerance_of(config))
            )
            _compare(worker.name, record, known, event.canary, answer, config, anew=False)
            if was_right and record.wrong.pop(event.canary, 0):
                record.doubtful[event.canary] = 0
            compared.append((worker, was_wrong and not record.wrong))
    return compared


def find_all_due(fleet: Fleet, config: CanaryConfig) -> list[CanaryValuesDecided]:
    """What a new leader has to write, whatever its predecessor had to."""
    found: list[CanaryValuesDecided] = []
    if isinstance(fleet.canaries, UnsetType):
        return found
    for kind, known in fleet.canaries.items():
        known.owed = {canary: values.version for canary, values in known.values.items()}
        due = (find_due(fleet, kind, known, canary, config) for canary in range(MOST_CANARIES))
        found += [decision for decision in due if decision is not None]
    return found


def record_of(worker: Worker) -> CanaryRecord | None:
    """The canaries of the worker's present incarnation."""
    record = worker.canary
    if isinstance(record, UnsetType):
        return None
    return record if record.incarnation == worker.incarnation else None


def is_wrong(record: CanaryRecord, config: CanaryConfig) -> bool:
    """Whether enough answers are wrong: those to different canaries, or to one again and again."""
    return len(record.wrong) >= config.confirm or (
        max(record.wrong.values(), default=0) >= config.repeats
    )


def is_witnessed(fleet: Fleet, name: str, record: CanaryRecord, tick: int) -> bool:
    """Whether another worker than `name` says the same as the golden values of its class, or this
    one did before `tick`."""
    classes = {} if isinstance(fleet.canaries, UnsetType) else fleet.canaries
    values = classes[record.kind].values.values() if record.kind in classes else ()
    return all(
        one.witnesses != (name,) or isinstance(one.since, UnsetType) or one.since < tick
        for one in values
    )


def good_tick_of(record: CanaryRecord) -> int:
    """Tick since when a wrong worker's results are in doubt (-1: from its beginning). Each wrong
    canary was right last at another tick; right answers to others show nothing about its damage."""
    wrong = record.wrong or record.doubtful
    return min((record.good_ticks.get(canary, -1) for canary in wrong), default=-1)


def in_words(record: CanaryRecord) -> str:
    """The evidence, of a worker with a wrong answer."""
    which = ", ".join(str(canary) for canary in record.wrong or record.doubtful)
    many = "canaries" if len(record.wrong or record.doubtful) > 1 else "canary"
    good_tick = good_tick_of(record)
    since = f"; last right answers at tick {good_tick}" if good_tick >= 0 else ""
    if record.wrong:
        return f"wrong answer to {many} {which}: {record.what}{since}"
    return f"its class does not agree on {many} {which}: {record.what}{since}"


def tolerance_of(config: CanaryConfig) -> float:
    return config.tolerance_milli / 1000


def _compare(
    name: str,
    record: CanaryRecord,
    known: ClassValues,
    canary: int,
    answer: CanaryAnswer,
    config: CanaryConfig,
    anew: bool,
) -> None:
    values = known.values.get(canary)
    if values is None:
        return
    what = difference(answer, values, tolerance_of(config))
    if not what:
        record.wrong.pop(canary, None)
        record.doubtful.pop(canary, None)
        record.good_ticks[canary] = answer.tick
        if not record.wrong and not record.doubtful:
            record.good += anew or not record.good
        return
    record.what, record.good = what, 0
    count = 1 if anew else 0
    if len(values.witnesses) > 1 or name in values.witnesses:
        before = record.wrong.get(canary, record.doubtful.pop(canary, 0))
        record.wrong[canary] = max(before + count, 1)
    else:
        record.doubtful[canary] = max(record.doubtful.get(canary, 0) + count, 1)
