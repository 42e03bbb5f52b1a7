"""The waiting room of a replica at work: who comes, whom a change of load calls, who goes unserved.

What is decided is `policies.waiting` and `policies.saturation`; here it is asked on the view,
recorded, and told to the exchanges. Nobody who passes straight through is recorded, and nobody
polls: whoever waits is called when the fold advances or an own event makes room, and at the time
at which a bound on the prompts ahead is kept. Attempts that go on behind a failure do not come
here; they are called before who does (`Scheduler.wake`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

import structlog

from relume.controlplane.gateway.ports import Arrival, Caller, Hopeless
from relume.events import vocabulary as v
from relume.events.errors import LogError
from relume.policies import routing_settings, waiting
from relume.policies.fair_queue import Entry
from relume.policies.saturation import (
    FREE,
    NO_WORKER,
    SATURATED,
    UNKNOWN,
    held_back,
    open_workers,
    saturation,
)
from relume.policies.waiting import Judged, Room
from relume.policies.waiting_settings import WaitingConfig, config_of

if TYPE_CHECKING:
    from relume.controlplane.scheduler import Scheduler

AT_ONCE = 32
"""So many are called or refused in one turn of the loop."""
RETRY_S = 5
"""Told to those refused while nothing is foretold."""
CODES = {
    waiting.DEADLINE: "deadline_unreachable",
    waiting.EXPIRED: "deadline_exceeded",
    waiting.SHARE: "tenant_limit",
    waiting.STOPPING: "stopping",
    waiting.NO_WORKER: "no_worker",
    **dict.fromkeys((waiting.TOO_LONG, waiting.FULL, waiting.DISPLACED), "overloaded"),
}
"""Of a refusal: `error.code`."""

log = structlog.get_logger("relume.waiting")


class _Held(NamedTuple):
    entry: Entry
    judged: Judged
    caller: Caller


class Waiting:
    """Implements relume.controlplane.gateway.ports.WaitingPort for a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.room = Room()
        self._scheduler = scheduler
        self._held: dict[str, _Held] = {}
        self._config = WaitingConfig()
        self._told: object = None
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._later_us = -1
        self._again_us = UNKNOWN
        self._closed = False

    @property
    def config(self) -> WaitingConfig:
        """The settings in force."""
        told = self._scheduler.view.settings_mark
        if told != self._told:
            self._told, self._config = told, config_of(self._scheduler.view)
        return self._config

    # --- WaitingPort

    def admit(
        self, arrival: Arrival, caller: Caller, size: int, patience_s: float, nobody: bool
    ) -> Hopeless | bool:
        """See WaitingPort.admit."""
        scheduler, config, model = self._scheduler, self.config, arrival.model
        if not config.requests or scheduler.never_served(model):
            return False
        scheduler.basis()  # all that was received counts
        now_us = scheduler.now_us()
        cause = self._cause(model, now_us)
        if cause == FREE or (cause == NO_WORKER and not nobody):
            return False  # who finds nobody has that on record first
        most_us = int(patience_s * 1e6) if cause == NO_WORKER else config.most_ms * 1000
        entry = Entry(
            arrival.request, model, waiting.rank_of(arrival.tier), arrival.share,
            waiting.cost(arrival.prompt_tokens, arrival.max_tokens), size, now_us,
            now_us + most_us, self._deadline_us(arrival, now_us),
        )  # fmt: skip
        if self._closed:
            return self._shed(entry, waiting.STOPPING, now_us, Judged("", (), 0, 0, -1))
        judged = self.room.enter(entry, now_us, config)
        if judged.refused:
            return self._shed(entry, judged.refused, now_us, judged)
        self._held[entry.request] = _Held(entry, judged, caller)
        try:
            scheduler.emit(
                v.RequestHeld(
                    scheduler.decision_id(), scheduler.basis(), entry.request, now_us, cause,
                    model, routing_settings.TIERS[entry.rank], entry.tenant, entry.tokens, size,
                    entry.until_us, entry.deadline_us, judged.ahead_requests, judged.ahead_tokens,
                    judged.predicted_us, len(self.room.entries), judged.evicted,
                )
            )  # fmt: skip
        finally:
            for name in judged.evicted:
                self._refuse(name, waiting.DISPLACED, now_us, entry.request)
        self._arm()
        return True

    def close(self) -> None:
        """See WaitingPort.close."""
        self._closed = True
        now_us = self._scheduler.now_us()
        for name in list(self.room.entries):
            self._refuse(name, waiting.STOPPING, now_us)

    # --- what the scheduler says

    def wake(self) -> None:
        """Somebody may have room: look, when those who were there before were asked."""
        if self.room.entries and self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._look)

    def dispatched(self, request: str, at_us: int, first_us: int) -> None:
        """A worker has it."""
        if request in self.room.entries:
            self.room.take(request, at_us, first_us, self.config)
            del self._held[request]

    def over(self, request: str) -> None:
        """Nobody waits for it any more."""
        if self.room.leave(request) is not None:
            del self._held[request]

    # --- inside

    def _cause(self, model: str, now_us: int) -> str:
        view = self._scheduler.view
        if self.room.waiting(model):
            return held_back(FREE if open_workers(view, model) else NO_WORKER, True)
        cause, again_us = saturation(view, model, self.config, now_us)
        self._look_again(again_us)
        return FREE if cause == SATURATED and self._blind else cause

    @property
    def _blind(self) -> bool:
        """While the log is away nobody hears what engines have finished: a worker that was busy
        then would be for ever."""
        return not self._scheduler.writer.healthy

    def _deadline_us(self, arrival: Arrival, now_us: int) -> int:
        """When its first token is due: as its client says, else, where late requests are to be
        shed, as its tier has it."""
        if arrival.ttft_ms:
            return now_us + arrival.ttft_ms * 1000
        config = routing_settings.config_of(self._scheduler.view)
        slo_us = config.slo_us(arrival.tier) if config.shed == "on" else 0
        return now_us + slo_us if slo_us else 0

    def _look(self) -> None:
        """Call those whose turn it is, refuse those whose time is over."""
        self._soon = None
        self._again_us = UNKNOWN
        left = self._refuse_late()
        for model in self.room.models():
            while left and self._call_next(model):
                left -= 1
        if not left:
            self.wake()  # others want a turn of the loop too
        self._arm()

    def _call_next(self, model: str) -> bool:
        """Whether somebody went."""
        scheduler = self._scheduler
        now_us = scheduler.now_us()
        cause, again_us = saturation(scheduler.view, model, self.config, now_us, glance=False)
        if cause == NO_WORKER:
            return False
        if cause == SATURATED and not self._blind:
            self._look_again(again_us)
            return False
        scheduler.basis()  # as the decision will have it
        entry = self.room.next(model, now_us, self.config)
        return entry is not None and self._call(entry, now_us)

    def _look_again(self, at_us: int) -> None:
        if at_us != UNKNOWN and not 0 <= self._again_us <= at_us:
            self._again_us = at_us

    def _call(self, entry: Entry, now_us: int) -> bool:
        self._scheduler.asked_us = now_us
        try:
            went = self._held[entry.request].caller.called()
        finally:
            self._scheduler.asked_us = -1
        if went:
            self.over(entry.request)  # also where it failed: whoever went does not wait
        return went

    def _refuse_late(self) -> int:
        """Refuse whose time is over; how many more may be called in this turn."""
        now_us = self._scheduler.now_us()
        late = self.room.over(now_us, AT_ONCE)
        for entry in late:
            if entry.deadline_us and entry.deadline_us <= now_us:
                reason = waiting.EXPIRED
            elif not open_workers(self._scheduler.view, entry.model):
                reason = waiting.NO_WORKER
            else:
                reason = waiting.TOO_LONG
            self._refuse(entry.request, reason, now_us)
        return AT_ONCE - len(late)

    def _refuse(self, request: str, reason: str, now_us: int, behalf: str = "") -> None:
        """Somebody who waits, or has lost its place, is told."""
        entry, judged, caller = self._held.pop(request)
        self.room.leave(request)
        caller.refused(self._shed(entry, reason, now_us, judged, behalf, waited=True))

    def _shed(
        self,
        entry: Entry,
        reason: str,
        now_us: int,
        judged: Judged,
        behalf: str = "",
        waited: bool = False,
    ) -> Hopeless:
        """Put it on record that it is refused; what its client is told."""
        scheduler, room = self._scheduler, self.room
        retry_s = RETRY_S
        if reason == waiting.STOPPING:
            retry_s = waiting.LEAST_RETRY_S
        elif reason != waiting.NO_WORKER:
            retry_s = room.retry_s(entry.model, now_us, RETRY_S)
        try:
            basis = scheduler.basis()
            scheduler.emit(
                v.RequestShed(
                    scheduler.decision_id(), basis, entry.request, now_us, reason, entry.model,
                    routing_settings.TIERS[entry.rank], entry.tenant, entry.tokens, entry.size,
                    entry.deadline_us, now_us - entry.entered_us if waited else -1,
                    judged.ahead_requests, judged.ahead_tokens, judged.predicted_us,
                    len(room.entries), retry_s, behalf,
                )
            )  # fmt: skip
        except LogError as error:
            log.error("refusal_not_written", reason=str(error), request=entry.request)
        status = 503 if reason in (waiting.NO_WORKER, waiting.STOPPING) else 429
        return Hopeless(status, _told(reason, entry, judged, now_us), retry_s, CODES[reason])

    def _arm(self) -> None:
        """Look again when the next one's time is over, or a bound is kept by the clock alone."""
        times = [at_us for at_us in (self.room.next_end_us(), self._again_us) if at_us >= 0]
        at_us = min(times, default=-1)
        if at_us == self._later_us:
            return
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._later_us = at_us
        if at_us >= 0:
            in_s = max(at_us - self._scheduler.now_us(), 0) / 1e6
            self._later = asyncio.get_running_loop().call_later(in_s, self._due)

    def _due(self) -> None:
        self._later, self._later_us = None, -1
        if self._soon is None:
            self._look()


def _told(reason: str, entry: Entry, judged: Judged, now_us: int) -> str:
    """A refusal in words for the client, with what it can do."""
    if reason == waiting.NO_WORKER:
        return "no worker can take the request at present; try again"
    if reason == waiting.STOPPING:
        return "this gateway is stopping and the request had not begun; try again"
    ahead = f"{judged.ahead_requests} requests go first"
    if judged.predicted_us >= 0:
        ahead += f", about {judged.predicted_us / 1e6:.1f} s"
    waited = f"after {(now_us - entry.entered_us) / 1e6:.1f} s"
    higher = "" if entry.rank == 0 else " or a higher x-relume-tier"
    return {
        waiting.DEADLINE: f"all workers are busy and its first token would be late ({ahead}); "
        f"try again later, or with a later x-slo-ttft-ms{higher}",
        waiting.EXPIRED: f"all workers were busy until its first token was late, {waited}; "
        f"try again later, or with a later x-slo-ttft-ms{higher}",
        waiting.TOO_LONG: f"all workers were busy, {waited}; try again later",
        waiting.FULL: f"all workers are busy and too many requests wait ({ahead}); "
        f"try again later{higher}",
        waiting.DISPLACED: f"all workers are busy, too many requests wait, and its place was "
        f"needed for one that goes first, {waited}; try again later{higher}",
        waiting.SHARE: "all workers are busy and as many requests of this tenant wait as may; "
        "send fewer at a time, or try again later",
    }[reason]
