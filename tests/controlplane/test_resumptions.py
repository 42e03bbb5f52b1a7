"""Returns that land late: who ends a request whose client came back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from relume.controlplane.replica.live_requests import LiveRequest
from relume.controlplane.replica.resumptions import (
    BEHIND_S,
    SETTLED_S,
    UNSERVED_TICKS,
    StreamResumptions,
)
from relume.controlplane.stream.arrival import Arrival
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Guarantee, RequestOutcome, TransportKind
from tests.policies.story import Story, arrived, decided, died, engine_step, finished, queued
from tests.policies.story import ended as story_ended

OURS = "r.r0"


class LateReturn:
    """Our replica and the request "q", whose client returned twice; then we let go of it or ended
    it, and the returns landed. `written`: what we wrote."""

    def __init__(self, let_go: bool, absent: bool = False, ended_by_another: bool = False) -> None:
        self.written: list[Any] = []
        self.left: list[str] = []
        self.now_us = 0
        request = SimpleNamespace(
            owner=OURS, boot="b", verdict=Guarantee.EXACT, attempt=0, worker="", incarnation=0,
            doubted=False,
        )  # fmt: skip
        self.fleet = SimpleNamespace(
            streams={OURS: SimpleNamespace(position=3)}, requests={"q": request}, placed={},
            workers={}, holders={}, tick=7,
        )  # fmt: skip
        decisions: Any = SimpleNamespace(
            view=SimpleNamespace(fleet=self.fleet, stream=OURS), boot="b", emit=self.emit,
            decision_id=lambda: "d",
        )  # fmt: skip
        self.arrival = Arrival(
            request="q", model="m", route="/v1/completions", stream=True, prompt_tokens=1,
            max_tokens=9, verdict="exact",
        )  # fmt: skip

        async def changed() -> None: ...

        self.live = live = {"q": LiveRequest(self.arrival)}
        self.returns = StreamResumptions(
            decisions, live, lambda *given: None, changed, lambda: self.now_us
        )
        self.returns.is_absent = lambda request: absent
        self.returns.let_go = self.left.append
        self.returns.came_back("q", 3, 0)
        first = self.written.pop()
        self.returns.came_back("q", 4, 0)  # written at position 5, and the first one before it
        last = self.written.pop()
        if let_go:
            self.returns.left_unserved(live["q"])
        if not absent:
            del live["q"]
        if ended_by_another:
            del self.fleet.requests["q"]
        self.returns.seen(OURS, 4, first)
        assert self.left == []
        self.pass_ticks(UNSERVED_TICKS)
        assert self.written == [], "an earlier return does not end it"
        self.returns.seen(OURS, 5, last)

    def emit(self, event: Any) -> int:
        self.written.append(event)
        return 4 + len(self.written)

    def pass_ticks(self, count: int) -> None:
        for _ in range(count):
            self.fleet.tick += 1
            self.returns.seen("fleet", self.fleet.tick, v.Tick(number=self.fleet.tick, unix_ms=0))

    def end(self, stream: str, outcome: RequestOutcome = RequestOutcome.COMPLETED) -> None:
        self.returns.seen(stream, 9, ended(outcome=outcome))


def ended(outcome: RequestOutcome) -> v.RequestEnded:
    return v.RequestEnded(
        request="q", outcome=outcome, status=200, tokens=9, finish="stop", attempts=2,
        verdict=Guarantee.EXACT,
    )  # fmt: skip


@pytest.mark.parametrize("let_go", [False, True])
def test_a_return_that_lands_late_ends_only_what_we_let_go_of(let_go: bool) -> None:
    late = LateReturn(let_go)
    late.pass_ticks(UNSERVED_TICKS - 1)
    assert late.written == []
    late.pass_ticks(2)
    assert [event.outcome for event in late.written] == [RequestOutcome.FAILED] * let_go


def test_an_end_at_another_replica_is_the_end_of_what_we_let_go_of() -> None:
    late = LateReturn(let_go=True)
    late.end("r.r1", RequestOutcome.CANCELLED)
    late.end(OURS)
    assert late.written == []
    late.end("r.r1")
    late.pass_ticks(UNSERVED_TICKS)
    assert [(event.outcome, event.tokens) for event in late.written] == [("completed", 9)]


@pytest.mark.parametrize("absent", [False, True])
def test_an_end_at_another_replica_ends_a_stream_whose_client_is_absent(absent: bool) -> None:
    late = LateReturn(let_go=False, absent=absent)
    late.end("r.r1")
    assert [event.outcome for event in late.written] == ["completed"] * absent


def test_a_return_that_lands_after_the_end_of_its_stream_leaves_nothing_here() -> None:
    """Another replica, to which the client went later, has ended it: nothing waits for the client
    until the grace is over."""
    late = LateReturn(let_go=False, absent=True, ended_by_another=True)
    assert late.left == ["q"] and late.written == []


def wait(late: LateReturn, seconds: float) -> None:
    """The log says something at the end of that time."""
    late.now_us += round(seconds * 1e6)
    late.returns.advanced()


def settled() -> LateReturn:
    """A replica that has followed the log for a while."""
    late = LateReturn(let_go=False)
    for _ in range(round(SETTLED_S)):
        wait(late, 1.0)
    return late


def test_a_replica_that_hears_nothing_from_the_log_knows_that_it_is_behind() -> None:
    late = settled()
    late.now_us += round(BEHIND_S * 1e6)
    assert not late.returns.is_behind
    late.now_us += 1
    assert late.returns.is_behind


@pytest.mark.parametrize("begins", [True, False])
def test_so_does_one_to_which_others_may_still_write_what_they_held_back(begins: bool) -> None:
    """Composed 21047: etcd was full for 4.6 s. A replica that had just begun said 410 to a client whose
    stream was in another's spool."""
    late = LateReturn(let_go=False) if begins else settled()
    wait(late, 1.0 if begins else BEHIND_S + 1.0)
    assert late.returns.is_behind
    wait(late, 1.0)
    assert late.returns.is_behind
    for _ in range(round(SETTLED_S)):
        wait(late, 1.0)
    assert not late.returns.is_behind


def test_an_end_at_another_replica_is_no_end_of_a_stream_that_is_not_ours() -> None:
    late = LateReturn(let_go=False, absent=True)
    late.fleet.requests["q"].owner = "r.r2"
    late.end("r.r1")
    assert late.written == []


def test_a_stream_that_another_replica_took_is_not_ended_here() -> None:
    late = LateReturn(let_go=True)
    assert late.returns._ending.keys() == {"q"}
    late.fleet.requests["q"].owner = "r.r1"
    theirs = v.ClientReturned(request="q", claim="c", attempt=1, tokens=5, events=0)
    late.returns.seen("r.r1", 9, theirs)
    assert not late.returns._ending, "its end is theirs to write"


def test_a_client_that_returns_to_what_we_let_go_of_gets_one_end() -> None:
    late = LateReturn(let_go=True)
    late.returns.adopt(late.arrival, 5, 0)
    del late.live["q"]  # it ended, and its end is on the way to the log
    late.pass_ticks(UNSERVED_TICKS + 1)
    assert [type(event) for event in late.written] == [v.ClientReturned]


class NewOwner:
    """Our replica takes "q1" from r1, which sent it to w0. `reports` come from engines, one at each
    time that it waits for the log."""

    def __init__(self, *reports: tuple[str, Any]) -> None:
        self.story = story = Story()
        story.worker("w0")
        story.worker("w1")
        story.replica("r1")
        story.replica("r0")
        story.tell("r.r1", arrived(), decided())
        self.reports = list(reports)
        self.lost: list[Any] = []
        self.live: dict[str, LiveRequest] = {}
        view = SimpleNamespace(fleet=story.fleet, stream=OURS)
        decisions: Any = SimpleNamespace(
            view=view, boot="b1", emit=self.emit, decision_id=lambda: "d"
        )
        self.returns = StreamResumptions(
            decisions, self.live, lambda *given: self.lost.append(given), self.changed, lambda: 0
        )

    def emit(self, event: Any) -> int:
        self.story.tell(OURS, event)
        return self.story.fleet.streams[OURS].position

    async def changed(self) -> None:
        if not self.reports:
            await asyncio.Event().wait()
        self.story.tell(*self.reports.pop(0))

    def adopt(self) -> None:
        arrival = Arrival(
            request="q1", model="m", route="/v1/completions", stream=True, prompt_tokens=1,
            max_tokens=9, verdict="exact",
        )  # fmt: skip
        self.returns.adopt(arrival, 5, 0)


@pytest.mark.parametrize("runs", [True, False])
async def test_a_new_owner_uses_no_number_of_an_attempt_that_was_not_written(runs: bool) -> None:
    """The former one sent attempt 2 to w1, and was killed before it wrote that."""
    owner = NewOwner()
    owner.story.tell("w.w1", engine_step(queued(attempt=2)))
    if not runs:
        owner.story.tell("w.w0", died())
    owner.adopt()
    owned = await owner.returns.owned("q1", 1.0)
    left, live = owned.left, owner.live["q1"]
    assert owned.ours and not owned.doubted
    if runs:
        assert left is not None and (left.worker, left.attempt) == ("w0", 1)
        assert live.attempt == 1 and owner.lost == []
        live.lose_attempt()
    else:
        assert left is None and [given[:3] for given in owner.lost] == [
            ("q1", 1, TransportKind.ENGINE_DEAD)
        ]
    assert live.attempt == 2, "the next one is the third"


@pytest.mark.parametrize("known", [True, False])
async def test_a_new_owner_finds_an_attempt_that_was_not_written(known: bool) -> None:
    """Its engine reports it, before or after the stream is ours: composed 90561."""
    report = ("w.w1", engine_step(queued(attempt=2)))
    owner = NewOwner(*[report][known:])
    if known:
        owner.story.tell(*report)
    owner.adopt()
    await owner.returns.owned("q1", 1.0)
    owner.live["q1"].lose_attempt()
    found = await owner.returns.later_attempt("q1", 10.0)
    assert found.ours and found.left is not None
    assert (found.left.worker, found.left.attempt, found.left.mode) == ("w1", 2, "attach")
    owner.live["q1"].lose_attempt()
    again = await owner.returns.later_attempt("q1", 0.01)
    assert again.ours and again.left is None, "it was tried already"


@pytest.mark.parametrize("known", [True, False])
async def test_a_new_owner_finds_an_attempt_that_finished_and_was_not_written(known: bool) -> None:
    """Composed 161261: while etcd was full, the former owner sent the stream on and was killed, and the
    engine finished it. Its report landed before the client's return."""
    owner = NewOwner()
    owner.story.tell("w.w1", engine_step(queued(attempt=2)))
    report = ("w.w1", engine_step(finished(attempt=2)))
    if known:
        owner.story.tell(*report)
    owner.adopt()
    await owner.returns.owned("q1", 1.0)
    if not known:
        owner.story.tell(*report)
    owner.live["q1"].lose_attempt()
    assert owner.live["q1"].attempt == 2, "the next one is the third"
    found = await owner.returns.later_attempt("q1", 10.0)
    assert found.ours and found.left is not None
    assert (found.left.worker, found.left.attempt, found.left.mode) == ("w1", 2, "attach")
    again = await owner.returns.later_attempt("q1", 0.01)
    assert again.ours and again.left is None, "it was tried already"


@pytest.mark.parametrize("ended", [False, True])
async def test_a_new_owner_finds_an_attempt_that_finished_and_was_written_late(ended: bool) -> None:
    """Composed 150246: a client went to and fro while its stream was moved; it lacked the end alone."""
    owner = NewOwner()
    owner.story.tell("w.w1", engine_step(queued(attempt=2)), engine_step(finished(attempt=2)))
    owner.adopt()
    late = decided(attempt=2, worker="w1")
    owner.story.tell("r.r1", late)
    owner.returns.seen("r.r1", 9, late)
    await owner.returns.owned("q1", 1.0)
    owner.live["q1"].lose_attempt()
    if ended:
        owner.story.tell(OURS, gone := story_ended())
        owner.returns.seen(OURS, 10, gone)
        assert not owner.returns._sent_late
        return
    found = await owner.returns.later_attempt("q1", 10.0)
    assert found.ours and found.left is not None
    assert (found.left.worker, found.left.attempt, found.left.mode) == ("w1", 2, "attach")
    again = await owner.returns.later_attempt("q1", 0.01)
    assert again.ours and again.left is None, "it was tried already"


async def test_a_new_owner_does_not_wait_for_a_stream_that_is_taken_from_it() -> None:
    owner = NewOwner()
    assert not (await owner.returns.later_attempt("q1", 10.0)).ours


def moving(story: Story, stream: str = OURS) -> bool:
    """Whether the replica of that stream leaves "q1" to its owner."""
    decisions: Any = SimpleNamespace(view=SimpleNamespace(fleet=story.fleet, stream=stream))
    nothing: Any = None
    return StreamResumptions(decisions, {}, nothing, nothing, lambda: 0).is_moving("q1")


def test_a_sampled_stream_without_an_engine_is_left_to_its_replica_while_that_serves() -> None:
    """Its client may return there; nobody else could continue what was sampled."""
    story = Story()
    story.worker("w0")
    story.replica("r1", "b2")
    story.replica("r0")
    assert not moving(story)
    story.tell("r.r1", replace(arrived(), verdict=Guarantee.SAMPLED), decided())
    assert not moving(story), "it runs: whoever attaches to it has all of it"
    story.tell("w.w0", died())
    assert moving(story)
    assert not moving(story, "r.r1")
    story.replica("r1", "b3")
    assert not moving(story), "its replica has begun anew, without it"


def test_one_that_can_be_generated_again_is_not() -> None:
    story = Story()
    story.worker("w0")
    story.replica("r1", "b2")
    story.tell("r.r1", replace(arrived(), verdict=Guarantee.EXACT), decided())
    story.tell("w.w0", died())
    assert not moving(story)


@pytest.mark.parametrize("chosen", [(), ("w1",)])
def test_a_holder_with_blocks_may_have_the_envelope_too(chosen: tuple[str, ...]) -> None:
    """Composed 171304: the choice of the holder was lost with the gateway of the stream."""
    late = LateReturn(let_go=False, absent=True)
    late.live["q"].envelopes = chosen
    late.fleet.holders = {
        name: SimpleNamespace(name=name, alive=name != "w3", covered=dict.fromkeys(held))
        for name, held in (("w0", "q"), ("w1", "q"), ("w2", "r"), ("w3", "q"))
    }
    assert sorted(late.returns.holders("q")) == ["w0", "w1"]
    assert late.returns.holders("unknown") == ()
