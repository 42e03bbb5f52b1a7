"""Per-request choices of one replica: read the view, decide, write the decision.

Every decision is taken on a view (R, p), recorded with that basis, appended to the
replica's stream without waiting, and acted on at once. Nothing here awaits between
reading the view and storing its successor.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import msgspec

from relume.controlplane.checkpoints import Checkpoints
from relume.controlplane.gateway.ports import Arrival, Assignment, Hopeless
from relume.controlplane.returns import Returns
from relume.controlplane.waiting import Waiting
from relume.events import codec
from relume.events import vocabulary as v
from relume.events.log import StreamWriter
from relume.policies import board, prefixes, recovery, routing
from relume.policies.counted import prompt_tokens
from relume.policies.receipts import Unsaid
from relume.policies.routing_settings import POLICY
from relume.policies.state import Worker
from relume.policies.view import View

GATHERED = (
    v.RequestArrived,
    v.RouteDecided,
    v.HolderChosen,
    v.RequestEnded,
    v.RequestHeld,
    v.RequestShed,
)
"""What may wait in the writer for more of its kind: nobody else acts on it at once, and a
decision travels with its request besides. Everything else is sent without delay."""
FINDABLE_S = 0.02
"""The decision about a request whose client may come back to another replica is sent so soon: at
once, each such request would cost a transaction of its own."""


class LiveRequest:
    """What the replica must remember of one open request beyond the log. `running`: its
    attempt is under way; `failure`: how the last one ended; `delivered` as it was then.
    `envelopes`: holders that may have it as its client sent it.
    `claimed_at`: where our stream says that its client came back, 0 if it did not."""

    __slots__ = (
        "arrival",
        "attempt",
        "avoid",
        "claimed_at",
        "delivered",
        "envelopes",
        "failure",
        "incarnation",
        "running",
        "worker",
    )

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.attempt = 0
        self.avoid: tuple[str, ...] = ()
        self.worker = ""
        self.incarnation = 0
        self.running = False
        self.failure = ""
        self.delivered = 0
        self.claimed_at = 0
        self.envelopes: tuple[str, ...] = ()


class Scheduler:
    """Implements controlplane.gateway.ports.SchedulerPort on a view and a writer.

    `microseconds` is the replica's monotonic clock, used only to record receive times.
    """

    def __init__(
        self,
        view: View,
        writer: StreamWriter,
        boot: str,
        policy: str,
        microseconds: Callable[[], int],
    ) -> None:
        self.view = view
        self.writer = writer
        self.boot = boot
        self.policy = policy
        self.pinned = ""
        """A policy for the next decisions whatever the settings say; empty: none."""
        self.live: dict[str, LiveRequest] = {}
        self.decisions = 0
        self.checkpoints = Checkpoints(self, microseconds)
        self.returns = Returns(self)
        self.waiting = Waiting(self)
        self.asked_us = -1
        """When the decision at hand was asked for; -1: when it is taken."""
        self.observers: list[Callable[[int, Any], None]] = []
        self._clock = microseconds
        self._began_us = microseconds()
        self._unsaid = Unsaid()
        self._changed = asyncio.Event()
        self._models: dict[str, bool] = {}

    # --- the log -----------------------------------------------------------------

    def emit(self, event: Any) -> int:
        """Append one of our own events and let the view know at once."""
        self._emit_receipts()
        position = self.writer.append(event)
        if type(event) not in GATHERED:
            self.writer.hurry()
        self.view.own(position, event)
        for observer in self.observers:
            observer(position, event)
        return position

    def basis(self) -> v.Basis:
        """The basis of a decision taken now; the decision must be the next event emitted."""
        self._emit_receipts()
        self.view.reach(self.writer.position)
        return self.view.basis

    def decision_id(self) -> str:
        """A name for the next decision of this replica, unique over its lives."""
        self.decisions += 1
        return f"{self.view.replica}.{self.boot}.{self.decisions}"

    def now_us(self) -> int:
        """Microseconds on the clock that receive times are recorded by."""
        return self._clock() - self._began_us

    def received(self, revision: int) -> None:
        """A watched revision group arrived now, and is to be folded next."""
        if not self._unsaid.received(self.view.receipts, revision, self.now_us()):
            board.forget(self.view)

    def _emit_receipts(self) -> None:
        event = self._unsaid.told()
        if event is not None:
            self.view.reach(self.writer.append(event))
            self._unsaid.said(self.view.receipts)

    def advanced(self, engines: bool = True) -> None:
        """The canonical fold advanced: settle the overlay, wake those who wait. `engines`:
        one of them may have said for the first time what it serves."""
        self.view.landed()
        board.keep_up(self.view)
        for worker in self.view.fleet.workers.values() if engines else ():
            if worker.model and worker.model not in self._models:
                self._models[worker.model] = True
        self.wake()

    def wake(self) -> None:
        """Something that may have given capacity happened."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self.waiting.wake()  # behind those who go on behind a failure

    # --- SchedulerPort -----------------------------------------------------------

    def models(self) -> list[str]:
        """Names of models that some worker serves or has served, sorted."""
        return sorted(self._models)

    def ready(self) -> bool:
        """Whether any worker could take a request of some model now."""
        return any(self._open_for(model) for model in self._models)

    def block_tokens(self, model: str) -> int:
        """See SchedulerPort.block_tokens."""
        return prefixes.block_tokens(self.view, model)

    def arrived(self, arrival: Arrival) -> Arrival:
        """See SchedulerPort.arrived."""
        verdict, reason = recovery.grounded(
            self.view, arrival.model, arrival.verdict, arrival.needs, arrival.fallback
        )
        if verdict != arrival.verdict:
            arrival = msgspec.structs.replace(arrival, verdict=verdict, reason=reason)
        if verdict == "restart" and arrival.resumable:
            arrival = msgspec.structs.replace(arrival, resumable="", grace_ticks=0)
        self.live[arrival.request] = LiveRequest(arrival)
        self.emit(
            v.RequestArrived(
                arrival.request,
                arrival.model,
                arrival.route,
                arrival.stream,
                arrival.prompt_tokens,
                arrival.max_tokens,
                arrival.verdict,
                arrival.reason,
                arrival.estimated,
                arrival.tenant,
                arrival.client_id,
                arrival.trace,
                arrival.resumable,
                arrival.grace_ticks,
            )
        )
        return arrival

    def adopted(self, arrival: Arrival) -> LiveRequest:
        """A request of another replica, to be served here."""
        live = self.live[arrival.request] = LiveRequest(arrival)
        return live

    def let_go(self, request: str) -> None:
        """The request is another replica's now, or nobody's: nothing more is said of it."""
        self.live.pop(request, None)
        self.waiting.over(request)
        self.view.let_go(request)

    async def changed(self) -> None:
        """Wait until the fold advances."""
        await self._changed.wait()

    def assign(self, request: str, cause: str, delivered: int) -> Assignment | Hopeless | None:
        """See SchedulerPort.assign. The decision is in the log whatever it says."""
        live = self.live[request]
        arrival = live.arrival
        if self.never_served(arrival.model):
            named = f"no model {arrival.model[:200]!r}; /v1/models lists what there is"
            return Hopeless(404, named)
        mode = recovery.mode_of(arrival.verdict, arrival.stream, delivered)
        if mode == "hopeless":
            return Hopeless(502, f"the worker was lost and this cannot go on: {arrival.reason}")
        if mode == "new":
            delivered = 0
        live.delivered = delivered
        prompt = prompt_tokens(self.view.fleet, request, arrival.prompt_tokens)
        query = routing.Query(
            request,
            arrival.model,
            prompt,
            delivered,
            live.avoid,
            live.attempt,
            arrival.prefix,
            session=arrival.session,
            tier=arrival.tier,
        )
        planned = cause != "wait_over" and self.checkpoints.planned(live)
        policy = "planned" if planned else self.pinned or self._policy()
        basis = self.basis()
        at_us = self.view.now_us = self.asked_us if self.asked_us >= 0 else self.now_us()
        choice = routing.decide(self.view, query, policy)
        attempt = live.attempt + 1 if choice.worker else live.attempt
        event = v.RouteDecided(
            self.decision_id(),
            basis,
            request,
            attempt,
            cause,
            mode,
            delivered,
            prompt,
            choice.worker,
            choice.incarnation,
            policy,
            arrival.model,
            live.avoid,
            choice.candidates,
            choice.others,
            arrival.prefix,
            at_us,
            routing.first_token_us(self.view, query, policy, choice),
            session=query.session,
            tier=query.tier,
            cached_tokens=choice.cached_tokens,
            refused=choice.refused,
        )
        self.emit(event)
        if choice.worker:
            self.waiting.dispatched(request, at_us, event.ttft_us)
        if arrival.resumable:
            self.writer.hurry(FINDABLE_S)  # other replicas must know of it before its client may go
        if choice.refused:
            return Hopeless(429, f"no worker would begin it in time: {choice.refused}")
        if not choice.worker:
            return None
        lost = live.attempt
        live.attempt, live.worker, live.incarnation = attempt, choice.worker, choice.incarnation
        live.running = True
        worker = self.view.fleet.workers[choice.worker]
        return Assignment(
            request,
            attempt,
            worker.name,
            worker.incarnation,
            worker.host,
            worker.port,
            mode,
            base64.urlsafe_b64encode(codec.encode(_to_travel(event))).rstrip(b"="),
            *self.checkpoints.of_dispatch(live, lost),
            arrival.priority,
        )

    def _policy(self) -> str:
        """The routing policy in force; one that another version knows is not."""
        told = self.view.setting(POLICY, self.policy)
        return told if told in routing.POLICIES else self.policy

    def timer_fired(self, timer: str, key: str) -> None:
        """See SchedulerPort.timer_fired."""
        self.emit(v.TimerFired(timer, key))

    async def capacity(self, request: str, timeout_s: float) -> bool:
        """See SchedulerPort.capacity."""
        model = self.live[request].arrival.model
        try:
            async with asyncio.timeout(timeout_s):
                while not self._open_for(model):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def observed(
        self, request: str, attempt: int, kind: str, delivered: int, detail: str = ""
    ) -> None:
        """See SchedulerPort.observed."""
        live = self.live[request]
        live.running, live.failure = False, kind
        failed = f"{live.worker}:{live.incarnation}"
        if kind != "moved" and failed not in live.avoid:
            live.avoid = (*live.avoid, failed)
        self.emit(
            v.TransportObserved(
                request, attempt, live.worker, live.incarnation, kind, delivered, detail[:200]
            )
        )

    def ended(
        self,
        request: str,
        outcome: str,
        status: int,
        tokens: int,
        finish: str,
        ttft_us: int = -1,
        longest_gap_us: int = -1,
        detail: str = "",
    ) -> None:
        """See SchedulerPort.ended."""
        live = self.live.pop(request)
        self.waiting.over(request)
        self.emit(
            v.RequestEnded(
                request,
                outcome,
                status,
                tokens,
                finish,
                live.attempt,
                live.arrival.verdict,
                ttft_us,
                longest_gap_us,
                detail[:200],
            )
        )
        self.waiting.wake()

    def never_served(self, model: str) -> bool:
        """Whether nobody serves or served `model`, though some model is known, and no engine
        is on its way that has yet to say for the first time what it serves."""
        if not self._models or model in self._models:
            return False
        return not any(map(_on_its_way, self.view.fleet.workers.values()))

    def _open_for(self, model: str) -> bool:
        query = routing.Query("", model, 0, 0)
        view = self.view
        return any(
            not routing.exclusion(view, worker, query) for worker in view.fleet.workers.values()
        )


def _to_travel(decision: v.RouteDecided) -> v.RouteDecided:
    """The decision as its worker gets it: without what only decisions behind it go by."""
    return msgspec.structs.replace(decision, prefix=b"") if decision.prefix else decision


def _on_its_way(worker: Worker) -> bool:
    """Whether its first engine is starting. One that is held or has died already may never
    come: nobody waits for its model."""
    if not worker.present or worker.model or worker.held or worker.deaths:
        return False
    return worker.engine in ("none", "starting")
