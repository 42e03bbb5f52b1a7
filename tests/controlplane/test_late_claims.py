"""Claims of streams that are on their way to the log, and what a moved request avoids."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.controlplane.replica.live_requests import LiveRequest
from relume.controlplane.replica.resumptions import UNSERVED_TICKS
from relume.controlplane.stream.arrival import Assignment
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    EffectKind,
    Guarantee,
    RequestOutcome,
    RouteCause,
    TransportKind,
)
from relume.policies.state.fold import apply_group
from tests.controlplane.test_doubted_streams import Fleet
from tests.controlplane.test_resumptions import OURS, LateReturn
from tests.controlplane.test_waiting import plane
from tests.policies.story import decided, died, ready, started

THEIRS = v.ClientReturned(request="q", claim="x", attempt=1, tokens=0, events=0)


def test_a_stream_is_kept_while_our_later_claim_is_on_its_way() -> None:
    """The log will have ours after theirs, and then it is ours."""
    for folded, gone in ((3, []), (9, ["q"])):
        late = LateReturn(let_go=False, absent=True)
        let_go: list[str] = []
        late.returns.let_go = let_go.append
        late.fleet.requests["q"].owner = "r.r1"
        late.fleet.streams[OURS].position = folded
        late.returns.seen("r.r1", 4, THEIRS)
        assert let_go == gone


@pytest.mark.parametrize("outcome", [RequestOutcome.FAILED, RequestOutcome.COMPLETED])
@pytest.mark.parametrize("absent", [True, False])
def test_a_stream_that_ended_while_our_claim_is_on_its_way_is_left(
    absent: bool, outcome: RequestOutcome
) -> None:
    """Composed 174985: another replica took the stream, and ended it. This one, whose client had left,
    sent it to one more worker, as its own claim had not landed."""
    late = LateReturn(let_go=False, absent=absent)
    late.live.setdefault("q", LiveRequest(late.arrival)).claimed_at = 5
    late.left.clear()
    late.fleet.requests["q"].owner = "r.r1"
    late.end("r.r1", outcome)
    assert late.left == [], "it is still in the fold"
    del late.fleet.requests["q"]
    late.end("r.r1", outcome)
    assert late.left == ["q"] * absent, "a client that is here is served"
    assert late.written == []


def test_one_that_another_replica_sent_on_meanwhile_reuses_no_number() -> None:
    late = LateReturn(let_go=False, absent=True)
    live, late.fleet.requests["q"].owner = late.live["q"], "r.r1"
    live.attempt, live.claimed_at = 1, 5
    theirs = replace(decided(attempt=3), request="q")
    late.returns.seen("r.r1", 7, theirs)
    late.returns.seen(OURS, 8, replace(decided(attempt=4), request="q"))
    live.lose_attempt()
    assert live.attempt == 3, "the next one is the fourth"


async def test_a_request_that_is_let_go_with_its_claim_on_its_way_is_ended() -> None:
    """Its claim makes this replica the owner, though it serves nobody."""
    async with plane() as p:
        p.ask("a", resumable="token", grace_ticks=9)
        p.log.pause()
        p.scheduler.returns.came_back("a", 0, 0)
        p.scheduler.let_go("a")
        p.log.resume()
        for group in p.log.groups:
            for segment in group.segments:
                if segment.stream == OURS:
                    last = segment.last
        p.follow()
        returned = p.own(v.ClientReturned)[0]
        p.scheduler.returns.seen(OURS, last, returned)
        for number in range(1, UNSERVED_TICKS + 3):
            p.fleet.tick = number
            p.scheduler.returns.seen("fleet", number, v.Tick(number=number, unix_ms=0))
        assert [e.outcome for e in p.own(v.RequestEnded)] == ["failed"]


async def test_one_that_is_ended_with_its_claim_on_its_way_waits_for_nothing() -> None:
    """Composed 140229: its end stands behind the claim, and the replica kept it for 20 ticks more."""
    async with plane() as p:
        p.ask("a", resumable="token", grace_ticks=9)
        p.follow()
        returns = p.scheduler.returns
        returns.is_absent, returns.let_go = lambda request: True, p.scheduler.let_go
        returns.came_back("a", 0, 0)
        claimed = p.log.groups[-1]
        theirs = v.RequestEnded(
            request="a", outcome=RequestOutcome.COMPLETED, status=200, tokens=9, finish="stop",
            attempts=1, verdict=Guarantee.EXACT,
        )  # fmt: skip
        returns.seen("r.r1", 1, theirs)
        assert "a" not in p.scheduler.live and p.own(v.RequestEnded) == [theirs]
        apply_group(p.fleet, claimed)  # ahead of the end
        returns.seen(OURS, claimed.segments[0].last, p.own(v.ClientReturned)[0])
        assert not returns._ending


async def test_a_request_avoids_an_engine_that_failed_it_and_not_one_that_it_was_moved_from() -> (
    None
):
    async with plane() as p:
        for name, kind, avoided in (
            ("moved", TransportKind.MOVED, ()),
            ("failed", TransportKind.RESET, ("w0:1",)),
        ):
            p.ask(name)
            assert name in p.sent
            p.scheduler.observed(name, 1, kind, 3)
            assert p.scheduler.live[name].avoid == avoided


@pytest.mark.parametrize(
    ("kind", "cause", "returns"),
    [
        (TransportKind.MOVED, RouteCause.MOVED, True),
        (TransportKind.MOVED, RouteCause.RETURNED, False),
        (TransportKind.ENGINE_DEAD, RouteCause.ENGINE_DEAD, False),
        (TransportKind.ENGINE_DEAD, RouteCause.RETURNED, False),
    ],
)
def test_only_a_request_that_was_moved_returns_to_the_worker_that_drains(
    kind: TransportKind, cause: RouteCause, returns: bool
) -> None:
    """Composed seed 9027: the plan of a move was abandoned, the engine died, and the client returned
    when an operator drained the next engine of that worker."""
    fleet = Fleet()
    first = fleet.arrive("q")
    place = first.worker, first.incarnation
    other = next(name for name in fleet.story.fleet.workers if name != first.worker)
    option = v.RecoveryOption(
        worker=other, kind="recompute", holder="", restored=0, wait_us=0, move_us=0, compute_us=0,
        done_us=0,
    )  # fmt: skip
    choice = v.MigrationChoice(
        request="q", attempt=1, tokens=9, left=9, chosen=0, options=(option,)
    )
    plan = v.MigrationPlanned(
        decision="d", basis=v.Basis(0, 0), worker=place[0], incarnation=place[1], cause="drain",
        tick=1, choices=(choice,),
    )  # fmt: skip
    fleet.story.tell("r.r0", plan)
    fleet.lost(first, 4, kind)
    for name in fleet.story.fleet.workers:
        if name != first.worker:
            fleet.story.tell(f"w.{name}", died(name))
    fleet.story.tell(f"w.{first.worker}", died(first.worker))
    fleet.story.tell(f"w.{first.worker}", started(first.worker, 2), ready(first.worker, 2))
    drain = v.EffectsDecided(
        decision="c", basis=v.Basis(0, 0), cause="an operator",
        effects=(v.Effect(EffectKind.DRAIN, first.worker),),
    )  # fmt: skip
    fleet.story.tell("fleet", drain)
    found = fleet.assign("q", cause, 4)
    assert found is None if not returns else isinstance(found, Assignment)
