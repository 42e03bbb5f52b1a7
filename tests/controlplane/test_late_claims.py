"""Claims of streams that are on their way to the log, and what a moved request avoids."""

from __future__ import annotations

from relume.controlplane.replica.resumptions import UNSERVED_TICKS
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import TransportKind
from tests.controlplane.test_resumptions import OURS, LateReturn
from tests.controlplane.test_waiting import plane

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
