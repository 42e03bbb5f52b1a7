"""What the scheduler answers before any worker is asked."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from relume.controlplane.replica.scheduler import Scheduler
from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected
from relume.events import vocabulary as v
from relume.events.log.errors import LogFull
from relume.events.log.memory import MemoryLog
from relume.events.vocabulary.enums import RequestOutcome, RouteCause
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View
from tests.controlplane.test_stall_watch import FullWriter
from tests.policies.story import MODEL, Story, arrived, decided, ended, ready, started

REGISTERED = v.WorkerRegistered(worker="w1", domain="host", agent_pid=1)
STARTED = v.EngineStarted("w1", 1, 2, 3)
DIED = v.EngineDied("w1", 1, "killed")
HELD = v.EffectsDecided(
    decision="c",
    basis=v.Basis(1, 0),
    cause="someone: hold w1",
    effects=(v.Effect("hold", "w1", 0, ""),),
)


def arrival(request: str, model: str = "m", delivered: int = 0) -> Arrival:
    """`delivered`: see `asked_for`."""
    return Arrival(
        request=request,
        model=model,
        route="completions",
        stream=not delivered,
        prompt_tokens=5,
        max_tokens=5,
        verdict="restart" if delivered else "exact",
        reason="drawn",
    )


async def asked_for(
    model: str, *second: object, first: bool = True, kind: str = "", delivered: int = 0
) -> Assignment | Rejected | None:
    """The answer to a request for `model` where w0 serves "m" with an engine of this `kind`, and
    `second` is told of w1. `delivered`: tokens of an attempt before, of an answer in one piece that
    cannot be continued."""
    log, fleet = MemoryLog(), Fleet()
    async with AsyncExitStack() as stack:
        names = ("r.r0", "w.w0", "w.w1", "fleet")
        opened = [await stack.enter_async_context(log.writer(name)) for name in names]
        writer, w0, w1, leader = opened
        if first:
            w0.append(
                v.WorkerRegistered(worker="w0", domain="host", agent_pid=1),
                v.EngineStarted("w0", 1, 2, 3),
                v.EngineReady(
                    worker="w0",
                    incarnation=1,
                    host="127.0.0.1",
                    port=9,
                    model="m",
                    max_model_len=4096,
                    block_size=16,
                    kv_blocks=512,
                    kind=kind,
                ),
            )
        for event in second:
            (leader if event is HELD else w1).append(event)
        for group in log.groups:
            apply_group(fleet, group)
        scheduler = Scheduler(View("r.r0", fleet), writer, "b", "least_load", lambda: 0)
        scheduler.advanced()
        scheduler.arrived(arrival("q", model, delivered))
        return scheduler.assign("q", "reset" if delivered else "arrival", delivered)


@pytest.mark.parametrize(
    "second",
    [
        (REGISTERED, STARTED, DIED),
        (REGISTERED, STARTED, DIED, v.EngineStarted("w1", 2, 4, 5)),
        (REGISTERED, HELD),
    ],
    ids=["dead", "crash loop", "held"],
)
async def test_worker_that_never_became_ready_hides_no_wrong_name(second: tuple[object]) -> None:
    answer = await asked_for("nobody", *second)
    assert isinstance(answer, Rejected)
    assert answer.status == 404
    assert isinstance(await asked_for("m", *second), Assignment)


@pytest.mark.parametrize("second", [(REGISTERED,), (REGISTERED, STARTED)], ids=["none", "starting"])
async def test_model_of_an_engine_on_its_way_is_waited_for(second: tuple[object]) -> None:
    assert await asked_for("other", *second) is None


async def test_while_no_model_is_known_every_name_is_waited_for() -> None:
    assert await asked_for("any", REGISTERED, STARTED, DIED, first=False) is None


async def test_an_attempt_that_starts_over_needs_no_engine_that_can_continue() -> None:
    """What the lost attempt had of the answer is discarded: a plain server can give it anew."""
    answer = await asked_for("m", kind="plain", delivered=4)
    assert isinstance(answer, Assignment) and answer.mode == "new"


def test_a_full_log_takes_the_ends_of_what_it_took_and_no_arrivals() -> None:
    writer = FullWriter()
    scheduler = Scheduler(View("r.r0", Fleet()), writer, "b", "least_load", lambda: 0)  # type: ignore[arg-type]
    scheduler.arrived(arrival("q1"))
    scheduler.decisions.received(7)
    writer.full = True
    with pytest.raises(LogFull):
        scheduler.arrived(arrival("q2"))
    assert list(scheduler.live) == ["q1"]
    scheduler.ended("q1", RequestOutcome.COMPLETED, 200, 5, "stop")
    assert (scheduler.live, writer.position) == ({}, 2)


def test_an_end_closes_what_was_sent_of_a_request_that_was_let_go() -> None:
    """The claim of this replica landed after it had given the client up, so it ends the request. The view
    depends on the basis alone: a replay of the log has no event at which a request is let go."""
    story = Story()
    story.worker("w0")
    story.replica("r0", "b")
    fleet, writer = story.fleet, FullWriter()
    scheduler = Scheduler(View("r.r0", fleet), writer, "b", "least_load", lambda: 0)  # type: ignore[arg-type]
    view = scheduler.view
    view.landed()
    writer.position = view.position
    scheduler.arrived(arrival("q1"))
    story.tell("r.r0", arrived())
    view.landed()
    assert isinstance(scheduler.assign("q1", RouteCause.ARRIVAL, 0), Assignment)
    assert view.load(fleet.workers["w0"]) == (5, 1)
    scheduler.let_go("q1")
    assert view.load(fleet.workers["w0"]) == (5, 1)
    scheduler.emit(ended("q1"))
    assert view.load(fleet.workers["w0"]) == (0, 0)
    story.tell("r.r0", decided(prompt=5), ended())
    view.landed()
    assert view.load(fleet.workers["w0"]) == (0, 0) and not view._own


def test_a_model_takes_what_each_of_its_workers_takes() -> None:
    """Clients size their prompts by it. A worker whose host is lost says nothing of it."""
    story = Story()
    for name, length in (("w0", 4096), ("w1", 2048), ("w2", 512)):
        story.worker(name)
        story.tell(f"w.{name}", started(name, 2), replace(ready(name, 2), max_model_len=length))
    story.leader()
    story.tell("fleet", v.WorkerLost("w2", story.epochs["w.w2"], "its lease is gone"))
    scheduler = Scheduler(View("r.r0", story.fleet), FullWriter(), "b", "least_load", lambda: 0)
    assert scheduler.model_lengths() == {MODEL: 2048}
