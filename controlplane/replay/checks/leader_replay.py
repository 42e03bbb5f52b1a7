"""What the leader owes by the log alone, worked out again and compared with what it wrote."""

from __future__ import annotations

from collections import deque
from typing import Any

from relume.controlplane.replay.divergence import Verdict
from relume.events import vocabulary as v
from relume.policies.decision_versions import (
    missing_of_leader,
)
from relume.policies.health import evidence
from relume.policies.leader import feature_level, log_detail
from relume.policies.leader.duties import step
from relume.policies.state.fleet import Fleet

_ANSWERS = (
    v.RequestEnded,
    v.EffectsDecided,
    v.ConfigChanged,
    v.CheckpointsReleased,
    v.CheckpointsVoided,
    v.HealthDecided,
    v.VerdictsWithheld,
    v.CanaryValuesDecided,
    v.DegradationDecided,
    v.RolloutDecided,
    v.SparesDecided,
)
"""What a leader writes because of the log alone. `WorkerLost` and `ReplicaLost` follow from leases,
whose history is not in the log: they are facts to replay."""

_KINDS: dict[type, str] = {
    v.HealthDecided: "health",
    v.VerdictsWithheld: "health",
    v.CanaryValuesDecided: "health",
    v.DegradationDecided: "degradation",
    v.SparesDecided: "spares",
    v.RolloutDecided: "rollout",
}
"""By which version a leader decides what is not among its duties (`leader`)."""


class LeaderReplay:
    """What the leader owes, against what it wrote."""

    def __init__(self, fleet: Fleet, verdict: Verdict) -> None:
        self._fleet = fleet
        self._verdict = verdict
        self._acting = False
        self._owed: deque[tuple[int, Any]] = deque()
        """What it has to write, and the tick before which it does."""

    def seen(self, stream: str, position: int, event: Any) -> None:
        """An event was folded. A leader answers from the fold of its election on."""
        if stream == "fleet":
            if type(event) is v.LeaderElected:
                # This one works out again what its predecessor had not finished.
                self._acting = True
                self._owed.clear()
            elif self._acting and type(event) in _ANSWERS:
                self._answered(stream, position, event)
            elif type(event) is v.DetailDecided:
                self._detailed(position, event)
            elif type(event) is v.FeatureLevelRaised:
                self._raised(position, event)
            elif type(event) is v.Tick:
                self._overdue(position, event)
        if self._acting:
            self._owes(step(self._fleet, event), type(event) is v.Tick)

    def landed(self) -> None:
        """A group of workers' records was folded without a call for each."""
        if self._acting:
            self._owes(evidence.owed(self._fleet), False)

    def _owes(self, owed: list[Any], at_tick: bool) -> None:
        if owed:
            # It ticks once it folded the tick before, and answered all up to there.
            by = self._fleet.tick + (1 if at_tick else 2)
            self._owed.extend((by, e) for e in owed if type(e) in _ANSWERS)

    def _overdue(self, position: int, event: v.Tick) -> None:
        while self._owed and self._owed[0][0] <= event.number:
            _, expected = self._owed.popleft()
            if not missing_of_leader(self._fleet, "leader"):
                place = self._fleet.revision, "fleet", position
                self._verdict.differ(*place, "answer", "not written", expected)

    def _detailed(self, position: int, event: v.DetailDecided) -> None:
        verdict = self._verdict
        if lacking := missing_of_leader(self._fleet, "detail"):
            verdict.cannot_take(lacking)
            return
        verdict.decisions += 1
        detail = log_detail.detail(
            event.was, event.database_bytes, event.quota_bytes, event.shed_percent
        )
        if detail != event.detail:
            place = self._fleet.revision, "fleet", position
            verdict.differ(*place, "decision", event.detail, detail)

    def _raised(self, position: int, event: v.FeatureLevelRaised) -> None:
        """When it is raised depends on owners too, whose history is not in the log."""
        if lacking := missing_of_leader(self._fleet, "leader"):
            self._verdict.cannot_take(lacking)
            return
        self._verdict.decisions += 1
        most = max(feature_level.read_by_all(self._fleet), event.was)
        if event.level > most:
            place = self._fleet.revision, "fleet", position
            self._verdict.differ(*place, "decision", event.level, most)

    def _answered(self, stream: str, position: int, event: Any) -> None:
        kind = _KINDS.get(type(event), "leader")
        if lacking := missing_of_leader(self._fleet, kind):
            self._verdict.cannot_take(lacking)
            self._owed.clear()
            return
        self._verdict.answers += 1
        expected = self._owed[0][1] if self._owed else "nothing owed"
        if expected != event:
            self._verdict.differ(self._fleet.revision, stream, position, "answer", event, expected)
        while self._owed and self._owed.popleft()[1] != event:
            pass
