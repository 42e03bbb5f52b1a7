"""Per-request choices of one replica: read the view, decide, write the decision.

Every decision is made on a view (R, p), recorded with that basis, appended to the replica's stream
without waiting, and acted on immediately. Nothing here awaits between reading the view and storing
its successor.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from relume.controlplane.gateway.ports import GatewayPort
from relume.controlplane.replica.admission import ReplicaAdmission
from relume.controlplane.replica.checkpoint_scheduling import Checkpoints
from relume.controlplane.replica.crosscheck.check_queue import CrossCheckQueue
from relume.controlplane.replica.decision_writer import DecisionWriter
from relume.controlplane.replica.live_requests import LiveRequest, LiveRequests
from relume.controlplane.replica.resumptions import StreamResumptions
from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected, arrived_event
from relume.controlplane.stream.error_codes import NOT_COMPARED
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.interface import StreamWriter
from relume.events.vocabulary.enums import (
    AttemptMode,
    EnginePhase,
    Guarantee,
    RequestOutcome,
    RouteCause,
    TimerKind,
    TransportKind,
)
from relume.events.wire.headers import encode_record
from relume.policies.health.evidence import has_failures
from relume.policies.recovery import resume_mode
from relume.policies.recovery.lineage import CorruptEngines, engine_of
from relume.policies.recovery.restart_times import RestartTimes
from relume.policies.routing import choose_worker, estimate_index
from relume.policies.routing.eligibility import excluded_at
from relume.policies.routing.route_query import RouteQuery
from relume.policies.routing.routing_settings import POLICY
from relume.policies.state import prefix_index
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View
from relume.policies.state.prompt_tokens import prompt_tokens

FINDABLE_S = 0.02
"""Maximum delay of the decision about a request whose client may resume at another replica: without
a delay, each such request would cost one transaction."""


class Scheduler:
    """Implements relume.controlplane.gateway.ports.SchedulerPort on a view and a writer.

    `microseconds` is the replica's monotonic clock, used only to record receive times. The parts
    (`checkpoints`, `returns`, `waiting`) share the live requests and the decision writer.
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
        self.policy = policy
        self.live: LiveRequests = {}
        self.decisions = DecisionWriter(view, writer, boot, microseconds)
        self.checkpoints = Checkpoints(self.decisions, self.live, microseconds)
        self.returns = StreamResumptions(
            self.decisions, self.live, self.observed, self.changed, microseconds
        )
        self.cross_checks = CrossCheckQueue(view)
        self.waiting = ReplicaAdmission(self.decisions, self.never_served)
        self.restarts = RestartTimes()
        self._corrupt = CorruptEngines()
        self._microseconds = microseconds
        self._changed = asyncio.Event()
        self._models: dict[str, bool] = {}

    def serve_clients_of(self, gateway: GatewayPort) -> None:
        """The gateway reports what clients have, and releases streams that another replica owns."""
        self.checkpoints.delivered_on = gateway.delivered_on
        self.returns.let_go = gateway.let_go
        self.returns.is_absent = gateway.is_absent

    # --- the log -----------------------------------------------------------------

    def emit(self, event: Any) -> int:
        """Append one of our own events and show it to the view at once. Raises LogError."""
        return self.decisions.emit(event)

    def seen(self, stream: str, position: int, event: Any) -> None:
        """The canonical fold took this event in."""
        self.restarts.seen(event, self._microseconds())
        if type(event) is v.HealthDecided:
            self._corrupt.on_decided(event)

    def served_before(self, worker: str, incarnation: int) -> list[LiveRequest]:
        """Requests that have tokens or blocks of that engine and do not run on it now."""
        engine, requests = engine_of(worker, incarnation), self.view.fleet.requests
        return [
            live
            for name, live in self.live.items()
            if not (live.running and live.engine == engine)
            and live.lineage.has_part_of(worker, incarnation, requests.get(name))
        ]

    def is_doubted(self, live: LiveRequest) -> bool:
        """Whether its stream has something of an engine that computes wrong results: its next attempt
        generates all of it again."""
        known = self.view.fleet.requests.get(live.arrival.request)
        return live.lineage.is_doubted(self._corrupt, known)

    def advanced(self, engines: bool = True) -> None:
        """The canonical fold advanced: settle the overlay, wake waiting requests. `engines`: one of
        them may have reported its model for the first time."""
        self.returns.advanced()
        self.view.landed()
        estimate_index.keep_up(self.view)
        for worker in self.view.fleet.workers.values() if engines else ():
            if worker.model and worker.model not in self._models:
                self._models[worker.model] = True
        self.wake()

    def wake(self) -> None:
        """Something that may have given capacity happened."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self.waiting.wake()  # after those that continue after a failure

    # --- SchedulerPort -----------------------------------------------------------

    def models(self) -> list[str]:
        """Names of models that some worker serves or has served, sorted."""
        return sorted(self._models)

    def model_lengths(self) -> dict[str, int]:
        """See SchedulerPort.model_lengths."""
        found: dict[str, int] = {}
        for worker in self.view.fleet.workers.values():
            if worker.present and worker.max_model_len:
                most = found.get(worker.model, worker.max_model_len)
                found[worker.model] = min(most, worker.max_model_len)
        return found

    def ready(self) -> bool:
        """Whether any worker could take a request of some model now."""
        return any(self._open_for(model) for model in self._models)

    def block_tokens(self, model: str) -> int:
        """See SchedulerPort.block_tokens."""
        return prefix_index.block_tokens(self.view, model)

    def arrived(self, arrival: Arrival) -> Arrival:
        """See SchedulerPort.arrived."""
        verdict, reason = resume_mode.grounded(
            self.view, arrival.model, arrival.verdict, arrival.needs, arrival.fallback
        )
        if verdict != arrival.verdict:
            arrival = msgspec.structs.replace(arrival, verdict=verdict, reason=reason)
        if verdict == Guarantee.RESTART and arrival.resumable:
            arrival = msgspec.structs.replace(arrival, resumable="", grace_ticks=0)
        if arrival.resumable:
            arrival = msgspec.structs.replace(arrival, log=self.decisions.log_id)
        self.emit(arrived_event(arrival))
        self.live[arrival.request] = LiveRequest(arrival)
        return arrival

    def let_go(self, request: str) -> None:
        """The request belongs to another replica now, or to none: record nothing more about it."""
        live = self.live.pop(request, None)
        if live is not None:
            self.returns.left_unserved(live)
        self.waiting.over(request)

    async def changed(self) -> None:
        """Wait until the fold advances."""
        await self._changed.wait()

    def assign(
        self, request: str, cause: RouteCause, delivered: int
    ) -> Assignment | Rejected | None:
        """See SchedulerPort.assign. The decision is in the log whatever it says."""
        live = self.live[request]
        arrival = live.arrival
        if self.never_served(arrival.model):
            unknown = f"no model {arrival.model[:200]!r}; /v1/models lists what there is"
            return Rejected(404, unknown)
        doubted = self.is_doubted(live)
        mode = resume_mode.mode_of(arrival.verdict, arrival.stream, delivered, doubted)
        if mode == AttemptMode.REPLAY and doubted and resume_mode.UNCOMPARED & set(arrival.needs):
            mode = AttemptMode.HOPELESS
        if mode == AttemptMode.HOPELESS and doubted:
            return Rejected(502, NOT_COMPARED)
        if mode == AttemptMode.HOPELESS:
            return Rejected(
                502, f"the worker was lost and this request cannot continue: {arrival.reason}"
            )
        live.delivered = 0 if mode == AttemptMode.NEW else delivered
        if mode == AttemptMode.NEW:
            live.lineage.start_over(doubted)
            doubted = False
        event = self._decided(live, cause, mode, doubted)
        self.decisions.emit(event)
        if event.worker:
            self.waiting.dispatched(request, event.at_us, event.ttft_us)
        if arrival.resumable:
            self.decisions.hurry(FINDABLE_S)  # another replica must find it if its client moves
        if event.refused:
            return Rejected(429, f"no worker would begin it in time: {event.refused}")
        return self._dispatched(live, event) if event.worker else None

    def _decided(
        self, live: LiveRequest, cause: RouteCause, mode: AttemptMode, doubted: bool
    ) -> v.RouteDecided:
        """The decision where the next attempt of `live` runs, on the view as it is now."""
        arrival, view = live.arrival, self.view
        query = RouteQuery(
            request=arrival.request,
            model=arrival.model,
            prompt_tokens=prompt_tokens(view.fleet, arrival.request, arrival.prompt_tokens),
            delivered=live.delivered,
            avoid=live.avoid,
            lost=live.attempt,
            prefix=arrival.prefix,
            session=arrival.session,
            tier=arrival.tier,
        )
        planned = cause != RouteCause.WAIT_OVER and self.checkpoints.planned(live, cause)
        policy = "planned" if planned else self._policy()
        basis = self.decisions.basis()
        at_us = view.now_us = self.decisions.decision_us()
        choice = choose_worker.decide(view, query, policy)
        return v.RouteDecided(
            decision=self.decisions.decision_id(),
            basis=basis,
            request=query.request,
            attempt=live.attempt + 1 if choice.worker else live.attempt,
            cause=cause,
            mode=mode,
            delivered=query.delivered,
            prompt_tokens=query.prompt_tokens,
            worker=choice.worker,
            incarnation=choice.incarnation,
            policy=policy,
            model=query.model,
            avoid=live.avoid,
            candidates=choice.candidates,
            others=choice.others,
            prefix=arrival.prefix,
            at_us=at_us,
            ttft_us=choose_worker.first_token_us(view, query, policy, choice),
            session=query.session,
            tier=query.tier,
            cached_tokens=choice.cached_tokens,
            refused=choice.refused,
            doubted=doubted,
        )

    def _dispatched(self, live: LiveRequest, event: v.RouteDecided) -> Assignment:
        """The attempt that was decided begins; its holders are chosen with it."""
        lost = live.attempt
        live.begin_attempt(event.attempt, event.worker, event.incarnation)
        worker = self.view.fleet.workers[event.worker]
        checkpoint, restore = self.checkpoints.of_dispatch(live, lost)
        live.lineage.begin(live.engine, event.delivered, bool(restore))
        if event.attempt > 1:
            self.waiting.continues(live)
        return Assignment(
            request=event.request,
            attempt=event.attempt,
            worker=worker.name,
            incarnation=worker.incarnation,
            host=worker.host,
            port=worker.port,
            mode=event.mode,
            dispatch=encode_record(codec.encode(_to_travel(event))),
            checkpoint=checkpoint,
            restore=restore,
            priority=live.arrival.priority,
            alone=_is_alone(event, worker),
            doubted=event.doubted,
        )

    def _policy(self) -> str:
        """The routing policy in force; a policy that this version lacks is ignored."""
        configured = self.view.setting(POLICY, self.policy)
        return configured if configured in choose_worker.POLICIES else self.policy

    def restart_left_s(self, model: str) -> float:
        """See SchedulerPort.restart_left_s."""
        return self.restarts.left_s(self.view, model, self._microseconds())

    def timer_fired(self, timer: TimerKind, key: str) -> None:
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
        self,
        request: str,
        attempt: int,
        kind: TransportKind,
        delivered: int,
        detail: str = "",
        status: int = 0,
    ) -> None:
        """See SchedulerPort.observed."""
        live = self.live[request]
        live.failure = kind
        live.lineage.end(live.engine, delivered)
        live.lose_attempt()
        failed = live.engine
        if kind != TransportKind.MOVED and failed not in live.avoid:
            live.avoid = (*live.avoid, failed)
        self.emit(
            v.TransportObserved(
                request=request,
                attempt=attempt,
                worker=live.worker,
                incarnation=live.incarnation,
                kind=kind,
                delivered=delivered,
                detail=detail[:200],
                status=status,
            )
        )

    def completed(self, request: str, path: str, body: bytes, tokens: array[int]) -> None:
        """See SchedulerPort.completed."""
        if (live := self.live.get(request)) is not None:
            self.cross_checks.offer(live, path, body, tokens)

    def ended(
        self,
        request: str,
        outcome: RequestOutcome,
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
                request=request,
                outcome=outcome,
                status=status,
                tokens=tokens,
                finish=finish,
                attempts=live.attempt,
                verdict=live.arrival.verdict,
                ttft_us=ttft_us,
                longest_gap_us=longest_gap_us,
                detail=detail[:200],
            )
        )
        self.waiting.wake()

    def never_served(self, model: str) -> bool:
        """Whether no worker serves or served `model`, although some model is known, and no starting
        engine has yet to report its model for the first time."""
        if not self._models or model in self._models:
            return False
        return not any(map(_on_its_way, self.view.fleet.workers.values()))

    def _open_for(self, model: str) -> bool:
        view = self.view
        return any(not excluded_at(view, w, model) for w in view.fleet.workers.values())


def _is_alone(event: v.RouteDecided, worker: Worker) -> bool:
    """Whether nothing else ran on the chosen worker, and no other request failed there lately."""
    for candidate in event.candidates:
        if candidate.worker == worker.name:
            return candidate.requests == 0 and not has_failures(worker)
    return False


def _to_travel(decision: v.RouteDecided) -> v.RouteDecided:
    """The decision as its worker gets it: without the parts that only later decisions use."""
    return msgspec.structs.replace(decision, prefix=b"") if decision.prefix else decision


def _on_its_way(worker: Worker) -> bool:
    """Whether its first engine is starting. An engine with restarts disabled, or one that died, may
    never be ready: no request waits for its model."""
    if not worker.present or worker.model or worker.held or worker.deaths:
        return False
    return worker.engine in (EnginePhase.NONE, EnginePhase.STARTING)
