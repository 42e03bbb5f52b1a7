"""The transition table: complete, closed, and no larger than what can happen."""

from __future__ import annotations

from typing import Any

import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from relume.controlplane.stream.arrival import Arrival, Rejected
from relume.controlplane.stream.errors import IllegalEvent
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import Stream
from relume.controlplane.stream.table import TABLE
from tests.stream.state_edges import PAGE, read, walk

STATES = {
    found
    for found in vars(s).values()
    if isinstance(found, type) and issubclass(found, s.State) and not found.__subclasses__()
}
EVENTS = {
    found
    for found in vars(e).values()
    if isinstance(found, type) and issubclass(found, e.Event) and found is not e.Event
} | {Rejected}


def machine() -> StreamMachine:
    arrival = Arrival(
        request="r", model="m", route="/v1/completions", stream=True, prompt_tokens=1,
        max_tokens=1, verdict="exact",
    )  # fmt: skip
    return StreamMachine(
        Stream(
            arrival=arrival, path="/p", response_id="q", body=b"", limits=GatewayConfig(), now=0.0
        )
    )


def blank(kind: Any) -> Any:
    return kind(*[None] * len(kind.__struct_fields__))


def test_every_state_has_a_row_and_every_event_a_place() -> None:
    assert TABLE.keys() == STATES
    assert {event for row in TABLE.values() for event in row} == EVENTS


def test_nothing_leads_away_from_the_end() -> None:
    ended = machine()
    ended.handle(e.Fault(), 0.0)
    state = ended.state
    assert type(state) is s.Ended
    for event in (e.ClientGone(), e.Fault(), e.ShutDown(), e.TakenOver(), e.Owned(True)):
        assert ended.handle(event, 1.0) == [] and ended.state is state


@pytest.mark.parametrize("state", sorted(STATES, key=lambda state: state.__name__))
def test_an_event_of_no_row_is_refused_and_changes_nothing(state: type) -> None:
    """By type alone: what a refused event carries does not matter."""
    for event in EVENTS - TABLE[state].keys():
        tested = machine()
        before = tested.state = blank(state)
        with pytest.raises(IllegalEvent) as raised:
            tested.handle(blank(event), 0.0)
        assert tested.state is before
        assert (raised.value.state, type(raised.value.event)) == (before, event)


def test_an_absent_client_does_not_leave_and_a_present_one_has_no_grace() -> None:
    tested = machine()
    with pytest.raises(IllegalEvent):
        tested.state = s.Waiting(9.0)
        tested.handle(e.GraceOver(), 0.0)
    tested.stream.absent_until = 5.0
    with pytest.raises(IllegalEvent):
        tested.handle(e.ClientGone(), 0.0)


@pytest.mark.full
def test_every_place_in_the_table_can_be_reached_and_leads_where_the_page_says() -> None:
    """A row that no run reaches is a claim nobody checks. The runs are always the same ones."""
    edges = walk()
    assert {state for state, _ in edges} == {state.__name__ for state in STATES - {s.Ended}}
    rare = {e.Fault, e.ShutDown, e.TakenOver, e.GraceOver, e.ClientReturned, e.ConnectionLost}
    # Frames come as `Data`, which the machine cuts; fed one by one they are the parser's output.
    frames = {e.Tokens, e.ChoiceTokens, e.Whole, e.Envelope, e.End, e.Broken}
    missing = {
        (state.__name__, event.__name__)
        for state, row in TABLE.items()
        for event in row.keys() - rare - frames
        if state is not s.Ended and (state.__name__, event.__name__) not in edges
    }
    assert missing == set()
    assert read(PAGE.read_text()) == edges, "python -m tests.stream.state_edges writes the page"


def test_no_run_leads_where_the_page_does_not_say() -> None:
    """The first of those runs; the others are tried in full."""
    known = read(PAGE.read_text())
    for place, following in walk(1_000).items():
        assert following <= known.get(place, set()), f"{place}: write the page anew if it is meant"
