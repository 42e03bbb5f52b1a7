"""Bugs in the rules by which replicas and the leader decide.

Replay retakes a decision with the same bug, so it agrees: only rules that share no code with
`policies/` notice. `TABLE` is a part of `plants.PLANTS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from relume.events.vocabulary.enums import EnginePhase
from relume.policies.checkpoints import decisions, placement
from relume.policies.leader import duties
from relume.policies.recovery import recovery_options
from relume.policies.recovery.recovery_options import StoredBlocks
from relume.policies.routing import choose_worker, eligibility, estimate_index, selection
from relume.policies.state.overlay.view import View

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
)
