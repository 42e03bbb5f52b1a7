"""Bugs in the rules by which replicas and the leader decide.

Replay retakes a decision with the same bug, so it agrees: only rules that share no code with
`policies/` notice. `TABLE` is a part of `plants.PLANTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from relume.events.vocabulary.enums import EnginePhase, RolloutStage, Tier
from relume.policies.checkpoints import decisions, placement
from relume.policies.degradation import batch_limits, levels
from relume.policies.leader import duties
from relume.policies.recovery import recovery_options
from relume.policies.recovery.recovery_options import StoredBlocks
from relume.policies.rollout import rollout_steps
from relume.policies.routing import choose_worker, eligibility, estimate_index, selection
from relume.policies.spares import spare_decisions
from relume.policies.state.overlay.view import View

BATCHES_LIMITED = Path(__file__).with_name("batches-limited.yaml")
"""In the library no level under which batches are limited falls to 0 before the run ends."""

Set = Callable[[Any, str, Any], None]


def _without(patch: Set, changed: Callable[[Any, bool], tuple[Any, bool]]) -> None:
    """Eligibility sees a worker, and whether it is suspected, as `changed`."""
    excluded = eligibility.excluded

    def blind(view: Any, worker: Any, model: str, suspected: bool) -> Any:
        worker, suspected = changed(worker, suspected)
        return excluded(view, worker, model, suspected)

    patch(eligibility, "excluded", blind)
    patch(choose_worker, "excluded", blind)


def _drain_forgotten(patch: Set) -> None:
    """a worker that drains gets requests all the same"""
    _without(patch, lambda w, suspected: (replace(w, draining=False), suspected))


def _suspicion_forgotten(patch: Set) -> None:
    """a worker that this replica suspects gets requests all the same"""
    _without(patch, lambda worker, suspected: (worker, False))


def _start_forgotten(patch: Set) -> None:
    """a worker whose engine is starting gets requests already"""

    def ready(worker: Any, suspected: bool) -> tuple[Any, bool]:
        starts = worker.engine == EnginePhase.STARTING and worker.model
        return (replace(worker, engine=EnginePhase.READY) if starts else worker), suspected

    _without(patch, ready)


def _failure_forgotten(patch: Set) -> None:
    """a request goes again to the engine that has just failed it"""
    excluded_for = eligibility.excluded_for

    def forgetful(worker: Any, query: Any) -> Any:
        return excluded_for(worker, replace(query, avoid=()))

    for module in (eligibility, choose_worker, selection):
        patch(module, "excluded_for", forgetful)


def _failure_not_planned(patch: Set) -> None:
    """a plan sends a request again to an engine that failed it before"""
    _failure_forgotten(patch)
    excluded = recovery_options._excluded
    patch(
        recovery_options,
        "_excluded",
        lambda request, target: excluded(replace(request, avoid=()), target),
    )


def _holder_drains(patch: Set) -> None:
    """placement does not see that a holder's host drains"""
    patch(placement, "usable", lambda site: site.alive)


def _uncovered_restore(patch: Set) -> None:
    """a plan takes every living holder to have what the best one has"""
    stored = decisions.stored

    def everywhere(fleet: Any, request: str) -> Any:
        found = stored(fleet, request)
        if not found:
            return found
        best = max(found, key=lambda part: part.tokens)
        living = (name for name, site in fleet.holders.items() if site.alive)
        return tuple(StoredBlocks(name, best.tokens, best.bytes) for name in living)

    patch(decisions, "stored", everywhere)


def _promised_restore(patch: Set) -> None:
    """a plan takes a holder to have all that was to be sent there"""

    def promised(fleet: Any, request: str) -> Any:
        placed = fleet.placed.get(request)
        if placed is None:
            return ()
        size = fleet.workers[placed.primary].block_size
        living = (name for name in placed.holders if fleet.holders[name].alive)
        return tuple(StoredBlocks(name, placed.blocks * size, placed.bytes) for name in living)

    patch(decisions, "stored", promised)


def _first_of_equals(patch: Set) -> None:
    """of workers that are equal the first is chosen, always"""
    patch(estimate_index, "turn_of", lambda of: of.requests)
    patch(View, "turn", property(lambda self: 0))
    patch(selection, "draw", lambda view, what: 0)


def _last_of_equals(patch: Set) -> None:
    """of workers that are equal the last is chosen, always"""
    patch(estimate_index, "turn_of", lambda of: of.requests)
    patch(View, "turn", property(lambda self: len(self.fleet.workers) - 1))
    patch(selection, "draw", lambda view, what: -1)


def _lost_at_once(patch: Set) -> None:
    """workers are declared lost although the log has only just recovered"""
    patch(duties, "HEALTHY_TICKS", -(1 << 30))
    patch(duties, "GONE_TICKS", 0)


def _lost_unseen(patch: Set) -> None:
    """a worker with requests is declared lost though its stream has an owner"""
    gone = duties._gone

    def wrong(fleet: Any, stream: str, tick: int) -> bool:
        return gone(fleet, stream, tick) or (tick % 64 == 32 and stream == "w.w1")

    patch(duties, "_gone", wrong)


def _batch_shed_from(patch: Set, least: levels.Level) -> None:
    """Requests of tier batch are refused from this level on."""

    def sheds(level: int, tier: str) -> bool:
        return level >= levels.Level.CLOSED or (level >= least and tier == Tier.BATCH)

    patch(levels, "sheds", sheds)


def _batch_shed_too_long(patch: Set) -> None:
    """requests of tier batch are still refused after the level fell from 2 to 1"""
    _batch_shed_from(patch, levels.Level.SHORT_ANSWERS)


def _batch_served_at_two(patch: Set) -> None:
    """requests of tier batch are served at level 2"""
    _batch_shed_from(patch, levels.Level.LATE)


def _level_falls_at_once(patch: Set) -> None:
    """a level falls to the one that is due, not by one step"""
    next_level = levels.next_level

    def to_the_due(level: int, share: int, *ticks: int) -> levels.Level:
        found = next_level(level, share, *ticks)
        return min(found, levels.level_due(share)) if found < level else found

    patch(levels, "next_level", to_the_due)


def _level_falls_without_margin(patch: Set) -> None:
    """a level falls as soon as a lower one is due, without a margin"""
    patch(levels, "may_fall", lambda level, share: levels.level_due(share) < level)


def _batches_stay_limited(patch: Set) -> None:
    """engines continue to run fewer requests at once after the level fell"""
    due = batch_limits._due

    def only_less(fleet: Any) -> Any:
        for effect in due(fleet):
            if int(effect.argument) < batch_limits.limit_of(fleet.workers[effect.worker]):
                yield effect

    patch(batch_limits, "_due", only_less)


def _domains_together(patch: Set) -> None:
    """a step of a rolling restart takes workers of two failure domains"""
    step = rollout_steps._step

    def two_steps(fleet: Any, rollout: Any, todo: Any) -> tuple[str, ...]:
        names = step(fleet, rollout, todo)
        rest = [worker for worker in todo if worker.name not in names]
        return names + step(fleet, rollout, rest) if rest else names

    patch(rollout_steps, "_step", two_steps)


def _returned(fleet: Any, rollout: Any) -> list[Any]:
    """The step is over: its workers get requests again."""
    return [rollout_steps._decided(rollout, RolloutStage.RETURNED, tuple(rollout.workers))]


def _canary_not_awaited(patch: Set) -> None:
    """a restarted engine gets requests as soon as it is ready, without a canary"""

    def returned(fleet: Any, rollout: Any) -> list[Any]:
        is_new = all(
            rollout_steps._is_new(w, rollout) for w in rollout_steps._of_step(fleet, rollout)
        )
        return _returned(fleet, rollout) if is_new else []

    patch(rollout_steps._STAGES, RolloutStage.RESTARTING, returned)


def _restart_not_awaited(patch: Set) -> None:
    """workers of a rolling restart get requests again while their engines are still restarting"""
    patch(rollout_steps._STAGES, RolloutStage.RESTARTING, _returned)


def _spares_open(patch: Set) -> None:
    """a spare gets requests like any other worker"""
    patch(eligibility, "_is_held_back", lambda view, worker: False)


def _promoted_late(patch: Set) -> None:
    """a spare is promoted at every eighth tick alone"""
    decision = spare_decisions._decision

    def rarely(fleet: Any, model: str, config: Any) -> Any:
        found = decision(fleet, model, config)
        fewer = found is not None and len(found.spares) < len(found.was)
        return None if fewer and fleet.tick % 8 else found

    patch(spare_decisions, "_decision", rarely)


def _spare_again_at_once(patch: Set) -> None:
    """a worker becomes a spare as soon as there is one too few"""
    decision = spare_decisions._decision

    def at_once(fleet: Any, model: str, config: Any) -> Any:
        return decision(fleet, model, replace(config, dwell_ticks=0))

    patch(spare_decisions, "_decision", at_once)


TABLE: tuple[tuple[str, str, Callable[[Set], None]], ...] = (
    ("I18", "composed 11", _drain_forgotten),
    ("I18", "agent-killed 0", _suspicion_forgotten),
    ("I18", "agent-killed 0", _start_forgotten),
    ("I18", "composed 11", _failure_forgotten),
    ("I18", "composed 11", _failure_not_planned),
    ("I8", "composed 11", _holder_drains),
    ("I23", "composed 11", _uncovered_restore),
    ("I23", "agents-terminated-in-turn 2", _promised_restore),
    ("I24", "agent-killed 0", _first_of_equals),
    ("I24", "wrong-weights-unseen 0", _last_of_equals),
    ("I17", "etcd-away 80", _lost_at_once),
    ("I17", "agent-stopped 1", _lost_unseen),
    ("I11", "capacity-staircase 0", _batch_shed_too_long),
    ("I11", "capacity-staircase 0", _batch_served_at_two),
    ("I11", "capacity-staircase 0", _level_falls_at_once),
    ("I11", "capacity-staircase 2", _level_falls_without_margin),
    ("I11", f"{BATCHES_LIMITED} 0", _batches_stay_limited),
    ("I27", "rolling-restart 0", _domains_together),
    ("I27", "rolling-restart 0", _canary_not_awaited),
    ("I27", "rolling-restart 0", _restart_not_awaited),
    ("I18", "spare-promoted 0", _spares_open),
    ("I18", "spare-promoted 0", _promoted_late),
    ("I18", "spare-promoted 0", _spare_again_at_once),
)
