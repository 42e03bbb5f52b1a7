"""The scheduler's decisions about checkpoints: holders for each dispatch, and plans for what
one failure interrupts. All of it is decided by `relume.policies.checkpoints.decisions` on the view,
written with its basis, and acted on at once.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from msgspec import Struct

from relume.controlplane.replica.decision_writer import DecisionWriter
from relume.controlplane.replica.live_requests import LiveRequest, LiveRequests
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import PlacementCause, RouteCause, TransportKind
from relume.policies.checkpoints import decisions as checkpoints
from relume.policies.checkpoints.checkpoint_settings import config_of
from relume.policies.liveness.suspicious import SUSPICIOUS
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Planned
from relume.policies.state.overlay.view import View
from relume.policies.state.prompt_tokens import prompt_tokens

log = structlog.get_logger("relume.checkpoints")

STALE_PLAN_US = 1_000_000
"""A plan is of one failure: of a later one another is made."""


class HolderChange(Struct, frozen=True, kw_only=True):
    """Other holders for a running attempt: its engine must be informed."""

    request: str
    attempt: int
    worker: str
    incarnation: int
    endpoints: tuple[str, ...]


class Checkpoints:
    """Decides for the live requests of one replica. `delivered_on` gives the tokens that the
    gateway has of the requests on an engine; `clock` counts microseconds."""

    def __init__(
        self, decisions: DecisionWriter, live: LiveRequests, clock: Callable[[], int]
    ) -> None:
        self._decisions = decisions
        self._live = live
        self._clock = clock
        self._planned: dict[tuple[str, int], tuple[int, frozenset[str]]] = {}
        self.delivered_on: Callable[[str, int], dict[str, int]] = lambda worker, incarnation: {}

    # --- a dispatch --------------------------------------------------------------------

    def of_dispatch(self, live: LiveRequest, lost: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(where to hold its blocks, where to restore them from) of the attempt just
        dispatched; `lost` is the attempt before it (0: none)."""
        if not live.arrival.protected or not checkpoints.takes_part(self._view, live.worker):
            return (), ()
        request = live.arrival.request
        restore: tuple[str, ...] = ()
        if lost:
            restore = checkpoints.sources(self._view, request, live.worker, lost)
        try:
            holders = self._place(live, _placed_because(live) if lost else PlacementCause.ARRIVAL)
        except LogError as error:  # it is served all the same
            log.error("holders_not_written", reason=str(error))
            return (), restore
        return checkpoints.endpoints(self._view, holders, live.worker), restore

    def _place(self, live: LiveRequest, cause: PlacementCause) -> tuple[str, ...]:
        """Choose holders for the attempt under way, and write it down."""
        view, config = self._view, config_of(self._view)
        if config.placement == "none":
            return ()
        arrival = live.arrival
        worker = view.fleet.workers[live.worker]
        prompt = prompt_tokens(view.fleet, arrival.request, arrival.prompt_tokens)
        tokens = prompt + live.delivered
        left = max(arrival.max_tokens - live.delivered, 1) if arrival.max_tokens else 0
        blocks = checkpoints.expected_blocks(worker, tokens, left, config)
        basis = self._decisions.basis()
        placed, size = checkpoints.place(view, arrival.request, live.worker, blocks)
        self._decisions.emit(
            v.HolderChosen(
                decision=self._decisions.decision_id(),
                basis=basis,
                request=arrival.request,
                attempt=live.attempt,
                cause=cause,
                primary=live.worker,
                holders=placed.holders,
                policy=config.placement,
                wanted=config.holders,
                expected_blocks=blocks,
                expected_bytes=size,
                reason=placed.reason,
                candidates=placed.candidates,
            )
        )
        return placed.holders

    # --- a failure ---------------------------------------------------------------------

    def planned(self, live: LiveRequest, cause: RouteCause) -> bool:
        """Whether there is a plan for the attempt that `live` lost; one is made when its
        failure has none yet, for all that the same engine was running. A plan to move the request
        counts only if this replica moved it: its worker may drain, and takes back only such requests."""
        if not live.attempt or live.running or not live.arrival.protected:
            return False
        is_moved = live.failure == TransportKind.MOVED and cause != RouteCause.RETURNED
        if is_moved and self._plan_of(live) is not None:
            return True
        place, now = (live.worker, live.incarnation), self._clock()
        made_at, considered = self._planned.get(place, (0, frozenset()))
        if live.arrival.request not in considered or now - made_at > STALE_PLAN_US:
            self._planned = {
                p: made for p, made in self._planned.items() if now - made[0] <= STALE_PLAN_US
            }
            self._planned[place] = now, self._plan(live, place)
        plan = self._plan_of(live)
        return plan is not None and not plan.source

    def _plan_of(self, live: LiveRequest) -> Planned | None:
        """The plan for the attempt that ended."""
        plan = self._view.checkpoints.plan(live.arrival.request)
        return plan if plan is not None and plan.attempt == live.attempt else None

    def _plan(self, live: LiveRequest, place: tuple[str, int]) -> frozenset[str]:
        """Decide how all requests that are lost with `live` continue; returns these requests."""
        view = self._view
        if live.worker not in view.fleet.workers:
            return frozenset()
        interrupted = self._interrupted(live, place)
        try:
            basis = self._decisions.basis()
            lost = [self._lost(one) for one in interrupted]
            if choices := checkpoints.plan(view, *place, lost):
                policy, name = config_of(view).recovery, self._decisions.decision_id()
                worker, incarnation = place
                self._decisions.emit(
                    v.RecoveryPlanned(
                        decision=name,
                        basis=basis,
                        worker=worker,
                        incarnation=incarnation,
                        policy=policy,
                        choices=choices,
                    )
                )
        except LogError as error:
            log.error("plan_not_written", reason=str(error))
            return frozenset()
        return frozenset(one.request for one in lost)

    def _interrupted(self, live: LiveRequest, place: tuple[str, int]) -> list[LiveRequest]:
        """What is lost with `live`: all that its engine was running, if that is dead."""
        if live.failure not in SUSPICIOUS:
            return [live]
        delivered = self.delivered_on(*place)
        found = [live]
        for other in self._live.values():
            if other.running and (other.worker, other.incarnation) == place:
                other.delivered = delivered.get(other.arrival.request, other.delivered)
                if other.arrival.protected:
                    found.append(other)
        return found

    def _lost(self, live: LiveRequest) -> checkpoints.Lost:
        request = live.arrival.request
        failed = f"{live.worker}:{live.incarnation}"
        avoid = live.avoid if failed in live.avoid else (*live.avoid, failed)
        tokens = checkpoints.tokens_lost(
            self._view, request, live.arrival.prompt_tokens, live.delivered
        )
        return checkpoints.Lost(request, live.attempt, tokens, avoid, live.arrival.tier)

    # --- holders come and go -------------------------------------------------------------

    def replace(self) -> list[HolderChange]:
        """Place checkpoints again for this replica's running requests that lost a holder, or lack
        one. What an engine has finished, and keeps for an absent client, has no blocks any more.

        Raises LogError.
        """
        found = []
        for live in list(self._live.values()):
            request = live.arrival.request
            if not live.running or not live.arrival.protected:
                continue
            if not checkpoints.takes_part(self._view, live.worker):
                continue
            cause = checkpoints.displaced(self._view, request, live.worker)
            if not cause or self._has_finished(live):
                continue
            before = self._view.checkpoints.placement(request)
            holders = self._place(live, cause)
            if before is None or holders != before.holders:
                found.append(self._change_of(live, holders))
        return found

    def _has_finished(self, live: LiveRequest) -> bool:
        """Whether its engine has reported the end of the attempt."""
        fleet, request = self._view.fleet, live.arrival.request
        known, worker = fleet.requests.get(request), fleet.workers.get(live.worker)
        if known is None or worker is None or known.attempt != live.attempt:
            return False  # the dispatch is not folded yet
        return key_of(request, live.attempt) not in worker.attempts

    def held_by(self, holder: str) -> list[HolderChange]:
        """Running requests of this replica that `holder` is to hold, with their endpoints as
        they are now: it may be reached elsewhere than before."""
        found = []
        for live in self._live.values():
            placed = self._view.checkpoints.placement(live.arrival.request)
            if live.running and placed is not None and holder in placed.holders:
                found.append(self._change_of(live, placed.holders))
        return found

    def _change_of(self, live: LiveRequest, holders: tuple[str, ...]) -> HolderChange:
        endpoints = checkpoints.endpoints(self._view, holders, live.worker)
        return HolderChange(
            request=live.arrival.request,
            attempt=live.attempt,
            worker=live.worker,
            incarnation=live.incarnation,
            endpoints=endpoints,
        )

    @property
    def _view(self) -> View:
        return self._decisions.view


def _placed_because(live: LiveRequest) -> PlacementCause:
    moved = live.failure == TransportKind.MOVED
    return PlacementCause.MOVED if moved else PlacementCause.RECOVERED
