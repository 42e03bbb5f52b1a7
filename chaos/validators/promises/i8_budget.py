"""I8: checkpoint bytes never exceed the budget; a holder is never in the primary's failure
domain while another is up.

Two accounts: what each state daemon says of its memory and its file, and what the log adds
up of acknowledgements. The second counts blocks that requests share once for each, so it is
compared only up to the first report that tells of sharing. The budget is what the daemon says,
and that is no more than its host was given. A decision is judged on the fold it was taken on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from relume.chaos.validators.records import ClientRecord, Violation, events_of, log_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.policies.checkpoints.decisions import sites
from relume.policies.checkpoints.placement import usable
from relume.policies.state.fleet import Fleet
from relume.policies.state.overlay.view import View

PROMISE = "I8"


def check(
    groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord], given: int | None = None
) -> list[Violation]:
    """Budgets that were exceeded, and holders beside their primary. `given`: bytes that each
    host was given, where that is known."""
    log = log_of(groups)
    decided = sorted(
        (at for at in events_of(log, "r.") if type(at.event) is v.HolderChosen),
        key=lambda at: at.event.basis.revision,
    )
    due = deque(decided)
    watch = _Account(given)

    def before(fleet: Fleet, group: RevisionGroup) -> None:
        while due and due[0].event.basis.revision < group.revision:
            watch.judge(fleet, due.popleft().event)
        watch.revision = group.revision

    fleet = log.fold(before, watch.seen)
    for at in due:
        watch.judge(fleet, at.event)
    watch.end()
    return watch.found


class _Account:
    """What was seen so far. `_most`: the most the log's account of a holder said since its
    last report, where nothing was shared yet."""

    def __init__(self, given: int | None) -> None:
        self._given = given
        self.found: list[Violation] = []
        self.revision = 0
        self._most: dict[str, tuple[int, int]] = {}
        self._shares: dict[str, bool] = {}
        self._limit: dict[str, int] = {}
        self._files: dict[str, int] = {}

    def _tell(self, about: str, detail: str, revision: int = 0) -> None:
        self.found.append(Violation(PROMISE, about, detail, revision or self.revision))

    def seen(self, fleet: Fleet, _stream: str, event: object) -> None:
        if type(event) is v.StateDaemonStarted:
            self._settle(event.worker)
            self._shares[event.worker] = False
            self._limit[event.worker] = event.budget_bytes
            self._files[event.worker] = event.file_bytes
            if self._given is not None and event.budget_bytes > self._given:
                text = f"takes {event.budget_bytes} bytes for its budget, given {self._given}"
                self._tell(event.worker, text)
        elif type(event) is v.StateDaemonReported:
            self._reported(event)
        elif isinstance(event, v.CheckpointAcknowledged | v.CheckpointsAcknowledged):
            holder = fleet.holders.get(event.holder)
            if holder is not None and holder.held_bytes > self._most.get(holder.name, (0, 0))[0]:
                self._most[holder.name] = (holder.held_bytes, self.revision)

    def _reported(self, event: v.StateDaemonReported) -> None:
        figures = dict(event.figures)
        budget = self._limit.get(event.worker, 0)
        for name in ("memory_used", "memory_resident"):
            if figures.get(name, 0) > budget:
                self._tell(event.worker, f"{name} is {figures[name]}, its budget {budget}")
        file_budget = max(self._files.get(event.worker, 0), figures.get("file_budget", 0))
        self._files[event.worker] = file_budget
        if figures.get("file_used", 0) > file_budget:
            self._tell(event.worker, f"file of {figures['file_used']} bytes, not {file_budget}")
        self._shares[event.worker] |= figures.get("shared", 0) > 0
        self._settle(event.worker)

    def _settle(self, worker: str) -> None:
        """Compare the log's account since the last report."""
        most, revision = self._most.pop(worker, (0, 0))
        limit = self._limit.get(worker, 0) + self._files.get(worker, 0)
        if most > limit and not self._shares.get(worker):
            self._tell(worker, f"{most} bytes were acknowledged, its budget is {limit}", revision)

    def end(self) -> None:
        for worker in list(self._most):
            self._settle(worker)

    def judge(self, fleet: Fleet, event: v.HolderChosen) -> None:
        """Whether a holder beside the primary was chosen although it need not be."""
        primary = fleet.workers.get(event.primary)
        if primary is None:
            return
        for name in event.holders:
            holder = fleet.workers.get(name)
            if holder is None or holder.domain != primary.domain:
                continue
            up = [site for site in sites(View("", fleet)) if usable(site)]
            elsewhere = [site.worker for site in up if site.domain != primary.domain]
            if elsewhere or name == event.primary:
                others = ", ".join(elsewhere) or "no other worker"
                self._tell(
                    event.request,
                    f"{name} is in the failure domain of {event.primary}; {others} was up",
                    event.basis.revision,
                )
