"""The stream watch: finds streams that get no more tokens while their engine makes steps.

It looks at when the token path last heard of each stream. For one that is silent it notes the
engine's step in the fold. Towards the end of the bound it probes the engine's HTTP server
(`/relume/state`). The answer says how many requests the engine has: one without any is done with a
stream that has begun there, also while none of its reports comes. Then the watch lets
`relume.policies.liveness.overdue` judge, writes the judgement, and loses the attempt of a stuck
stream, so that it continues on another worker. The other streams of that engine stay where they are.
An engine that answers no probe while none of its streams gets a byte is out of reach: a replica leaves
it with each stream that it owes a token.

A look that comes late judges nothing: the event loop stood still, and bytes may wait in sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import structlog

from relume.controlplane.gateway.ports import GatewayPort
from relume.controlplane.replica.engine_calls import UNUSABLE, url_of
from relume.controlplane.replica.liveness.disowned_streams import DisownedStreams
from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EnginePhase, ProbeResult, TransportKind
from relume.events.wire.worker_calls import STATE_PATH
from relume.policies.liveness import overdue
from relume.policies.liveness.overdue import OverdueConfig, Silence
from relume.policies.state.fleet import Fleet, Worker

PERIOD_S = 0.25
QUIET_S = 0.5
"""Time between two looks at an engine none of whose streams is silent."""
SILENT_S = 0.5
"""Silence after which the engine's step is noted, if the bound is longer."""
LATE_S = 0.25
PROBE_TIMEOUT_S = 2.0
"""Two round trips of a slow network fit: a connection, and the answer."""
PROBE_AHEAD_S = 0.25
"""The probe is sent this long before the end of the bound."""
SETTLE_S = 0.2
"""Time from the probe's answer in which tokens that the server had waiting arrive."""
FRESH_S = 1.0
DETAIL = "its next token is overdue"
"""The same for all streams, so that alike failures of one request compare equal."""
log = structlog.get_logger("relume.stall")

Engine = tuple[str, int]
"""Worker and incarnation."""
Attempt = tuple[str, int]
"""Request and attempt."""


class Mark(msgspec.Struct, frozen=True):
    """A silent stream: the time of its last byte, and its engine's step when it was noted. By the
    engine's reports, whether it was done with it, and whether it decoded it. Whether a token of it
    came from there: then the engine had it."""

    since: float
    from_step: int
    is_over: bool
    is_decoded: bool
    has_begun: bool

    def is_like(self, other: Mark) -> bool:
        """Whether they differ in the step alone."""
        return self == msgspec.structs.replace(other, from_step=self.from_step)


class Answered(msgspec.Struct, frozen=True):
    """The last probe of an engine that was answered: when it was sent, when answered, and how many
    requests the engine had (-1: it does not say)."""

    sent: float
    at: float
    held: int


class EngineState(msgspec.Struct):
    """The part of `/relume/state` that identifies the engine and counts its requests: those that its
    scheduler has, and those that its HTTP side waits for."""

    worker: str
    incarnation: int
    running: int = -1
    waiting: int = -1
    unfinished: int = -1

    @property
    def held(self) -> int:
        """Requests it has, by whichever source has more; -1 if one is unknown."""
        if min(self.running, self.waiting, self.unfinished) < 0:
            return -1
        return max(self.running + self.waiting, self.unfinished)


class StreamWatch:
    """One for a replica. `now` is the loop's clock in seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        gateway: GatewayPort,
        now: Callable[[], float],
        period_s: float = PERIOD_S,
    ) -> None:
        self._scheduler = scheduler
        self._gateway = gateway
        self._now = now
        self._period_s = period_s
        self._looked = now()
        self._due: dict[Engine, float] = {}
        self._marks: dict[Engine, dict[Attempt, Mark]] = {}
        self._answered: dict[Engine, Answered] = {}
        self._unanswered: dict[Engine, float] = {}
        """When the first of its latest probes was sent, none of which was answered."""
        self._probing: dict[Engine, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._disowned = DisownedStreams(scheduler)
        self._judged = 0

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with each event folded: this replica may have been declared lost."""
        self._disowned.seen(stream, position, event)

    def folded(self, group: RevisionGroup) -> None:
        """Called when a whole group was folded: nothing to do."""

    async def run(self) -> None:
        """Watch for ever; the caller owns the task."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await asyncio.sleep(self._period_s)
                    self._look(tasks)
        finally:
            if self._session is not None:
                await self._session.close()

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        now, before = self._now(), self._looked
        self._looked = now
        view, activity = self._scheduler.view, self._gateway.activity
        if now - before > self._period_s + LATE_S or not overdue.is_known(view.fleet):
            self._marks.clear()
            self._unanswered.clear()
            return
        config = overdue.config_of(view)
        for key, engine in activity.items():
            if engine.open_streams and self._due.get(key, 0.0) <= now:
                self._look_at(tasks, key, now, config)
        if len(self._due) > len(activity):
            self._due = {key: at for key, at in self._due.items() if key in activity}
            self._marks = {key: found for key, found in self._marks.items() if key in activity}
            self._answered = {k: found for k, found in self._answered.items() if k in activity}
            self._unanswered = {k: at for k, at in self._unanswered.items() if k in activity}

    def _look_at(
        self, tasks: asyncio.TaskGroup, key: Engine, now: float, config: OverdueConfig
    ) -> None:
        worker = self._scheduler.view.fleet.workers.get(key[0])
        if worker is None or worker.incarnation != key[1] or worker.engine != EnginePhase.READY:
            self._due[key] = now + QUIET_S
            return
        bound_s = overdue.bound_us(worker, config) / 1e6
        silent = self._gateway.silent_on(*key, now - min(SILENT_S, bound_s / 2))
        marks = self._noted(key, worker, silent)
        self._due[key] = now if silent or marks else now + QUIET_S
        late = {
            of: mark
            for of, mark in marks.items()
            if now - mark.since >= bound_s - PROBE_AHEAD_S
            and (_is_owed(mark, worker, config) or mark.has_begun)
        }
        if not late:
            return
        answered = self._answered.get(key)
        if answered is None or now - answered.at > FRESH_S:
            self._probe(tasks, key, worker)
            self._look_unanswered(key, worker, late, now, config)
            return
        if now - answered.at < SETTLE_S:
            return
        for of, mark in late.items():
            if now - mark.since < bound_s:
                continue
            held = answered.held if mark.has_begun else -1
            if answered.sent - mark.since < bound_s - PROBE_AHEAD_S:
                self._probe(tasks, key, worker)
            elif _is_owed(mark, worker, config) or not held:
                seen = _silence(mark.since, mark, now, ProbeResult.ANSWERED, held)
                if self._judge(key, of, seen, config):
                    del marks[of]

    def _look_unanswered(
        self,
        key: Engine,
        worker: Worker,
        late: dict[Attempt, Mark],
        now: float,
        config: OverdueConfig,
    ) -> None:
        """Judge the streams of an engine that answers no probe."""
        heard = self._gateway.activity[key].last_byte
        if self._unanswered.get(key, 0.0) <= heard:
            return
        if now - heard < overdue.bound_us(worker, config, is_answered=False) / 1e6:
            return
        for of, mark in late.items():
            if _is_owed(mark, worker, config):
                seen = _silence(heard, mark, now, ProbeResult.SILENT)
                if self._judge(key, of, seen, config):
                    self._marks[key].pop(of, None)

    def _has_begun(self, request: str, delivered: dict[str, int]) -> bool:
        live = self._scheduler.live.get(request)
        return live is not None and delivered.get(request, 0) > live.lineage.had

    def _is_over(self, fleet: Fleet, worker: Worker, of: Attempt) -> bool:
        """Whether the engine is done with it, by its reports."""
        if not overdue.is_finished(fleet, worker, *of):
            return False
        return of[0] in fleet.requests or self._disowned.is_finished(*of)

    def _noted(
        self, key: Engine, worker: Worker, silent: dict[Attempt, float]
    ) -> dict[Attempt, Mark]:
        """The marks of the engine's streams that are silent although it decodes them, is done with
        them, or had them; steps count from the first look at which that held. One that may send
        nothing before its engine is done is silent from the look at which it is."""
        fleet, old, found = self._scheduler.view.fleet, self._marks.get(key, {}), {}
        for of in self._gateway.withheld_on(*key):
            if self._is_over(fleet, worker, of):
                found[of] = old.get(of) or Mark(
                    self._looked, worker.step, is_over=True, is_decoded=False, has_begun=False
                )
        delivered = self._gateway.delivered_on(*key) if silent else {}
        for of, since in silent.items():
            is_over = self._is_over(fleet, worker, of)
            is_decoded = overdue.decodes(worker, *of)
            has_begun = self._has_begun(of[0], delivered)
            if not (is_over or is_decoded or has_begun):
                continue
            mark, before = Mark(since, worker.step, is_over, is_decoded, has_begun), old.get(of)
            found[of] = before if before is not None and before.is_like(mark) else mark
        if found:
            self._marks[key] = found
        else:
            self._marks.pop(key, None)
        return found

    def _judge(self, key: Engine, of: Attempt, seen: Silence, config: OverdueConfig) -> bool:
        """Judge one stream; a stuck one loses its attempt. Returns whether it is stuck."""
        scheduler = self._scheduler
        try:
            basis = scheduler.decisions.basis()
            found = overdue.judge(scheduler.view.fleet, key, of, seen, config)
            if not found.stuck:
                return False
            self._judged += 1
            scheduler.emit(
                v.StreamJudged(
                    decision=f"{scheduler.view.replica}.{scheduler.decisions.boot}"
                    f".stream{self._judged}",
                    basis=basis,
                    request=of[0],
                    attempt=of[1],
                    worker=key[0],
                    incarnation=key[1],
                    silent_us=seen.silent_us,
                    from_step=seen.from_step,
                    probe=seen.probe,
                    steps=found.steps,
                    decodes=found.decodes,
                    finished=found.finished,
                    bound_us=found.bound_us,
                    stuck=found.stuck,
                    held=seen.held,
                )
            )
        except LogError as error:  # without the log nothing more can be judged
            log.warning("stream_not_judged", request=of[0], reason=str(error))
            return False
        log.warning("stream_stuck", request=of[0], worker=key[0], silent_us=seen.silent_us)
        if seen.probe == ProbeResult.ANSWERED:
            self._gateway.break_stream(*key, *of, TransportKind.STUCK, DETAIL)
        else:
            self._gateway.break_stream(*key, *of, TransportKind.UNREACHABLE, overdue.OUT_OF_REACH)
        return True

    def _probe(self, tasks: asyncio.TaskGroup, key: Engine, worker: Worker) -> None:
        if key not in self._probing:
            task = tasks.create_task(self._ask(key, worker))
            self._probing[key] = task
            task.add_done_callback(lambda _: self._probing.pop(key, None))

    async def _ask(self, key: Engine, worker: Worker) -> None:
        """Probe the engine, and note when it answered, or since when it did not in all the time it had.
        An answer may wait in its socket if this process stood still."""
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout)
        sent = self._now()
        try:
            async with self._session.get(url_of(worker, STATE_PATH)) as answer:
                who = msgspec.json.decode(await answer.read(), type=EngineState)
        except TimeoutError:
            engine = self._gateway.activity.get(key)
            is_first = engine is not None and self._unanswered.get(key, 0.0) <= engine.last_byte
            if is_first and self._now() - sent <= PROBE_TIMEOUT_S + LATE_S:
                self._unanswered[key] = sent
            return
        except UNUSABLE:
            return
        self._unanswered.pop(key, None)
        if (who.worker, who.incarnation) == key:
            self._answered[key] = Answered(sent, self._now(), who.held)


def _silence(since: float, mark: Mark, now: float, probe: ProbeResult, held: int = -1) -> Silence:
    """What is seen of a stream that has had no byte `since`."""
    silent_us = int((now - since) * 1e6)
    return Silence(silent_us=silent_us, from_step=mark.from_step, probe=probe, held=held)


def _is_owed(mark: Mark, worker: Worker, config: OverdueConfig) -> bool:
    """Whether the engine's reports say that the stream is owed a token, or its end."""
    steps = worker.step - mark.from_step
    return mark.is_over or (mark.is_decoded and steps >= config.steps)
