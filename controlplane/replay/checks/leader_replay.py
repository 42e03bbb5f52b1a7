"""What the leader owes by the log alone, worked out again and compared with what it wrote."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from relume.controlplane.replay.divergence import Verdict
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RolloutStage
from relume.policies.decision_versions import (
    missing_of_leader,
)
from relume.policies.health import evidence
from relume.policies.leader import feature_level, log_detail
from relume.policies.leader.duties import LATE, MOST_SILENT_MS, step
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
    v.WeightsCompared,
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
    v.WeightsCompared: "health",
    v.DegradationDecided: "degradation",
    v.SparesDecided: "spares",
    v.RolloutDecided: "rollout",
}
"""By which version a leader decides what is not among its duties (`leader`)."""


class _Refusal(NamedTuple):
    """A refusal as late, where it is, the last tick before it, and when the one before that was."""

    revision: int
    position: int
    event: v.ConfigChanged
    tick: int
    unix_ms: int


class LeaderReplay:
    """What the leader owes, against what it wrote."""

    def __init__(self, fleet: Fleet, verdict: Verdict) -> None:
        self._fleet = fleet
        self._verdict = verdict
        self._acting = False
        self._owed: deque[tuple[int, Any]] = deque()
        """What it has to write, and the tick before which it does."""
        self._late: list[_Refusal] = []
        """Commands that it refused because the log was away, by its own clock."""
        self._ticked_ms = (0, 0)
        """Times of the last two ticks."""

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
                self._was_away(event)
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
        if self._refuses_as_late(position, event):
            return
        expected = self._owed[0][1] if self._owed else "nothing owed"
        if expected != event:
            self._verdict.differ(self._fleet.revision, stream, position, "answer", event, expected)
        while self._owed and self._owed.popleft()[1] != event:
            pass

    def _refuses_as_late(self, position: int, event: Any) -> bool:
        """Whether it refuses a command that it owes another answer, because the log was away: then it
        owes that answer no more."""
        if type(event) is not v.ConfigChanged or (event.key, event.value) != ("", LATE):
            return False
        owed = list(self._owed)
        places = [at for at, (_, e) in enumerate(owed) if _command_of(e) == event.decision]
        if not places or owed[places[0]][1] == event:
            return False
        first = places[0]
        if first and _is_of(owed[first - 1][1], event.decision):
            first -= 1
        self._owed = deque([*owed[:first], *owed[places[0] + 1 :]])
        fleet = self._fleet
        # The last tick may be of the same moment as this refusal.
        since_ms = self._ticked_ms[0] or fleet.tick_unix_ms
        self._late.append(_Refusal(fleet.revision, position, event, fleet.tick, since_ms))
        return True

    def _was_away(self, tick: v.Tick) -> None:
        """Whether the log had been away when commands were refused for that, by one of the next two
        ticks. The next one may have been under way then; the one after it was written later, but
        perhaps by a leader with another clock."""
        self._ticked_ms = self._ticked_ms[1], tick.unix_ms
        for refusal in list(self._late):
            was_away = (
                tick.unix_ms - refusal.unix_ms > MOST_SILENT_MS // 2
            )  # clocks of leaders differ
            if not was_away and tick.number <= refusal.tick + 1:
                continue
            self._late.remove(refusal)
            if not was_away:
                place = refusal.revision, "fleet", refusal.position
                self._verdict.differ(*place, "answer", refusal.event, "the log was not away")


def _is_of(event: Any, command: str) -> bool:
    """Whether it is a rolling restart that the command begins, or the end of one by a command."""
    if type(event) is not v.RolloutDecided:
        return False
    return bool(event.rollout == command or event.stage == RolloutStage.CANCELLED)


def _command_of(event: Any) -> str:
    answers = type(event) in (v.EffectsDecided, v.ConfigChanged)
    return str(event.decision) if answers else ""
