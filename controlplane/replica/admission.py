"""Runs the admission queue of a replica: arrivals, calls after a change of load, refusals.
`relume.policies.admission.admission_queue` and `relume.policies.routing.saturation` decide; this
module calls them on the view, records the decision, and informs the request sessions. A request
that passes straight through is not recorded, and nothing polls: a waiting request is called if the
fold advances or an own event makes room, and at the time at which a bound on the prompts ahead is
met. Attempts after a failure do not wait here; they are called before those that do
(`Scheduler.wake`), and those stay back until the engines report them (`Continuations`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import structlog

from relume.controlplane.gateway.ports import Caller
from relume.controlplane.replica.decision_writer import DecisionWriter
from relume.controlplane.replica.live_requests import Continuations, LiveRequest
from relume.controlplane.stream import error_codes
from relume.controlplane.stream.arrival import Arrival, Rejected
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import QueueCause, ShedReason, Tier
from relume.events.wire.headers import TIER
from relume.policies.admission import admission_queue
from relume.policies.admission.admission_queue import AdmissionQueue, QueueDecision
from relume.policies.admission.admission_settings import WaitingConfig, config_of
from relume.policies.admission.fair_queue import Entry
from relume.policies.degradation import effects
from relume.policies.routing import routing_settings
from relume.policies.routing.saturation import (
    FREE,
    NO_WORKER,
    SATURATED,
    UNKNOWN,
    call_next,
    on_arrival,
    open_workers,
)

AT_ONCE = 32
"""Maximum number of requests called or refused per turn of the loop."""
RETRY_S = 5
"""Retry-after of a refusal without an estimate."""

_FOR_LOAD = frozenset(admission_queue.REASONS) - {
    admission_queue.NO_WORKER,
    admission_queue.STOPPING,
    admission_queue.DEGRADED,
}
"""Refusals that another request, or a later one, need not get: the others have status 503."""
_UNQUEUED = QueueDecision(refused="", evicted=(), ahead_requests=0, ahead_tokens=0, predicted_us=-1)
"""Of a request that the queue did not look at."""

log = structlog.get_logger("relume.waiting")


class _QueuedRequest(NamedTuple):
    """`patient_until_us`: time until which it waits while no worker is open."""

    entry: Entry
    judged: QueueDecision
    caller: Caller
    patient_until_us: int


class ReplicaAdmission:
    """Implements relume.controlplane.gateway.ports.AdmissionPort. `never_served` says whether no
    worker serves or served a model."""

    def __init__(self, decisions: DecisionWriter, never_served: Callable[[str], bool]) -> None:
        self.queue = AdmissionQueue()
        self._continuations = Continuations()
        self._decisions = decisions
        self._never_served = never_served
        self._held: dict[str, _QueuedRequest] = {}
        self._config = WaitingConfig()
        self._settings_mark: object = None
        self._soon: asyncio.Handle | None = None
        self._is_woken_again = False
        self._later: asyncio.TimerHandle | None = None
        self._later_us = -1
        self._again_us = UNKNOWN
        self._closed = False

    @property
    def config(self) -> WaitingConfig:
        """The settings in force."""
        mark = self._decisions.view.settings_mark
        if mark != self._settings_mark:
            self._settings_mark, self._config = mark, config_of(self._decisions.view)
        return self._config

    # --- WaitingPort

    def admit(
        self, arrival: Arrival, caller: Caller, size: int, patience_s: float, nobody: bool
    ) -> Rejected | bool:
        """See WaitingPort.admit."""
        if (refused := self._refused_by_level(arrival, size)) is not None:
            return refused
        decisions, config, model = self._decisions, self.config, arrival.model
        if not config.requests or self._never_served(model):
            return False
        decisions.basis()  # all that was received counts
        now_us = decisions.now_us()
        cause = self._cause(arrival, now_us)
        if cause == FREE or (cause == NO_WORKER and not nobody):
            return False  # a request without a worker has that on record first
        patience_us = int(patience_s * 1e6)
        most_us = patience_us if cause == NO_WORKER else config.most_ms * 1000
        entry = self._entry(arrival, size, now_us, most_us)
        if self._closed:
            return self._shed(entry, admission_queue.STOPPING, now_us, _UNQUEUED)
        judged = self.queue.enter(entry, now_us, config)
        if judged.refused:
            return self._shed(entry, judged.refused, now_us, judged)
        self._held[entry.request] = _QueuedRequest(entry, judged, caller, now_us + patience_us)
        try:
            decisions.emit(
                v.RequestHeld(
                    decision=decisions.decision_id(),
                    basis=decisions.basis(),
                    request=entry.request,
                    at_us=now_us,
                    cause=QueueCause(cause),
                    model=model,
                    tier=Tier(routing_settings.TIERS[entry.rank]),
                    tenant=entry.tenant,
                    tokens=entry.tokens,
                    size=size,
                    until_us=entry.until_us,
                    deadline_us=entry.deadline_us,
                    ahead_requests=judged.ahead_requests,
                    ahead_tokens=judged.ahead_tokens,
                    predicted_us=judged.predicted_us,
                    depth=len(self.queue.entries),
                    evicted=judged.evicted,
                )
            )
        finally:
            for name in judged.evicted:
                self._refuse(name, admission_queue.DISPLACED, now_us, entry.request)
        self._arm()
        return True

    def output_limit(self, model: str) -> int:
        """See WaitingPort.output_limit."""
        return effects.output_limit(self._decisions.view, model)

    def close(self) -> None:
        """See WaitingPort.close."""
        self._closed = True
        now_us = self._decisions.now_us()
        for name in list(self.queue.entries):
            self._refuse(name, admission_queue.STOPPING, now_us)

    # --- what the scheduler says

    def wake(self) -> None:
        """A worker may have room: check, after earlier requests were called."""
        if not self.queue.entries:
            return
        self._is_woken_again = self._soon is not None
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._look_last)

    def continues(self, live: LiveRequest) -> None:
        """An attempt after a failure goes to its worker: what waits here goes after it."""
        self._continuations.sent(live, self._decisions.now_us())

    def dispatched(self, request: str, at_us: int, first_us: int) -> None:
        """A worker has it."""
        if request in self.queue.entries:
            self.queue.take(request, at_us, first_us, self.config)
            del self._held[request]

    def over(self, request: str) -> None:
        """Its session no longer waits."""
        self._continuations.over(request)
        if self.queue.leave(request) is not None:
            del self._held[request]

    # --- inside

    def _entry(self, arrival: Arrival, size: int, now_us: int, most_us: int) -> Entry:
        return Entry(
            request=arrival.request,
            model=arrival.model,
            rank=admission_queue.rank_of(arrival.tier),
            tenant=arrival.share,
            tokens=admission_queue.cost(arrival.prompt_tokens, arrival.max_tokens),
            size=size,
            entered_us=now_us,
            until_us=now_us + most_us,
            deadline_us=self._deadline_us(arrival, now_us),
        )

    def _refused_by_level(self, arrival: Arrival, size: int) -> Rejected | None:
        """The refusal of an arrival whose tier the fleet's level refuses."""
        view = self._decisions.view
        if not effects.refuses(view, arrival.model, arrival.tier):
            return None
        now_us = self._decisions.now_us()
        entry = self._entry(arrival, size, now_us, 0)
        return self._shed(entry, admission_queue.DEGRADED, now_us, _UNQUEUED)

    def _cause(self, arrival: Arrival, now_us: int) -> str:
        cause, again_us = on_arrival(
            self._decisions.view, self.queue, arrival.model, arrival.tier, self.config, now_us
        )
        self._look_again(again_us)
        return FREE if cause == SATURATED and self._blind else cause

    @property
    def _blind(self) -> bool:
        """While the log is unavailable no report of finished requests arrives: a worker that was
        busy then would stay busy."""
        return not self._decisions.healthy

    def _deadline_us(self, arrival: Arrival, now_us: int) -> int:
        """When its first token is due: as its client says, else, where late requests are to be
        shed, as its tier has it."""
        if arrival.ttft_ms:
            return now_us + arrival.ttft_ms * 1000
        config = routing_settings.config_of(self._decisions.view)
        slo_us = config.slo_us(arrival.tier) if config.shed == "on" else 0
        if slo_us:
            slo_us *= effects.slo_factor(self._decisions.view, arrival.model)
        return now_us + slo_us if slo_us else 0

    def _look_last(self) -> None:
        """Look after attempts that the last call of `wake` concerns too: they may be due after this call.
        That happens once, so that frequent calls delay no request further."""
        if self._is_woken_again:
            self._is_woken_again = False
            self._soon = asyncio.get_running_loop().call_soon(self._look)
        else:
            self._look()

    def _look(self) -> None:
        """Call the requests that are next, refuse those whose time is over."""
        self._soon = None
        self._again_us = UNKNOWN
        left = self._refuse_late()
        for model in self.queue.models():
            while left and self._call_next(model):
                left -= 1
        if not left:
            self.wake()  # others want a turn of the loop too
        self._arm()

    def _call_next(self, model: str) -> bool:
        """Whether a request went."""
        now_us = self._decisions.now_us()
        if self._stays_back(model, now_us):
            return False
        if self._next(model, now_us) is None:
            return False
        self._decisions.basis()  # as the decision will have it
        entry = self._next(model, now_us)
        return entry is not None and self._call(entry, now_us)

    def _stays_back(self, model: str, now_us: int) -> bool:
        """Whether attempts after a failure are on their way, as far as reports can say so."""
        if self._blind:
            return False
        until_us = self._continuations.until_us(model, self._decisions.view.fleet, now_us)
        self._look_again(until_us)
        return until_us >= 0

    def _next(self, model: str, now_us: int) -> Entry | None:
        """The request that a worker has room for."""
        view = self._decisions.view
        entry, again_us = call_next(view, self.queue, model, self.config, now_us, self._blind)
        self._look_again(again_us)
        return entry

    def _look_again(self, at_us: int) -> None:
        if at_us != UNKNOWN and not 0 <= self._again_us <= at_us:
            self._again_us = at_us

    def _call(self, entry: Entry, now_us: int) -> bool:
        with self._decisions.deciding_at(now_us):
            went = self._held[entry.request].caller.called()
        if went:
            self.over(entry.request)  # also if it failed: a called request does not wait
        return went

    def _refuse_late(self) -> int:
        """Refuse requests whose time is over; returns how many more may be called in this turn.
        One that has no worker by then waits as long as one that found none on arrival."""
        now_us = self._decisions.now_us()
        late = self.queue.over(now_us, AT_ONCE)
        for entry in late:
            if entry.deadline_us and entry.deadline_us <= now_us:
                reason = admission_queue.EXPIRED
            elif open_workers(self._decisions.view, entry.model):
                reason = admission_queue.TOO_LONG
            elif now_us < (until_us := self._held[entry.request].patient_until_us):
                self.queue.extend(entry.request, until_us)
                continue
            else:
                reason = admission_queue.NO_WORKER
            self._refuse(entry.request, reason, now_us)
        return AT_ONCE - len(late)

    def _refuse(self, request: str, reason: str, now_us: int, behalf: str = "") -> None:
        """Inform a request that waits or was displaced."""
        entry, judged, caller, _ = self._held.pop(request)
        self.queue.leave(request)
        caller.refused(self._shed(entry, reason, now_us, judged, behalf, waited=True))

    def _shed(
        self,
        entry: Entry,
        why: str,
        now_us: int,
        judged: QueueDecision,
        behalf: str = "",
        waited: bool = False,
    ) -> Rejected:
        """Record the refusal; returns the answer for its client."""
        decisions, queue, reason = self._decisions, self.queue, ShedReason(why)
        retry_s = RETRY_S
        if reason == admission_queue.STOPPING:
            retry_s = admission_queue.LEAST_RETRY_S
        elif reason == admission_queue.DEGRADED:
            retry_s = effects.retry_after_s(decisions.view, entry.model)
        elif reason != admission_queue.NO_WORKER:
            retry_s = queue.retry_s(entry.model, now_us, RETRY_S)
        try:
            basis = decisions.basis()
            decisions.emit(
                v.RequestShed(
                    decision=decisions.decision_id(),
                    basis=basis,
                    request=entry.request,
                    at_us=now_us,
                    reason=reason,
                    model=entry.model,
                    tier=Tier(routing_settings.TIERS[entry.rank]),
                    tenant=entry.tenant,
                    tokens=entry.tokens,
                    size=entry.size,
                    deadline_us=entry.deadline_us,
                    waited_us=now_us - entry.entered_us if waited else -1,
                    ahead_requests=judged.ahead_requests,
                    ahead_tokens=judged.ahead_tokens,
                    predicted_us=judged.predicted_us,
                    depth=len(queue.entries),
                    retry_after_s=retry_s,
                    behalf=behalf,
                )
            )
        except LogError as error:
            log.error("refusal_not_written", reason=str(error), request=entry.request)
        return Rejected(
            429 if reason in _FOR_LOAD else 503,
            _refusal_text(reason, entry, judged, now_us),
            retry_s,
            error_codes.OF_REASONS[reason],
        )

    def _arm(self) -> None:
        """Check again when the next one's time is over, or when the clock alone satisfies a
        bound."""
        times = [at_us for at_us in (self.queue.next_end_us(), self._again_us) if at_us >= 0]
        at_us = min(times, default=-1)
        if at_us == self._later_us:
            return
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._later_us = at_us
        if at_us >= 0:
            in_s = max(at_us - self._decisions.now_us(), 0) / 1e6
            self._later = asyncio.get_running_loop().call_later(in_s, self._due)

    def _due(self) -> None:
        self._later, self._later_us = None, -1
        if self._soon is None:
            self._look()


def _refusal_text(reason: ShedReason, entry: Entry, judged: QueueDecision, now_us: int) -> str:
    """A refusal in words for the client, with what it can do."""
    if reason == admission_queue.NO_WORKER:
        return error_codes.NO_WORKER
    if reason == admission_queue.STOPPING:
        return error_codes.STOPPING_UNBEGUN
    if reason == admission_queue.DEGRADED:
        return error_codes.DEGRADED
    ahead = f"{judged.ahead_requests} requests go first"
    if judged.predicted_us >= 0:
        ahead += f", about {judged.predicted_us / 1e6:.1f} s"
    waited = f"after {(now_us - entry.entered_us) / 1e6:.1f} s"
    higher = "" if entry.rank == 0 else f" or a higher {TIER}"
    return {
        admission_queue.DEADLINE: f"all workers are busy and its first token would be late ({ahead}); "
        f"try again later, or with a later x-slo-ttft-ms{higher}",
        admission_queue.EXPIRED: f"all workers were busy until its first token was late, {waited}; "
        f"try again later, or with a later x-slo-ttft-ms{higher}",
        admission_queue.TOO_LONG: f"all workers were busy, {waited}; try again later",
        admission_queue.FULL: f"all workers are busy and too many requests wait ({ahead}); "
        f"try again later{higher}",
        admission_queue.DISPLACED: f"all workers are busy, too many requests wait, and its place was "
        f"needed for one that goes first, {waited}; try again later{higher}",
        admission_queue.SHARE: "all workers are busy and as many requests of this tenant wait as may; "
        "send fewer at a time, or try again later",
    }[reason]
