"""Runs and short logs for the tests of the promises."""

from __future__ import annotations

from relume.chaos.validators.records import ClientRecord, Violation
from relume.events import vocabulary as v
from relume.events.log.interface import LandedSegment, RevisionGroup
from tests.policies.story import (
    Story,
    arrived,
    decided,
    ended,
    engine_step,
    finished,
    observed,
    queued,
)
from tests.replay.scene import Scene


class Run:
    """A run that kept its promises: its log, its clients, what was acknowledged."""

    def __init__(self) -> None:
        self.groups: list[RevisionGroup] = []
        self.clients: list[ClientRecord] = []
        self.landed: list[LandedSegment] = []


async def sound_run() -> Run:
    run = Run()
    async with Scene(51) as scene:
        for name in scene.replicas:
            scene._writers[name].on_landed(run.landed.append)
        await scene.traffic(40)
        scene.workers["w0"].die()
        admin = scene.replicas["r0"].scheduler
        admin.emit(
            v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w1")
        )
        await scene.traffic(15, "more")
        scene.workers["w0"].start()
        scene.workers["w1"].tell(v.EffectApplied("c1", 0))
        await scene.settled()
        for clients in scene.clients.values():
            for request, (outcome, tokens) in clients.outcomes.items():
                status = {"completed": 200, "cancelled": 0, "failed": 200, "rejected": 503}
                run.clients.append(
                    ClientRecord(
                        request=request,
                        status=status[outcome],
                        outcome=outcome,
                        token_count=tokens,
                        finish="length" if outcome == "completed" else "",
                        text="x" * tokens,
                        content_id=str(tokens),
                        starts=list(range(tokens)),
                        gaps_ms=[1.0] * tokens,
                    )
                )
    for tokens in range(1, 13):
        kept = ClientRecord(
            request=f"calm{tokens}",
            status=0,
            outcome="completed",
            text="x" * tokens,
            token_count=tokens,
            finish="length",
        )
        kept.content_id, kept.undisturbed = str(tokens), True
        run.clients.append(kept)
    run.groups = [*scene.log.groups]
    return run


def short() -> Story:
    """q1 runs on w0; nothing is wrong, and nothing has ended yet."""
    story = Story()
    story.worker("w0")
    story.worker("w1")
    story.replica()
    story.tell("r.r0", arrived(), decided())
    story.tell("w.w0", engine_step(queued()))
    return story


def whole() -> Story:
    story = short()
    story.tell("w.w0", engine_step(finished()))
    story.tell("r.r0", ended())
    return story


def moved(delivered: int, seen: int = 17) -> Story:
    story = short()
    fields = {f: getattr(observed(), f) for f in v.TransportObserved.__struct_fields__}
    again = {
        f: getattr(decided(attempt=2, worker="w1", delivered=delivered), f)
        for f in v.RouteDecided.__struct_fields__
    }
    story.tell(
        "r.r0",
        v.TransportObserved(**{**fields, "delivered": seen}),
        v.RouteDecided(**{**again, "mode": "continue"}),
    )
    return story


def idle(kv_used: int = 0, waiting: int = 0) -> v.EngineStep:
    return v.EngineStep(
        incarnation=1,
        step=9,
        duration_us=5,
        batch=0,
        sum_context=0,
        prefill_tokens=0,
        waiting=waiting,
        kv_used=kv_used,
    )


def daemon(worker: str, budget: int = 1000) -> v.StateDaemonStarted:
    return v.StateDaemonStarted(worker=worker, boot="b", epoch=1, address="", budget_bytes=budget)


def held(worker: str, request: str, tokens: int) -> v.CheckpointAcknowledged:
    return v.CheckpointAcknowledged(
        holder=worker,
        boot="b",
        request=request,
        child=0,
        attempt=1,
        blocks=tokens // 16,
        tokens=tokens,
        bytes=10 * tokens,
    )


def chosen(request: str, holder: str, primary: str = "w0", revision: int = 1) -> v.HolderChosen:
    return v.HolderChosen(
        decision="d",
        basis=v.Basis(revision, 0),
        request=request,
        attempt=1,
        cause="arrival",
        primary=primary,
        holders=(holder,),
        policy="load_aware",
        wanted=1,
        expected_blocks=8,
        expected_bytes=80,
    )


def about(found: list[Violation]) -> str:
    assert found, "the check found nothing"
    return "; ".join(str(f) for f in found)
