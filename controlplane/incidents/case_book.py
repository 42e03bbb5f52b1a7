"""The latest records, and those that are still going on among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.incident import Incident
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import FailedPart, FailureClass

MOST_INCIDENTS = 200
"""Records that a replica remembers. The log has all: `relume incidents --log`."""


class CaseBook:
    """Cases by id, oldest first, at most `most`. `dropped` is called with each that goes."""

    def __init__(self, dropped: Callable[[Case], None], most: int) -> None:
        self._most = most
        self._cases: dict[str, Case] = {}
        self._latest: dict[tuple[FailedPart, str], Case] = {}
        self._slow: dict[str, Case] = {}
        self._dropped = dropped

    def __iter__(self) -> Iterator[Case]:
        return iter(list(self._cases.values()))

    def open(
        self,
        entry: Entry,
        part: FailedPart,
        name: str,
        incarnation: int,
        failure: FailureClass,
        reason: str,
    ) -> Case:
        """A new case, with `entry` as the first event that tells of it."""
        record = Incident(
            id=f"{entry.revision}.{entry.index}",
            part=part,
            name=name,
            incarnation=incarnation,
            failure=failure,
            reason=reason,
            began_ms=entry.at_ms,
            noticed_ms=entry.at_ms,
        )
        case = Case(record=record, last=incarnation, evidence_ms=entry.at_ms)
        self._cases[record.id] = case
        if failure == FailureClass.SLOW:
            self._slow[name] = case
        else:
            self._latest[part, name] = case
        if len(self._cases) > self._most:
            self.drop(next(iter(self._cases.values())))
        return case

    def drop(self, case: Case) -> None:
        """Forget it: it is too old, or was none."""
        record = case.record
        self._cases.pop(record.id, None)
        if self._latest.get((record.part, record.name)) is case:
            del self._latest[record.part, record.name]
        if self._slow.get(record.name) is case:
            del self._slow[record.name]
        self._dropped(case)

    def latest(self, part: FailedPart, name: str) -> Case | None:
        """The newest of this part, slowness apart: it is a failure beside others."""
        return self._latest.get((part, name))

    def slow(self, worker: str) -> Case | None:
        """The newest about the slowness of this worker."""
        return self._slow.get(worker)

    def of_engine(self, worker: str, incarnation: int) -> Case | None:
        """The newest about this incarnation of a worker's engine, slowness apart."""
        latest = self._latest.get((FailedPart.WORKER, worker))
        if latest is None or latest.record.incarnation <= incarnation <= latest.last:
            return latest
        for case in reversed(self._cases.values()):
            record = case.record
            if record.name != worker or record.part != FailedPart.WORKER:
                continue
            if record.failure != FailureClass.SLOW and (
                record.incarnation <= incarnation <= case.last
            ):
                return case
        return None
