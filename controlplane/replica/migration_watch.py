"""Running requests leave a worker that drains, that is overloaded, or that was a spare.

`MigrationWatch` follows the fold. When a drain begins, and at every tick, it asks
`relume.policies.migration.moves` which of this replica's requests leave, writes the plan with its
basis, and has the engines hand the planned requests over (`POST /relume/handover`). An engine that
does so ends the stream with `:x moved`, and the gateway dispatches the next attempt where the plan
has it, with the tokens delivered and the holders of its blocks.

Everything that fails leaves the request where it is or makes it an ordinary failover: an
unreachable engine continues (or the stall watch finds it hung), a lost target is replaced by
another, missing blocks are computed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import structlog
from msgspec import Struct

from relume.controlplane.gateway.ports import GatewayPort
from relume.controlplane.replica import engine_calls
from relume.controlplane.stream.arrival import Arrival
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import AttemptMode, EffectKind, MigrationCause, Tier
from relume.events.wire.worker_calls import HANDOVER_PATH, Handover
from relume.policies.admission.admission_queue import by_tier
from relume.policies.checkpoints import decisions
from relume.policies.checkpoints.checkpoint_settings import config_of
from relume.policies.migration import moves
from relume.policies.recovery import resume_mode
from relume.policies.routing.eligibility import excluded_at
from relume.policies.state.account import key_of

if TYPE_CHECKING:
    from relume.controlplane.replica.scheduler import LiveRequest, Scheduler

MOVERS = 8
"""Number of engines called concurrently: also the maximum that a target gets at a time."""
WAITING = 10_000
"""Maximum number of queued moves; others stay for a later plan."""
TRIES = 3
"""An attempt that could not be moved so often stays."""
LEAVING_S = 15.0
"""Maximum time for a handed-over attempt to end its stream before it is planned again: its client
may read slowly."""
_MAY_BEGIN = frozenset({v.Tick, v.WorkerLeaving, v.RolloutDecided})
"""Events at which requests may have to leave."""

log = structlog.get_logger("relume.migration")


class Move(Struct, frozen=True, kw_only=True):
    """One planned handover."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    target: str


class MigrationWatch:
    """One for a replica, for the requests it serves."""

    def __init__(self, scheduler: Scheduler, gateway: GatewayPort) -> None:
        self._scheduler = scheduler
        self._gateway = gateway
        self._due = False
        self._moves: asyncio.Queue[Move] = asyncio.Queue(WAITING)
        self._leaving: dict[str, tuple[int, float]] = {}
        """Attempts that were planned to leave, and until when nothing else is."""
        self._failed: dict[tuple[str, int], int] = {}
        self._reasons: dict[str, frozenset[tuple[str, int, str]]] = {}

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with each event folded."""
        kind = type(event)
        if kind in _MAY_BEGIN:
            self._due = True
        elif kind is v.EffectsDecided:
            self._due = self._due or any(e.kind == EffectKind.DRAIN for e in event.effects)

    def folded(self, group: RevisionGroup) -> None:
        """Called when a whole group was folded: a decision's basis is no less."""
        if not self._due:
            return
        self._due = False
        sources = list(moves.sources(self._scheduler.view))
        self._forget()
        self._reasons = {
            w: reasons for w, reasons in self._reasons.items() if (w, "drain") in sources
        }
        for worker, cause in sources:
            try:
                self._plan(worker, cause)
            except LogError as error:
                log.warning("moves_not_written", worker=worker, reason=str(error))

    def _forget(self) -> None:
        now, live = _now(), self._scheduler.live
        for request, (attempt, until) in list(self._leaving.items()):
            if request not in live or live[request].attempt != attempt or now > until:
                del self._leaving[request]
        for request, attempt in list(self._failed):
            if request not in live or live[request].attempt != attempt:
                del self._failed[request, attempt]

    def _plan(self, worker: str, cause: MigrationCause) -> None:
        """Decide for one worker, write it down and set the moves going. Raises LogError."""
        view = self._scheduler.view
        incarnation = view.fleet.workers[worker].incarnation
        if cause == MigrationCause.IMBALANCE and self._leaving:
            return  # what is under way may even it out
        running = self._running(worker, incarnation, cause)
        if not running:
            self._reasons.pop(worker, None)
            return
        basis = self._scheduler.decisions.basis()
        choices = moves.plan(view, cause, worker, incarnation, running)
        if all(c.chosen < 0 for c in choices):
            reasons = frozenset((c.request, c.attempt, c.reason) for c in choices)
            if cause != MigrationCause.DRAIN or reasons <= self._reasons.get(worker, frozenset()):
                return  # nothing moves, and why is known
            self._reasons[worker] = reasons
        name = self._scheduler.decisions.decision_id()
        self._scheduler.emit(
            v.MigrationPlanned(
                decision=name,
                basis=basis,
                worker=worker,
                incarnation=incarnation,
                cause=cause,
                tick=view.fleet.tick,
                choices=choices,
            )
        )
        for choice in by_tier(choices, lambda choice: choice.tier):
            if choice.chosen >= 0:
                target = choice.options[choice.chosen].worker
                self._begin(
                    Move(
                        request=choice.request,
                        attempt=choice.attempt,
                        worker=worker,
                        incarnation=incarnation,
                        target=target,
                    )
                )

    def _begin(self, move: Move) -> None:
        self._leaving[move.request] = move.attempt, _now() + LEAVING_S
        try:
            self._moves.put_nowait(move)
        except asyncio.QueueFull:
            self._abandon(move, "too many wait")

    def _running(self, worker: str, incarnation: int, cause: MigrationCause) -> list[moves.Running]:
        """This replica's requests that run there, can resume elsewhere and are not leaving."""
        found = []
        movable = dict(self._gateway.movable_on(worker, incarnation))
        if cause == MigrationCause.DRAIN:
            movable |= self._away(worker, incarnation)
        for request, delivered in movable.items():
            live = self._scheduler.live.get(request)
            if live is None or not live.running or not self._goes_on(live, delivered):
                continue
            if cause == MigrationCause.PROMOTION and live.arrival.tier != Tier.BATCH:
                continue
            if request in self._leaving or self._failed.get((request, live.attempt), 0) >= TRIES:
                continue
            found.append(self._running_of(live, delivered))
        return found

    def _away(self, worker: str, incarnation: int) -> dict[str, int]:
        """Requests that run there for absent clients. A finished one waits in its buffer, and
        delays no drain."""
        attempts, live = self._scheduler.view.fleet.workers[worker].attempts, self._scheduler.live
        away = self._gateway.away_on(worker, incarnation)
        return {
            request: delivered
            for request, delivered in away.items()
            if request in live and key_of(request, live[request].attempt) in attempts
        }

    def _running_of(self, live: LiveRequest, delivered: int) -> moves.Running:
        arrival, view = live.arrival, self._scheduler.view
        tokens = decisions.tokens_lost(view, arrival.request, arrival.prompt_tokens, delivered)
        left = config_of(view).output_tokens
        if arrival.max_tokens:
            left = max(min(arrival.max_tokens - delivered, left), 1)
        return moves.Running(
            request=arrival.request,
            attempt=live.attempt,
            tokens=tokens,
            left=left,
            avoid=live.avoid,
            tier=arrival.tier,
        )

    # --- the moves --------------------------------------------------------------------

    async def run(self) -> None:
        """Have requests handed over, for ever; the caller owns the task."""
        async with engine_calls.session() as session, asyncio.TaskGroup() as tasks:
            for _ in range(MOVERS):
                tasks.create_task(self._move_all(session))

    async def _move_all(self, session: aiohttp.ClientSession) -> None:
        while True:
            move = await self._moves.get()
            if not self._stands(move):
                continue  # it ended, or was lost, before its turn
            try:
                place = move.worker, move.incarnation
                delivered = self._gateway.movable_tokens(*place, move.request)
                failure = self._obstacle(move, delivered)
                if not failure:
                    fleet = self._scheduler.view.fleet
                    live = self._scheduler.live[move.request]
                    unbegun = not delivered and not self._goes_on(live, 1)
                    call = Handover(move.request, move.attempt, move.incarnation, unbegun)
                    failure = await engine_calls.ask(
                        session, fleet, move.worker, HANDOVER_PATH, call
                    )
            except engine_calls.LOST as error:
                failure = str(error) or type(error).__name__
            if failure and self._stands(move):
                self._abandon(move, failure)
            elif not failure:
                self._gateway.given_up(move.request, move.attempt)

    def _stands(self, move: Move) -> bool:
        live = self._scheduler.live.get(move.request)
        return live is not None and live.running and live.attempt == move.attempt

    def _obstacle(self, move: Move, delivered: int | None) -> str:
        """Why it is not to be made now, though it was planned. `delivered`: its tokens that are here;
        None: another worker cannot take it up."""
        view = self._scheduler.view
        target = view.fleet.workers[move.target]
        if excluded := excluded_at(view, target):
            return f"{move.target}: {excluded}"
        live = self._scheduler.live[move.request]
        if delivered is None or not self._goes_on(live, delivered):
            return "no other worker can continue what its client has by now"
        return ""

    def _goes_on(self, live: LiveRequest, delivered: int) -> bool:
        return goes_on(live.arrival, delivered, self._scheduler.is_doubted(live))

    def _abandon(self, move: Move, reason: str) -> None:
        """It stays, and may be planned for again at a later tick."""
        key = move.request, move.attempt
        self._leaving.pop(move.request, None)
        self._failed[key] = self._failed.get(key, 0) + 1
        log.info("move_abandoned", request=move.request, worker=move.worker, reason=reason)
        try:
            self._scheduler.emit(
                v.MigrationAbandoned(
                    request=move.request,
                    attempt=move.attempt,
                    worker=move.worker,
                    incarnation=move.incarnation,
                    reason=reason[:200],
                )
            )
        except LogError as error:
            log.warning("moves_not_written", worker=move.worker, reason=str(error))


def goes_on(arrival: Arrival, delivered: int, is_doubted: bool) -> bool:
    """Whether nothing that was delivered would have to be generated again: moved again and again, that
    would never end."""
    mode = resume_mode.mode_of(arrival.verdict, arrival.stream, delivered, is_doubted)
    return arrival.protected and (mode == AttemptMode.CONTINUE or not delivered)


def _now() -> float:
    return asyncio.get_running_loop().time()
