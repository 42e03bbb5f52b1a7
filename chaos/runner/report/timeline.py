"""What happened in a run, in the order of time and by worker: the data of a report.

Times are milliseconds from the start of the run, by the wall clocks of the log's segments.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from msgspec import Struct, field

from relume.chaos.outcome import Outcome
from relume.chaos.runner.run_statistics import MS, real
from relume.chaos.validators.records import Log, courses, events_of, of_clients
from relume.events import vocabulary as v
from relume.events.log.codec import to_json
from relume.events.log.entries import Entry


class Life(Struct, kw_only=True):
    """A process's life: of an engine (`number` its incarnation), a replica, or as leader."""

    number: int
    from_ms: float
    ready_ms: float | None = None
    to_ms: float | None = None
    reason: str = ""


class Attempt(Struct, kw_only=True):
    """One attempt on a worker; `row` is its row among concurrent attempts. `end`: finished, or how
    it was lost."""

    request: str
    attempt: int
    from_ms: float
    first_ms: float | None = None
    to_ms: float | None = None
    end: str = ""
    restored: int = 0
    row: int = 0


class Lane(Struct, kw_only=True):
    """A worker, or a control plane replica."""

    name: str
    domain: str = ""
    lives: list[Life] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    leads: list[Life] = field(default_factory=list)
    rows: int = 1


class Struck(Struct, frozen=True, kw_only=True):
    """A fault that struck."""

    name: str
    what: str
    target: str
    from_ms: float
    to_ms: float | None
    detail: str


class TimelineRequest(Struct, frozen=True, kw_only=True):
    """A request as its client saw it, with its id in the log and its workers."""

    request: str
    id: str
    outcome: str
    sent_ms: float
    ttft_ms: float | None
    gap_ms: float | None
    end_ms: float | None
    tokens: int
    workers: tuple[str, ...]
    interrupted: bool


class Decision(Struct, frozen=True, kw_only=True):
    """A decision with all candidates, as `relume why` shows it."""

    at_ms: float
    kind: str
    about: str
    chosen: str
    event: dict[str, Any]


class Timeline(Struct, kw_only=True):
    """A whole run. `gaps_ms`: of undisturbed and of interrupted streams."""

    ends_ms: float
    workers: list[Lane]
    replicas: list[Lane]
    faults: list[Struck]
    requests: list[TimelineRequest]
    decisions: list[Decision]
    gaps_ms: tuple[list[float], list[float]]


def timeline(run: Outcome) -> Timeline:
    """The timeline of `run`. Raises LogError if its log cannot be read."""
    log = Log(run.groups, run.truth.clock_ms if run.truth is not None else None)
    reading = _LogReading(run)
    for at in events_of(log):
        reading.see(at)
    for lane in reading.workers.values():
        _pack(lane)
    requests = list(_requests(run, log))
    gaps: tuple[list[float], list[float]] = [], []
    for request, history in zip(requests, real(run), strict=True):
        gaps[request.interrupted].extend(history.record.gaps_ms)
    return Timeline(
        ends_ms=max(run.ended_ns / MS, reading.last_ms),
        workers=list(reading.workers.values()),
        replicas=list(reading.replicas.values()),
        faults=[
            Struck(
                name=f.name, what=f.what, target=f.target, from_ms=f.at_ns / MS,
                to_ms=None if f.until_ns is None else f.until_ns / MS, detail=f.detail,
            )
            for f in run.fired
        ],
        requests=requests,
        decisions=reading.decisions,
        gaps_ms=gaps,
    )  # fmt: skip


class _LogReading:
    """Collects a timeline's data from the log, event by event."""

    def __init__(self, run: Outcome) -> None:
        self.began_ms = run.began_ms
        self.last_ms = 0.0
        self.workers = {
            name: Lane(name=name, domain=domain) for name, domain in run.schedule.workers.items()
        }
        self.replicas = {name: Lane(name=name) for name in run.schedule.control_planes}
        self.decisions: list[Decision] = []
        self._running: dict[tuple[str, str, int], Attempt] = {}
        self._leader: Life | None = None

    def see(self, at: Entry) -> None:
        now = float(at.at_ms - self.began_ms) if at.at_ms else self.last_ms
        self.last_ms = max(self.last_ms, now)
        event = at.event
        if type(event) is v.EngineStep:
            self._step(at.stream[2:], event, now)
        elif at.stream.startswith("w."):
            self._of_worker(at.stream[2:], event, now)
        else:
            self._of_replica(at.stream.partition(".")[2], event, now)

    def _worker(self, name: str) -> Lane:
        return self.workers.setdefault(name, Lane(name=name))

    def _of_worker(self, name: str, event: Any, now: float) -> None:
        lane = self._worker(name)
        match event:
            case v.EngineStarted():
                lane.lives.append(Life(number=event.incarnation, from_ms=now))
            case v.EngineReady() if lane.lives:
                lane.lives[-1].ready_ms = now
            case v.EngineDied() if lane.lives:
                lane.lives[-1].to_ms, lane.lives[-1].reason = now, event.reason
                for key in [key for key in self._running if key[0] == name]:
                    self._end(*key, now, "engine died")
            case v.RestoreDone():
                if running := self._running.get((name, event.request, event.attempt)):
                    running.restored = event.tokens

    def _step(self, name: str, event: v.EngineStep, now: float) -> None:
        for change in event.changes:
            key = name, change.request, change.attempt
            kind = type(change)
            if kind is v.RequestQueued and key not in self._running:
                self._running[key] = Attempt(
                    request=change.request, attempt=change.attempt, from_ms=now
                )
                self._worker(name).attempts.append(self._running[key])
            elif kind is v.FirstToken and (running := self._running.get(key)):
                running.first_ms = running.first_ms or now
            elif isinstance(change, v.EngineFinished):
                self._end(*key, now, "finished" if change.reason != "abort" else "aborted")

    def _end(self, worker: str, request: str, attempt: int, now: float, how: str) -> None:
        if running := self._running.pop((worker, request, attempt), None):
            running.to_ms, running.end = max(now, running.from_ms), how

    def _of_replica(self, name: str, event: Any, now: float) -> None:
        match event:
            case v.ReplicaStarted():
                lane = self.replicas.setdefault(name, Lane(name=name))
                lane.lives.append(Life(number=len(lane.lives) + 1, from_ms=now, ready_ms=now))
            case v.ReplicaStopped() | v.ReplicaLost():
                lane = self.replicas.setdefault(event.replica, Lane(name=event.replica))
                if lane.lives:
                    lane.lives[-1].to_ms = now
                    lane.lives[-1].reason = type(event).__name__
            case v.LeaderElected():
                self._leaderless(now)
                self._leader = Life(number=0, from_ms=now)
                self.replicas.setdefault(event.replica, Lane(name=event.replica)).leads.append(
                    self._leader
                )
            case v.LeaderResigned():
                self._leaderless(now)
            case v.TransportObserved():
                key = event.worker, event.request, event.attempt
                self._end(*key, now, event.kind)
            case _ if hasattr(event, "basis"):
                self.decisions.append(_decision(event, now))

    def _leaderless(self, now: float) -> None:
        if self._leader is not None:
            self._leader.to_ms, self._leader = now, None


def _decision(event: Any, now: float) -> Decision:
    about, chosen = getattr(event, "request", "") or getattr(event, "worker", ""), ""
    match event:
        case v.RouteDecided():
            about = f"{event.request}/{event.attempt} ({event.cause})"
            chosen = event.worker or "no worker"
        case v.HolderChosen():
            about = f"{event.request}/{event.attempt} ({event.cause})"
            chosen = ", ".join(event.holders) or f"none: {event.reason}"
        case v.RecoveryPlanned() | v.MigrationPlanned():
            about = f"{len(event.choices)} requests of {event.worker}:{event.incarnation}"
            kinds = [c.options[c.chosen].kind for c in event.choices if c.chosen >= 0]
            chosen = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        case v.StallJudged():
            about = f"{event.worker}:{event.incarnation}"
            chosen = "hung" if event.hung else "not hung"
        case v.StreamJudged():
            about = f"{event.request} on {event.worker}:{event.incarnation}"
            chosen = "stuck" if event.stuck else "not stuck"
        case v.EffectsDecided():
            about = event.cause
            chosen = ", ".join(f"{effect.kind} {effect.worker}" for effect in event.effects)
    return Decision(
        at_ms=now, kind=type(event).__name__, about=about, chosen=chosen, event=to_json(event)
    )


def _requests(run: Outcome, log: Log) -> Iterator[TimelineRequest]:
    histories = real(run)
    pairs = of_clients(courses(log), [history.record for history in histories])
    for history, (record, course) in zip(histories, pairs, strict=True):
        first, last = history.first_ns, history.last_ns
        decisions = course.decisions if course is not None else []
        yield TimelineRequest(
            request=history.request,
            id=course.request if course is not None else "",
            outcome=record.outcome,
            sent_ms=history.sent_ns / MS,
            ttft_ms=None if first is None else (first - history.sent_ns) / MS,
            gap_ms=max(record.gaps_ms, default=None),
            end_ms=None if last is None else last / MS,
            tokens=record.token_count,
            workers=tuple(decision.worker for decision in decisions),
            interrupted=len(decisions) > 1,
        )


def _pack(lane: Lane) -> None:
    """Give attempts that run at the same time rows of their own."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    rows = 0
    for attempt in sorted(lane.attempts, key=lambda attempt: attempt.from_ms):
        while busy and busy[0][0] <= attempt.from_ms:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, rows)
            rows += 1
        attempt.row = heapq.heappop(free)
        end = attempt.to_ms if attempt.to_ms is not None else float("inf")
        heapq.heappush(busy, (end, attempt.row))
    lane.rows = max(rows, 1)
