"""Verifies the admission queue: rebuilds it from what the replica wrote, and repeats its decisions.

Four decisions follow from the settings at the basis and from earlier events, all of which are in
the stream: which requests are queued and why, which one is displaced by which, which are refused on
arrival and with what numbers, and which is called next. Inputs come from the log: the times, a
client's tenant, tier and deadline, how long it would wait, that a gateway stopped, that a refusal
had no worker, why a wait ended, when to retry, and how many waited at a refusal. A decision that
cannot be repeated (the view is not at its basis, or this build does not have its version) is
accepted as an input too.
"""

from __future__ import annotations

from typing import Any

from relume.controlplane.replay.divergence import Verdict
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RouteCause, Tier
from relume.policies.admission import admission_queue
from relume.policies.admission.admission_queue import AdmissionQueue, QueueDecision, rank_of
from relume.policies.admission.admission_settings import WaitingConfig, config_of
from relume.policies.admission.fair_queue import Entry
from relume.policies.decision_versions import missing, version_of
from relume.policies.degradation import effects
from relume.policies.routing.saturation import call_next, on_arrival
from relume.policies.state.overlay.view import View

ON_ARRIVAL = (
    admission_queue.DEADLINE,
    admission_queue.EXPIRED,
    admission_queue.FULL,
    admission_queue.SHARE,
)


class AdmissionReplay:
    """The room of one replica. It is known from a start of the replica on."""

    def __init__(self, view: View, verdict: Verdict) -> None:
        self._view = view
        self._verdict = verdict
        self._queue: AdmissionQueue | None = AdmissionQueue() if not view.fleet.revision else None
        self._evicted: dict[str, str] = {}

    def seen(self, position: int, event: Any, founded: bool) -> None:
        """An own event that the view is about to have. `founded`: it is a decision that can be
        repeated, and the view is at its basis."""
        kind, queue = type(event), self._queue
        if kind is v.ReplicaStarted:
            self._queue, self._evicted = AdmissionQueue(), {}
        elif queue is None:
            return
        elif kind is v.RequestEnded:
            queue.leave(event.request)
        elif kind is v.RouteDecided:
            if event.request in queue.entries:
                self._routed(queue, position, event, founded)
        elif kind is v.RequestHeld:
            self._held(queue, position, event, founded)
        elif kind is v.RequestShed:
            self._shed(queue, position, event, founded)

    def _held(
        self, queue: AdmissionQueue, position: int, event: v.RequestHeld, founded: bool
    ) -> None:
        if not founded:
            queue.put(entry_of(event), event.at_us)
            return
        view, config = self._view, config_of(self._view)
        tier = event.tier if self._lets_use_spares(queue, event.model) else Tier.NONE
        cause, _ = on_arrival(view, queue, event.model, tier, config, event.at_us)
        judged = queue.enter(entry_of(event), event.at_us, config)
        self._evicted = dict.fromkeys(judged.evicted, event.request)
        written = event.cause, event.ahead_requests, event.ahead_tokens, event.predicted_us
        found = cause, judged.ahead_requests, judged.ahead_tokens, judged.predicted_us
        self._compare(
            position, event,
            (*written, event.depth, event.evicted, ""),
            (*found, len(queue.entries), judged.evicted, judged.refused),
        )  # fmt: skip

    def _shed(
        self, queue: AdmissionQueue, position: int, event: v.RequestShed, founded: bool
    ) -> None:
        waited = queue.leave(event.request)
        if not founded:
            return
        if event.reason == admission_queue.DISPLACED:
            self._compare(
                position, event, event.behalf, self._evicted.pop(event.request, "no request")
            )
        elif event.reason == admission_queue.DEGRADED:
            refused = effects.refuses(self._view, event.model, event.tier)
            retry_s = effects.retry_after_s(self._view, event.model)
            self._compare(position, event, (True, event.retry_after_s), (refused, retry_s))
        elif waited is not None:
            in_time = event.at_us < waited.end_us and event.reason != admission_queue.STOPPING
            self._compare(position, event, False, in_time)
        elif event.reason in ON_ARRIVAL:
            judged = queue.enter(entry_of(event), event.at_us, config_of(self._view))
            queue.leave(event.request)
            recorded = QueueDecision(
                refused=event.reason,
                evicted=(),
                ahead_requests=event.ahead_requests,
                ahead_tokens=event.ahead_tokens,
                predicted_us=event.predicted_us,
            )
            self._compare(position, event, recorded, judged)

    def _routed(
        self, queue: AdmissionQueue, position: int, event: v.RouteDecided, founded: bool
    ) -> None:
        config = config_of(self._view)
        if event.cause == RouteCause.WAIT_OVER and (lacking := missing(self._view, "admission")):
            self._verdict.cannot_take(lacking)
        elif event.cause == RouteCause.WAIT_OVER:
            if founded:
                turn = self._next(queue, event, config)
                self._compare(position, event, event.request, turn)
        if event.worker:
            queue.take(event.request, event.at_us, event.ttft_us, config)

    def _next(self, queue: AdmissionQueue, event: v.RouteDecided, config: WaitingConfig) -> str:
        """Who was to be called when this one was. Whether a worker had room is not checked."""
        if version_of(self._view, "admission") > 1:
            found, _ = call_next(self._view, queue, event.model, config, event.at_us, overload=True)
        else:
            found = queue.next(event.model, event.at_us, config)
        return found.request if found is not None else "no request"

    def _lets_use_spares(self, queue: AdmissionQueue, model: str) -> bool:
        """Whether the writer lets an arrival of tier batch go to a spare: version 1 does not, and
        version 2 does not while others wait."""
        version = version_of(self._view, "admission")
        return version > 2 or (version == 2 and not queue.waiting(model))

    def _compare(self, position: int, event: Any, expected: Any, actual: Any) -> None:
        self._verdict.waits += 1
        if expected != actual:
            where = event.basis.revision, self._view.stream, position
            self._verdict.differ(*where, "decision", expected, actual)


def entry_of(event: v.RequestHeld | v.RequestShed) -> Entry:
    """The request as it came to the room."""
    until_us = event.until_us if type(event) is v.RequestHeld else event.at_us + 1
    return Entry(
        request=event.request,
        model=event.model,
        rank=rank_of(event.tier),
        tenant=event.tenant,
        tokens=event.tokens,
        size=event.size,
        entered_us=event.at_us,
        until_us=until_us,
        deadline_us=event.deadline_us,
    )
