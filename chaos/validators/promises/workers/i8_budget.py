"""I8: checkpoint bytes never exceed the budget; a holder is never in the primary's failure
domain while a worker of another domain is up.

There are two accounts: each state daemon's report of its memory and its file, and the log's sum of
acknowledgements. The second counts a shared block once per request, so it is compared only up to
the first report with sharing. The budget is the one that the daemon reports, which must not exceed
that of its host. It can change while the daemon runs: between two reports the larger one holds, and after
its last report the largest of that daemon. Choices of holders are judged in `decisions.holder_choices`.
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.promises.decisions.holder_choices import wrong_holders
from relume.chaos.validators.records import ClientRecord, Violation, log_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet

PROMISE = "I8"


def check(
    groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord], given: int | None = None
) -> list[Violation]:
    """Exceeded budgets, and holders in their primary's domain. `given`: each host's budget in
    bytes, if known."""
    log = log_of(groups)
    watch = _Account(given)
    log.fold(watch.before, watch.seen)
    watch.end()
    wrong = wrong_holders(log.known)
    return [*watch.found, *(Violation(PROMISE, *found) for found in wrong)]


class _Account:
    """The accounts so far. `_most`: maximum of the log's account of a holder since its last
    report, and its revision."""

    def __init__(self, given: int | None) -> None:
        self._given = given
        self.found: list[Violation] = []
        self.revision = 0
        self._most: dict[str, tuple[int, int]] = {}
        self._shares: dict[str, bool] = {}
        self._limit: dict[str, int] = {}
        self._largest: dict[str, int] = {}
        self._files: dict[str, int] = {}

    def before(self, _fleet: Fleet, group: RevisionGroup) -> None:
        """The next group follows."""
        self.revision = group.revision

    def _add(self, about: str, detail: str, revision: int = 0) -> None:
        self.found.append(Violation(PROMISE, about, detail, revision or self.revision))

    def seen(self, fleet: Fleet, _stream: str, event: object) -> None:
        if type(event) is v.StateDaemonStarted:
            self._settle(event.worker, is_last=True)
            self._shares[event.worker] = False
            self._limit[event.worker] = self._largest[event.worker] = event.budget_bytes
            self._files[event.worker] = event.file_bytes
            self._check_given(event.worker, event.budget_bytes)
        elif type(event) is v.StateDaemonReported:
            self._reported(event)
        elif isinstance(event, v.CheckpointAcknowledged | v.CheckpointsAcknowledged):
            holder = fleet.holders.get(event.holder)
            if holder is not None and holder.held_bytes > self._most.get(holder.name, (0, 0))[0]:
                self._most[holder.name] = (holder.held_bytes, self.revision)

    def _reported(self, event: v.StateDaemonReported) -> None:
        figures = dict(event.figures)
        known = self._limit.get(event.worker, 0)
        now = figures.get("memory_budget", known)
        self._check_given(event.worker, now)
        budget = self._limit[event.worker] = max(known, now)
        self._largest[event.worker] = max(self._largest.get(event.worker, 0), now)
        for name in ("memory_used", "memory_resident"):
            if figures.get(name, 0) > budget:
                self._add(event.worker, f"{name} is {figures[name]}, its budget {budget}")
        file_budget = max(self._files.get(event.worker, 0), figures.get("file_budget", 0))
        self._files[event.worker] = file_budget
        if figures.get("file_used", 0) > file_budget:
            self._add(event.worker, f"file of {figures['file_used']} bytes, not {file_budget}")
        self._shares[event.worker] |= figures.get("shared", 0) > 0
        self._settle(event.worker)
        self._limit[event.worker] = now

    def _check_given(self, worker: str, budget: int) -> None:
        if self._given is not None and budget > self._given:
            self._add(worker, f"takes {budget} bytes for its budget, given {self._given}")

    def _settle(self, worker: str, is_last: bool = False) -> None:
        """Compare the log's account since the last report. `is_last`: no other one follows."""
        most, revision = self._most.pop(worker, (0, 0))
        budget = (self._largest if is_last else self._limit).get(worker, 0)
        limit = budget + self._files.get(worker, 0)
        if most > limit and not self._shares.get(worker):
            self._add(worker, f"{most} bytes were acknowledged, its budget is {limit}", revision)

    def end(self) -> None:
        for worker in list(self._most):
            self._settle(worker, is_last=True)
