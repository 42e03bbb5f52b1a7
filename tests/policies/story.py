"""Short ways to tell a log: segments with a true chain, and events with usual values."""

from __future__ import annotations

from typing import Any

from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import GENESIS, pack, unpack
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.fold import apply_group

MODEL = "m"


class Story:
    """A log being written, and its fold. `tell(stream, *events)` is one transaction."""

    def __init__(self) -> None:
        self.groups: list[RevisionGroup] = []
        self.fleet = Fleet()
        self.heads: dict[str, tuple[int, bytes, int]] = {}
        self.epochs: dict[str, int] = {}
        self.seen: list[Any] = []
        self.at_ms = 0

    @property
    def revision(self) -> int:
        return self.groups[-1].revision if self.groups else 0

    def own(self, stream: str) -> int:
        """The stream gets a new owner; returns its epoch."""
        self.epochs[stream] = self.revision + 1
        self._commit(RevisionGroup(self.revision + 1, owners=((stream, self.revision + 1),)))
        return self.epochs[stream]

    def lapse(self, stream: str) -> None:
        """The owner's lease is gone."""
        self._commit(RevisionGroup(self.revision + 1, owners=((stream, 0),)))

    def tell(self, stream: str, *events: Any) -> RevisionGroup:
        if stream not in self.epochs:
            self.own(stream)
        seq, previous, first = self.heads.get(stream, (0, GENESIS, 1))
        records = [e if isinstance(e, bytes) else encode(e) for e in events]
        packed = pack(stream, self.epochs[stream], seq + 1, first, previous, records, self.at_ms)
        segment = unpack(packed)
        self.heads[stream] = (segment.seq, segment.hash, segment.last + 1)
        return self._commit(RevisionGroup(self.revision + 1, (segment,)))

    def _commit(self, group: RevisionGroup) -> RevisionGroup:
        self.groups.append(group)
        apply_group(self.fleet, group, lambda stream, position, event: self.seen.append(event))
        return group

    # --- usual beginnings ------------------------------------------------------------

    def worker(self, name: str = "w0", incarnation: int = 1) -> Worker:
        """A worker whose engine is ready."""
        self.tell(
            f"w.{name}",
            v.WorkerRegistered(worker=name, domain="host", agent_pid=7),
            started(name, incarnation),
            ready(name, incarnation),
        )
        return self.fleet.workers[name]

    def replica(self, name: str = "r0", boot: str = "b1") -> None:
        """A replica that serves."""
        self.tell(f"r.{name}", replica_started(name, boot))

    def leader(self, replica: str = "r0", boot: str = "b1") -> None:
        """`replica` leads."""
        self.own("fleet")
        self.tell("fleet", v.LeaderElected(replica, boot))

    def healthy_ticks(self, count: int, first: int | None = None) -> int:
        """Ticks a second apart; returns the last number."""
        number = self.fleet.tick if first is None else first - 1
        for _ in range(count):
            number += 1
            self.tell("fleet", v.Tick(number, 1_000_000 + 1000 * number))
        return number


def replica_started(name: str = "r0", boot: str = "b1", **more: Any) -> v.ReplicaStarted:
    return v.ReplicaStarted(replica=name, boot=boot, host="127.0.0.1", port=8000, pid=11, **more)


def started(name: str = "w0", incarnation: int = 1) -> v.EngineStarted:
    return v.EngineStarted(name, incarnation, 100 + incarnation, 1)


def ready(name: str = "w0", incarnation: int = 1, model: str = MODEL) -> v.EngineReady:
    return v.EngineReady(
        worker=name,
        incarnation=incarnation,
        host="127.0.0.1",
        port=9000,
        model=model,
        max_model_len=4096,
        block_size=16,
        kv_blocks=512,
    )


def died(name: str = "w0", incarnation: int = 1) -> v.EngineDied:
    return v.EngineDied(name, incarnation, "killed")


def arrived(request: str = "q1", prompt: int = 100, verdict: str = "exact") -> v.RequestArrived:
    return v.RequestArrived(
        request=request,
        model=MODEL,
        route="completions",
        stream=True,
        prompt_tokens=prompt,
        max_tokens=64,
        verdict=verdict,
    )


def decided(
    request: str = "q1",
    attempt: int = 1,
    worker: str = "w0",
    incarnation: int = 1,
    prompt: int = 100,
    delivered: int = 0,
    basis: v.Basis | None = None,
) -> v.RouteDecided:
    return v.RouteDecided(
        decision=f"r0.b1.{request}.{attempt}",
        basis=basis or v.Basis(0, 0),
        request=request,
        attempt=attempt,
        cause="arrival" if attempt == 1 else "reset",
        mode="new",
        delivered=delivered,
        prompt_tokens=prompt,
        worker=worker,
        incarnation=incarnation,
        policy="least_load",
        model=MODEL,
    )


def observed(
    request: str = "q1", attempt: int = 1, worker: str = "w0", inc: int = 1, kind: str = "reset"
) -> v.TransportObserved:
    return v.TransportObserved(
        request=request, attempt=attempt, worker=worker, incarnation=inc, kind=kind, delivered=0
    )


def ended(request: str = "q1", outcome: str = "completed", attempts: int = 1) -> v.RequestEnded:
    return v.RequestEnded(
        request=request,
        outcome=outcome,
        status=200,
        tokens=64,
        finish="length",
        attempts=attempts,
        verdict="exact",
    )


def engine_step(*changes: Any, incarnation: int = 1, lost: int = 0, us: int = 900) -> v.EngineStep:
    return v.EngineStep(
        incarnation=incarnation,
        step=1,
        duration_us=us,
        batch=1,
        sum_context=100,
        prefill_tokens=0,
        waiting=0,
        kv_used=8,
        changes=changes,
        lost=lost,
    )


def found_hung(worker: str = "w0", incarnation: int = 1) -> v.EngineHung:
    """The word of an agent about its idle engine."""
    return v.EngineHung(
        worker=worker,
        incarnation=incarnation,
        silent_us=2_300_000,
        looks=3,
        steps=7,
        step_age_us=0,
        expected_us=900,
        cpu_us=0,
        wait_us=0,
        running=0,
        waiting=0,
        process_state="T",
    )


def dropped(
    count: int = 5, worker: str = "w0", incarnation: int = 1, muted: bool = False
) -> v.ReportsDropped:
    """The agent cannot read what its engine reports."""
    return v.ReportsDropped(
        worker=worker,
        incarnation=incarnation,
        count=count,
        reason="malformed record",
        muted=muted,
    )


def queued(
    request: str = "q1", attempt: int = 1, prompt: int = 100, dispatch: bytes = b""
) -> v.RequestQueued:
    return v.RequestQueued(request, attempt, prompt, dispatch)


def finished(request: str = "q1", attempt: int = 1) -> v.EngineFinished:
    return v.EngineFinished(request, attempt, "length", 64)


def assert_idle(worker: Worker) -> None:
    """Nothing is held, nothing is owed."""
    assert worker.attempts == {}
    assert worker.prefill_left == 0
